"""The chart: what it renders is valid, safe, connected, and made of settings that there are."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from tests.deploy.manifests import (
    CHART,
    CONFIGS,
    ROOT,
    Manifest,
    Pod,
    check_schemas,
    flags,
    of_kind,
    pods,
    program,
    render,
    run,
    service_of,
)
from tests.deploy.network import reaches

import penstock.models
from penstock.rpc.identity import ROLES, caller_of, role_host
from penstock.rpc.server import LIVE
from penstock.runtime.config import service_app
from penstock.runtime.metrics import GatewayMetrics, WorkerMetrics

EVERYTHING: Manifest = {
    "keys": {"existingSecret": "keys"},
    "redis": {"existingSecret": "redis"},
    "gateway": {"tls": {"secretName": "tls"}, "autoscaling": {"enabled": True}},
    "model": {"name": "mini", "volume": {"persistentVolumeClaim": {"claimName": "weights", "readOnly": True}}},
    "draft": {"enabled": True},
    "picker": {"enabled": True},
    "serviceMonitor": {"enabled": True},
    "pools": {
        "prefill": {"autoscaling": {"enabled": True}},
        "decode": {"autoscaling": {"enabled": True, "kind": "keda", "queueSeconds": 1.5}},
        "node": {
            "workers": [{"role": "prefill"}, {"role": "both", "resources": {"limits": {"nvidia.com/gpu": 1}}}],
            "disk": {"size": "2Gi", "bytes": "1GiB", "storageClassName": "local"},
        },
        "cache": {"replicas": 2, "disk": {"size": "2Gi", "bytes": "1GiB"}},
        "large": {
            "nodes": 3,
            "workers": [{"role": "both", "stageArgs": ["--threads=2"]}, {"role": "prefill"}],
            "autoscaling": {"enabled": True},
        },
    },
}


@pytest.fixture(scope="module")
def plain() -> list[Manifest]:
    """With the values as they are."""
    return render()


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> list[Manifest]:
    """With everything that can be switched on."""
    values = tmp_path_factory.mktemp("values") / "full.yaml"
    values.write_text(yaml.safe_dump(EVERYTHING))
    return render("--values", str(values))


@pytest.fixture(params=["plain", "full"])
def manifests(request: pytest.FixtureRequest) -> list[Manifest]:
    """Either."""
    rendered: list[Manifest] = request.getfixturevalue(request.param)
    return rendered


def test_helm_finds_nothing_to_complain_of() -> None:
    linted = run(program("helm"), "lint", "--strict", str(CHART))
    assert linted.returncode == 0, linted.stdout + linted.stderr


def test_all_of_it_is_valid(plain: list[Manifest], full: list[Manifest]) -> None:
    check_schemas(plain, set())
    check_schemas(full, {"ServiceMonitor", "ScaledObject", "InferencePool", "LeaderWorkerSet"})


def test_there_is_a_workload_for_each_part(plain: list[Manifest], full: list[Manifest]) -> None:
    kinds = {name: pod.workload["kind"] for name, pod in pods(full).items()}
    assert kinds == {
        "penstock-gateway": "Deployment",
        "penstock-router": "StatefulSet",
        "penstock-prefill": "Deployment",
        "penstock-decode": "Deployment",
        "penstock-draft": "Deployment",
        "penstock-picker": "Deployment",
        "penstock-node": "StatefulSet",
        "penstock-cache": "StatefulSet",
        "penstock-large": "LeaderWorkerSet",
        "penstock-large-stage": "LeaderWorkerSet",
    }
    assert set(pods(plain)) == {f"penstock-{part}" for part in ("gateway", "router", "prefill", "decode")}
    budgets = of_kind(full, "PodDisruptionBudget")
    for name, pod in pods(full).items():
        [spread] = pod.spec["topologySpreadConstraints"]
        assert spread["labelSelector"]["matchLabels"].items() <= pod.labels.items()
        assert (
            name in ("penstock-draft", "penstock-picker")
            or budgets[name]["spec"]["selector"]["matchLabels"].items() <= pod.labels.items()
        )


def test_settings_exist_and_are_right(manifests: list[Manifest]) -> None:
    """Each command line makes the settings of its service, by the service's own reader."""
    tried = set()
    model = penstock.models.embedded("penstock-mini")
    for pod in pods(manifests).values():
        for container in pod.containers:
            service, made = service_of(container), []
            arguments = [
                arg.replace("$(POD_IP)", "127.0.0.1")
                .replace("$(POD_NAME)", pod.name)
                .replace("/models/penstock-mini", str(model))
                for arg in container["args"]
            ]
            service_app(service, made.append, CONFIGS[service])(arguments, result_action="return_value")
            assert len(made) == 1
            tried.add(service)
            for variable in container["env"]:
                name = variable["name"].removeprefix(f"PENSTOCK_{service.upper()}_").lower()
                assert not variable["name"].startswith("PENSTOCK_") or name in CONFIGS[service].__dataclass_fields__
    assert tried == (set(CONFIGS) if len(pods(manifests)) > 4 else set(CONFIGS) - {"draft", "picker", "stage"})


def test_what_is_wrong_is_refused_by_name(tmp_path: Path) -> None:
    for wrong, named in (
        ("gatway.replicas=2", "gatway"),
        ("pool.store.hostBytes=1Gb", "/pool/store/hostBytes"),
        ("redis.url=http://redis", "/redis/url"),
        ("pools.decode.workers[0].role=dcode", "must be one of 'prefill', 'decode', 'both'"),
        ("router.args[0]=max-held=3", "/router/args/0"),
        ("pools.gateway.replicas=1", "invalid propertyName 'gateway'"),
        ("pools.decode.nodes=0", "/pools/decode/nodes"),
        ("pools.decode.nodes=2,pools.decode.workers=null", "pools.decode.nodes: stores alone take no further nodes"),
        (
            "pools.decode.nodes=2,pools.decode-stage.replicas=1",
            "pools.decode-stage: the pods of decode on",
        ),
        ("pools.decode.nodes=2,pools.decode.disk.size=1Gi", "pools.decode.disk: a pool of several nodes has none"),
    ):
        tried = run(program("helm"), "template", "penstock", str(CHART), "--set", wrong)
        assert tried.returncode != 0
        assert named in tried.stderr, tried.stderr
    size = "pools.decode.disk.size=10Gi"
    tried = run(program("helm"), "template", "penstock", str(CHART), "--set", size)
    assert "pool.disk.bytes: say how much" in tried.stderr


def test_pods_are_restricted(manifests: list[Manifest]) -> None:
    """As the level `restricted` of Pod Security has it, and with a root file system that nobody writes to."""
    for pod in pods(manifests).values():
        security = pod.spec["securityContext"]
        assert security["runAsNonRoot"] and security["runAsUser"] > 0
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod.spec["automountServiceAccountToken"] is False
        assert not {"hostPID", "hostIPC", "hostNetwork"} & set(pod.spec)
        assert {kind for volume in pod.spec["volumes"] for kind in volume if kind != "name"} <= {
            *("emptyDir", "secret", "persistentVolumeClaim")
        }
        for container in pod.containers:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"]["limits"] and container["resources"]["requests"]


def test_environment_of_other_services_is_no_setting(manifests: list[Manifest]) -> None:
    assert all(pod.spec["enableServiceLinks"] is False for pod in pods(manifests).values())


def test_workers_and_store_of_a_pod_share_memory(full: list[Manifest]) -> None:
    for name in ("penstock-prefill", "penstock-decode", "penstock-node", "penstock-large"):
        pod = pods(full)[name]
        assert pod.spec["shareProcessNamespace"] is True
        [store] = pod.spec["initContainers"]
        assert store["restartPolicy"] == "Always" and service_of(store) == "kvstore"
        assert {flags(each)["host-id"] for each in pod.containers} == {"$(POD_NAME)"}
        assert {flags(each)["kvstore"] for each in pod.spec["containers"]} == {flags(store)["address"]}
        workers = [flags(each)["address"] for each in pod.spec["containers"]]
        assert len(set(workers)) == len(workers)


def test_a_store_with_a_disk_has_it_after_a_restart(full: list[Manifest]) -> None:
    node = pods(full)["penstock-node"]
    [claim] = node.workload["spec"]["volumeClaimTemplates"]
    [store] = node.spec["initContainers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in store["volumeMounts"]}
    assert claim["spec"]["resources"]["requests"]["storage"] == "2Gi"
    assert Path(flags(store)["nvme-dir"]).parent == Path(mounts[claim["metadata"]["name"]])
    assert flags(store)["nvme-bytes"] == "1GiB"
    assert node.spec["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"
    cache = pods(full)["penstock-cache"]
    assert [service_of(each) for each in cache.containers] == ["kvstore"]


GROUP_FIELDS = {"size", "restartPolicy", "leaderTemplate", "workerTemplate"}
"""Of a LeaderWorkerSet's leaderWorkerTemplate, those that the chart has use of."""


def test_workers_of_several_nodes_find_their_stages(full: list[Manifest]) -> None:
    """By the names that the controller gives the pods of a group, each at the stage of its own number."""
    pod = pods(full)["penstock-large"]
    spec = pod.workload["spec"]
    group = spec["leaderWorkerTemplate"]
    assert pod.workload["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
    assert set(spec) == {"rolloutStrategy", "leaderWorkerTemplate", "networkConfig"} and set(group) == GROUP_FIELDS
    assert (group["size"], group["restartPolicy"]) == (3, "None")
    stages = pods(full)["penstock-large-stage"].containers
    for number, worker in enumerate(pod.spec["containers"]):
        port = flags(stages[number])["address"].rpartition(":")[2]
        hosts = ",".join(f"$(POD_NAME)-{node}.penstock-large:{port}" for node in (1, 2))
        assert (flags(worker)["pp"], flags(worker)["stage-hosts"]) == ("3", hosts)
        assert flags(stages[number])["model"] == flags(worker)["model"]
        assert float(flags(stages[number])["drain-s"]) > float(flags(worker)["drain-s"])
    assert flags(stages[0])["threads"] == "2" and "threads" not in flags(stages[1])
    assert spec["networkConfig"] == {"subdomainPolicy": "Shared"}
    assert "penstock-large" not in of_kind(full, "Service"), "the controller makes one of this name"
    [scaler] = [one for name, one in of_kind(full, "HorizontalPodAutoscaler").items() if name == "penstock-large"]
    target = scaler["spec"]["scaleTargetRef"]
    assert (target["apiVersion"], target["kind"]) == ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet")


def test_a_pod_ends_after_it_has_drained(manifests: list[Manifest]) -> None:
    for name, pod in pods(manifests).items():
        grace = pod.spec["terminationGracePeriodSeconds"]
        drains = [float(flags(each).get("drain-s", 0)) for each in pod.containers]
        hooks = [each["lifecycle"]["preStop"]["sleep"]["seconds"] for each in pod.containers if "lifecycle" in each]
        assert grace >= max(drains) + sum(hooks) + 10, name
        assert bool(hooks) is (name == "penstock-gateway")


def test_probes_ask_what_services_answer(manifests: list[Manifest]) -> None:
    for pod in pods(manifests).values():
        for container in pod.containers:
            probes = [container[f"{kind}Probe"] for kind in ("startup", "liveness", "readiness")]
            address = flags(container).get("address", "")
            if service_of(container) == "gateway":
                assert [probe["httpGet"]["path"] for probe in probes] == ["/healthz", "/healthz", "/readyz"]
                scheme = "HTTPS" if "tls-cert" in flags(container) else "HTTP"
                assert {probe["httpGet"]["scheme"] for probe in probes} == {scheme}
                continue
            assert {str(probe["grpc"]["port"]) for probe in probes} == {address.rpartition(":")[2]}
            assert [probe["grpc"].get("service") for probe in probes] == [LIVE, LIVE, None]


ROLE_OF = {"prefill": "worker", "decode": "worker", "kvstore": "store"}
"""The roles of services whose names are others."""


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> list[Manifest]:
    """With everything, and with certificates that cert-manager makes."""
    values = tmp_path_factory.mktemp("values") / "guarded.yaml"
    values.write_text(yaml.safe_dump(EVERYTHING | {"memberTls": {"enabled": True, "issuer": {"name": "mesh"}}}))
    return render("--values", str(values))


def test_each_service_shows_the_certificate_of_its_role(guarded: list[Manifest], full: list[Manifest]) -> None:
    check_schemas(guarded, {"ServiceMonitor", "ScaledObject", "InferencePool", "Certificate", "LeaderWorkerSet"})
    made = {one["spec"]["secretName"]: one["spec"] for one in of_kind(guarded, "Certificate").values()}
    shown = set()
    for pod in pods(guarded).values():
        secrets = {one["name"]: one["secret"]["secretName"] for one in pod.spec["volumes"] if "secret" in one}
        for container in pod.containers:
            service = service_of(container)
            role = ROLE_OF.get(service, service)
            [mount] = [one for one in container["volumeMounts"] if one["mountPath"] == flags(container)["member-tls"]]
            secret = made[secrets[mount["name"]]]
            assert secret["dnsNames"] == [role_host(role)]
            assert caller_of({"x509_subject_alternative_name": [secret["uris"][0].encode()]}).role == role
            shown.add(role)
    assert shown == {*ROLES} - {"operator"} and len(made) == len(ROLES), "that of an operator is for people"
    assert not of_kind(full, "Certificate")
    assert not any("member-tls" in flags(each) for pod in pods(full).values() for each in pod.containers)


def test_workers_seal_unless_they_are_told_not_to(plain: list[Manifest]) -> None:
    def sealing(manifests: list[Manifest]) -> set[str]:
        everybody = [each for pod in pods(manifests).values() for each in pod.containers]
        return {flags(each).get("seal", "") for each in everybody if service_of(each) in ("prefill", "decode")}

    assert sealing(plain) == {"true"}
    assert sealing(render("--set", "seal=false")) == {""}


def test_who_asks_for_certificates_is_probed_from_inside(guarded: list[Manifest]) -> None:
    for pod in pods(guarded).values():
        for container in pod.containers:
            if (service := service_of(container)) == "gateway":
                continue
            probes = [container[f"{kind}Probe"] for kind in ("startup", "liveness", "readiness")]
            if service == "picker":
                assert all("grpc" in probe for probe in probes)
                continue
            port = flags(container)["address"].rpartition(":")[2]
            asked = [probe["exec"]["command"] for probe in probes]
            assert [command[:2] for command in asked] == [["sh", "-c"]] * 3
            program = f'exec python -m penstock.rpc.probe "$POD_IP:{port}"'
            end = f" --member-tls {flags(container)['member-tls']}"
            assert [command[2] for command in asked] == [f"{program} {LIVE}{end}"] * 2 + [program + end]


def test_ports_are_those_of_the_settings(manifests: list[Manifest]) -> None:
    for pod in pods(manifests).values():
        said = [
            int(flags(each)[name].rpartition(":")[2])
            for each in pod.containers
            for name in flags(each)
            if "address" in name
        ]
        assert sorted(said) == sorted(pod.ports.values())
        assert len(set(said)) == len(said)
    names = {name: set(pod.ports) for name, pod in pods(manifests).items()}
    for name, service in of_kind(manifests, "Service").items():
        for port in service["spec"]["ports"]:
            having = [pod for pod, ports in names.items() if port["targetPort"] in ports]
            assert having if name.endswith("-metrics") else name in having


@dataclass(frozen=True)
class Way:
    """Whether one part has to reach another's port."""

    source: str
    target: str
    port: int
    open: bool = True


WAYS = [
    Way("", "gateway", 8080),
    Way("", "gateway", 8081),
    Way("gateway", "router", 7000),
    Way("gateway", "prefill", 7010),
    Way("gateway", "node", 7011),
    Way("prefill", "router", 7000),
    Way("cache", "router", 7000),
    Way("decode", "prefill", 7010),
    Way("decode", "cache", 7001),
    Way("decode", "draft", 7003),
    Way("router", "gateway", 8081),
    Way("router", "decode", 7010),
    Way("router", "draft", 7003),
    Way("draft", "router", 7000),
    Way("large", "large-stage", 7300),
    Way("large", "large-stage", 7301),
    Way("router", "large-stage", 7300),
    Way("gateway", "large-stage", 7300, open=False),
    Way("", "large-stage", 7300, open=False),
    Way("large-stage", "router", 7000, open=False),
    Way("large-stage", "large", 7001, open=False),
    Way("", "picker", 9002),
    Way("picker", "router", 7000),
    Way("picker", "gateway", 8081),
    Way("picker", "decode", 7010, open=False),
    Way("picker", "gateway", 8080, open=False),
    Way("", "router", 7000, open=False),
    Way("", "decode", 7010, open=False),
    Way("", "node", 7001, open=False),
    Way("", "draft", 7003, open=False),
    Way("", "router", 9100, open=False),
    Way("gateway", "node", 7001, open=False),
    Way("gateway", "draft", 7003, open=False),
    Way("draft", "node", 7001, open=False),
    Way("decode", "gateway", 8080, open=False),
    Way("router", "router", 9100, open=False),
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: f"{way.source or 'outside'}-{way.target}-{way.port}")
def test_nobody_reaches_what_is_not_for_them(full: list[Manifest], way: Way) -> None:
    parts: dict[str, Pod] = {name.removeprefix("penstock-"): pod for name, pod in pods(full).items()}
    source = parts[way.source] if way.source else None
    assert reaches(full, source, parts[way.target], way.port) is way.open


def test_a_client_may_be_named(full: list[Manifest]) -> None:
    label = {"podSelector": {"matchLabels": {"app.kubernetes.io/component": "decode"}}}
    only = render("--set-json", f"networkPolicy.clients=[{json.dumps(label)}]")
    there = pods(only)
    assert reaches(only, there["penstock-decode"], there["penstock-gateway"], 8080) is False, "it may not leave"
    assert reaches(only, None, there["penstock-gateway"], 8080) is False


def test_nobody_scrapes_where_nobody_is_named() -> None:
    policy = of_kind(render("--set-json", "networkPolicy.metrics=[]"), "NetworkPolicy")["penstock-all"]
    assert "ingress" not in policy["spec"] and "Ingress" in policy["spec"]["policyTypes"]


def test_a_pool_of_endpoints_is_the_gateways(full: list[Manifest]) -> None:
    [pool] = of_kind(full, "InferencePool").values()
    gateway, picker = pods(full)["penstock-gateway"], pods(full)["penstock-picker"]
    assert pool["spec"]["selector"]["matchLabels"].items() <= gateway.labels.items()
    assert [port["number"] for port in pool["spec"]["targetPorts"]] == [gateway.ports["http"]]
    asked = pool["spec"]["endpointPickerRef"]
    [port] = of_kind(full, "Service")[asked["name"]]["spec"]["ports"]
    assert (asked["port"]["number"], picker.ports[port["targetPort"]]) == (port["port"], picker.ports["picker"])


def test_scaling_asks_for_metrics_that_there_are(full: list[Manifest]) -> None:
    exported = {"penstock_requests_live", WorkerMetrics.QUEUE_S, WorkerMetrics.KV_USAGE}
    assert "penstock_requests_live" in GatewayMetrics().text().decode()
    rules = yaml.safe_load((ROOT / "deploy/helm/prometheus-adapter.yaml").read_text())["rules"]["custom"]
    adapted = {rule["name"]["as"]: rule["seriesQuery"].split("{")[0] for rule in rules}
    assert set(adapted.values()) == exported
    asked = {
        metric["pods"]["metric"]["name"]
        for scaler in of_kind(full, "HorizontalPodAutoscaler").values()
        for metric in scaler["spec"]["metrics"]
    }
    assert asked == set(adapted)
    [scaled] = of_kind(full, "ScaledObject").values()
    queries = [trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"]]
    assert f"({WorkerMetrics.QUEUE_S}{{" in queries[0] and f'"{WorkerMetrics.KV_USAGE}"' in queries[1]
    [monitor] = of_kind(full, "ServiceMonitor").values()
    label = monitor["spec"]["podTargetLabels"][0].replace(".", "_").replace("/", "_")
    assert all(f'{label}="decode"' in query for query in queries)


def test_who_scales_is_not_told_how_many(full: list[Manifest]) -> None:
    scalers = [*of_kind(full, "HorizontalPodAutoscaler").values(), *of_kind(full, "ScaledObject").values()]
    targets = {scaler["spec"]["scaleTargetRef"]["name"]: scaler["spec"]["scaleTargetRef"]["kind"] for scaler in scalers}
    assert set(targets) == {"penstock-gateway", "penstock-prefill", "penstock-decode", "penstock-large"}
    for name, pod in pods(full).items():
        workload = pod.workload["metadata"]["name"]
        assert ("replicas" in pod.workload["spec"]) is (workload not in targets), name
        assert targets.get(workload, pod.workload["kind"]) == pod.workload["kind"]


def test_every_port_of_metrics_is_scraped(full: list[Manifest]) -> None:
    there = {name for pod in pods(full).values() for name in pod.ports if name.startswith("metrics")}
    [monitor] = of_kind(full, "ServiceMonitor").values()
    [service] = (one for name, one in of_kind(full, "Service").items() if name.endswith("-metrics"))
    assert {each["port"] for each in monitor["spec"]["endpoints"]} == there
    assert {port["name"] for port in service["spec"]["ports"]} == there
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert all(service["spec"]["selector"].items() <= pod.labels.items() for pod in pods(full).values())
