"""Which gateway gets a request. Pure: state in, answer out.

A gateway remembers the tokens of a session's last turn and encodes only what is new, so a session stays where it was:
rendezvous hashing, which moves few sessions when gateways come and go. Its bound is that of consistent hashing with
bounded loads (Mirrokni, Thorup and Zadimoghaddam, 2018). Workers and cached KV play no part here: every gateway asks
the routers, and places its requests equally well.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import ceil

import xxhash

FEW = 4
"""Requests that a gateway may have whatever its share: those of one session come together."""
MOST_CHOICES = 3
"""Gateways that Envoy may try, one after the other."""


def order(gateways: Collection[str], waiting: Mapping[str, int], session: str, most_over: float) -> list[str]:
    """The gateways to try, the best first; `waiting` has how many requests of each wait for their answer to begin.

    With a session they come in an order of its own, but for those behind that have more than `most_over` times their
    share. Without one the least busy comes first.
    """
    if not gateways:
        return []
    if not session:
        return sorted(gateways, key=lambda one: (waiting.get(one, 0), one))[:MOST_CHOICES]
    share = (1 + sum(waiting.get(one, 0) for one in gateways)) / len(gateways)
    most = max(FEW, ceil(most_over * share))

    def rank(gateway: str) -> tuple[bool, int]:
        full = waiting.get(gateway, 0) >= most
        return full, -xxhash.xxh3_64_intdigest(f"{len(session)}:{session}{gateway}".encode(errors="surrogatepass"))

    return sorted(gateways, key=rank)[:MOST_CHOICES]
