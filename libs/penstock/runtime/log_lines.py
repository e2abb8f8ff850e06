"""Where log lines go: to a file that somebody reads, and never at the cost of who writes them."""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque

_PIECE = select.PIPE_BUF
"""Bytes that a pipe takes at once when it takes any."""
_LAST_S = 1.0


class LogLines:
    """A text file for log lines of a process whose event loop must not wait. A reader may stand still: a supervisor
    that was stopped, a container's log driver that is full. Then lines wait here, up to a bound; those beyond it are
    dropped, and the first line that gets through again is preceded by one that says how many. Any thread may write."""

    def __init__(self, fd: int, most_bytes: int = 1 << 18) -> None:
        """`fd` stays the caller's. At most so many bytes wait."""
        self._fd = fd
        self._most_bytes = most_bytes
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)
        self._waiting: deque[bytes] = deque()
        self._bytes = 0
        self._dropped = 0
        self._lock = threading.Lock()

    def write(self, text: str) -> int:
        """Takes whole lines; returns how many characters it has taken, which is all."""
        data = text.encode(errors="backslashreplace")
        with self._lock:
            self._pass_on()
            if self._bytes + len(data) > self._most_bytes:
                self._dropped += 1
            else:
                if self._dropped:
                    self._add(b'{"event": "log lines were dropped: nobody read them", "lines": %d}\n' % self._dropped)
                    self._dropped = 0
                self._add(data)
                self._pass_on()
        return len(text)

    def flush(self) -> None:
        """Passes on what can be passed on at once."""
        with self._lock:
            self._pass_on()

    def close(self) -> None:
        """Passes on what still waits, for a second at most."""
        end = time.monotonic() + _LAST_S
        with self._lock:
            while self._waiting and (left_s := end - time.monotonic()) > 0:
                self._poll.poll(left_s * 1000)
                self._pass_on()

    def _add(self, data: bytes) -> None:
        self._waiting.append(data)
        self._bytes += len(data)

    def _pass_on(self) -> None:
        while self._waiting and self._poll.poll(0):
            data = self._waiting.popleft()
            self._bytes -= len(data)
            try:
                written = os.write(self._fd, data[:_PIECE])
            except BlockingIOError:
                written = 0
            except OSError:  # nobody will ever read it
                continue
            if written < len(data):
                self._waiting.appendleft(data[written:])
                self._bytes += len(data) - written
            if not written:
                return
