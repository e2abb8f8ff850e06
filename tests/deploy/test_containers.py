"""The compose file is really built, brought up, used by the official client, and taken down."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from loadtest.containers.engine import why_not

ROOT = Path(__file__).parents[2]
_REASON = why_not()


@pytest.mark.timeout(900)  # the image is built first
@pytest.mark.skipif(bool(_REASON), reason=f"needs a container engine: {_REASON}")
def test_the_page_on_containers_runs_as_it_stands_there() -> None:
    """`make test-containers`: it asserts that sessions go on when containers are killed, and from which tier."""
    tried = subprocess.run(["make", "test-containers"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert tried.returncode == 0, tried.stdout[-4000:] + tried.stderr[-4000:]
    assert "healthy, hardened, light; the store's memory is mapped" in tried.stdout
    assert "nothing is left" in tried.stdout
