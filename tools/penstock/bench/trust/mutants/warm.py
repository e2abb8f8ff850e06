"""A process that has imported what tests import and nothing of ours, and forks a child for each run of tests: so a run
begins at once, with modules as new, one of them from a source that is given.

It reads one JSON object a line from standard input, and answers with one: see `running`, its other side. It is run as a
script, because its own package would bring modules along.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

_MOST_BYTES = 8 << 30
"""Of memory, which a change may make grow without end."""


class _Changed(SourceFileLoader):
    """Loads one module from a source that is in no file."""

    def __init__(self, name: str, path: str, source: str) -> None:
        super().__init__(name, path)
        self._source = source

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._source, self.path, "exec", dont_inherit=True)


class _OneModule(MetaPathFinder):
    """Finds the module that is changed."""

    def __init__(self, name: str, path: str, source: str) -> None:
        self._name, self._path, self._source = name, path, source

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        return spec_from_file_location(fullname, self._path, loader=_Changed(fullname, self._path, self._source))


class _Plainly:
    """A plugin: what Hypothesis finds is not made smaller, nor kept; its examples are the same in each run."""

    def pytest_configure(self) -> None:
        from hypothesis import Phase, settings

        phases = (Phase.explicit, Phase.generate)
        known = settings.get_profile("patient")
        settings.register_profile("plainly", known, phases=phases, database=None, derandomize=True)
        settings.load_profile("plainly")


def _run(ask: Mapping[str, Any], folder: Path) -> int:
    """In the child: the tests, up to the first that fails."""
    import pytest

    resource.setrlimit(resource.RLIMIT_CPU, (int(ask["cpu_s"]) + 1, int(ask["cpu_s"]) + 3))
    resource.setrlimit(resource.RLIMIT_DATA, (_MOST_BYTES, _MOST_BYTES))
    if ask["module"]:
        sys.meta_path.insert(0, _OneModule(ask["module"], str(Path(ask["path"]).absolute()), ask["source"]))
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--basetemp={folder / 't'}"]
    options += ["--assert=plain", "--tb=line", "--no-header", "-o", f"timeout={ask['test_s']}"]
    return int(pytest.main([*options, *ask["tests"]], plugins=[_Plainly()]))


def _forked(ask: Mapping[str, Any]) -> dict[str, object]:
    """What became of a run: `status` is that of pytest, or minus the signal that ended it; None: it took too long."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        folder = Path(name)
        child = os.fork()
        if not child:
            _become(ask, folder)
        status = _status(child, float(ask["wall_s"]))
        said = (folder / "said").read_text("utf-8", "replace") if (folder / "said").exists() else ""
    return {"status": status, "seconds": time.monotonic() - begin, "said": said[-4000:]}


def _become(ask: Mapping[str, Any], folder: Path) -> None:
    """The child's life; does not return."""
    status = 70
    try:
        os.setsid()
        said = os.open(folder / "said", os.O_WRONLY | os.O_CREAT)
        null = os.open(os.devnull, os.O_RDONLY)
        for old, new in ((null, 0), (said, 1), (said, 2)):
            os.dup2(old, new)
        status = _run(ask, folder)
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)


def _status(child: int, wall_s: float) -> int | None:
    """Waits for a child, and ends it and what it has started when it is late."""
    handle = os.pidfd_open(child)
    try:
        late = not select.select([handle], [], [], wall_s)[0]
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        os.close(handle)
    return None if late or code in {-signal.SIGXCPU, -signal.SIGKILL} else code


def main() -> None:
    """Until standard input ends. The arguments name what is imported."""
    warnings.simplefilter("ignore")
    for name in sys.argv[1:]:
        importlib.import_module(name)
    ours = [name for name in sys.modules if name.startswith("penstock")]
    assert not ours, f"a changed module would not be imported anew: {ours}"
    for line in sys.stdin:
        print(json.dumps(_forked(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
