"""What follows from an architecture's name and may be missing from its config.json.

Families share one decoder. A `Family` holds the defaults of fields that may be absent and the switches that have no
field at all; the rest is read by `parse_config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum


class Windows(Enum):
    """Which layers look at a sliding window of recent tokens only."""

    NONE = "no layer"
    ALL = "every layer, when sliding_window is set"
    ALL_IF_USED = "every layer, when use_sliding_window is true"
    LATE_IF_USED = "from layer max_window_layers on, when use_sliding_window is true"
    MOST = "all but every n-th layer"
    CHUNKS = "the layers that rotate, in chunks of attention_chunk_size"

    @property
    def by_type(self) -> bool:
        """Whether `layer_types` may say otherwise."""
        return self in (Windows.LATE_IF_USED, Windows.MOST)


class AttentionBias(Enum):
    """Which projections of attention have a bias."""

    NONE = "none"
    INPUTS = "query, key and value"
    CONFIGURED = "all four, when attention_bias is true"


class Routing(Enum):
    """Whether some layers send each token to a few experts instead of through one feed-forward block."""

    NONE = "none"
    MIXTRAL = "mixtral"
    QWEN = "qwen"
    DEEPSEEK = "deepseek"
    LLAMA_4 = "llama 4"


@dataclass(frozen=True, slots=True)
class Family:
    rms_eps: float = 1e-6
    rope_theta: float = 10000.0
    tied: bool = False
    head_dim: int | None = None
    """None: hidden_size / num_attention_heads."""
    attention_bias: AttentionBias = AttentionBias.NONE
    mlp_bias: bool = False
    """config.json's mlp_bias counts."""
    qk_norm: bool = False
    windows: Windows = Windows.NONE
    window: int | None = None
    """Tokens, when sliding_window is absent."""
    full_every: int = 0
    """With Windows.MOST: the n."""
    routing: Routing = Routing.NONE
    gemma: bool = False
    """Norms multiply by 1 + weight, embeddings are scaled, blocks are normalised behind too, GELU gates."""
    attention_softcap: float | None = None
    """When attn_logit_softcapping is absent."""
    attention_softcaps: bool = False
    """attn_logit_softcapping may be set."""
    logit_softcap: float | None = None
    """When final_logit_softcapping is absent."""
    local_rope: bool = False
    """Layers with a window have rope settings of their own."""
    partial_rotary: bool = False
    """partial_rotary_factor and rope type longrope count."""
    latent: bool = False
    """Keys and values are made from a common vector (multi-head latent attention)."""
    interleaved: bool = False
    """The rotation turns neighbouring dimensions together, unless rope_interleave is false."""
    dense_size: str = "intermediate_size"
    """The field that has the inner size of blocks that all tokens go through."""
    text_part: bool = False
    """A vision-language model: only its text part is served, whose settings are config.json's text_config."""
    spatial: bool = False
    """The rotation has sections: one for the place in time, one for that among the rows of a picture, one for that
    among its columns. Of a text all three are the same."""
    absent: Mapping[str, int] = field(default_factory=dict)
    """Sizes that config.json may leave out."""


_GEMMA_3 = Family(
    rope_theta=1e6,
    tied=True,
    head_dim=256,
    attention_bias=AttentionBias.CONFIGURED,
    qk_norm=True,
    gemma=True,
    windows=Windows.MOST,
    window=4096,
    full_every=6,
    local_rope=True,
)

_DEEPSEEK = Family(
    latent=True,
    interleaved=True,
    attention_bias=AttentionBias.CONFIGURED,
    routing=Routing.DEEPSEEK,
    absent={
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "max_position_embeddings": 4096,
    },
)
_LLAMA_4 = Family(
    rms_eps=1e-5,
    rope_theta=500000.0,
    head_dim=128,
    interleaved=True,
    dense_size="intermediate_size_mlp",
    attention_bias=AttentionBias.CONFIGURED,
    windows=Windows.CHUNKS,
    window=8192,
    routing=Routing.LLAMA_4,
    absent={
        "vocab_size": 202048,
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    },
)

_QWEN_2_5_VL = Family(
    rms_eps=1e-5,
    rope_theta=1e6,
    attention_bias=AttentionBias.INPUTS,
    windows=Windows.LATE_IF_USED,
    window=4096,
    text_part=True,
    spatial=True,
    absent={
        "vocab_size": 152064,
        "hidden_size": 8192,
        "intermediate_size": 29568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32768,
    },
)

FAMILIES = {
    "LlamaForCausalLM": Family(attention_bias=AttentionBias.CONFIGURED, mlp_bias=True),
    "MistralForCausalLM": Family(windows=Windows.ALL, window=4096),
    "Qwen2ForCausalLM": Family(attention_bias=AttentionBias.INPUTS, windows=Windows.LATE_IF_USED, window=4096),
    "Qwen3ForCausalLM": Family(
        head_dim=128, attention_bias=AttentionBias.CONFIGURED, qk_norm=True, windows=Windows.LATE_IF_USED, window=4096
    ),
    "MixtralForCausalLM": Family(rms_eps=1e-5, rope_theta=1e6, windows=Windows.ALL, routing=Routing.MIXTRAL),
    "Qwen3MoeForCausalLM": Family(
        attention_bias=AttentionBias.CONFIGURED,
        qk_norm=True,
        windows=Windows.ALL_IF_USED,
        window=4096,
        routing=Routing.QWEN,
    ),
    "Gemma2ForCausalLM": Family(
        tied=True,
        head_dim=256,
        attention_bias=AttentionBias.CONFIGURED,
        gemma=True,
        windows=Windows.MOST,
        window=4096,
        full_every=2,
        attention_softcap=50.0,
        attention_softcaps=True,
        logit_softcap=30.0,
    ),
    "Gemma3ForCausalLM": _GEMMA_3,
    "Gemma3ForConditionalGeneration": replace(
        _GEMMA_3,
        text_part=True,
        absent={
            "vocab_size": 262208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131072,
        },
    ),
    "Phi3ForCausalLM": Family(rms_eps=1e-5, windows=Windows.ALL, partial_rotary=True),
    "DeepseekV3ForCausalLM": _DEEPSEEK,
    "Kimi_K25ForConditionalGeneration": replace(_DEEPSEEK, text_part=True),
    "KimiK25ForConditionalGeneration": replace(_DEEPSEEK, text_part=True),
    "Llama4ForCausalLM": _LLAMA_4,
    "Llama4ForConditionalGeneration": replace(_LLAMA_4, text_part=True),
    "Qwen2_5_VLForConditionalGeneration": _QWEN_2_5_VL,
}
SUPPORTED = tuple(FAMILIES)
