"""The page of a report in a real browser."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

import pytest
from tests.tools.load.test_reports import WHOLE

from penstock.load.page import page
from penstock.load.report import report

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), "")
DARK = "--blink-settings=preferredColorScheme=0"
WIDTH = 420

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no Chromium is installed (Debian: apt-get install chromium)")


def shown(html: Path, *options: str) -> tuple[Path, str]:
    """A picture of the page, and what the browser's console said."""
    picture = html.with_suffix(".png")
    done = subprocess.run(
        (
            *(CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking"),
            *(f"--user-data-dir={html.parent / 'profile'}", "--enable-logging=stderr", f"--window-size={WIDTH},3000"),
            *(*options, f"--screenshot={picture}", html.as_uri()),
        ),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return picture, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


def size(picture: Path) -> tuple[int, int]:
    """Of a PNG."""
    width, height = struct.unpack(">II", picture.read_bytes()[16:24])
    return width, height


@pytest.mark.parametrize("options", [(), (DARK,)], ids=["light", "dark"])
def test_the_page_is_drawn_and_the_console_says_nothing(tmp_path: Path, options: tuple[str, ...]) -> None:
    html = tmp_path / "run.html"
    html.write_text(page(report(WHOLE), WHOLE.records), encoding="utf-8")
    picture, said = shown(html, *options)
    assert said == "" and size(picture)[0] == WIDTH


def test_a_page_with_an_error_would_be_noticed(tmp_path: Path) -> None:
    html = tmp_path / "wrong.html"
    html.write_text("<!doctype html><title>x</title><script>throw new Error('wrong')</script>", encoding="utf-8")
    assert "wrong" in shown(html)[1]
