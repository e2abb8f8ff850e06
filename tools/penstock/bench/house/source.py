"""What one Python file holds, counted from its syntax tree.

A function's length runs from its `def` line to its last line, without decorators; nested functions are counted as
well. Parameters and arguments are counted without `self` and `cls`. A name is public when neither it nor a class
around it begins with an underscore, and it does not stand inside a function.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

MANY_ARGUMENTS = 6
"""A call with so many positional arguments is counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionFacts:
    """One function or method."""

    name: str
    path: str
    line: int
    lines: int
    parameters: int
    annotated: int
    """Of the parameters."""
    returns: bool
    """Whether the result is annotated."""
    public: bool
    documented: bool

    @property
    def place(self) -> str:
        """`path:line name`."""
        return f"{self.path}:{self.line} {self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassFacts:
    """One class."""

    name: str
    path: str
    line: int
    methods: int
    public_methods: int
    """Properties count, names that begin with an underscore do not."""
    public: bool
    documented: bool

    @property
    def place(self) -> str:
        """`path:line name`."""
        return f"{self.path}:{self.line} {self.name}"


@dataclass(slots=True)
class FileFacts:
    """One file."""

    path: str
    lines: int
    functions: list[FunctionFacts] = field(default_factory=list)
    classes: list[ClassFacts] = field(default_factory=list)
    calls: int = 0
    long_calls: list[int] = field(default_factory=list)
    """Lines of calls with MANY_ARGUMENTS positional arguments or more."""
    any: int = 0
    """Uses of `Any`, without imports of it."""
    ignores: int = 0
    """Comments `type: ignore`."""


def read_file(path: Path, root: Path) -> FileFacts:
    """Reads a file of the tree below `root`. Raises SyntaxError."""
    return read_text(path.read_text(encoding="utf-8"), path.relative_to(root).as_posix())


def read_text(text: str, path: str) -> FileFacts:
    """The same for a text. Raises SyntaxError."""
    facts = FileFacts(path, text.count("\n") + (not text.endswith("\n") and bool(text)))
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            facts.calls += 1
            if sum(map(_values, node.args)) >= MANY_ARGUMENTS:
                facts.long_calls.append(node.lineno)
        elif isinstance(node, ast.Name) and node.id == "Any":
            facts.any += 1
    facts.ignores = sum("type: ignore" in comment for comment in _comments(text))
    _visit(tree, facts, public=True, method=False)
    return facts


def _values(argument: ast.expr) -> int:
    """Positional arguments that it stands for: `*(a, b)` is two."""
    if isinstance(argument, ast.Starred) and isinstance(argument.value, ast.Tuple | ast.List):
        return len(argument.value.elts)
    return 1


def _comments(text: str) -> Iterator[str]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def _visit(node: ast.AST, facts: FileFacts, *, public: bool, method: bool) -> None:
    """Adds the functions and classes below `node`; `public` and `method` say what surrounds them."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            facts.functions.append(_function(child, facts.path, public=public and _open(child.name), method=method))
            _visit(child, facts, public=False, method=False)
        elif isinstance(child, ast.ClassDef):
            facts.classes.append(_class(child, facts.path, public=public and _open(child.name)))
            _visit(child, facts, public=public and _open(child.name), method=True)
        else:
            _visit(child, facts, public=public, method=method)


def _function(node: ast.FunctionDef | ast.AsyncFunctionDef, path: str, *, public: bool, method: bool) -> FunctionFacts:
    parameters = _parameters(node, method)
    return FunctionFacts(
        name=node.name,
        path=path,
        line=node.lineno,
        lines=(node.end_lineno or node.lineno) - node.lineno + 1,
        parameters=len(parameters),
        annotated=sum(parameter.annotation is not None for parameter in parameters),
        returns=node.returns is not None,
        public=public,
        documented=ast.get_docstring(node) is not None,
    )


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef, method: bool) -> Sequence[ast.arg]:
    given = node.args
    positional = [*given.posonlyargs, *given.args]
    if method and positional and not any(ast.unparse(each) == "staticmethod" for each in node.decorator_list):
        positional = positional[1:]
    rest = [each for each in (given.vararg, given.kwarg) if each is not None]
    return [*positional, *given.kwonlyargs, *rest]


def _class(node: ast.ClassDef, path: str, *, public: bool) -> ClassFacts:
    methods = {child.name for child in node.body if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)}
    return ClassFacts(
        name=node.name,
        path=path,
        line=node.lineno,
        methods=len(methods),
        public_methods=sum(_open(name) for name in methods),
        public=public,
        documented=ast.get_docstring(node) is not None,
    )


def _open(name: str) -> bool:
    return not name.startswith("_")
