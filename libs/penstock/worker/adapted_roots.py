"""Whose chains are computed with adapters: an order to evict a tenant names the roots of models alone, and an adapter
whose pages are still here may have been unloaded."""

from __future__ import annotations

from collections import OrderedDict

_MOST = 1 << 16


class AdaptedRoots:
    """The namespaces of the roots that were used last."""

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._namespaces: OrderedDict[bytes, bytes] = OrderedDict()

    def used(self, root: bytes, namespace: bytes) -> None:
        """A request of this namespace has blocks of this root."""
        self._namespaces[root] = namespace
        self._namespaces.move_to_end(root)
        if len(self._namespaces) > self._most:
            self._namespaces.popitem(last=False)

    def of(self, namespace: bytes) -> frozenset[bytes]:
        """The roots of a namespace."""
        return frozenset(root for root, own in self._namespaces.items() if own == namespace)
