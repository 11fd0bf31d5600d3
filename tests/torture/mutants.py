"""Small mistakes, made one at a time in the syntax tree of a module."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_COMPARE: dict[type[ast.cmpop], list[type[ast.cmpop]]] = {
    ast.Lt: [ast.LtE, ast.GtE],
    ast.LtE: [ast.Lt, ast.Gt],
    ast.Gt: [ast.GtE, ast.LtE],
    ast.GtE: [ast.Gt, ast.Lt],
    ast.Eq: [ast.NotEq],
    ast.NotEq: [ast.Eq],
    ast.In: [ast.NotIn],
    ast.NotIn: [ast.In],
    ast.Is: [ast.IsNot],
    ast.IsNot: [ast.Is],
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Add,
    ast.MatMult: ast.Add,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
}
_CALLS = {"min": "max", "max": "min", "all": "any", "any": "all", "sorted": "list", "startswith": "endswith"}
_PACE = {"CHUNK", "_CHUNK", "THREADS", "threads", "INTERVAL", "_STEPS"}
_CALLS |= {"append": "extend", "argmax": "argmin", "sum": "len"}


@dataclass(frozen=True)
class Mutant:
    """`lines` is the stretch of the statement that was changed, in the unchanged source."""

    number: int
    what: str
    lines: tuple[int, int]
    tree: ast.Module

    def __str__(self) -> str:
        return f"line {self.lines[0]}: {self.what}"


def mutants(source: str) -> list[Mutant]:
    tree = ast.parse(source)
    made = []
    for number, (what, node, change) in enumerate(_sites(tree)):
        twin = copy.deepcopy(tree)
        # The same place in the copy: walking visits both in the same order.
        place = next(i for i, other in enumerate(ast.walk(tree)) if other is node)
        target = next(other for i, other in enumerate(ast.walk(twin)) if i == place)
        change(target)
        ast.fix_missing_locations(twin)
        made.append(Mutant(number, what, _lines(tree, node), twin))
    return made


Change = Callable[[ast.AST], None]
Site = tuple[str, ast.AST, Change]


def _lines(tree: ast.Module, node: ast.AST) -> tuple[int, int]:
    """Of the innermost statement around the node, without the body of a compound one."""
    best = (getattr(node, "lineno", 1), getattr(node, "end_lineno", 1))
    for statement in ast.walk(tree):
        if isinstance(statement, ast.stmt) and any(other is node for other in ast.walk(statement)):
            first, last = statement.lineno, statement.end_lineno or statement.lineno
            body = getattr(statement, "body", None)
            if body and not isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
                last = min(last, max(first, body[0].lineno - 1))
            if not isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
                best = (first, last)
    return best


def _sites(tree: ast.Module) -> Iterator[Site]:
    skipped = {id(inner) for node in ast.walk(tree) for inner in _not_ours(node)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        yield from _expression(node)
        yield from _statement(node)


def _not_ours(node: ast.AST) -> Iterator[ast.AST]:
    """What is left alone: texts for people, annotations, what exists for type checkers, imports, and pace."""
    whole: list[ast.AST | None] = []
    if _is_pace(node):
        whole = [node]
    elif isinstance(node, ast.Raise):
        whole = [node.exc, node.cause]
    elif isinstance(node, ast.Call) and ast.unparse(node.func) in (
        "describe",
        "field",
        "re.compile",
        "warnings.simplefilter",
    ):
        whole = [node]
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        whole = [node.returns, *node.decorator_list]
    elif (
        isinstance(node, ast.keyword) and node.arg == "strict"
    ):  # a second look at lengths that are equal anyway
        whole = [node.value]
    elif isinstance(node, ast.ClassDef):
        whole = list(node.decorator_list)
    elif isinstance(node, (ast.arg, ast.AnnAssign)):
        whole = [node.annotation]
    elif isinstance(node, (ast.JoinedStr, ast.Assert, ast.Import, ast.ImportFrom)) or _for_types(node):
        whole = [node]
    for part in whole:
        if part is not None:
            yield from ast.walk(part)


def _is_pace(node: ast.AST) -> bool:
    """How much at a time, how many at once, how often: time and memory depend on it, results do not."""
    if isinstance(node, ast.Assign):
        names = {target.id for target in node.targets if isinstance(target, ast.Name)}
        return bool(names & _PACE) or "cpu_count" in ast.unparse(node.value)
    if isinstance(node, ast.Compare):
        return any(isinstance(side, ast.Name) and side.id in _PACE for side in node.comparators)
    return False


def _for_types(node: ast.AST) -> bool:
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.unparse(node.test)
    alias = isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript)
    return alias and ast.unparse(node).split(" = ")[-1].startswith(
        ("Callable", "Sequence", "Mapping", "tuple")
    )


def _set(field: str, value: object) -> Change:
    return lambda node: setattr(node, field, value)


def _expression(node: ast.AST) -> Iterator[Site]:
    if isinstance(node, ast.Compare):
        for k, operator in enumerate(node.ops):
            for new in _COMPARE.get(type(operator), []):
                what = f"{type(operator).__name__} -> {new.__name__} in `{ast.unparse(node)}`"
                yield what, node, _other_comparison(k, new)
    elif isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in _ARITHMETIC:
        new_operator = _ARITHMETIC[type(node.op)]
        yield (
            f"{type(node.op).__name__} -> {new_operator.__name__} in `{ast.unparse(node)}`",
            node,
            _set("op", new_operator()),
        )
    elif isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield f"and <-> or in `{ast.unparse(node)}`", node, _set("op", other)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield f"`not` dropped in `{ast.unparse(node)}`", node, _drop_not
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield f"sign dropped in `{ast.unparse(node)}`", node, _set("op", ast.UAdd())
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield f"{node.value} -> {not node.value}", node, _set("value", not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        yield f"{node.value} -> {node.value + 1}", node, _set("value", node.value + 1)
    elif isinstance(node, ast.IfExp):
        yield f"branches exchanged in `{ast.unparse(node)}`", node, _exchange("body", "orelse")
    elif isinstance(node, ast.Call):
        yield from _call(node)
    elif isinstance(node, ast.comprehension) and node.ifs:
        yield f"filter dropped: `{ast.unparse(node.ifs[0])}`", node, _set("ifs", [])


def _call(node: ast.Call) -> Iterator[Site]:
    name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
    if name in _CALLS:
        yield f"{name} -> {_CALLS[name]} in `{ast.unparse(node)}`", node, _other_function(_CALLS[name])
    plain = [argument for argument in node.args if not isinstance(argument, ast.Starred)]
    several = len(plain) == len(node.args) >= 2 and ast.dump(plain[0]) != ast.dump(plain[1])
    if several and name not in ("isinstance", "min", "max", "getattr"):
        yield f"first two arguments exchanged in `{ast.unparse(node)}`", node, _exchange_arguments


def _other_comparison(k: int, new: type[ast.cmpop]) -> Change:
    def change(node: ast.AST) -> None:
        assert isinstance(node, ast.Compare)
        node.ops[k] = new()

    return change


def _other_function(name: str) -> Change:
    def change(node: ast.AST) -> None:
        assert isinstance(node, ast.Call)
        setattr(node.func, "id" if isinstance(node.func, ast.Name) else "attr", name)

    return change


def _exchange_arguments(node: ast.AST) -> None:
    assert isinstance(node, ast.Call)
    node.args[0], node.args[1] = node.args[1], node.args[0]


def _exchange(first: str, second: str) -> Change:
    def change(node: ast.AST) -> None:
        one, two = getattr(node, first), getattr(node, second)
        setattr(node, first, two)
        setattr(node, second, one)

    return change


def _drop_not(node: ast.AST) -> None:
    """`not x` becomes `not not x`, which is the truth of x."""
    assert isinstance(node, ast.UnaryOp)
    node.operand = ast.UnaryOp(ast.Not(), node.operand)


def _statement(node: ast.AST) -> Iterator[Site]:
    if isinstance(node, (ast.If, ast.While)):
        yield f"condition negated: `{ast.unparse(node.test)}`", node, _negate
    if (
        isinstance(node, ast.Return)
        and node.value is not None
        and ast.unparse(node.value) not in ("None", "False")
    ):
        yield (
            f"returns None instead of `{ast.unparse(node.value)[:60]}`",
            node,
            _set("value", ast.Constant(None)),
        )
    for field in ("body", "orelse", "finalbody"):
        for inner in [] if isinstance(node, (ast.IfExp, ast.Lambda)) else getattr(node, field, []):
            droppable = isinstance(inner, (ast.Raise, ast.AugAssign, ast.Continue, ast.Break))
            call = isinstance(inner, ast.Expr) and isinstance(
                inner.value, (ast.Call, ast.Yield, ast.YieldFrom)
            )
            if droppable or call:
                what = f"statement dropped: `{ast.unparse(inner).splitlines()[0][:70]}`"
                yield what, inner, _as_pass()


def _negate(node: ast.AST) -> None:
    assert isinstance(node, (ast.If, ast.While))
    node.test = ast.UnaryOp(ast.Not(), node.test)


def _as_pass() -> Change:
    def change(node: ast.AST) -> None:
        # The node cannot be taken out of its parent from here: it becomes an `if False:` around itself.
        twin = copy.copy(node)
        for name in list(node._fields):
            delattr(node, name)
        node.__class__ = ast.If
        assert isinstance(node, ast.If)
        node.test, node.body, node.orelse = ast.Constant(False), [twin], []  # type: ignore[list-item]

    return change
