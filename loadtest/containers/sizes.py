"""Builds the images and prints their sizes, in MB of 10^6 bytes before compression: `make images`."""

from __future__ import annotations

import json
import sys

from loadtest.containers.engine import IMAGES, build, docker, said, why_not


def main() -> int:
    """Prints one JSON object, and returns 0."""
    reason = why_not()
    if reason:
        print(f"not tried: {reason}", file=sys.stderr)
        return 2
    with docker() as environment:
        build(environment)
        sizes = {
            kind: said(["docker", "image", "inspect", "--format", "{{.Size}}", image], environment)
            for kind, image in IMAGES.items()
        }
    print(json.dumps({f"image_mb_{kind}": round(int(size) / 1e6, 1) for kind, size in sizes.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
