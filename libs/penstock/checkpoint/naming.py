"""What the tensors of one decoder layer are called, behind `model.layers.N.` and before `.weight` or `.bias`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerNames:
    """Where several names stand together, their matrices are put one above the other."""

    input_norm: str = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    out: str = "self_attn.o_proj"
    attention_post_norm: str = "post_attention_layernorm"
    """Only where the model has post_norms."""
    mlp_norm: str = "post_attention_layernorm"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    mlp_post_norm: str = "post_feedforward_layernorm"
    router: str = "mlp.gate"
    expert_gate_up: tuple[str, ...] = ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj")
    expert_down: str = "mlp.experts.{}.down_proj"


_PLAIN = LayerNames()
_GEMMA = LayerNames(mlp_norm="pre_feedforward_layernorm")
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
}


def layer_names(architecture: str) -> LayerNames:
    """The names in checkpoints of `architecture`."""
    return _OTHERS.get(architecture, _PLAIN)
