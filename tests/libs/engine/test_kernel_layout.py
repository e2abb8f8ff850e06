"""The seam between Python and C++: what one side alone changes is not compiled, or not loaded."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from penstock.engine.kernels.cpu import build, layout

SOURCES = Path(build.__file__).parent


def complaint(directory: Path, header: str, source: str = "entry.cpp") -> str:
    """What the compiler says of a source with another layout.h."""
    (directory / "layout.h").write_text(header)
    compiler = shutil.which("g++") or "c++"
    command = (compiler, "-fsyntax-only", "-std=c++20", f"-I{directory}", str(SOURCES / source))
    return subprocess.run(command, capture_output=True, text=True).stderr


def test_it_compiles_as_it_is(tmp_path):
    assert "error" not in complaint(tmp_path, layout.header())


@pytest.mark.parametrize("structure", ["Linear", "Layer", "Model", "Step"])
def test_a_field_that_only_cpp_has_does_not_compile(tmp_path, structure):
    changed = layout.header().replace(f"struct {structure} {{", f"struct {structure} {{ int32_t another[2];")
    assert "layout.py says otherwise" in complaint(tmp_path, changed)


@pytest.mark.parametrize("structure", ["Linear", "Layer", "Model", "Step"])
def test_nor_one_that_only_python_has(tmp_path, structure):
    """As if the checks knew it and the structure did not."""
    found = re.search(rf"struct {structure} {{\n.*?;", layout.header(), re.DOTALL)
    changed = layout.header().replace(found[0], f"struct {structure} {{")
    assert "error" in complaint(tmp_path, changed)


@pytest.mark.parametrize(
    ("name", "source"),
    [("linear", "entry.cpp"), ("checksum", "packing.cpp"), ("read", "read.cpp"), ("guess", "lookup.cpp")],
)
def test_a_function_with_other_arguments_does_not_compile(tmp_path, name, source):
    changed = re.sub(rf"(penstock_{name}\()", r"\1int8_t, ", layout.header())
    assert "conflicting declaration" in complaint(tmp_path, changed, source)


def test_a_new_field_makes_another_library(monkeypatch):
    class MoreArgs(ctypes.Structure):
        _fields_ = (*layout.StepArgs._fields_, ("another", ctypes.c_int32))

    name = build.file_name()
    monkeypatch.setattr(layout, "STRUCTURES", (*layout.STRUCTURES[:-1], MoreArgs))
    assert build.file_name() != name


def test_a_library_of_another_layout_is_not_loaded(monkeypatch):
    path = build.cached(build.kernels_directory())
    build.load(path)
    monkeypatch.setattr(layout, "VERSION", layout.VERSION ^ 1)
    with pytest.raises(build.NotBuilt, match=r"\.so was built with layout [0-9a-f]{16}, and layout.py is [0-9a-f]{16}"):
        build.load(path)


def test_nor_is_one_that_is_none_of_ours(tmp_path):
    tmp_path.chmod(0o700)
    path = tmp_path / "other.so"
    subprocess.run(("g++", "-shared", "-x", "c++", "-", "-o", path), input="int other;", text=True, check=True)
    path.chmod(0o700)
    with pytest.raises(build.NotBuilt, match=r"other\.so does not say which layout"):
        build.load(path)


def test_kinds_have_one_number_each():
    assert [layout.Kind.of(name) for name in ("float32", "torch.bfloat16", "int8", "lossless")] == [0, 1, 2, 3]
    with pytest.raises(KeyError):
        layout.Kind.of("torch.int64")
