"""The deaths that are measured."""

from __future__ import annotations

import signal

KINDS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
SERVICES = ("decode", "prefill", "kvstore", "draft", "router")
ALONE = "only_decode"
"""The decode worker of a mesh that has no other."""
