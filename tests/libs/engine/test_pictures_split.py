"""Models that see pictures, split over several processes: what they say is what transformers says."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
from tests.libs.engine import test_padded, test_patches, test_pictures
from tests.libs.engine.rank_threads import in_threads, on_hosts
from tests.libs.engine.seeing import asked, engine_config

from penstock.engine.engine import Engine
from penstock.engine.ranks import stages
from penstock.pictures.picture import Grid

KINDS = {"llama 4": test_pictures, "qwen 2.5": test_patches, "kimi": test_padded}
SPLITS = [
    {"tp": 2},
    {"pp": 2},
    {"tp": 2, "pp": 2},
    {"tp": 2, "kernels": False},
    {"pp": 3, "kernels": False},
    {"tp": 2, "pp": 2, "kernels": False, "pages_apart": True},
]


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def seeing(kind, tmp_path_factory):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return KINDS[kind].Seeing(tmp_path_factory.mktemp("seeing"))


@pytest.fixture
def prompts(kind, seeing):
    """Two, with a picture between texts, and with two pictures, of which one is large."""
    if kind == "llama 4":
        one, other = test_pictures.drawn(1), test_pictures.drawn(2, Grid(2, 1))
        parts = [(9, one, 12), (5, other, 7, one, 30)]
        return [test_pictures.prompt(seeing.form, *each) for each in parts]
    one, other = (KINDS[kind].drawn(*each) for each in ((1, 4, 6), (2, 3, 2)))
    return [KINDS[kind].prompt(*each) for each in ((9, other, 12), (5, one, 7, other, 30))]


@pytest.mark.parametrize(
    ("split", "away"), [*((split, False) for split in SPLITS), ({"pp": 2, "tp": 2}, True)], ids=str
)
async def test_split_model_sees_what_the_whole_one_sees(kind, seeing, kit, prompts, split, away, monkeypatch):
    """Prompts in chunks that cut pictures, and for stages in pieces that cut them again; what is in pages is not
    computed again, and texts behind pictures are decoded."""
    monkeypatch.setattr(stages, "_LEAST", 8)
    config = replace(engine_config(seeing), **split)
    async with Engine.open(config, load=on_hosts(config.model) if away else in_threads) as engine:
        assert not engine.no_pictures
        for number, prompt in enumerate(prompts):
            whole = (len(prompt[0]) - 1) // 16 * 16
            assert await asked(engine, kit, seeing, f"first {number}", prompt, count=6) == 0
            assert await asked(engine, kit, seeing, f"again {number}", prompt, count=6) >= whole
        assert engine.shown.computed == (4 if kind == "llama 4" else 2), "rank 0 alone does that, of each tile once"


async def test_ranks_in_processes_of_their_own_see_too(seeing, kit, prompts):
    async with Engine.open(replace(engine_config(seeing), tp=2)) as engine:
        assert await asked(engine, kit, seeing, "one", prompts[1], count=3) == 0
