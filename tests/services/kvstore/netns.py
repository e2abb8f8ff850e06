"""Two network namespaces joined by a cable, and a cable from here to each: stores on hosts that can be cut apart."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import penstock
from penstock.runtime.lifecycle import SUPERVISOR_FD

PORT = 7401


def command(*words: str) -> str:
    """Runs a program and returns what it says; raises CalledProcessError with its complaint."""
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=10).stdout


def impossible() -> str:
    """Why namespaces can't be had here; empty when they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"pens{os.getpid()}t"
    try:
        command("ip", "netns", "add", name)
        command("ip", "netns", "del", name)
    except FileNotFoundError:
        return "there is no `ip` program"
    except subprocess.CalledProcessError as error:
        return f"no network namespaces here: {error.stderr.strip()}"
    return ""


class Network:
    """Hosts `a` and `b`. Their cable to each other can be cut, slowed and made to lose packets."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._tag = f"p{os.getpid() % 10_000}"
        self._net = f"10.213.{os.getpid() % 250}"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        """The latest store on each host."""
        self.names = {host: f"{self._tag}{host}" for host in "ab"}
        for name in self.names.values():
            command("ip", "netns", "add", name)
            stack.callback(_forget, "netns", name)
            command("ip", "-n", name, "link", "set", "lo", "up")
        self._cable("", "a", 1)
        self._cable("", "b", 5)
        self._cable("a", "b", 9)

    def from_here(self, host: str, port: int = PORT) -> str:
        """The address of a service, by default its store, on a host for this process."""
        return f"{self._net}.{ {'a': 2, 'b': 6}[host] }:{port}"

    @property
    def a_from_b(self) -> str:
        """The address of a's store for b."""
        return f"{self._net}.9:{PORT}"

    def _cable(self, one: str, two: str, number: int) -> None:
        ends = (f"{self._tag}{one or 'r'}{two}", f"{self._tag}{two}{one or 'r'}")
        command("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        if not one:  # the kernel takes its time with what a namespace held; the next test wants the name at once
            self._stack.callback(_forget, "link", ends[0])
        for at, (end, host) in enumerate(zip(ends, (one, two), strict=True)):
            where = []
            if host:
                command("ip", "link", "set", end, "netns", self.names[host])
                where = ["-n", self.names[host]]
            command("ip", *where, "address", "add", f"{self._net}.{number + at}/30", "dev", end)
            command("ip", *where, "link", "set", end, "up")

    # -- what can happen to the cable

    def cut(self) -> None:
        """Nothing passes between the hosts."""
        command("ip", "-n", self.names["a"], "link", "set", f"{self._tag}ab", "down")

    def mend(self) -> None:
        """As before."""
        command("ip", "-n", self.names["a"], "link", "set", f"{self._tag}ab", "up")

    def shape(self, *discipline: str) -> None:
        """What a sends to b goes through a queueing discipline, as `tc` writes it."""
        self._tc("replace", *discipline)

    def dropped(self) -> int:
        """Packets that the discipline has dropped."""
        said = command("tc", "-n", self.names["a"], "-s", "qdisc", "show", "dev", f"{self._tag}ab")
        found = re.search(r"dropped (\d+)", said)
        return int(found[1]) if found else 0

    def _tc(self, what: str, *rest: str) -> None:
        command("tc", "-n", self.names["a"], "qdisc", what, "dev", f"{self._tag}ab", "root", *rest)

    def cut_off(self, host: str) -> None:
        """Nothing passes between this process and a host."""
        command("ip", "link", "set", f"{self._tag}r{host}", "down")

    # -- processes

    def store(self, host: str, host_bytes: int, *options: str) -> None:
        """A store process on a host, ready when this returns."""
        self.processes[host] = self.start(host, "kvstore", "--host-bytes", str(host_bytes), "--host-id", host, *options)

    def start(self, host: str, service: str, *options: str, port: int = PORT) -> subprocess.Popen[bytes]:
        """A service on a host, which listens at a port and is ready when this returns."""
        ours, theirs = socket.socketpair()
        paths = [str(Path(part).parent) for part in penstock.__path__]
        inside = ["ip", "netns", "exec", self.names[host], sys.executable, "-m", f"penstock.{service}"]
        with theirs:
            process = subprocess.Popen(
                [*inside, "--address", f"0.0.0.0:{port}", *options],
                env={**os.environ, SUPERVISOR_FD: str(theirs.fileno()), "PYTHONPATH": os.pathsep.join(paths)},
                pass_fds=[theirs.fileno()],
                stderr=subprocess.DEVNULL,
            )
        self._stack.callback(ours.close)
        self._stack.callback(_kill, process)
        with ours.makefile() as lines:
            assert json.loads(lines.readline())["address"]
        return process


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait(10)


def _forget(kind: str, name: str) -> None:
    with suppress(subprocess.CalledProcessError):
        command("ip", kind, "del", name)


@contextmanager
def network() -> Iterator[Network]:
    """Everything is gone when the block ends; the cables go with their namespaces."""
    with ExitStack() as stack:
        yield Network(stack)
