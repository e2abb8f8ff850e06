"""What services without torch may import."""

from __future__ import annotations

import subprocess
import sys

LIGHT = (
    "request",
    "hooks",
    "errors",
    "config",
    "sequence",
    "scheduler",
    "drafting",
    "stats",
    "checks",
    "appetite",
    "reference",
)


def test_no_torch_in_the_plain_half():
    modules = [f"penstock.engine.{name}" for name in LIGHT]
    modules += ["penstock.checkpoint", "penstock.kv.pages", "penstock.kv.identity"]
    script = f"import sys; import {', '.join(modules)}; assert not {{'torch', 'numpy'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], env={"PYTHONPATH": ":".join(sys.path)}, check=True)
