"""What axe finds in the operator's console, in a real Chromium."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from openai import AsyncOpenAI

from penstock.bench.e2e.running import free_port, serving
from penstock.bench.e2e.servers import MESH, MeshForm, up
from penstock.bench.harness import Figure, figure, missing
from penstock.models import embedded

_ID, _UNIT = "console_axe_violations", "places"
_MODEL = "penstock-mini"
_AXE = Path("runs/axe")
_GOAL = 0.0


async def console_figures(quick: bool) -> Sequence[Figure]:
    """Of all views, in light and dark, on a wide and on a narrow window, of a mesh that has had a request."""
    try:
        from penstock.testing import browser as driven
    except ImportError:
        return [missing(_ID, _UNIT, "playwright is not installed: it is of the extra dev", _GOAL)]
    executable, axe = driven.chromium(), driven.axe_source(_AXE)
    if executable is None or axe is None:
        return [missing(_ID, _UNIT, "this machine has no Chromium, or no npm", _GOAL)]
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    async with (
        serving(up(MESH, embedded(_MODEL), port, MeshForm()), port),
        AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client,
        driven.open_browser(executable) as browser,
    ):
        await client.chat.completions.create(model=_MODEL, messages=[{"role": "user", "content": "Hello"}])
        found = await driven.console_violations(browser, url, axe)
    count = float(sum(map(len, found.values())))
    return [figure(_ID, [count], _UNIT, f"{len(found)} pages", _GOAL, lower_is_better=True)]
