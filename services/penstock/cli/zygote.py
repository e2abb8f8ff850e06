"""`python -m penstock.cli.zygote MODULE ...`: a process that has imported what workers import, and forks them.

A worker spends most of its start on importing torch. One that is forked here has that behind it, so it is back sooner
when it died, and workers of one host share the memory of what they imported. The zygote itself starts no thread, opens
no channel and computes nothing: only such a process may be forked safely.

The supervisor holds the other end of a socket (SOCK_SEQPACKET) in `PENSTOCK_ZYGOTE_FD`. It sends a message of JSON for
each worker, `{"module": ..., "arguments": [...], "environment": {...}}`, with two file descriptors: where the worker
writes its lines, and its end of the socket pair of `penstock.runtime.lifecycle`. The answer is `{"pid": ...}`, and when
the worker has ended `{"pid": ..., "code": ...}`. The zygote ends with its supervisor.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from setproctitle import setproctitle

from penstock.runtime.lifecycle import SUPERVISOR_FD

ZYGOTE_FD = "PENSTOCK_ZYGOTE_FD"
LONGEST_ORDER = 64 * 1024
"""Bytes of a message."""
_FDS = 2


class _Child(Exception):
    """Raised in a process that was just forked, so that it leaves the zygote's frames."""

    def __init__(self, module: str) -> None:
        super().__init__(module)
        self.module = module


def main(modules: Sequence[str]) -> None:
    """Serves until the supervisor has gone."""
    control = socket.socket(fileno=int(os.environ.pop(ZYGOTE_FD)))
    control.set_inheritable(False)
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a collection in a worker writes to no page that all share
    try:
        _serve(control)
    except _Child as child:
        module = child.module
    else:
        return
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _serve(control: socket.socket) -> None:
    ours, theirs = socket.socketpair()
    with control, ours, theirs, selectors.DefaultSelector() as selector:
        for end in (ours, theirs):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)  # else the wake-up below would not come
        signal.set_wakeup_fd(theirs.fileno())
        selector.register(control, selectors.EVENT_READ)
        selector.register(ours, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is ours:
                    ours.recv(4096)
                    _reap(control)
                elif not _obey(control):
                    return


def _obey(control: socket.socket) -> bool:
    """Forks what the next message asks for; False when there will be no more."""
    order, fds, _, _ = socket.recv_fds(control, LONGEST_ORDER, _FDS)
    if not order:
        return False
    try:
        wanted = json.loads(order)
        begun, begins = os.pipe()
        fds += [begun, begins]
        pid = os.fork()
        if pid == 0:
            _become(wanted, *fds[:_FDS])
        os.close(fds.pop())
        os.read(begun, 1)  # until the child leads a session of its own: from then on it can be killed as one
        _tell(control, pid=pid)
    finally:
        for fd in fds:
            os.close(fd)
    return True


def _become(wanted: Mapping[str, Any], lines: int, supervisor: int) -> None:
    """In the child: takes the place that a program started for itself would have."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for standard in (1, 2):
        os.dup2(lines, standard)
    os.environ.update(wanted["environment"])
    os.environ[SUPERVISOR_FD] = str(os.dup(supervisor))
    module, arguments = wanted["module"], wanted["arguments"]
    sys.argv = [module, *arguments]
    setproctitle(" ".join([sys.executable, "-m", module, *arguments]))
    raise _Child(module)


def _reap(control: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        _tell(control, pid=pid, code=os.waitstatus_to_exitcode(status))


def _tell(control: socket.socket, **values: int) -> None:
    control.send(json.dumps(values).encode())


if __name__ == "__main__":
    main(sys.argv[1:])
