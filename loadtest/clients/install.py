"""Makes the clients' environments, each in a directory of its own: `python -m loadtest.clients.install [NAME ...]`.

They go to $PENSTOCK_CLIENTS, else to runs/clients, and hold exactly what `environments/` pins. Of Python there are
several, since no resolver finds one for all clients; those of Node are the directories with a package.json. An
environment that was made of the same pins is left alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

PINS = Path(__file__).parent / "environments"
_COMPLETE = ".complete"
"""The file of an environment that says of which pins it was made; it is written last."""


def place() -> Path:
    """Where the environments are."""
    return Path(os.environ.get("PENSTOCK_CLIENTS") or Path(__file__).parents[2] / "runs" / "clients")


def environments() -> list[str]:
    """Their names."""
    of_python = [file.stem for file in PINS.glob("*.txt")]
    return sorted([*of_python, *(file.parent.name for file in PINS.glob("*/package.json"))])


def of_node(name: str) -> bool:
    """Whether it is one of Node, and not of Python."""
    return (PINS / name).is_dir()


def interpreter(name: str) -> Path:
    """Runs a program in that environment."""
    return Path(shutil.which("node") or "node") if of_node(name) else place() / name / "bin" / "python"


def installed(name: str) -> bool:
    """Whether the environment is there, whole, and of the present pins."""
    try:
        return (place() / name / _COMPLETE).read_text() == _pins(name)
    except OSError:
        return False


def install(name: str) -> None:
    """Makes one environment anew. Raises CalledProcessError or OSError when that fails, and leaves nothing."""
    directory = place() / name
    shutil.rmtree(directory, ignore_errors=True)
    try:
        if of_node(name):
            shutil.copytree(PINS / name, directory)
            # Without a lock the package pins its own dependencies, which differ by platform.
            locked = (directory / "package-lock.json").exists()
            how = ("ci",) if locked else ("install", "--no-package-lock")
            subprocess.run(("npm", *how, "--no-audit", "--no-fund"), cwd=directory, check=True)
        else:
            venv.create(directory, with_pip=True)
            pip = (interpreter(name), "-m", "pip", "--quiet", "install", "--no-deps")
            subprocess.run((*pip, "--requirement", PINS / f"{name}.txt"), check=True)
        (directory / _COMPLETE).write_text(_pins(name))
    except (subprocess.CalledProcessError, OSError):
        shutil.rmtree(directory, ignore_errors=True)
        raise


def _pins(name: str) -> str:
    files = sorted((PINS / name).glob("*.json")) if of_node(name) else [PINS / f"{name}.txt"]
    return "".join(file.read_text() for file in files)


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
