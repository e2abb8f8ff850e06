"""Places or bytes that tenants share: whoever comes finds some, and nothing is kept from one who is alone."""

from __future__ import annotations

from collections.abc import Callable

_KEPT = 8
"""One part in so many is not for one tenant alone: others find it when they come."""


def equal(_tenant: str) -> float:
    """Tenants with equal shares."""
    return 1.0


class TenantPot:
    """Counts what each tenant holds of `most`.

    As long as half is free anybody may take. Beyond that a tenant may hold its share by weight among those who hold
    something, and one that is alone seven eighths; what it held before others came it keeps until it gives it back.
    """

    def __init__(self, most: int, *, several: bool, weight: Callable[[str], float] = equal) -> None:
        """Without `several` there is only one tenant, to whom all of it belongs."""
        self.most = most
        self.used = 0
        self._several = several
        self._weight = weight
        self._held: dict[str, int] = {}

    def take(self, tenant: str, amount: int = 1) -> bool:
        """Takes so much, if the tenant may have it."""
        own, total = self._held.get(tenant, 0) + amount, self.used + amount
        if total > self.most or (total > self.most // 2 and own > self._share(tenant)):
            return False
        self._held[tenant] = own
        self.used = total
        return True

    def give_back(self, tenant: str, amount: int = 1) -> None:
        """Of what the tenant has taken."""
        self.used -= amount
        left = self._held[tenant] - amount
        if left:
            self._held[tenant] = left
        else:
            del self._held[tenant]

    def _share(self, tenant: str) -> int:
        """The most that it may hold now."""
        if not self._several:
            return self.most
        others = sum(self._weight(one) for one in self._held if one != tenant)
        if not others:
            return self.most - self.most // _KEPT
        own = self._weight(tenant)
        return max(1, int(self.most * own / (own + others)))
