"""Makes the clients' environments, each in a directory of its own: `python -m loadtest.clients.install [NAME ...]`.

They go to $PENSTOCK_CLIENTS, else to runs/clients, and hold exactly what `environments/` pins: two of Python for the
clients, which no resolver finds one for, one of Python for schemathesis, and one of Node. One that is
there already is left alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

PINS = Path(__file__).parent / "environments"
NODE = "node"


def place() -> Path:
    """Where the environments are."""
    return Path(os.environ.get("PENSTOCK_CLIENTS") or Path(__file__).parents[2] / "runs" / "clients")


def environments() -> list[str]:
    """Their names."""
    return [*sorted(file.stem for file in PINS.glob("*.txt")), NODE]


def interpreter(name: str) -> Path:
    """Runs a program in that environment."""
    return Path(shutil.which("node") or "node") if name == NODE else place() / name / "bin" / "python"


def installed(name: str) -> bool:
    """Whether the environment can be used."""
    return (place() / name / "node_modules").is_dir() if name == NODE else interpreter(name).exists()


def install(name: str) -> None:
    """Makes one environment anew. Raises CalledProcessError or OSError when that fails, and leaves nothing."""
    directory = place() / name
    try:
        if name == NODE:
            shutil.copytree(PINS / NODE, directory, dirs_exist_ok=True)
            subprocess.run(("npm", "ci", "--no-audit", "--no-fund"), cwd=directory, check=True)
        else:
            venv.create(directory, with_pip=True, clear=True)
            pip = (interpreter(name), "-m", "pip", "--quiet", "install", "--no-deps")
            subprocess.run((*pip, "--requirement", PINS / f"{name}.txt"), check=True)
    except (subprocess.CalledProcessError, OSError):
        shutil.rmtree(directory, ignore_errors=True)
        raise


def main(names: list[str]) -> int:
    """The exit code: how many could not be installed."""
    failed = 0
    for name in names or environments():
        if name not in environments():
            raise SystemExit(f"an environment is one of {', '.join(environments())}, not {name!r}")
        if installed(name):
            continue
        try:
            install(name)
            print(f"{name}: installed in {place() / name}", flush=True)
        except (subprocess.CalledProcessError, OSError) as error:
            failed += 1
            print(f"{name}: not installed: {error}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
