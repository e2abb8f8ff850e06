"""Builds the images and prints their sizes, in MB of 10^6 bytes before compression: `make images`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping

from loadtest.containers.engine import IMAGES, build, docker, said, why_not

MOST_MB = {"image_mb_light": 250.0, "image_mb_worker": 1600.0}
"""What the images may take."""


def main() -> int:
    """Prints one JSON object, and returns 0."""
    reason = why_not()
    if reason:
        print(f"not tried: {reason}", file=sys.stderr)
        return 2
    with docker() as environment:
        build(environment)
        print(json.dumps(sizes(environment)))
    return 0


def sizes(environment: Mapping[str, str]) -> dict[str, float]:
    """MB of each image, which is there."""
    inspect = ["docker", "image", "inspect", "--format", "{{.Size}}"]
    return {
        f"image_mb_{kind}": round(int(said([*inspect, image], environment)) / 1e6, 1) for kind, image in IMAGES.items()
    }


if __name__ == "__main__":
    sys.exit(main())
