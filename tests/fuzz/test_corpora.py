"""Every parser keeps its promises on the kept inputs, and on what becomes of them."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

from .contract import Contract, examine
from .corpus import CORPUS, kept
from .every import CONTRACTS
from .mutation import mutated

EACH = pytest.mark.parametrize("contract", CONTRACTS, ids=lambda one: one.name)
LARGEST_FILE, LARGEST = 4 << 10, 200 << 10


@EACH
def test_kept_inputs(contract: Contract) -> None:
    with contract.opened() as check:
        for data in kept(contract.name).values():
            examine(contract, check, data)


@EACH
def test_inputs_made_of_them(contract: Contract) -> None:
    with contract.opened() as check:

        @settings(max_examples=contract.examples, database=None, suppress_health_check=list(HealthCheck))
        @given(mutated([*kept(contract.name).values()], contract.words))
        def run(data: bytes) -> None:
            examine(contract, check, data)

        run()


def test_corpora_are_small_and_all_in_use() -> None:
    files = [path for path in CORPUS.rglob("*") if path.is_file()]
    assert {path.parent.name for path in files} == {contract.name for contract in CONTRACTS}
    assert max(path.stat().st_size for path in files) <= LARGEST_FILE
    assert sum(path.stat().st_size for path in files) <= LARGEST
