"""The console in a real Chromium, and what axe finds in it.

Playwright, which drives the browser, is of the extra `dev`; Chromium is the system's, axe-core comes from npm.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Literal

from playwright.async_api import Browser, Page, async_playwright

AXE = "axe-core@4.14.1"
Scheme = Literal["light", "dark"]
SCHEMES: tuple[Scheme, ...] = ("light", "dark")
WIDTHS: Mapping[str, tuple[int, int]] = {"wide": (1440, 900), "narrow": (390, 844)}
"""Of the window, and its heights."""
_VIEWS: Mapping[str, str] = {
    "mesh": "tbody tr",
    "sessions": "main .view",
    "requests": "tbody tr a",
    "playground": "#model",
}
"""What is there once a view is."""
_FLAGS = ["--no-sandbox", "--disable-background-networking", "--disable-dev-shm-usage"]
_INSTALL_S = 120.0


def chromium() -> str | None:
    """Where the browser is; None: this machine has none."""
    return next((found for name in ("chromium", "chromium-browser") if (found := shutil.which(name))), None)


def axe_source(directory: Path) -> str | None:
    """The text of axe-core, which is installed below `directory` once; None where npm can't."""
    file = directory / "node_modules" / "axe-core" / "axe.min.js"
    npm = shutil.which("npm")
    if not file.is_file() and npm is not None:
        directory.mkdir(parents=True, exist_ok=True)
        command = (npm, "install", "--prefix", str(directory), "--no-audit", "--no-fund", "--no-package-lock", AXE)
        with suppress(subprocess.TimeoutExpired):
            subprocess.run(command, check=False, capture_output=True, timeout=_INSTALL_S)
    return file.read_text() if file.is_file() else None


@asynccontextmanager
async def open_browser(executable: str) -> AsyncIterator[Browser]:
    """The browser, for the length of the block."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=executable, args=_FLAGS)
        try:
            yield browser
        finally:
            await browser.close()


@asynccontextmanager
async def console_page(
    browser: Browser, url: str, *, scheme: Scheme = "light", key: str = "", still: bool = True, width: str = "wide"
) -> AsyncIterator[Page]:
    """The console of the gateway at `url` in a window of its own, with an operator's key where one is given. `still`:
    the reader wants reduced motion."""
    across, high = WIDTHS[width]
    async with await browser.new_context(
        color_scheme=scheme,
        reduced_motion="reduce" if still else "no-preference",
        viewport={"width": across, "height": high},
    ) as context:
        page = await context.new_page()
        await page.goto(f"{url}/console")
        if key:
            await page.fill("#key", key)
            await page.press("#key", "Enter")
        yield page


async def visit(page: Page, view: str) -> None:
    """Shows a view of the console, and returns when it is there. `request` is the latest request."""
    if view == "request":
        await visit(page, "requests")
        await page.click("tbody tr a")
        await page.wait_for_selector(".waterfall, .problem")
        return
    await page.click(f'#views a[href="#/{view}"]')
    await page.wait_for_selector(_VIEWS[view], state="attached")


VIEWS = (*_VIEWS, "request")


async def axe_violations(page: Page, axe: str) -> list[str]:
    """What axe finds in the page as it is: the rule and the place, of each."""
    await page.evaluate(f"{axe}\n;undefined")
    found = await page.evaluate("axe.run().then((said) => said.violations)")
    return [f"{rule['id']}: {' '.join(map(str, node['target']))}" for rule in found for node in rule["nodes"]]


async def console_violations(
    browser: Browser, url: str, axe: str, *, key: str = "", views: Sequence[str] = VIEWS
) -> dict[str, list[str]]:
    """What axe finds in each view, in light and in dark, wide and narrow; the figure `console_axe_violations` is how
    many there are. The mesh has had a request."""
    found = {}
    for scheme in SCHEMES:
        for width in WIDTHS:
            async with console_page(browser, url, scheme=scheme, key=key, width=width) as page:
                for view in views:
                    await visit(page, view)
                    found[f"{scheme} {width} {view}"] = await axe_violations(page, axe)
    return found
