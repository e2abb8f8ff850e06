"""A board in a few words, and the JSON that Grafana reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Json = dict[str, Any]
Unit = Literal["s", "percentunit", "reqps", "short", "bytes", "Bps", "tokens/s", "tokens", "ops"]

_SCHEMA_VERSION = 39
"""Of Grafana's dashboard model; newer versions of Grafana migrate it when they read it."""
_ACROSS, _WIDTH, _HEIGHT = 3, 8, 8
"""Panels side by side; Grafana's grid has 24 columns."""
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True, slots=True)
class Query:
    """A line or more of a panel."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """A chart over time."""

    title: str
    says: str
    """What to read from it, for who points at the title."""
    unit: Unit
    queries: Sequence[Query]
    stacked: bool = False
    most: float | None = None
    """Top of the scale; None: as it comes."""


@dataclass(frozen=True, slots=True)
class BoardChoice:
    """A variable whose values are listed; the first is the default."""

    name: str
    label: str
    values: Sequence[str]


@dataclass(frozen=True, slots=True)
class Board:
    """A dashboard: rows of panels under titles."""

    name: str
    """Of its file, and in its address."""
    title: str
    says: str
    rows: Mapping[str, Sequence[Panel]]
    choices: Sequence[BoardChoice] = ()


def rate(name: str, where: str = "", by: str = "") -> str:
    """PromQL: growth of a counter by second, summed up."""
    return f"sum{f' by ({by}) ' if by else ''}(rate({name}{{{where}}}[$__rate_interval]))"


def quantile(part: float, name: str, where: str = "", by: str = "") -> str:
    """PromQL: a quantile of a histogram."""
    grouped = ", ".join(filter(None, ("le", by)))
    return f"histogram_quantile({part}, sum by ({grouped}) (rate({name}_bucket{{{where}}}[$__rate_interval])))"


def quantiles(name: str, where: str = "") -> list[Query]:
    """The median, and what one of ten and one of a hundred exceed."""
    return [Query(quantile(part, name, where), f"p{part * 100:g}") for part in (0.5, 0.9, 0.99)]


def ratio(above: str, below: str) -> str:
    """PromQL: a quotient that is absent while nothing happens; both have the same labels."""
    return f"{above} / ({below} > 0)"


def share(parts: str, whole: str) -> str:
    """PromQL: likewise of several parts and one whole."""
    return f"{parts} / on() group_left() ({whole} > 0)"


def board_json(board: Board) -> Json:
    """The dashboard as Grafana reads it. Panels lie side by side, row below row."""
    panels: list[Json] = []
    y = 0
    for title, row in board.rows.items():
        panels.append(_row(title, len(panels) + 1, y))
        y += 1
        for place, panel in enumerate(row):
            x, line = place % _ACROSS * _WIDTH, place // _ACROSS
            panels.append(_panel(panel, len(panels) + 1, x, y + line * _HEIGHT))
        y += -(-len(row) // _ACROSS) * _HEIGHT
    return {
        "uid": f"penstock-{board.name}",
        "title": f"Penstock: {board.title}",
        "description": board.says,
        "tags": ["penstock"],
        "schemaVersion": _SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "graphTooltip": 1,
        "links": [{"type": "dashboards", "title": "Penstock", "tags": ["penstock"], "asDropdown": True}],
        "templating": {"list": [_source(), _models(), *map(_choice, board.choices)]},
        "annotations": {"list": []},
        "panels": panels,
    }


def _row(title: str, number: int, y: int) -> Json:
    place = {"x": 0, "y": y, "w": 24, "h": 1}
    return {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}


def _panel(panel: Panel, number: int, x: int, y: int) -> Json:
    custom: Json = {"lineWidth": 1, "fillOpacity": 20 if panel.stacked else 5, "showPoints": "never"}
    if panel.stacked:
        custom["stacking"] = {"mode": "normal", "group": "A"}
    defaults: Json = {"unit": panel.unit, "min": 0, "custom": custom}
    if panel.most is not None:
        defaults["max"] = panel.most
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.says,
        "datasource": _DATASOURCE,
        "gridPos": {"x": x, "y": y, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {"refId": chr(ord("A") + at), "datasource": _DATASOURCE, "expr": query.expr, "legendFormat": query.legend}
            for at, query in enumerate(panel.queries)
        ],
    }


def _source() -> Json:
    return {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus", "hide": 0}


def _models() -> Json:
    query = "label_values(vllm:generation_tokens_total, model_name)"
    return {
        "name": "model",
        "label": "Model",
        "type": "query",
        "datasource": _DATASOURCE,
        "query": {"query": query, "refId": "models"},
        "definition": query,
        "refresh": 2,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
        "hide": 0,
    }


def _choice(choice: BoardChoice) -> Json:
    options = [{"text": value, "value": value, "selected": not at} for at, value in enumerate(choice.values)]
    return {
        "name": choice.name,
        "label": choice.label,
        "type": "custom",
        "query": ",".join(choice.values),
        "options": options,
        "current": options[0],
        "hide": 0,
    }
