"""What the tensors of one decoder layer are called, behind `model.layers.N.` and before `.weight` or `.bias`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.checkpoint.model_config import ModelConfig

_LAYER = "model.layers."


@dataclass(frozen=True, slots=True)
class LatentNames:
    """Where keys and values are made from a common vector."""

    query_norm: str = "self_attn.q_a_layernorm"
    query: str = "self_attn.q_b_proj"
    norm: str = "self_attn.kv_a_layernorm"
    keys_values: str = "self_attn.kv_b_proj"


@dataclass(frozen=True, slots=True)
class LayerNames:
    """Where several names stand together, their matrices are put one above the other."""

    input_norm: str = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """What reads the hidden state: for queries, then for what is kept."""
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    out: str = "self_attn.o_proj"
    latent: LatentNames | None = None
    attention_post_norm: str = "post_attention_layernorm"
    """Only where the model has post_norms."""
    mlp_norm: str = "post_attention_layernorm"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    mlp_post_norm: str = "post_feedforward_layernorm"
    router: str = "mlp.gate"
    router_bias: str = "mlp.gate.e_score_correction_bias"
    """The whole name; only where choices are corrected."""
    expert_gate_up: tuple[str, ...] = ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj")
    expert_down: str = "mlp.experts.{}.down_proj"
    all_gate_up: str | None = None
    """The whole name of the tensor [experts, hidden, 2 * inner] that has all of them, instead of one for each; ..."""
    all_down: str | None = None
    """... and that of [experts, inner, hidden]."""
    shared_gate_up: tuple[str, ...] = ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj")
    shared_down: str = "mlp.shared_experts.down_proj"
    experts_module: str = "mlp.experts"
    """The module that has all of them in transformers since version 5, whatever checkpoints have; ..."""
    router_module: str = "mlp.gate"
    """... and the router's there."""


_PLAIN = LayerNames()
_GEMMA = LayerNames(mlp_norm="pre_feedforward_layernorm")
_LLAMA_4 = LayerNames(
    gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
    router="feed_forward.router",
    all_gate_up="feed_forward.experts.gate_up_proj",
    all_down="feed_forward.experts.down_proj",
    shared_gate_up=("feed_forward.shared_expert.gate_proj", "feed_forward.shared_expert.up_proj"),
    shared_down="feed_forward.shared_expert.down_proj",
    experts_module="feed_forward.experts",
    router_module="feed_forward.router",
)
_OTHERS = {
    "MixtralForCausalLM": LayerNames(
        router="block_sparse_moe.gate",
        expert_gate_up=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
        expert_down="block_sparse_moe.experts.{}.w2",
    ),
    "Gemma2ForCausalLM": _GEMMA,
    "Gemma3ForCausalLM": _GEMMA,
    "Gemma3ForConditionalGeneration": _GEMMA,
    "Phi3ForCausalLM": LayerNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",)),
    "Llama4ForCausalLM": _LLAMA_4,
    "Llama4ForConditionalGeneration": _LLAMA_4,
}


def layer_of(name: str) -> int | None:
    """The layer of the decoder to which a tensor of this name belongs; None: to none."""
    return int(name.removeprefix(_LAYER).partition(".")[0]) if name.startswith(_LAYER) else None


def layer_names(config: ModelConfig) -> LayerNames:
    """The names in checkpoints of such models."""
    names = _OTHERS.get(config.architecture, _PLAIN)
    if config.latent is None:
        return names
    query = "self_attn.q_proj" if config.latent.query_rank is None else "self_attn.q_a_proj"
    return replace(names, qkv=(query, "self_attn.kv_a_proj_with_mqa"), latent=LatentNames())
