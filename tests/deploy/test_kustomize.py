"""The base is what the chart renders, and the overlays build."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.deploy.manifests import KUSTOMIZE, Manifest, check_schemas, of_kind, parse, pods, program, render, run
from tests.deploy.network import reaches


def build(folder: Path) -> list[Manifest]:
    built = run(program("kubectl"), "kustomize", str(folder))
    assert built.returncode == 0, built.stderr
    return list(parse(built.stdout))


def test_the_base_is_what_the_chart_renders() -> None:
    """`make charts` writes it anew."""
    rendered = render("--values", str(KUSTOMIZE / "values.yaml"))
    assert list(parse((KUSTOMIZE / "base/penstock.yaml").read_text())) == rendered


def test_a_pool_of_several_nodes_is_added(tmp_path: Path) -> None:
    """By a component, which is what the chart renders for it."""
    copied = tmp_path / "kustomize"
    shutil.copytree(KUSTOMIZE, copied)
    component = copied / "components/several-nodes"
    [rendered] = render("--values", str(component / "values.yaml"), "--show-only", "templates/pools.yaml")
    assert list(parse((component / "pool.yaml").read_text())) == [rendered]
    cluster = copied / "overlays/cluster/kustomization.yaml"
    cluster.write_text(f"{cluster.read_text()}\ncomponents: [../../components/several-nodes]\n")
    built = build(cluster.parent)
    check_schemas(built, {"LeaderWorkerSet"})
    there = pods(built)
    assert {"penstock-large", "penstock-large-stage"} < set(there)
    assert reaches(built, there["penstock-large"], there["penstock-large-stage"], 7300)
    images = {each["image"] for pod in there.values() for each in pod.containers}
    assert images == {"registry.example/penstock:worker", "registry.example/penstock:light"}


def test_one_node(tmp_path: Path) -> None:
    copied = tmp_path / "kustomize"
    shutil.copytree(KUSTOMIZE, copied)
    local = copied / "overlays/local"
    (local / "keys.json").write_text('{"keys": []}')
    (local / "server.key").write_text("00" * 32)
    built = build(local)
    check_schemas(built, set())
    [secret] = of_kind(built, "Secret").values()
    assert secret["metadata"]["name"] == "penstock-keys" and set(secret["data"]) == {"keys.json", "server.key"}
    volumes = pods(built)["penstock-gateway"].spec["volumes"]
    assert "penstock-keys" in [volume["secret"]["secretName"] for volume in volumes if "secret" in volume]
    assert all(one["metadata"].get("namespace", "penstock") == "penstock" for one in built)
    requests = pods(built)["penstock-decode"].spec["containers"][0]["resources"]["requests"]
    assert requests == {"cpu": "500m", "memory": "1Gi"}


def test_many_nodes() -> None:
    built = build(KUSTOMIZE / "overlays/cluster")
    check_schemas(built, set())
    there = pods(built)
    replicas = {name: pod.workload["spec"]["replicas"] for name, pod in there.items()}
    assert replicas == {"penstock-gateway": 3, "penstock-router": 2, "penstock-prefill": 4, "penstock-decode": 8}
    images = {each["image"] for pod in there.values() for each in pod.containers}
    assert images == {"registry.example/penstock:worker", "registry.example/penstock:light"}
    for name in ("gateway", "router"):
        names = [each["name"] for each in there[f"penstock-{name}"].spec["containers"][0]["env"]]
        composed = [each for each in names if each.startswith("PENSTOCK_")]
        assert composed and all(names.index("REDIS") < names.index(each) for each in composed)
    redis = there["penstock-decode"]  # stands for whoever Redis is: what matters is who may leave for it
    assert not reaches(built, there["penstock-prefill"], redis, 6379)
