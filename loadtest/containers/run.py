"""Runs `docs/containers.md` as it stands there, with podman in Docker's place: `make test-containers`.

Builds the images, brings the mesh up, serves the official client, kills containers, and takes all down. Between that it
looks at the containers (checks.py), and at the end whether anything is left.
"""

from __future__ import annotations

import json
import re
import shlex
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from loadtest.containers.engine import PROJECT, ROOT, build, docker, said, why_not
from loadtest.containers.sizes import MOST_MB, sizes

DOCUMENT = ROOT / "docs" / "containers.md"
_DOWN = "docker compose down"
_LEAST = 100
"""Cached tokens of a turn that finds the turn before it."""
_TURNS = {2: "", 3: "host", 4: "", 5: "remote", 6: "nvme", 7: ""}
"""The tier that most of a turn's cached tokens have to come from; empty: any. Before the third turn workers die, before
the fourth their store, before the fifth there is a second machine and the first one's workers die, and before the sixth
all go."""
_END = """
status=$?
test $status = 0 || docker compose logs --tail 50 >&2
docker compose down --volumes
exit $status
"""
Turn = dict[str, int]


def main() -> int:
    """Returns 0 when everything was as the document says."""
    reason = why_not()
    if reason:
        print(f"not tried: {reason}", file=sys.stderr)
        return 2
    with docker() as environment, tempfile.TemporaryDirectory() as place:
        build(environment)
        for name, size in sizes(environment).items():
            assert size < MOST_MB[name], f"{name} is {size}, more than {MOST_MB[name]}"
        port = _free_port()
        script = Path(place) / "script.sh"
        script.write_text(commands(DOCUMENT.read_text(), Path(place), port))
        done = subprocess.run(
            ["bash", str(script)],
            env={**environment, "PENSTOCK_PORT": str(port)},
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        print(done.stdout)
        assert done.returncode == 0, "a command of the document failed"
        _check_turns([json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"worker"')])
        for kind in ("ps --all --format {{.Names}}", "volume ls --format {{.Name}}", "network ls --format {{.Name}}"):
            left = [name for name in said(["podman", *kind.split()], environment).split() if name.startswith(PROJECT)]
            assert not left, f"{left} are left"
        print("nothing is left")
    return 0


def blocks(document: str, *languages: str) -> list[str]:
    """The blocks of code in these languages, in order."""
    found = re.findall(r"```(\w*)\n(.*?)```", document, flags=re.DOTALL)
    return [text for language, text in found if language in languages]


def commands(document: str, place: Path, port: int) -> str:
    """All commands of the document, with this port and this Python, and the checks before what is first taken down. Its
    Python is written to `place`."""
    [turn] = blocks(document, "python")
    program = place / "turn.py"
    program.write_text(turn.replace("127.0.0.1:8000", f"127.0.0.1:{port}"))
    python = shlex.quote(sys.executable)
    text = "".join(blocks(document, "sh"))
    text = text.replace(_DOWN, f"{python} -m loadtest.containers.checks\n{_DOWN}", 1)
    text = text.replace("python turn.py", f"{python} {shlex.quote(str(program))}")
    text = text.replace("127.0.0.1:8000", f"127.0.0.1:{port}")
    return f"set -euxo pipefail\ntrap {shlex.quote(_END)} EXIT\n{text}"


def _check_turns(turns: list[Turn]) -> None:
    print("cached tokens of the turns by tier:", *turns)
    assert len(turns) == max(_TURNS), f"{max(_TURNS)} turns are wanted"
    for number, tier in _TURNS.items():
        cached = turns[number - 1]
        assert sum(cached.values()) > _LEAST, f"turn {number} finds the blocks of the turns before it: {cached}"
        if tier:
            assert cached[tier] > _LEAST, f"turn {number} finds them in {tier}: {cached}"


def _free_port() -> int:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        return int(holder.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
