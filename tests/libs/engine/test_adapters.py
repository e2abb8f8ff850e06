"""LoRA adapters: each request gets the tokens of the model into which its adapter is merged, whatever is beside it."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace

import pytest
import torch
from tests.libs.engine.rank_threads import in_threads, on_hosts

from penstock.checkpoint import CheckpointError, inspect
from penstock.engine.engine import Engine
from penstock.engine.errors import EngineError, RequestRefused
from penstock.engine.forward import following, redundancy
from penstock.engine.forward.redundancy import note_rows
from penstock.engine.kernels.cpu.decoder import CompiledDecoder
from penstock.kv.identity import Chain, root_key
from penstock.testing.adapters import fingerprint_of, write_adapter, write_merged
from penstock.testing.checkpoints import DEEPSEEK_IN_VECTORS, TINY_DEEPSEEK, TINY_LLAMA_4, TinyModel, write_checkpoint

LATENT = {
    "targets": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "exclude_modules": r".*\.experts\..*",
}
KINDS = {
    "llama": (TinyModel(), {}),
    "tied qwen with biases": (TinyModel("Qwen2ForCausalLM", tied=True, seed=1), {"use_rslora": True, "lora_alpha": 3}),
    "phi": (TinyModel("Phi3ForCausalLM", seed=2), {"targets": ("qkv_proj", "gate_up_proj", "down_proj")}),
    "gemma": (TinyModel("Gemma2ForCausalLM", seed=3, extra={"sliding_window": 32, "query_pre_attn_scalar": 16}), {}),
    "mixtral": (
        TinyModel("MixtralForCausalLM", seed=4, extra={"num_local_experts": 4, "num_experts_per_tok": 2}),
        {"targets": ("q_proj", "k_proj", "v_proj", "o_proj")},
    ),
    "deepseek": (replace(TINY_DEEPSEEK, vocab_size=320), LATENT),
    "deepseek in vectors": (replace(DEEPSEEK_IN_VECTORS, vocab_size=320), LATENT),
    "llama 4": (replace(TINY_LLAMA_4, vocab_size=320), {}),
}
PARAMETERS = {"parameters": ("experts.gate_up_proj", "experts.down_proj", "gate.weight")}
FUSED = {"rank_pattern": {r".*\.gate_up_proj": 6}, "alpha_pattern": {r".*\.gate_up_proj": 9}}
QWEN_MOE = TinyModel(
    "Qwen3MoeForCausalLM",
    seed=8,
    extra={"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
)
EXPERTS = {
    "mixtral, modules": (
        KINDS["mixtral"][0],
        {"targets": ("q_proj", "gate", "w1", "w2", "w3"), "experts": True, "rank_pattern": {r"experts\.2\.w3": 7}},
    ),
    "mixtral, parameters": (KINDS["mixtral"][0], {"targets": ("o_proj",), **PARAMETERS}),
    "qwen 3, modules": (QWEN_MOE, {"experts": True, "use_rslora": True}),
    "qwen 3, parameters": (QWEN_MOE, {"targets": ("q_proj", "v_proj"), **PARAMETERS, **FUSED}),
    "deepseek, modules": (
        replace(DEEPSEEK_IN_VECTORS, vocab_size=320),
        {"targets": ("gate", "gate_proj", "up_proj", "down_proj"), "experts": True},
    ),
    "deepseek, parameters": (
        replace(TINY_DEEPSEEK, vocab_size=320),
        {"targets": ("q_b_proj", "kv_a_proj_with_mqa"), **PARAMETERS, **FUSED},
    ),
    "llama 4, parameters": (
        replace(TINY_LLAMA_4, vocab_size=320),
        {"targets": ("q_proj", "router"), "parameters": PARAMETERS["parameters"][:2], **FUSED},
    ),
}
"""As PEFT adapts experts that are modules each, and as parameters of one."""
MANY = {"rank_pattern": {"q_proj": 9, "layers.1.mlp.down_proj": 2}, "alpha_pattern": {"v_proj": 3}}


class Family:
    """A model, two adapters of it, and what these are merged into."""

    def __init__(self, directory, tiny, settings):
        self.model = write_checkpoint(directory / "model", tiny)
        self.adapters = {
            "one": write_adapter(directory / "one", self.model, seed=1, strength=0.7, **settings),
            "two": write_adapter(directory / "two", self.model, seed=2, strength=0.7, rank=3, **settings),
        }
        if tiny.architecture == "LlamaForCausalLM":
            del self.adapters["two"]
            self.adapters["two"] = write_adapter(directory / "patterns", self.model, seed=2, strength=0.7, **MANY)
        self.merged = {
            name: write_merged(directory / f"merged-{name}", self.model, adapter)
            for name, adapter in self.adapters.items()
        }
        self.fingerprints = {name: fingerprint_of(adapter, self.model) for name, adapter in self.adapters.items()}
        self.lora = tuple(f"{name}={adapter}" for name, adapter in self.adapters.items())


@pytest.fixture(scope="module", params=KINDS)
def family(request, tmp_path_factory):
    return Family(tmp_path_factory.mktemp("adapters"), *KINDS[request.param])


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return Family(tmp_path_factory.mktemp("llama"), *KINDS["llama"])


@pytest.fixture(scope="module")
async def expected(family, kit):
    """The answers of the base model and of each merged one."""
    return await answers_of(family, kit)


async def answers_of(family, kit, **settings):
    found = {}
    for name, model in {"": family.model, **family.merged}.items():
        async with Engine.open(settings_of(model, **settings)) as engine:
            found[name] = await kit.read_all(engine, kit.mixed())
    return found


def settings_of(model, **fields):
    from penstock.engine.config import EngineConfig

    base = {"kv_pool_tokens": 8192, "max_batch_tokens": 64, "max_running": 32, "threads": 1, "lookup_tokens": 0}
    return EngineConfig(model=model, **(base | fields))


@pytest.mark.parametrize(
    ("kernels", "ranks", "stages", "away"),
    [
        (True, 1, 1, False),
        (False, 1, 1, False),
        (True, 2, 1, False),
        (True, 1, 2, False),
        (False, 2, 2, False),
        (True, 2, 2, True),
    ],
)
async def test_a_batch_of_two_adapters_and_none(family, expected, kit, kernels, ranks, stages, away):
    """All at once, in chunks: prompts of up to 300 tokens, steps of 64. Of ranks each has its part of an adapter, also
    of those on other hosts."""
    names = ["", "one", "two"]
    settings = settings_of(family.model, lora=family.lora, kernels=kernels, tp=ranks, pp=stages)
    async with Engine.open(settings, load=on_hosts(family.model) if away else in_threads) as engine:
        assert dict(engine.adapters.names) == family.fingerprints
        requests = [
            replace(one, id=f"{name}-{one.id}", adapter=family.fingerprints.get(name, ""))
            for one in kit.mixed()
            for name in names
        ]
        answers = await kit.read_all(engine, requests)
    for place, answer in enumerate(answers):
        kit.assert_same(answer, expected[names[place % 3]][place // 3])
    assert expected["one"][4].ids != expected[""][4].ids != expected["two"][4].ids


@pytest.fixture(scope="module", params=EXPERTS)
def sparse(request, tmp_path_factory):
    return Family(tmp_path_factory.mktemp("experts"), *EXPERTS[request.param])


@pytest.fixture(scope="module")
async def sparse_expected(sparse, kit):
    return await answers_of(sparse, kit)


@pytest.mark.parametrize(
    ("fields", "away"),
    [
        ({}, False),
        ({"tp": 2, "ep": 2, "pp": 2}, False),
        ({"tp": 4, "ep": 2, "kernels": False}, False),
        ({"tp": 2, "pp": 2}, True),
    ],
    ids=str,
)
async def test_experts_and_routers_of_two_adapters_and_none(sparse, sparse_expected, kit, fields, away):
    """As above; a step of rows without such an adapter is the kernels' still."""
    names = ["", "one", "two"]
    load = on_hosts(sparse.model) if away else in_threads
    async with Engine.open(settings_of(sparse.model, lora=sparse.lora, **fields), load=load) as engine:
        requests = [
            replace(one, id=f"{name}-{one.id}", adapter=sparse.fingerprints.get(name, ""))
            for one in kit.mixed()
            for name in names
        ]
        answers = await kit.read_all(engine, requests)
    for place, answer in enumerate(answers):
        kit.assert_same(answer, sparse_expected[names[place % 3]][place // 3])
    assert sparse_expected["one"][4].ids != sparse_expected[""][4].ids != sparse_expected["two"][4].ids


async def test_experts_that_have_copies_are_adapted_in_each(tmp_path, kit, monkeypatch):
    monkeypatch.setattr(redundancy, "cache_directory", lambda _: tmp_path / "notes")
    family = Family(tmp_path, *EXPERTS["mixtral, parameters"])
    checkpoint = inspect(family.model)
    note_rows(checkpoint, [[100, 1, 1, 1]] * checkpoint.config.n_layers)
    expected = (await answers_of(family, kit))["one"]
    settings = settings_of(family.model, lora=family.lora, tp=2, ep=2, redundant_experts=1)
    async with Engine.open(settings, load=in_threads) as engine:
        assert engine._runner.ranks.checkpoint.part.rank.copies[0] == ((), (0,))
        requests = [replace(one, adapter=family.fingerprints["one"]) for one in kit.mixed()]
        for answer, right in zip(await kit.read_all(engine, requests), expected, strict=True):
            kit.assert_same(answer, right)


@pytest.mark.parametrize(("kind", "compiled"), [("mixtral", True), ("mixtral, parameters", False)])
async def test_torch_computes_the_steps_of_experts_adapters(tmp_path, kit, monkeypatch, kind, compiled):
    """And those alone."""
    family = Family(tmp_path, *(KINDS | EXPERTS)[kind])
    steps = []
    forward = CompiledDecoder._step
    monkeypatch.setattr(
        CompiledDecoder, "_step", lambda self, runs, *a, **k: (steps.append(len(runs)), forward(self, runs, *a, **k))
    )
    async with Engine.open(settings_of(family.model, lora=family.lora)) as engine:
        request = kit.request("a", 20, kit.greedy(8))
        await kit.read(engine, replace(request, adapter=family.fingerprints["one"]))
        assert bool(steps) == compiled
        await kit.read(engine, kit.renamed(request, "b"))
    assert len(steps) >= 8


async def test_the_compiled_step_computes_them(llama, kit, monkeypatch):
    steps = []
    forward = CompiledDecoder._step
    monkeypatch.setattr(
        CompiledDecoder, "_step", lambda self, runs, *a, **k: (steps.append(len(runs)), forward(self, runs, *a, **k))
    )
    async with Engine.open(settings_of(llama.model, lora=llama.lora)) as engine:
        requests = [replace(kit.request(n, 20, kit.greedy(8)), adapter=llama.fingerprints[n]) for n in ("one", "two")]
        await kit.read_all(engine, requests)
    assert max(steps) == 2


async def test_drafts_are_verified_with_the_adapter(llama, kit):
    """Some drafts are right and some are wrong."""
    plain = (await answers_of(llama, kit))["one"]
    texts = {
        request.id: [token.token for token in answer.tokens] for request, answer in zip(kit.mixed(), plain, strict=True)
    }

    def propose(ask):
        done = len(ask.tokens) - len(next(one.prompt for one in kit.mixed() if one.id == ask.id))
        right = texts[ask.id][done : done + ask.k]
        return [(token + (place == 3)) % 256 for place, token in enumerate(right)]

    async with Engine.open(
        settings_of(llama.model, lora=llama.lora, draft_always=True, draft_timeout_s=30), kit.Drafts(propose)
    ) as engine:
        requests = [replace(one, adapter=llama.fingerprints["one"]) for one in kit.mixed()]
        for answer, right in zip(await kit.read_all(engine, requests), plain, strict=True):
            kit.assert_same(answer, right)
        assert engine.stats().drafts.accepted > 20


async def test_pages_are_shared_by_one_adapter_and_by_nobody_else(llama, kit):
    async with Engine.open(settings_of(llama.model, lora=llama.lora)) as engine:
        size = engine.spec.block_size
        base = kit.request("long", 200, kit.greedy(8))

        async def shared(number, adapter):
            root = root_key(engine.spec, b"n" * 32, adapter)
            request = replace(base, id=str(number), adapter=adapter)
            answer = await kit.read(engine, request, chain=Chain(root, size, request.prompt))
            return answer.last.shared_tokens, answer.ids

        one, two = llama.fingerprints["one"], llama.fingerprints["two"]
        cold = {adapter: await shared(number, adapter) for number, adapter in enumerate(("", one, two))}
        assert [tokens for tokens, _ in cold.values()] == [0, 0, 0]
        for number, (adapter, (_, ids)) in enumerate(cold.items()):
            tokens, again = await shared(number + 10, adapter)
            assert tokens >= 192 and again == ids


@pytest.mark.parametrize("ranks", [1, 2])
async def test_few_are_in_memory_and_others_come_back(llama, kit, ranks):
    plain = await answers_of(llama, kit)
    async with Engine.open(settings_of(llama.model, lora=llama.lora, max_loras=1, tp=ranks), load=in_threads) as engine:
        assert engine.adapters.in_memory == 1
        loads = engine.adapters.loads
        requests = [
            replace(one, id=f"{name}{one.id}", adapter=llama.fingerprints[name])
            for one in kit.mixed()
            for name in ("one", "two")
        ]
        answers = await asyncio.wait_for(kit.read_all(engine, requests), 60)
        assert engine.adapters.in_memory == 1
        assert engine.adapters.loads > loads
    for place, answer in enumerate(answers):
        kit.assert_same(answer, plain[("one", "two")[place % 2]][place // 2])


@pytest.mark.parametrize("stages", [1, 2])
async def test_a_step_keeps_the_adapter_of_a_request_that_has_left(llama, kit, stages):
    async with Engine.open(settings_of(llama.model, pp=stages, max_batch_tokens=512), load=in_threads) as engine:
        for number in range(3):
            await engine.adapters.add("one", llama.adapters["one"])
            request = kit.request(f"{number}", 400, kit.greedy(5))
            updates = engine.generate(replace(request, adapter=llama.fingerprints["one"]))
            first = asyncio.ensure_future(anext(updates))
            while not engine._flights:
                await asyncio.sleep(0)
            first.cancel()
            await asyncio.wait([first])
            await updates.aclose()
            assert engine.adapters.remove("one")
            assert engine._flights and engine.adapters.in_memory == 1
            while engine._flights:
                await asyncio.sleep(0)
            assert engine.adapters.in_memory == 0
            await kit.read(engine, kit.renamed(request, "another"))


async def test_named_and_taken_away_while_it_runs(llama, kit, tmp_path):
    async with Engine.open(settings_of(llama.model)) as engine:
        request = replace(kit.request("a", 30, kit.greedy(30)), adapter=llama.fingerprints["one"])
        with pytest.raises(RequestRefused, match="is not loaded"):
            await kit.read(engine, request)
        assert await engine.adapters.add("one", llama.adapters["one"]) == llama.fingerprints["one"]
        whole = (await kit.read(engine, request)).ids
        updates = engine.generate(replace(request, id="b"))
        found = [token.token for token in (await anext(updates)).tokens]
        assert engine.adapters.remove("one") and not engine.adapters.remove("one")
        assert engine.adapters.in_memory == 1, "a request still uses it"
        async for update in updates:
            found += [token.token for token in update.tokens]
        assert found == whole
        assert engine.adapters.in_memory == 0
        with pytest.raises(RequestRefused, match="is not loaded"):
            await kit.read(engine, replace(request, id="c"))


async def test_a_directory_that_changes_is_not_taken_for_what_it_was(llama, kit, tmp_path):
    copy = shutil.copytree(llama.adapters["one"], tmp_path / "copy")
    settings = settings_of(llama.model, lora=(f"one={copy}", f"two={llama.adapters['two']}"), max_loras=1)
    async with Engine.open(settings) as engine:
        shutil.copy(llama.adapters["two"] / "adapter_config.json", copy)
        shutil.copy(llama.adapters["two"] / "adapter_model.safetensors", copy)
        with pytest.raises(EngineError, match="has changed since it got its name"):
            await kit.read(engine, replace(kit.request("a", 9, kit.greedy(2)), adapter=llama.fingerprints["one"]))
        assert await engine.adapters.add("one", copy) == llama.fingerprints["two"]
        assert set(engine.adapters.names.values()) == {llama.fingerprints["two"]}


async def test_an_adapter_that_another_rank_cannot_load_disturbs_nobody(llama, kit, monkeypatch):
    def refuse(path, model):
        raise CheckpointError(path, "is not here")

    async with Engine.open(settings_of(llama.model, tp=2), load=in_threads) as engine:
        await engine.adapters.add("one", llama.adapters["one"])
        request = replace(kit.request("a", 30, kit.greedy(5)), adapter=llama.fingerprints["one"])
        before = (await kit.read(engine, request)).ids
        monkeypatch.setattr(following, "inspect_adapter", refuse)
        with pytest.raises(CheckpointError, match="is not here"):
            await engine.adapters.add("two", llama.adapters["two"])
        assert [*engine.adapters.names] == ["one"]
        assert (await kit.read(engine, replace(request, id="b"))).ids == before


async def test_numbers_that_are_not_finite_are_refused(llama, tmp_path):
    from safetensors.torch import load_file, save_file

    copy = shutil.copytree(llama.adapters["one"], tmp_path / "copy")
    tensors = load_file(copy / "adapter_model.safetensors")
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
    tensors[name][2, 3] = torch.nan
    save_file(tensors, copy / "adapter_model.safetensors")
    async with Engine.open(settings_of(llama.model)) as engine:
        with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
            await engine.adapters.add("bad", copy)
        assert not engine.adapters.names
        assert inspect(llama.model).config.n_layers == 3
        with pytest.raises(CheckpointError, match="is not a directory"):
            await engine.adapters.add("none", tmp_path / "none")


def test_a_name_is_one_that_clients_can_ask_for(llama):
    from penstock.runtime.config import ConfigError

    for entry, right in (("one", "must be NAME=DIR"), ("a:b=x", "without : and ="), ("=x", "1 to 100")):
        with pytest.raises(ConfigError, match=right):
            settings_of(llama.model, lora=(entry,))
    with pytest.raises(ConfigError, match="twice"):
        settings_of(llama.model, lora=("a=x", "a=y"))


def farthest(found, right):
    """The most by which the logprob of a probable token is off."""
    return max(
        abs(dict(own.top).get(token, -20.0) - logprob)
        for own, expected in zip(found, right, strict=True)
        for token, logprob in expected.top[:2]
    )


@pytest.mark.parametrize(
    ("dtype", "weights", "near"), [("bfloat16", "plain", 0.3), ("bfloat16", "lossless", 0.3), ("int8", "auto", 0.4)]
)
async def test_other_kinds_of_weights(llama, kit, dtype, weights, near):
    """The compiled step adds the same to matrices that are kept in fewer bits: answers are near those in float32, and
    far from those of the base model."""
    requests = [kit.request(str(length), length, kit.greedy(1, logprobs=5)) for length in (3, 17, 40, 90)]
    async with Engine.open(settings_of(llama.merged["one"])) as engine:
        right = [answer.tokens[0] for answer in await kit.read_all(engine, requests)]
    off = {}
    async with Engine.open(settings_of(llama.model, lora=llama.lora, dtype=dtype, weights=weights)) as engine:
        for adapter in ("", llama.fingerprints["one"]):
            named = [replace(request, id=f"{adapter}{request.id}", adapter=adapter) for request in requests]
            found = [answer.tokens[0] for answer in await kit.read_all(engine, named)]
            off[adapter] = farthest(found, right)
    assert off[llama.fingerprints["one"]] < near < 1 < off[""]


async def test_weights_in_int4(llama, kit):
    """The compiled step adds to them what torch does, in float32, to the numbers that they stand for."""
    requests = [kit.request(str(length), length, kit.greedy(1, logprobs=5)) for length in (3, 17, 40, 90)]
    adapted = [replace(request, adapter=llama.fingerprints["one"]) for request in requests]
    found = {}
    for kernels in (True, False):
        settings = settings_of(llama.model, lora=llama.lora, dtype="int4", kernels=kernels)
        async with Engine.open(settings) as engine:
            answers = {name: await kit.read_all(engine, some) for name, some in (("", requests), ("one", adapted))}
            found[kernels] = {name: [answer.tokens[0] for answer in some] for name, some in answers.items()}

    right = found[False]["one"]
    assert farthest(found[True]["one"], right) < 0.4 < 1 < farthest(found[True][""], right)
