"""Who reaches whom, as NetworkPolicies have it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tests.deploy.manifests import Manifest, Pod, of_kind


def reaches(manifests: Sequence[Manifest], source: Pod | None, target: Pod, port: int) -> bool:
    """Whether a pod reaches another's port over TCP; None is a pod of somebody else in another namespace."""
    policies = list(of_kind(manifests, "NetworkPolicy").values())
    leaves = source is None or _allowed(policies, source, "egress", "to", target, port, target)
    return leaves and _allowed(policies, target, "ingress", "from", source, port, target)


def _allowed(
    policies: Sequence[Manifest],
    held: Pod,
    way: str,
    peers: str,
    other: Pod | None,
    port: int,
    target: Pod,
) -> bool:
    mine = [
        policy["spec"]
        for policy in policies
        if _selects(policy["spec"]["podSelector"], held.labels) and way.capitalize() in policy["spec"]["policyTypes"]
    ]
    rules = [rule for spec in mine for rule in spec.get(way, ())]
    return not mine or any(_matches(rule, peers, other, port, target) for rule in rules)


def _matches(rule: Manifest, peers: str, other: Pod | None, port: int, target: Pod) -> bool:
    ports = rule.get("ports")
    if ports is not None and not any(_has(one, port, target) for one in ports):
        return False
    return peers not in rule or any(_is(peer, other) for peer in rule[peers])


def _is(peer: Manifest, other: Pod | None) -> bool:
    """Peers in other namespaces are nobody here."""
    return other is not None and "namespaceSelector" not in peer and _selects(peer["podSelector"], other.labels)


def _has(one: Manifest, port: int, target: Pod) -> bool:
    first = target.ports.get(one["port"], -1) if isinstance(one["port"], str) else one["port"]
    return one.get("protocol") == "TCP" and first <= port <= one.get("endPort", first)


def _selects(selector: Manifest, labels: Mapping[str, str]) -> bool:
    for wish in selector.get("matchExpressions", ()):
        has = wish["key"] in labels
        right = {"Exists": has, "In": labels.get(wish["key"]) in wish.get("values", ())}[wish["operator"]]
        if not right:
            return False
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())
