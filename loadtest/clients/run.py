"""Runs every client's cases against a mesh: `python -m loadtest.clients.run [--write] [--json] [NAME ...]`.

A NAME is a part of a client's name, or `conformance`. The exit code is 1 when something fails.
"""

from __future__ import annotations

import argparse
import json
import sys

from loadtest.clients import conformance
from loadtest.clients.clients import CLIENTS, OK, Tried, run
from loadtest.clients.document import DOCUMENT, document
from loadtest.clients.served import served


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog="loadtest.clients.run", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="parts of clients' names; none: all")
    parser.add_argument("--url", default="", help="a mesh that runs already, instead of one of this run's own")
    parser.add_argument("--grpc", default="", help="the address of its gRPC API")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--write", action="store_true", help=f"write {DOCUMENT.name}")
    options = parser.parse_args()
    chosen = [each for each in CLIENTS if not options.names or any(part in each.name for part in options.names)]
    tried = []
    conforms = None
    with served(options.url, options.grpc) as doors:
        for client in chosen:
            if client.peer and client.missing:  # it takes gigabytes, so nobody has to have it
                print(f"left out: {client.name}, see {client.missing}", file=sys.stderr)
                continue
            tried.append(run(client, doors))
            if not options.json:
                _show(tried[-1])
        if not options.names or conformance.ENVIRONMENT in options.names:
            conforms = conformance.run(doors.url)
            if not options.json:
                print(conforms.sentence)
    if options.json:
        print(json.dumps(_figures(tried, conforms), indent=2))
    if options.write and conforms and not options.names:
        DOCUMENT.write_text(document(tried, conforms.sentence))
    return 0 if all(each.unchanged for each in tried) and not (conforms and conforms.problems) else 1


def _figures(tried: list[Tried], conforms: conformance.Conforms | None) -> dict[str, object]:
    return {
        "clients_unchanged": sum(each.unchanged for each in tried),
        "clients": [
            {"name": each.client, "versions": each.versions, "seconds": round(each.seconds, 1), "cases": each.cases}
            for each in tried
        ],
        "schemathesis": conforms and {"requests": conforms.requests, "problems": conforms.problems},
    }


def _show(tried: Tried) -> None:
    versions = ", ".join(f"{name} {version}" for name, version in tried.versions.items())
    print(f"{'works' if tried.unchanged else 'FAILS':<6}{tried.client} ({versions}), {tried.seconds:.0f} s")
    for name, found in tried.cases.items():
        if found != OK:
            print(f"      {name}: {found}")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
