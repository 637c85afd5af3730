"""Small changes of a source file: planted ones from a list, and drawn ones."""

from __future__ import annotations

import ast
import copy
import functools
import random
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from benchmarks.mutation.copies import PACKAGE, ROOMS, digest

COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.Gt),
    ast.LtE: (ast.Lt, ast.GtE),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.GtE: (ast.Gt, ast.LtE),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
}
EXTREMES = {
    "min": "max", "minimum": "maximum", "amin": "amax", "argmin": "argmax", "fmin": "fmax", "cummin": "cummax",
}  # fmt: skip
EXTREMES |= {high: low for low, high in EXTREMES.items()}
# Calls that say something to readers or type checkers and compute nothing.
SPOKEN = {"TypeVar", "NewType", "cast", "field", "dataclass", "warn"}
# Arguments whose loss changes nothing that a test on one machine could see.
UNSEEN = {"device", "strict"}


class Change(NamedTuple):
    """A part of a file and what stands there instead."""

    kind: str
    start: int  # of the old text, in bytes
    end: int
    new: str


class Mutant(NamedTuple):
    """One change of one file."""

    id: str
    file: str  # relative to the package
    line: int
    last_line: int
    old: str
    new: str
    note: str
    source: str  # the whole file with the change

    @property
    def key(self) -> str:
        """Which change of which text this is: a result holds for it alone."""
        return digest(f"{digest((PACKAGE / self.file).read_text(encoding='utf-8'))} {digest(self.source)}")


class Signatures:
    """Which parameters of the package's own functions and classes have defaults."""

    def __init__(self, sources: Iterable[str]) -> None:
        self._known: dict[str, list[dict[str, bool]]] = defaultdict(list)
        for source in sources:
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    self._known[node.name].append(_defaults(node.args))
                elif isinstance(node, ast.ClassDef):
                    fields = [part for part in node.body if isinstance(part, ast.AnnAssign)]
                    self._known[node.name].append({ast.unparse(f.target): f.value is not None for f in fields})

    def can_drop(self, called: str, argument: str) -> bool:
        """Return whether a call works without a named argument; outside the package that is supposed."""
        if called not in self._known:
            return argument not in UNSEEN
        found = [parameters[argument] for parameters in self._known[called] if argument in parameters]
        return bool(found) and all(found)


def _defaults(arguments: ast.arguments) -> dict[str, bool]:
    placed = [*arguments.posonlyargs, *arguments.args]
    n_required = len(placed) - len(arguments.defaults)
    has_default = {a.arg: i >= n_required for i, a in enumerate(placed)}
    return has_default | {
        a.arg: default is not None for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    }


class Changes(ast.NodeVisitor):
    """Collects every change that the drawing may choose in one file."""

    def __init__(self, source: str, signatures: Signatures) -> None:
        self.found: list[Change] = []
        self._signatures = signatures
        self._starts = [0]
        for line in source.encode().splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._returns_bool = False
        self.visit(ast.parse(source))

    # What is not changed: words, types, and what only guards them.

    def visit_Raise(self, node: ast.Raise) -> None: ...
    def visit_Assert(self, node: ast.Assert) -> None: ...
    def visit_JoinedStr(self, node: ast.JoinedStr) -> None: ...
    def visit_TypeAlias(self, node: ast.AST) -> None: ...

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for default in [*node.args.defaults, *node.args.kw_defaults]:
            if default is not None:
                self.visit(default)
        outer, self._returns_bool = self._returns_bool, isinstance(node.returns, ast.Name) and node.returns.id == "bool"
        for part in node.body:
            self.visit(part)
        self._returns_bool = outer

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for part in node.body:
            self.visit(part)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for part in node.orelse:
                self.visit(part)
        else:
            self.generic_visit(node)

    # What is changed.

    def visit_Compare(self, node: ast.Compare) -> None:
        for i, operator in enumerate(node.ops):
            for other in COMPARISONS[type(operator)]:
                self._add("compare", node, _with(node, ops=[*node.ops[:i], other(), *node.ops[i + 1 :]]))
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        is_text = any(isinstance(side, ast.JoinedStr) or _is_text(side) for side in (node.left, node.right))
        if type(node.op) in ARITHMETIC and not is_text:
            self._add("arithmetic", node, _with(node, op=ARITHMETIC[type(node.op)]()))
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if type(node.op) in ARITHMETIC and not isinstance(node.value, ast.JoinedStr) and not _is_text(node.value):
            self._add("arithmetic", node, _with(node, op=ARITHMETIC[type(node.op)]()))
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self._add("logic", node, _with(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And()))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self._add("constant", node, ast.Constant(not value))
        elif isinstance(value, int):
            self._add("constant", node, ast.Constant(value + 1))
        elif isinstance(value, float):
            self._add("constant", node, ast.Constant(2 * value if value else 1.0))

    def visit_Return(self, node: ast.Return) -> None:
        is_condition = isinstance(node.value, ast.Compare | ast.BoolOp) or _is_not(node.value)
        if node.value is not None and (self._returns_bool or is_condition):
            inner = node.value.operand if _is_not(node.value) else None
            self._add("negated", node.value, inner or ast.UnaryOp(ast.Not(), node.value))
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        called = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
        owner = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""
        if called in SPOKEN or owner in {"logger", "logging"}:
            return
        if called in EXTREMES:
            other = EXTREMES[called]
            func = _with(node.func, attr=other) if isinstance(node.func, ast.Attribute) else ast.Name(other)
            self._add("extreme", node.func, func)
        for i, keyword in enumerate(node.keywords):
            if keyword.arg is not None and self._signatures.can_drop(called, keyword.arg):
                self._add("argument", node, _with(node, keywords=[*node.keywords[:i], *node.keywords[i + 1 :]]))
        self.generic_visit(node)

    def _add(self, kind: str, node: ast.expr | ast.stmt, new: ast.AST) -> None:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        text = ast.unparse(ast.fix_missing_locations(new))
        if isinstance(new, ast.BinOp | ast.BoolOp | ast.Compare | ast.UnaryOp):
            text = f"({text})"  # whatever stands around it
        start = self._starts[node.lineno - 1] + node.col_offset
        self.found.append(Change(kind, start, self._starts[node.end_lineno - 1] + node.end_col_offset, text))


def _with(node: ast.AST, **fields: Any) -> ast.AST:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _is_not(node: ast.AST | None) -> TypeGuard[ast.UnaryOp]:
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)


def changed(source: str, change: Change) -> str | None:
    """Return the file with the change, or None if that does not compile or says the same."""
    text = source.encode()
    new = (text[: change.start] + change.new.encode() + text[change.end :]).decode()
    try:
        tree = ast.parse(new)
        compile(tree, "<mutant>", "exec", dont_inherit=True)
    except SyntaxError:
        return None
    return new if ast.dump(tree) != _meaning(source) else None


@functools.lru_cache(maxsize=256)
def _meaning(source: str) -> str:
    return ast.dump(ast.parse(source))


def drawn(sources: Mapping[str, str], n: int, seed: int) -> list[Mutant]:
    """Return n mutants of the files, at most one a line; the same for the same files, n and seed.

    First the kind is drawn, then one of its places: else most of them would be numbers.
    """
    signatures = Signatures(sources.values())
    places: dict[str, list[tuple[str, Change]]] = defaultdict(list)
    for file in sorted(sources):
        for change in sorted(set(Changes(sources[file], signatures).found)):
            places[change.kind].append((file, change))
    choice = random.Random(seed)
    for kind in sorted(places):
        choice.shuffle(places[kind])
    found: dict[tuple[str, int], Mutant] = {}
    while len(found) < n and places:
        kind = choice.choice(sorted(places))
        file, change = places[kind].pop()
        if not places[kind]:
            del places[kind]
        made = mutant_of(file, sources[file], change)
        if made is not None:
            found.setdefault((file, made.line), made)
    return sorted(found.values(), key=lambda mutant: (mutant.file, mutant.line))


def mutant_of(file: str, source: str, change: Change, name: str = "", note: str = "") -> Mutant | None:
    """Return the mutant of a file, or None if the change is none."""
    new = changed(source, change)
    if new is None:
        return None
    text = source.encode()
    line = text[: change.start].count(b"\n") + 1
    old = text[change.start : change.end].decode()
    drawn_name = f"{Path(file).stem}-{line}-{change.kind}-{digest(f'{change.start} {change.new}')[:4]}"
    return Mutant(name or drawn_name, file, line, line + old.count("\n"), old, change.new, note or change.kind, new)


def planted(path: Path, sources: Mapping[str, str]) -> list[Mutant]:
    """Return the bugs of a list, or say which of them is no change of the present sources."""
    found = []
    for entry in tomllib.loads(path.read_text(encoding="utf-8")).get("mutant", []):
        where, file = f"{path.name}: {entry['id']}", entry["file"]
        if file not in sources:
            raise SystemExit(f"{where}: there is no file {file} in {', '.join(ROOMS)}; correct `file`.")
        first, last = 0, len(sources[file].encode())
        if "near" in entry:
            first, last = _span(sources[file], entry["near"], where)
        part, old = sources[file].encode()[first:last], entry["old"].encode()
        if part.count(old) != 1:
            raise SystemExit(
                f"{where}: `old` must occur once in {entry.get('near', file)}, but occurs {part.count(old)} times; "
                "write more of the line, or name the function as `near`."
            )
        start = first + part.index(old)
        change = Change("planted", start, start + len(old), entry["new"])
        made = mutant_of(file, sources[file], change, entry["id"], entry["note"])
        if made is None:
            raise SystemExit(f"{where}: with `new` the file does not compile or says the same; correct `new`.")
        found.append(made)
    if len({mutant.id for mutant in found}) < len(found):
        raise SystemExit(f"{path.name}: two bugs have the same id; every id must be another one.")
    return found


def _span(source: str, name: str, what: str) -> tuple[int, int]:
    """Return where the function or method of a name begins and ends, in bytes."""
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = [node for path, node in named_parts(ast.parse(source)) if path == name or path.endswith(f".{name}")]
    if len(found) != 1:
        raise SystemExit(f"{what}: `near` must name one function, but {name} names {len(found)}; write Class.{name}.")
    return starts[found[0].lineno - 1], starts[found[0].end_lineno or 0]


def named_parts(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.stmt]]:
    for part in ast.iter_child_nodes(node):
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield prefix + part.name, part
            yield from named_parts(part, f"{prefix}{part.name}.")
        else:
            yield from named_parts(part, prefix)
