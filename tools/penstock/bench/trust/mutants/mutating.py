"""All small changes that can be made to a source: a comparison turned, a bound moved, a call left out.

A change replaces a few characters, so what is printed of it is the line as somebody could have written it. Docstrings,
logging, type hints, assertions, errors that are raised and what `__repr__` says stay as they are; so does what would
compile to the same.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import CodeType

from penstock.bench.trust.mutants.mutant import Mutant

_TURNED: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
_SWAPPED: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
}
_OPPOSITES = {"min": "max", "max": "min", "any": "all", "all": "any"}
_BOUNDED = {"min", "max", "range"}
"""Functions whose constant arguments are bounds."""
_SHOWN = {"__repr__", "__str__"}
_LOGGING = re.compile(r"(^|\.)_?log(ger|ging)?\.")


@dataclass(frozen=True, slots=True)
class _Edit:
    """`text` instead of the bytes from `start` to `end`."""

    start: int
    end: int
    text: str
    kind: str
    function: str


def mutants(path: str, source: str) -> list[Mutant]:
    """All of a file, in the order of its lines. Those that compile to the same as the file, or as one before, are left
    out."""
    raw, found, seen = source.encode(), list[Mutant](), {_essence(compile(source, path, "exec"))}
    alike: Counter[tuple[str, str, str]] = Counter()
    for edit in sorted(_Finder(raw).edits(), key=lambda edit: (edit.start, edit.end)):
        made = _made(path, raw, edit)
        essence = _essence(compile(made.source, path, "exec"))
        if essence not in seen:
            seen.add(essence)
            key = (made.function, made.before, made.after)
            found.append(replace(made, number=alike[key]))
            alike[key] += 1
    return found


def _made(path: str, raw: bytes, edit: _Edit) -> Mutant:
    text = edit.text.encode()
    first, last = raw.rfind(b"\n", 0, edit.start) + 1, raw.find(b"\n", edit.end)
    last = len(raw) if last < 0 else last
    before, after = raw[first:last], raw[first : edit.start] + text + raw[edit.end : last]
    return Mutant(
        path=path,
        line=raw.count(b"\n", 0, edit.start) + 1,
        function=edit.function or "<module>",
        kind=edit.kind,
        before=_dedented(before),
        after=_dedented(after),
        source=(raw[: edit.start] + text + raw[edit.end :]).decode(),
    )


def _dedented(lines: bytes) -> str:
    return "\n".join(line.strip() for line in lines.decode().splitlines())


def _essence(code: CodeType) -> tuple[object, ...]:
    """What a program does, without where it stands."""
    constants = tuple(_essence(one) if isinstance(one, CodeType) else (type(one), one) for one in code.co_consts)
    return (code.co_name, code.co_code, constants, code.co_names, code.co_varnames, code.co_exceptiontable)


class _Finder(ast.NodeVisitor):
    """Collects what can be changed in one source."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        self._begins = [0]
        for line in raw.splitlines(keepends=True):
            self._begins.append(self._begins[-1] + len(line))
        self._inside: list[str] = []
        self._edits: list[_Edit] = []

    def edits(self) -> list[_Edit]:
        """Of the whole source."""
        self.visit(ast.parse(self._raw))
        return self._edits

    def _start(self, node: ast.expr | ast.stmt) -> int:
        return self._begins[node.lineno - 1] + node.col_offset

    def _end(self, node: ast.expr | ast.stmt) -> int:
        assert node.end_lineno is not None and node.end_col_offset is not None, "a parsed node has an end"
        return self._begins[node.end_lineno - 1] + node.end_col_offset

    def _edit(self, start: int, end: int, text: str, kind: str) -> None:
        self._edits.append(_Edit(start, end, text, kind, ".".join(self._inside)))

    def _instead(self, node: ast.expr | ast.stmt, text: str, kind: str) -> None:
        self._edit(self._start(node), self._end(node), text, kind)

    def _between(self, left: ast.expr, right: ast.expr, sign: tuple[str, str], kind: str) -> None:
        """Another operator between two operands; brackets around them stay."""
        begin, gap = self._end(left), self._raw[self._end(left) : self._start(right)].decode()
        at = re.search(r"\s+".join(map(re.escape, sign[0].split())), gap)
        if at is not None:
            self._edit(begin + len(gap[: at.start()].encode()), begin + len(gap[: at.end()].encode()), sign[1], kind)

    # What stays as it is.

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._function(node)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if node.name not in _SHOWN:
            self._within(node.name, [*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body])

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._within(node.name, node.body)

    def _within(self, name: str, nodes: Sequence[ast.AST]) -> None:
        self._inside.append(name)
        for node in nodes:
            self.visit(node)
        self._inside.pop()

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._assigned([node.target], node)

    def visit_Assert(self, node: ast.Assert) -> None:
        pass

    def visit_Raise(self, node: ast.Raise) -> None:
        pass

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass

    # Statements.

    def visit_Expr(self, node: ast.Expr) -> None:
        call = node.value.value if isinstance(node.value, ast.Await) else node.value
        if not isinstance(call, ast.Call):
            self.generic_visit(node)
            return
        name = ast.unparse(call.func)
        if _LOGGING.search(name) or name.startswith("super()"):
            return
        self._instead(node, "pass", "call left out")
        self.generic_visit(node)

    def visit_Delete(self, node: ast.Delete) -> None:
        self._instead(node, "pass", "deletion left out")

    def visit_Assign(self, node: ast.Assign) -> None:
        self._assigned(node.targets, node)

    def _assigned(self, targets: list[ast.expr], node: ast.Assign | ast.AnnAssign) -> None:
        kept = isinstance(targets[0], ast.Attribute | ast.Subscript)
        if kept and self._inside and self._inside[-1] not in {"__init__", "__post_init__"}:
            self._instead(node, "pass", "assignment left out")
        assert node.value is not None, "the caller has looked"
        self._flag(node.value)
        for part in (*targets, node.value):
            self.visit(part)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._instead(node, "pass", "assignment left out")
        if (sign := _SWAPPED.get(type(node.op))) is not None:
            self._between(node.target, node.value, (f"{sign[0]}=", f"{sign[1]}="), "sign swapped")
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None:
            self._flag(node.value)
        self.generic_visit(node)

    def visit_Break(self, node: ast.Break) -> None:
        self._instead(node, "continue", "break turned")

    def visit_Continue(self, node: ast.Continue) -> None:
        self._instead(node, "break", "continue turned")

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) != "TYPE_CHECKING":
            self._negated(node.test)
            self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        if not isinstance(node.test, ast.Constant):
            self._negated(node.test)
        self.generic_visit(node)

    # Expressions.

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._negated(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self._negated(test)
        self.generic_visit(node)

    def _negated(self, test: ast.expr) -> None:
        if isinstance(test, ast.Compare) and len(test.ops) == 1:
            return  # the comparison is turned
        if not (isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)):
            text = self._raw[self._start(test) : self._end(test)].decode()
            self._instead(test, f"(not ({text}))", "condition negated")

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            rest = self._raw[self._start(node) + len(b"not") : self._end(node)]
            self._edit(self._start(node), self._end(node) - len(rest.lstrip()), "", "not dropped")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for left, op, right in zip(operands, node.ops, operands[1:], strict=False):
            self._between(left, right, _TURNED[type(op)], "comparison turned")
        for one in operands:
            self._bound(one)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if (sign := _SWAPPED.get(type(node.op))) is not None:
            self._between(node.left, node.right, sign, "sign swapped")
        if isinstance(node.op, ast.Add | ast.Sub):
            self._bound(node.left)
            self._bound(node.right)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        words = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._between(left, right, words, f"{words[0]} turned")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name in _OPPOSITES:
            self._instead(node.func, _OPPOSITES[name], f"{name} turned")
        if name in _BOUNDED:
            for one in node.args:
                self._bound(one)
        for word in node.keywords:
            self._flag(word.value)
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self._bound(node.slice)
        self.generic_visit(node)

    def visit_Slice(self, node: ast.Slice) -> None:
        for one in (node.lower, node.upper):
            if one is not None:
                self._bound(one)
        self.generic_visit(node)

    def _bound(self, node: ast.expr) -> None:
        """Moves a whole number by one."""
        value = _whole(node)
        if value is not None:
            self._instead(node, str(value + 1), "bound moved")

    def _flag(self, node: ast.expr) -> None:
        if isinstance(node, ast.Constant) and isinstance(node.value, bool):
            self._instead(node, str(not node.value), "flag turned")


def _whole(node: ast.expr) -> int | None:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _whole(node.operand)
        return None if value is None else -value
    return node.value if isinstance(node, ast.Constant) and type(node.value) is int else None
