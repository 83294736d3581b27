"""One small change to a file of the package, and all that the syntax tree offers."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

NEGATED: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE), ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE), ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,), ast.NotIn: (ast.In,),
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
EXTREMES = {"min": "max", "max": "min"}
MESSAGES = ("logger", "logging", "warnings")


@dataclass(frozen=True)
class Mutant:
    """A file with one change. `old` and `new` are the whole lines that change, as one line.
    `lines` are those that a test must run to notice it."""

    path: str
    lines: tuple[int, ...]
    old: str
    new: str
    source: str

    @property
    def folder(self) -> str:
        return self.path.split("/")[1]

    def __str__(self) -> str:
        return f"{self.path}:{self.lines[0]}: {self.old}  →  {self.new}"


def mutants_of(root: Path, path: str) -> list[Mutant]:
    """All mutants of a file, in the order of the source."""
    source = (root / path).read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    for node, replacement in _changes(ast.parse(source)):
        first, last = node.lineno, node.end_lineno or node.lineno
        begin, end = (
            starts[first - 1] + node.col_offset,
            starts[last - 1] + (node.end_col_offset or 0),
        )
        text = ast.unparse(replacement).encode()
        if not isinstance(node, ast.stmt):
            text = b"(" + text + b")" if b"\n" not in text else text
        changed = source[:begin] + text + source[end:]
        whole_end = starts[last] - 1
        found.append(
            Mutant(
                path,
                tuple(range(first, last + 1)),
                _flat(source[starts[first - 1] : whole_end]),
                _flat(changed[starts[first - 1] : whole_end + len(changed) - len(source)]),
                changed.decode(),
            )
        )
    return found


def _flat(text: bytes) -> str:
    return " ".join(text.decode().split())


def _changes(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, ast.AST]]:
    """Each node that can be changed, and what replaces it."""
    if isinstance(node, ast.expr | ast.stmt):
        for replacement in _replacements(node):
            yield node, replacement
    if isinstance(node, ast.If | ast.While | ast.IfExp) and isinstance(
        node.test, ast.Name | ast.Attribute | ast.Call
    ):
        yield node.test, ast.UnaryOp(ast.Not(), node.test)
    for name, value in ast.iter_fields(node):
        if _is_silent(node, name):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _changes(child)


def _is_silent(node: ast.AST, field: str) -> bool:
    """Types, messages and decorators: no test should depend on these."""
    if field in ("annotation", "returns", "decorator_list") or isinstance(
        node, ast.Raise | ast.Assert | ast.JoinedStr | ast.ImportFrom
    ):
        return True
    if isinstance(node, ast.keyword):
        return node.arg in ("strict", "frozen")
    if isinstance(node, ast.Module | ast.Expr):
        return False
    if isinstance(node, ast.Assign):  # a union of types
        return isinstance(node.value, ast.BinOp) and isinstance(node.value.op, ast.BitOr)
    return isinstance(node, ast.Call) and ast.unparse(node.func).startswith(MESSAGES)


def _replacements(node: ast.expr | ast.stmt) -> Iterator[ast.AST]:
    match node:
        case ast.Compare(ops=[op]):
            for other in NEGATED[type(op)]:
                yield ast.Compare(node.left, [other()], node.comparators)
        case ast.BinOp() if type(node.op) in ARITHMETIC and not _is_text(node.left):
            yield ast.BinOp(node.left, ARITHMETIC[type(node.op)](), node.right)
        case ast.BoolOp():
            yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
        case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.Invert()):
            yield node.operand
        case ast.Constant(value=bool()):
            yield ast.Constant(not node.value)
        case ast.Constant(value=int() | float()):
            yield ast.Constant(node.value + 1)
        case ast.Call(func=ast.Name(id=name)) if name in EXTREMES:
            yield ast.Call(ast.Name(EXTREMES[name]), node.args, node.keywords)
        case ast.Return(value=ast.expr() as value) if not _is_false(value):
            yield ast.Return(ast.Constant(None))
        case ast.AugAssign():
            yield ast.Pass()
        case ast.Expr(value=ast.Call() as call) if not _is_silent(call, "func"):
            yield ast.Pass()
        case ast.Subscript(slice=ast.Slice() as part):
            for moved in _moved(part):
                yield ast.Subscript(node.value, moved, node.ctx)


def _moved(part: ast.Slice) -> Iterator[ast.Slice]:
    """The slice with one of its ends moved by one; constants are changed as such."""
    one = ast.Constant(1)
    if part.upper is not None and not isinstance(part.upper, ast.Constant):
        yield ast.Slice(part.lower, ast.BinOp(part.upper, ast.Sub(), one), part.step)
    if part.lower is not None and not isinstance(part.lower, ast.Constant):
        yield ast.Slice(ast.BinOp(part.lower, ast.Add(), one), part.upper, part.step)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or isinstance(getattr(node, "value", None), str)


def _is_false(node: ast.expr) -> bool:
    """None or False: who asks for the truth of one cannot tell it from the other."""
    return isinstance(node, ast.Constant) and (node.value is None or node.value is False)
