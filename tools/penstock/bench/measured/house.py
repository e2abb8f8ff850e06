"""The section about the source itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.bench.measured.results import NOTHING, Results, table

Data = Mapping[str, Any]

_COUNTED: tuple[tuple[str, Callable[[Data], str]], ...] = (
    ("functions over 60 lines", lambda data: str(len(data["long_functions"]))),
    ("files over 300 lines", lambda data: str(len(data["long_files"]))),
    ("functions with more than 7 parameters", lambda data: str(len(data["many_parameters"]))),
    ("classes over 15 public methods", lambda data: str(len(data["big_classes"]["15"]))),
    ("classes over 20 public methods", lambda data: str(len(data["big_classes"]["20"]))),
    ("calls with 6 or more positional arguments", lambda data: f"{data['long_calls']} of {data['calls']:,}"),
    ("`Any` per 1,000 lines", lambda data: f"{data['any_per_1000']:.1f}"),
    ("`type: ignore`", lambda data: str(data["type_ignores"])),
    ("public class names that stand more than once", lambda data: str(len(data["repeated_names"]))),
)


def section(now: Results, earlier: Results | None = None) -> str:
    """In Markdown."""
    columns = [now.data] if earlier is None else [earlier.data, now.data]
    heads = ["now"] if earlier is None else ["before", "now"]
    return f"""## The source

`make house`: read from the syntax trees of a checkout, without generated code. Files and functions in lines: median /
90th percentile / longest. *Core* is everything but the code that trains the embedded models.

{table(["group", *heads], _groups(columns))}

{table(["core", *heads], [[name, *(write(data) for data in columns)] for name, write in _COUNTED])}

The rooms of a package are its files and subfolders, an arrow is one room that imports another, floors are the longest
chain of arrows. Where rooms import each other in a ring, the fewest arrows without which there is none are said to run
up. Circles are rings of files.

{table(["package: rooms / floors / arrows / up / circles", *heads], _packages(columns))}
"""


def _groups(columns: Sequence[Data]) -> list[list[str]]:
    names = [group["name"] for group in columns[-1]["groups"]]
    rows = []
    for name in names:
        found = [next((group for group in data["groups"] if group["name"] == name), None) for data in columns]
        rows.append([f"{name.removeprefix('- ')}: files, lines", *(_sized(group) for group in found)])
        rows.append(["file / function lengths", *(_lengths(group) for group in found)])
        if columns[-1]["groups"][names.index(name)]["arguments"]:
            rows.append(["arguments annotated, public names with docstring", *(_shares(group) for group in found)])
    return rows


def _sized(group: Data | None) -> str:
    return NOTHING if group is None else f"{group['files']['count']:,}, {group['lines']:,}"


def _lengths(group: Data | None) -> str:
    if group is None:
        return NOTHING
    sizes = [group[part] for part in ("files", "functions") if group[part]["count"]]
    return "; ".join(f"{size['median']:g} / {size['p90']} / {size['max']}" for size in sizes)


def _shares(group: Data | None) -> str:
    if group is None:
        return NOTHING
    shares = ((group["annotated"], group["arguments"]), (group["documented"], group["public"]))
    return ", ".join(f"{100 * part / max(1, whole):.1f} %" for part, whole in shares)


def _packages(columns: Sequence[Data]) -> list[list[str]]:
    names = list(dict.fromkeys(package["package"] for data in reversed(columns) for package in data["packages"]))
    rows = []
    for name in names:
        found = [next((each for each in data["packages"] if each["package"] == name), None) for data in columns]
        rows.append([f"`{name}`", *(_storeys(package) for package in found)])
    return rows


def _storeys(package: Data | None) -> str:
    if package is None:
        return NOTHING
    numbers = [package[name] for name in ("rooms", "floors", "arrows")] + [len(package["up"]), len(package["circles"])]
    return " / ".join(map(str, numbers))
