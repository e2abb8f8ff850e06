"""`python -m penstock.supply.licences`: fails when a locked package has a licence that `allowed.toml` does not have.

A package says its licence as an SPDX expression, by a classifier, or in words, of which the first that it has counts.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from email.message import Message
from importlib import metadata
from pathlib import Path

_ALLOWED = Path(__file__).with_name("allowed.toml")
_CLASSIFIER = "License :: "
_NOTHING_SAID = {"License :: DFSG approved", "License :: OSI Approved"}


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowedLicences:
    """Under which packages may come."""

    licences: frozenset[str]
    """SPDX identifiers."""
    words: Mapping[str, str]
    """What classifiers and packages say in words, as SPDX expressions."""
    packages: Mapping[str, str]
    """The whole expression of packages that may come under others too; somebody has looked at each."""

    @classmethod
    def read(cls, path: Path = _ALLOWED) -> AllowedLicences:
        """Raises OSError, ValueError, KeyError."""
        data = tomllib.loads(path.read_text("utf-8"))
        return cls(licences=frozenset(data["licences"]), words=data["words"], packages=data["packages"])

    def refused(self, package: str, said: str) -> bool:
        """Whether a package may not come under what it says."""
        if self.packages.get(package) == said:
            return False
        return not self._allows(self.words.get(said, said))

    def _allows(self, expression: str) -> bool:
        """One of the alternatives, and of that every part. Brackets are not understood, and so refused."""
        ways = (way.split(" AND ") for way in expression.split(" OR "))
        return any(all(part.strip() in self.licences for part in way) for way in ways)


def said(package: Message) -> str:
    """What a package's metadata say of its licence; empty when they say nothing."""
    expression = package.get("License-Expression")
    if expression:
        return str(expression)
    classifiers = [line for line in package.get_all("Classifier", []) if line.startswith(_CLASSIFIER)]
    names = [line.rpartition(" :: ")[2] for line in classifiers if line not in _NOTHING_SAID]
    words: str = " OR ".join(sorted(names)) or (package.get("License") or "").strip()
    return words.partition("\n")[0]


def locked(constraints: str) -> list[str]:
    """Names of packages, as constraints have them."""
    return re.findall(r"^([A-Za-z0-9._-]+)==", constraints, re.MULTILINE)


def refusals(packages: Iterable[str], allowed: AllowedLicences) -> list[str]:
    """A line for each package that is installed and may not come. One that is not installed is not looked at."""
    found = []
    for name in packages:
        try:
            words = said(metadata.metadata(name))  # type: ignore[arg-type]  # a Message, which its protocol hides
        except metadata.PackageNotFoundError:
            continue
        if allowed.refused(name, words):
            found.append(f"{name}: {words or 'says nothing of its licence'}")
    return found


def main(root: Path = Path()) -> None:
    """Of the packages in constraints.txt."""
    names = locked((root / "constraints.txt").read_text("utf-8"))
    if lines := refusals(names, AllowedLicences.read()):
        print("licences that tools/penstock/supply/allowed.toml does not allow:", *lines, sep="\n  ", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
