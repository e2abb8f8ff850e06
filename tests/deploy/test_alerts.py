"""Alerts: each fires when it should and only then, and the runbook has a section for it. Boards: Prometheus can parse
every query, and Grafana finds a dashboard of its shape."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.observing.boards import BOARDS

ROOT = Path(__file__).parents[2]
ALERTS = ROOT / "deploy/prometheus/alerts.yaml"
PROMTOOL = shutil.which("promtool") or shutil.which("promtool", path=ROOT / "runs/promtool/usr/bin")
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="no promtool; `make setup` fetches it where there is apt-get"
)
Series = dict[str, str]


@dataclass(frozen=True)
class Case:
    """Samples of an hour, one each minute, after which an alert fires, or does not."""

    fires: Series
    quiet: Series


def _buckets(name: str, **counts: int) -> Series:
    """Growth by minute of buckets, whose bounds are written with `_` for the point."""
    return {
        f'{name}_bucket{{model_name="m", le="{bound[1:].replace("_", ".")}"}}': f"0+{count}x60"
        for bound, count in {**counts, "_+Inf": 60}.items()
    }


TTFT, ITL = "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds"
LOST = 'penstock_workers_lost_total{model_name="m", stage="decode", reason="failed"}'
CASES = {
    "PenstockErrors": Case(
        {'penstock_requests_total{outcome="ok"}': "0+90x60", 'penstock_requests_total{outcome="error"}': "0+10x60"},
        {'penstock_requests_total{outcome="ok"}': "0+90x60", 'penstock_requests_total{outcome="refused"}': "0+90x60"},
    ),
    "PenstockSlowFirstToken": Case(_buckets(TTFT, _5_0=10, _10_0=60), _buckets(TTFT, _5_0=60, _10_0=60)),
    "PenstockSlowTokens": Case(_buckets(ITL, _0_3=10, _0_4=60), _buckets(ITL, _0_2=60, _0_3=60)),
    "PenstockRefusing": Case(
        {'penstock_requests_refused_total{status="503", reason="overloaded"}': "0+60x60"},
        {'penstock_requests_refused_total{status="429", reason="rate_limit_exceeded"}': "0+60x60"},
    ),
    "PenstockUsageDefects": Case(
        {"penstock_usage_defects_total": "0x55 1x5"}, {"penstock_usage_defects_total": "1x60"}
    ),
    "PenstockDown": Case(
        {'up{job="penstock-router", instance="r"}': "0x60"},
        {'up{job="penstock-router", instance="r"}': "1x60", 'up{job="other", instance="o"}': "0x60"},
    ),
    "PenstockNoWorkers": Case(
        {
            'penstock_members{instance="r", role="decode"}': "0x60",
            'penstock_members{instance="r", role="both"}': "0x60",
        },
        {
            'penstock_members{instance="r", role="decode"}': "0x60",
            'penstock_members{instance="r", role="both"}': "1x60",
        },
    ),
    "PenstockFailovers": Case({LOST: "0+6x60"}, {LOST: "0+1x60"}),
    "PenstockTaskFailures": Case(
        {'penstock_task_failures_total{instance="s", task="disk"}': "_x55 1x5"},
        {'penstock_task_failures_total{instance="s", task="disk"}': "3x60"},
    ),
    "PenstockStateBehind": Case({"penstock_state_behind_seconds": "30x60"}, {"penstock_state_behind_seconds": "0x60"}),
    "PenstockPredictionsOff": Case(
        {
            'penstock_plan_actual_seconds_total{what="token"}': "0+3x60",
            'penstock_plan_predicted_seconds_total{what="token"}': "0+1x60",
        },
        {
            'penstock_plan_actual_seconds_total{what="token"}': "0+1x60",
            'penstock_plan_predicted_seconds_total{what="token"}': "0+1x60",
        },
    ),
    "PenstockQueue": Case({"penstock_queue_seconds": "20x60"}, {"penstock_queue_seconds": "5x60"}),
    "PenstockHeld": Case({"penstock_held_requests": "2x60"}, {"penstock_held_requests": "2x57 0x3"}),
    "PenstockKvFull": Case({"vllm:kv_cache_usage_perc": "0.99x60"}, {"vllm:kv_cache_usage_perc": "0.5x60"}),
    "PenstockPreempting": Case({"vllm:num_preemptions_total": "0+60x60"}, {"vllm:num_preemptions_total": "7x60"}),
    "PenstockSaturated": Case(
        {"penstock_worker_busy_seconds_total": "0+57x60"}, {"penstock_worker_busy_seconds_total": "0+30x60"}
    ),
    "PenstockStoreFaults": Case(
        {'penstock_store_faults_total{what="lease"}': "0+60x60"},
        {'penstock_store_faults_total{what="lease"}': "0+1x60"},
    ),
    "PenstockDamagedBlocks": Case(
        {'penstock_store_nvme_corrupt_total{instance="s"}': "0x55 1x5"},
        {'penstock_store_nvme_corrupt_total{instance="s"}': "1x60"},
    ),
    "PenstockDiskLeftAlone": Case(
        {
            "penstock_store_nvme_slots": "9x60",
            "penstock_store_nvme_writing": "0x60",
            "penstock_store_nvme_reading": "1x60",
        },
        {
            "penstock_store_nvme_slots": "0x60",
            "penstock_store_nvme_writing": "0x60",
            "penstock_store_nvme_reading": "0x60",
        },
    ),
    "PenstockDraftsLate": Case({"penstock_draft_faults_total": "0+120x60"}, {"penstock_draft_faults_total": "0+6x60"}),
}


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def promtool(*arguments: str | Path) -> None:
    done = subprocess.run([str(PROMTOOL), *map(str, arguments)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_has_its_cases_and_its_section_in_the_runbook() -> None:
    sections = re.split(r"^## ", (ROOT / "docs/runbook.md").read_text(), flags=re.MULTILINE)[1:]
    texts = dict(section.split("\n", 1) for section in sections)
    named = [rule["alert"] for rule in rules()]
    assert set(named) == CASES.keys() == texts.keys() and len(named) == len(set(named))
    for rule in rules():
        name = rule["alert"]
        assert rule["annotations"]["runbook"] == f"docs/runbook.md#{name.lower()}"
        assert rule["annotations"]["summary"] and rule["labels"]["severity"] in ("page", "ticket")
        assert len(texts[name].split()) > 30, f"{name}: says what to do"


@needs_promtool
def test_prometheus_takes_the_rules() -> None:
    promtool("check", "rules", ALERTS)


@needs_promtool
def test_each_alert_fires_when_it_should_and_only_then(tmp_path: Path) -> None:
    tests = [
        {
            "name": f"{name}, {'fires' if fires else 'quiet'}",
            "interval": "1m",
            "input_series": [{"series": one, "values": values} for one, values in series.items()],
            "promql_expr_test": [
                {
                    "expr": f'count(ALERTS{{alertname="{name}", alertstate="firing"}})',
                    "eval_time": "60m",
                    "exp_samples": [{"labels": "{}", "value": 1}] if fires else [],
                }
            ],
        }
        for name, case in CASES.items()
        for fires, series in ((True, case.fires), (False, case.quiet))
    ]
    file = tmp_path / "alerts.test.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": tests}))
    promtool("test", "rules", file)


@needs_promtool
def test_prometheus_can_parse_what_boards_ask(tmp_path: Path) -> None:
    asked = [
        {"record": f"board:query{number}", "expr": query.expr.replace("$__rate_interval", "1m")}
        for number, query in enumerate(
            query for board in BOARDS for row in board.rows.values() for panel in row for query in panel.queries
        )
    ]
    file = tmp_path / "boards.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "boards", "rules": asked}]}))
    promtool("check", "rules", file)
    assert len(asked) > 60


def test_boards_have_the_shape_of_dashboards() -> None:
    """Panels with a title that says what it shows, and one place each; only variables that the board has."""
    paths = sorted((ROOT / "deploy/grafana/boards").glob("*.json"))
    boards = [json.loads(path.read_text()) for path in paths]
    assert len({board["uid"] for board in boards}) == len(boards) == len(BOARDS)
    for board in boards:
        assert board["schemaVersion"] >= 36 and board["title"] and isinstance(board["panels"], list)
        variables = {variable["name"] for variable in board["templating"]["list"]}
        ids = [panel["id"] for panel in board["panels"]]
        assert len(ids) == len(set(ids))
        taken = set()
        for panel in board["panels"]:
            place = panel["gridPos"]
            cells = {
                (x, y)
                for x in range(place["x"], place["x"] + place["w"])
                for y in range(place["y"], place["y"] + place["h"])
            }
            assert not cells & taken and place["x"] + place["w"] <= 24, panel["title"]
            taken |= cells
            if panel["type"] == "row":
                continue
            assert panel["title"] and panel["description"] and panel["targets"]
            for target in panel["targets"]:
                used = set(re.findall(r"\$\{?(\w+)", target["expr"])) - {"__rate_interval"}
                assert used <= variables, target["expr"]
                assert target["datasource"]["uid"] == "${datasource}" and target["legendFormat"]


def test_grafana_is_told_where_the_boards_are() -> None:
    root = ROOT / "deploy/grafana/provisioning"
    [provider] = yaml.safe_load((root / "dashboards/penstock.yaml").read_text())["providers"]
    assert provider["type"] == "file" and provider["options"]["path"] == "/var/lib/grafana/boards"
    sources = yaml.safe_load((root / "datasources/penstock.yaml").read_text())["datasources"]
    assert [source["type"] for source in sources if source.get("isDefault")] == ["prometheus"]
