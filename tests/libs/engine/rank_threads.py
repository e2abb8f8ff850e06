"""Ranks in threads of the test's process, which are there much sooner than processes."""

from __future__ import annotations

import os
import socket
import threading
from functools import partial
from queue import SimpleQueue

from penstock.checkpoint import inspect, remembered_fingerprint
from penstock.engine.forward.following import follow
from penstock.engine.forward.model import load_model
from penstock.engine.ranks.hosting import host_stage
from penstock.engine.ranks.speaking import speak


class RankThread:
    """What follows rank 0."""

    leaving = ()

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


class Way:
    """One side of a Distance between threads."""

    def __init__(self, there, back):
        self._there, self._back = there, back

    def send(self, content):
        self._there.put(content)

    def receive(self):
        content = self._back.get()
        if content is None:
            self._back.put(None)
            raise EOFError
        return content

    def close(self):
        self._there.put(None)
        self._back.put(None)


class StageThreads:
    """What speaks for a stage, and its host, whose model is in another directory."""

    leaving = ()

    def __init__(self, model, theirs):
        self._socket = theirs.dup()
        self.pid = os.getpid()
        self.watched = os.eventfd(0)
        one, other = SimpleQueue(), SimpleQueue()
        fingerprint = remembered_fingerprint(inspect(model))
        self._jobs = [
            threading.Thread(target=speak, args=(self._socket, Way(one, other)), daemon=True),
            threading.Thread(target=host_stage, args=(Way(other, one), model, fingerprint, 1, RankThread), daemon=True),
        ]
        for job in self._jobs:
            job.start()

    def kill(self):
        self._socket.shutdown(socket.SHUT_RDWR)

    def end(self):
        for job in self._jobs:
            job.join()
        self._socket.close()
        os.close(self.watched)


def on_hosts(model):
    """As `in_threads`, with each stage but the first on a host of its own, which has `model`."""

    def load(config, checkpoint):
        return load_model(config, checkpoint, RankThread, [partial(StageThreads, model)] * (config.pp - 1))

    return load
