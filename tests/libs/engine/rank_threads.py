"""Ranks in threads of the test's process, which are there much sooner than processes."""

from __future__ import annotations

import os
import socket
import threading

from penstock.engine.forward.following import follow
from penstock.engine.forward.model import load_model


class RankThread:
    """What follows rank 0."""

    def __init__(self, theirs):
        self._socket = theirs.dup()
        self.pid = os.getpid()
        self.watched = os.eventfd(0)
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self):
        follow(self._socket)

    def kill(self):
        self._socket.shutdown(socket.SHUT_RDWR)

    def end(self):
        self._thread.join()
        self._socket.close()
        os.close(self.watched)


def in_threads(config, checkpoint):
    return load_model(config, checkpoint, RankThread)
