"""Every family computes what transformers computes: past its sliding windows, cut up, batched, reused and verified."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.checkpoint import SUPPORTED, CheckpointError, Rope, fingerprint, inspect
from penstock.checkpoint.model_config import parse_config, text_values
from penstock.engine.config import EngineConfig
from penstock.engine.engine import Engine
from penstock.engine.forward.runner import Runner
from penstock.engine.kernels.cpu import decoder as compiled_decoder
from penstock.engine.request import SamplingParams
from penstock.engine.sampling.choice import Choice
from penstock.engine.step.run import Run
from penstock.testing.checkpoints import write_tokenizer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers

SIZES = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 256,
    "eos_token_id": 257,
}
EXPERTS = {"num_local_experts": 5, "num_experts_per_tok": 2}
QWEN_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 16}
COMPILED = {"head_dim": 16}
"""Sizes that are whole vectors, as step.cpp wants them."""
GEMMA = {"head_dim": 16, "sliding_window": 21, "query_pre_attn_scalar": 24}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LOCAL_GLOBAL = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
LONGROPE = {
    "max_position_embeddings": 2048,
    "original_max_position_embeddings": 64,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.75,
        "short_factor": [1.0, 1.1, 1.3],
        "long_factor": [1.0, 2.5, 9.0],
    },
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
LATENT_COMPILED = {
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "moe_intermediate_size": 32,
}
DEEP_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
LLAMA_4 = {
    "head_dim": 16,
    "intermediate_size_mlp": 40,
    "num_local_experts": 5,
    "num_hidden_layers": 4,
    "attention_chunk_size": 24,
    "floor_scale": 16,
    "rms_norm_eps": 1e-5,
}
LLAMA_4_COMPILED = {"intermediate_size_mlp": 80, "num_local_experts": 6}
SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
WHOLE = {
    "gemma": ("Gemma3", {"vision_config": VISION, "mm_tokens_per_image": 4}),
    "kimi": ("Kimi_K25", {"vision_config": {**VISION, "rope_parameters": None}, "projection_hidden_size": 16}),
    "llama": (
        "Llama4",
        {"vision_config": {**VISION, "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16}},
    ),
    "qwen": ("Qwen2_5_VL", {"vision_config": {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 32}}),
}
"""Models of text and pictures: the class, and what it needs beside the text part."""
CASES = {
    "mistral-window": ("Mistral", {"sliding_window": 33}),
    "qwen2-late-windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    "qwen3-typed-windows": (
        "Qwen3",
        {
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "mixtral": ("Mixtral", EXPERTS),
    "mixtral-window": ("Mixtral", {**EXPERTS, "sliding_window": 17, "num_experts_per_tok": 1}),
    "qwen3-moe": ("Qwen3Moe", QWEN_EXPERTS),
    "qwen3-moe-mixed": (
        "Qwen3Moe",
        {**QWEN_EXPERTS, "norm_topk_prob": True, "mlp_only_layers": [0], "attention_bias": True},
    ),
    "mixtral-compiled": ("Mixtral", {**EXPERTS, **COMPILED, "sliding_window": 17}),
    "qwen3-moe-compiled": (
        "Qwen3Moe",
        {**QWEN_EXPERTS, **COMPILED, "moe_intermediate_size": 80, "num_experts": 13, "mlp_only_layers": [1]},
    ),
    "qwen3-moe-compiled-normalised": (
        "Qwen3Moe",
        {**QWEN_EXPERTS, **COMPILED, "moe_intermediate_size": 16, "num_experts": 32, "norm_topk_prob": True},
    ),
    "gemma2": ("Gemma2", {**GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}),
    "gemma2-uncapped": ("Gemma2", {**GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3": ("Gemma3", {**GEMMA, "sliding_window_pattern": 2}),
    "gemma3-scaled": ("Gemma3", {**GEMMA, "sliding_window_pattern": 3, "rope_parameters": LOCAL_GLOBAL}),
    "gemma3-text-part": ("Gemma3", {**GEMMA, "sliding_window_pattern": 2, "with_pictures": "gemma"}),
    "deepseek": ("DeepseekV3", LATENT),
    "deepseek-yarn": ("DeepseekV3", {**LATENT, "rope_parameters": DEEP_YARN, "n_shared_experts": 2}),
    "deepseek-plain-queries": (
        "DeepseekV3",
        {**LATENT, "q_lora_rank": None, "attention_bias": True, "n_group": 1, "topk_group": 1},
    ),
    "deepseek-dense": ("DeepseekV3", {**LATENT, "first_k_dense_replace": 3, "rope_interleave": False}),
    "deepseek-compiled": ("DeepseekV3", {**LATENT, **LATENT_COMPILED}),
    "deepseek-compiled-yarn": (
        "DeepseekV3",
        {**LATENT, **LATENT_COMPILED, "rope_parameters": DEEP_YARN, "q_lora_rank": None, "attention_bias": True},
    ),
    "deepseek-compiled-many-heads": (
        "DeepseekV3",
        {**LATENT, **LATENT_COMPILED, "num_attention_heads": 34, "num_key_value_heads": 34, "n_shared_experts": 2},
    ),
    "llama4": ("Llama4", LLAMA_4),
    "llama4-some-dense": (
        "Llama4",
        {**LLAMA_4, "interleave_moe_layer_step": 2, "num_experts_per_tok": 2, "use_qk_norm": False},
    ),
    "llama4-scaled": (
        "Llama4",
        {**LLAMA_4, "rope_parameters": LLAMA3, "attn_temperature_tuning": False, "no_rope_layers": [0, 1, 1, 1]},
    ),
    "llama4-sharply-scaled": ("Llama4", {**LLAMA_4, "rope_parameters": {**LLAMA3, "high_freq_factor": 1.0}}),
    "llama4-compiled": ("Llama4", {**LLAMA_4, **LLAMA_4_COMPILED}),
    "llama4-compiled-some-dense": (
        "Llama4",
        {
            **LLAMA_4,
            **LLAMA_4_COMPILED,
            "interleave_moe_layer_step": 2,
            "num_experts_per_tok": 2,
            "use_qk_norm": False,
            "attention_bias": True,
            "rope_parameters": LLAMA3,
        },
    ),
    "kimi-compiled-text-part": ("DeepseekV3", {**LATENT, **LATENT_COMPILED, "with_pictures": "kimi"}),
    "kimi-text-part": ("DeepseekV3", {**LATENT, "with_pictures": "kimi"}),
    "llama4-text-part": ("Llama4", {**LLAMA_4, "with_pictures": "llama"}),
    "qwen2.5-vl-text-part": ("Qwen2_5_VL", {"rope_parameters": SECTIONS, "with_pictures": "qwen"}),
    "qwen2.5-vl-yarn": (
        "Qwen2_5_VL",
        {"rope_parameters": {**SECTIONS, "rope_type": "yarn", "factor": 4.0}, "with_pictures": "qwen"},
    ),
    "phi3": ("Phi3", {"sliding_window": 40}),
    "phi3-partial-tied": ("Phi3", {"partial_rotary_factor": 0.5, "tie_word_embeddings": True}),
    "phi3-longrope-short": ("Phi3", LONGROPE),
    "phi3-longrope-long": ("Phi3", LONGROPE),
}
EXPERT_FIELDS = {"num_experts_per_tok", "num_local_experts"}
CONTEXT = {"phi3-longrope-long": 512}
"""Longer than the original context: the long factors."""
LENGTHS = (1, 16, 17, 40, 63, 170)


def config_class(family):
    return getattr(transformers, f"{family}{'Text' if family in ('Gemma3', 'Llama4', 'Qwen2_5_VL') else ''}Config")


def drawn(family, with_pictures=None, **fields):
    """A random model of transformers."""
    config = config_class(family)(**{**SIZES, **fields})
    config._attn_implementation = "eager"
    if not with_pictures:
        return getattr(transformers, f"{family}ForCausalLM")(config)
    whole_config, more = WHOLE[with_pictures]
    whole = getattr(transformers, f"{whole_config}Config")(text_config=config, **more)
    whole._attn_implementation = "eager"
    whole.initializer_range = SIZES["initializer_range"]
    return getattr(transformers, f"{whole_config}ForConditionalGeneration")(whole)


def with_published_names(file):
    """transformers saves the text part's layers as if they were the picture part's blocks; published files do not."""
    tensors = {
        name.replace("language_model.model.blocks.", "language_model.model.layers."): tensor
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})


class Case:
    """A checkpoint that transformers drew and saved, with norms that are not all alike, and the model itself."""

    def __init__(self, name, directory):
        self.name, self.directory, self.context = name, directory, CONTEXT.get(name)
        family, fields = CASES[name]
        torch.manual_seed(11)
        model = drawn(family, **fields).eval()
        with torch.no_grad():
            for key, weight in model.named_parameters():
                if "norm" in key or key.endswith(".bias"):
                    weight += torch.randn_like(weight) / 5
            for key, weight in model.named_buffers():
                if key.endswith("e_score_correction_bias"):
                    weight += torch.randn_like(weight)
            for key, weight in model.named_parameters():
                if family.startswith("Gemma") and "embed_tokens" in key:
                    weight *= 0.1  # else the scaled embedding drowns the rest, and each token follows itself
        model.save_pretrained(directory)
        if fields.get("with_pictures") == "kimi":
            with_published_names(directory / "model.safetensors")
        write_tokenizer(directory / "tokenizer.json")
        self.model = model
        long = self.context is not None
        self.lengths = [length for length in LENGTHS if name != "phi3-longrope-short" or length < 60]
        self.lengths = [length + 70 if long else length for length in self.lengths]

    def runner(self, dtype="float32", **settings):
        config = EngineConfig(model=self.directory, dtype=dtype, kv_pool_tokens=1600, **settings)
        return Runner(inspect(self.directory, self.context), config)

    def prompt(self, length):
        return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(length)).tolist()

    def logits(self, tokens):
        with torch.inference_mode():
            return self.model(torch.tensor([tokens]), use_cache=False).logits[0].float()

    def greedy(self, prompt, count):
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Case(request.param, tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def told(request, record_property):
    """Which architecture a test is of, for who reads the report."""
    if "case" in request.fixturenames:
        case = request.getfixturevalue("case")
        record_property("architecture", inspect(case.directory).config.architecture)


def run_of(tokens, start, count, pages, drafts=()):
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=0)  # else no logits leave the kernels
    choice = Choice(params, frozenset(), tokens, len(tokens), tuple(drafts))
    return Run(choice, start, count, pages, (str(pages[0]), 0))


def logits_of(runner, runs):
    """The logits of a step, in the order of the batch."""
    seen = []
    runner.logits = lambda order, features: seen.append(type(runner).logits(runner, order, features)) or seen[0]
    runner.step(runs)
    del runner.logits
    return seen[0]


def tables(lengths):
    """Block tables that interleave, so that no sequence lies in one piece."""
    counts = [-(-length // 16) + 1 for length in lengths]
    pages = [[] for _ in counts]
    free = iter(range(1, 100))
    while any(len(own) < count for own, count in zip(pages, counts, strict=True)):
        for own, count in zip(pages, counts, strict=True):
            if len(own) < count:
                own.append(next(free))
    return pages


def close(found, wanted, atol=1e-4):
    torch.testing.assert_close(found, wanted, atol=atol, rtol=0)


def test_every_logit_of_a_prompt_at_once(case):
    prompt = case.prompt(case.lengths[-1])
    found = logits_of(case.runner(), [run_of(prompt[:1], 0, 1, tables([len(prompt)])[0], prompt[1:])])
    close(found, case.logits(prompt))


@pytest.mark.parametrize("case", ["deepseek-compiled", "deepseek-compiled-yarn"], indirect=True)
def test_prompts_whose_rows_look_far_are_torchs(case, monkeypatch):
    """From where their vectors are cheaper expanded; both ways go on from what the other has kept."""
    monkeypatch.setattr(compiled_decoder, "_FAR_IN_FLOATS", 40)
    runner, prompt, steps = case.runner(), case.prompt(170), []
    wanted, pages = case.logits(prompt), tables([170])[0]
    for start, end in ((0, 40), (40, 90), (90, 100), (100, 164), (164, 170)):
        run = run_of(prompt[: start + 1], start, 1, pages, prompt[start + 1 : end])
        steps.append(runner.takes([run]))
        close(logits_of(runner, [run]), wanted[start:end])
    assert steps == [True, False, True, False, True]


def test_models_of_experts_run_through_the_kernels(case):
    compiled = case.runner()._compiled is not None
    assert compiled if "compiled" in case.name else not (compiled and CASES[case.name][0] in ("Mixtral", "Qwen3Moe"))


@pytest.mark.parametrize("chunk", [9, 50])
def test_chunks_of_mixed_batches_then_decode_and_verification(case, chunk):
    """Prompts of many lengths in chunks, then a token each, then several at once as drafts are verified."""
    runner = case.runner()
    texts = [case.prompt(length + 6) for length in case.lengths]
    wanted = [case.logits(text) for text in texts]
    pages = tables([len(text) for text in texts])
    for start in range(0, max(case.lengths), chunk):
        live = [at for at, length in enumerate(case.lengths) if start < length]
        runs = [
            run_of(texts[at][: case.lengths[at]], start, min(chunk, case.lengths[at] - start), pages[at]) for at in live
        ]
        for run, at, answer in zip(runs, live, runner.step(runs), strict=True):
            assert [chosen.token for chosen in answer] == (
                [int(wanted[at][case.lengths[at] - 1].argmax())] if run.samples else []
            )
    ends = case.lengths
    together = zip(texts, ends, pages, strict=True)
    found = logits_of(runner, [run_of(text[: end + 1], end, 1, own) for text, end, own in together])
    close(found, torch.stack([logits[end] for logits, end in zip(wanted, ends, strict=True)]))
    together = zip(texts, ends, pages, strict=True)
    found = logits_of(
        runner, [run_of(text[: end + 2], end + 1, 1, own, text[end + 2 :]) for text, end, own in together]
    )
    close(found, torch.cat([logits[end + 1 :] for logits, end in zip(wanted, ends, strict=True)]))


async def test_engine_says_what_transformers_says(case, kit):
    """Through the engine: alone, together, and with a prefix whose KV another run stored."""
    requests = [kit.request(str(length), length, kit.greedy(5)) for length in case.lengths]
    expected = [case.greedy(request.prompt, 5) for request in requests]
    config = EngineConfig(
        case.directory,
        kv_pool_tokens=1024,
        max_batch_tokens=60,
        max_running=6,
        threads=1,
        max_model_len=case.context or 0,
    )
    async with Engine.open(config) as engine:
        sink = kit.Sink()
        assert (await kit.read(engine, requests[-1], sink=sink)).ids == expected[-1]
        answers = await kit.read_all(engine, requests)
        assert [answer.ids for answer in answers] == expected
        stored = [sink.blocks[number] for number in sorted(sink.blocks)]
        blocks = stored[: (len(requests[-1].prompt) - 1) // 16]
        again = await kit.read(engine, requests[-1], source=kit.Source(blocks))
        assert again.ids == expected[-1] and again.last.cached_tokens == 16 * len(blocks) > 0
        assert again.last.computed_tokens == len(requests[-1].prompt) - 16 * len(blocks)


def test_bfloat16_runs_and_stays_near(case):
    """A smoke test: the rounding of 8-bit mantissas, no more."""
    prompt = case.prompt(case.lengths[-1])
    run = run_of(prompt[:1], 0, 1, tables([len(prompt)])[0], prompt[1:])
    exact, rounded = (logits_of(case.runner(dtype), [run]) for dtype in ("float32", "bfloat16"))
    assert rounded.isfinite().all()
    assert torch.nn.functional.cosine_similarity(exact, rounded, dim=-1).median() > 0.98


@pytest.mark.parametrize("case", ["deepseek", "deepseek-compiled", "llama4", "llama4-compiled"], indirect=True)
def test_kv_in_8_bits_stays_near(case):
    prompt = case.prompt(case.lengths[-1])
    run = run_of(prompt[:1], 0, 1, tables([len(prompt)])[0], prompt[1:])
    rounded = case.runner(kv_dtype="int8")
    assert rounded.memory.layout.endswith("-scaled-v1")
    exact, kept = (logits_of(runner, [run]) for runner in (case.runner(), rounded))
    assert torch.nn.functional.cosine_similarity(exact, kept, dim=-1).median() > 0.98


@pytest.mark.parametrize("name", [name for name, (_, fields) in CASES.items() if set(fields) & EXPERT_FIELDS])
def test_int8_experts_run_and_stay_near(tmp_path, name):
    """The same; and lossless weights are those of bfloat16."""
    case = Case(name, tmp_path)
    prompt = case.prompt(case.lengths[-1])
    run = run_of(prompt[:1], 0, 1, tables([len(prompt)])[0], prompt[1:])
    exact, rounded, plain = (logits_of(case.runner(dtype), [run]) for dtype in ("float32", "int8", "bfloat16"))
    assert torch.nn.functional.cosine_similarity(exact, rounded, dim=-1).median() > 0.95
    assert torch.equal(logits_of(case.runner("bfloat16", weights="lossless"), [run]), plain)


def parsed(architecture, **fields):
    sizes = {key: value for key, value in SIZES.items() if "size" in key or "num" in key or "max" in key}
    return parse_config(Path("config.json"), {"architectures": [architecture], **sizes, **fields})


@pytest.mark.parametrize("architecture", SUPPORTED)
def test_absent_fields_mean_what_transformers_takes_them_for(architecture):
    family = {"Kimi_K25": "DeepseekV3", "KimiK25": "DeepseekV3"}.get(*[architecture.partition("For")[0]] * 2)
    theirs = config_class(family)(**SIZES)
    more = {"Qwen3Moe": {"moe_intermediate_size": 768}, "Qwen2_5_VL": {"rope_scaling": {"mrope_section": [1, 1, 2]}}}
    ours = parsed(architecture, **more.get(family, {}))
    width = getattr(theirs, "sliding_window", None) or getattr(theirs, "attention_chunk_size", None)
    types = getattr(theirs, "layer_types", None) or ["sliding_attention" if width else "full_attention"] * 3
    assert ours.windows == tuple(None if kind == "full_attention" else width for kind in types)
    assert (ours.rms_eps, ours.tied) == (theirs.rms_norm_eps, getattr(theirs, "tie_word_embeddings", False))
    ropes = theirs.rope_parameters
    assert ours.rope.theta == ropes.get("full_attention", ropes)["rope_theta"]
    assert ours.local_rope is None or ours.local_rope.theta == ropes["sliding_attention"]["rope_theta"]
    assert ours.attention_softcap == getattr(theirs, "attn_logit_softcapping", None)
    assert ours.logit_softcap == getattr(theirs, "final_logit_softcapping", None)
    assert ours.attention_scale == getattr(theirs, "query_pre_attn_scalar", ours.head_dim) ** -0.5
    head_dim = getattr(theirs, "head_dim", None) or SIZES["hidden_size"] // SIZES["num_attention_heads"]
    latent = ours.latent
    if latent is not None:
        assert (ours.head_dim, ours.rotary_dim) == (theirs.qk_head_dim, head_dim)
        assert (latent.rank, latent.query_rank) == (theirs.kv_lora_rank, theirs.q_lora_rank)
        assert (latent.plain_dim, latent.value_dim) == (theirs.qk_nope_head_dim, theirs.v_head_dim)
    else:
        assert ours.head_dim == head_dim
    if architecture.startswith("Llama4"):
        assert [layer not in ours.unrotated for layer in range(3)] == [bool(each) for each in theirs.no_rope_layers]
        assert (ours.temperature.strength, ours.temperature.tokens) == (theirs.attn_scale, theirs.floor_scale)
        assert ours.key_norm == theirs.use_qk_norm and ours.intermediate_size == theirs.intermediate_size_mlp
        assert [layer for layer, sparse in enumerate(ours.experts.layers) if sparse] == theirs.moe_layers
    if ours.experts is not None:
        count = getattr(theirs, "num_experts", None) or theirs.num_local_experts
        assert (ours.experts.count, ours.experts.per_token) == (count, theirs.num_experts_per_tok)
        assert ours.experts.normalised == getattr(theirs, "norm_topk_prob", not architecture.startswith("Llama4"))


@pytest.mark.parametrize("dense", [0, 3])
def test_experts_of_deepseek_when_fields_are_absent(dense):
    ours = parsed("DeepseekV3ForCausalLM", first_k_dense_replace=dense).experts
    if dense:
        assert ours is None
        return
    theirs = transformers.DeepseekV3Config(**SIZES)
    assert (ours.groups, ours.groups_used, ours.scaling) == (8, 4, 2.5)
    assert (theirs.n_group, theirs.topk_group, theirs.routed_scaling_factor) == (8, 4, 2.5)
    assert ours.shared_size == ours.intermediate_size == theirs.moe_intermediate_size


def test_older_spellings():
    scaled = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_theta": 5e5, "rope_local_base_freq": 2e4}
    gemma = parsed("Gemma3ForCausalLM", **scaled)
    assert (gemma.rope, gemma.local_rope) == (Rope("linear", 5e5, 8.0), Rope(theta=2e4))
    factors = {"short_factor": [1.0, 2.0, 3.0, 4.0], "long_factor": [1.0] * 4}
    phi = parsed("Phi3ForCausalLM", original_max_position_embeddings=128, rope_scaling={"type": "su", **factors})
    assert phi.rope.kind == "longrope" and phi.rope.factors == (1.0, 2.0, 3.0, 4.0) and phi.max_positions == 128
    assert phi.rope.attention_factor == pytest.approx((1 + math.log(4) / math.log(128)) ** 0.5)


def test_sizes_that_the_text_part_leaves_out():
    """As in the published models, which name only what differs from the class's own sizes."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    values = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text, "eos_token_id": [1, 106]}
    ours = parse_config(Path("config.json"), text_values(Path("config.json"), values))
    theirs = transformers.Gemma3TextConfig(**text)
    assert (ours.vocab_size, ours.max_positions) == (theirs.vocab_size, theirs.max_position_embeddings)
    assert (ours.n_heads, ours.n_kv_heads) == (theirs.num_attention_heads, theirs.num_key_value_heads)
    assert (ours.head_dim, ours.n_layers, ours.windows.count(1024)) == (256, 34, 29)


def test_windows_read_few_pages(tmp_path):
    """A windowed layer gathers what its window touches, however long the text is."""
    case = Case("mistral-window", tmp_path)
    seen = []
    runner = case.runner()
    gather = runner.memory.gather
    runner.memory.gather = lambda index, batch, tokens: seen.append(tokens) or gather(index, batch, tokens)
    tokens = case.prompt(400)
    runner.step([run_of(tokens, 399, 1, tables([400])[0])])
    assert seen == [48, 48, 48], "367, the first in view, is in the page that begins at 352"


def test_longrope_follows_the_context_asked_for(tmp_path):
    case = Case("phi3-longrope-short", tmp_path)
    short, long = inspect(case.directory, 64), inspect(case.directory, 65)
    assert short.config == inspect(case.directory).config and short.config.max_positions == 64
    assert long.config.max_positions == 2048 and long.config.rope.factors == (1.0, 2.5, 9.0)
    assert fingerprint(short) == fingerprint(case.directory) != fingerprint(long), "their KV is not the same"


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("gemma2", {"hidden_activation": "relu"}, "hidden_activation 'relu' is not supported, only gelu_pytorch_tanh"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention True is not supported"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be a positive number, not 0"),
        ("gemma2", {"layer_types": ["full_attention"]}, "layer_types must be a list of num_hidden_layers 3 names"),
        ("gemma2", {"layer_types": ["chunked_attention"] * 3}, "'chunked_attention' is not supported, only full_att"),
        ("gemma2", {"sliding_window": None}, "sliding_window is null"),
        ("gemma2", {"rope_parameters": LOCAL_GLOBAL}, "rope_parameters by layer type"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0 is not supported, only null"),
        ("gemma3", {"rope_parameters": {"rope_type": "default"}}, "rope_parameters must hold full_attention and"),
        ("gemma3", {"partial_rotary_factor": 0.5}, None),
        ("gemma3-text-part", {"text_config": [1]}, r"text_config must be an object, not \[1\]"),
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok 9 must not be more than the 5 experts"),
        ("mixtral", {"num_local_experts": 6}, r"gate\.weight has shape \[5, 32\], config.json"),
        ("mixtral", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types must be a list"),
        ("mixtral-window", {"layer_types": ["full_attention"] * 3}, "layer_types .* is not supported: this family"),
        ("qwen3-moe", {"mlp_only_layers": [3]}, r"mlp_only_layers must be a list of layer numbers below 3, not \[3\]"),
        ("qwen3-moe", {"num_experts": 7}, "num_experts and num_local_experts must be the same number"),
        ("qwen3-moe", {"decoder_sparse_step": 2}, r"mlp\.gate_proj"),
        ("phi3", {"partial_rotary_factor": 0.4}, None),
        ("phi3-longrope-short", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "'linear' is not supp"),
        ("phi3-longrope-short", {"rope_parameters": {"rope_type": "longrope"}}, "short_factor must be a list of 4"),
    ],
)
def test_what_cannot_be_computed_is_refused(tmp_path, name, changes, reason):
    case = Case(name, tmp_path)
    file = tmp_path / "config.json"
    values = json.loads(file.read_text())
    if reason is None:
        values.pop("rope_parameters")
        reason = "partial_rotary_factor"
    file.write_text(json.dumps({**values, **changes}))
    with pytest.raises(CheckpointError, match=reason):
        inspect(case.directory)
