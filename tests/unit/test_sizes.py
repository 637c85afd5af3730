"""Limits that keep the code readable: lines and branches of a function, names of the contract, words kept apart."""

import ast
import importlib
import inspect
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.helpers.repository import ROOT, SOURCE

ROOMS = ("algorithms", "core", "maths")
MOST_LINES = 50  # of a function, its docstring included
MOST_COMPLEX = 12  # McCabe's number of a function
MOST_NAMES = 14  # public names of the base class of all methods, inherited ones included
OTHER_DEVICES = (".is_cuda", "cuda", "Thread", "pin_memory")  # formulas do not know where they are computed
FASTER_ROUNDS = (  # words of how a round is made fast, which only `accel` knows
    "can_begin", "beginning", "begun", "tidied", "compared_with", "reuses", "gramian_of", "announced", "norm_bound",
)  # fmt: skip

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


class Function(NamedTuple):
    path: Path  # relative to the package
    node: FunctionNode

    @property
    def n_lines(self) -> int:
        return (self.node.end_lineno or self.node.lineno) - self.node.lineno + 1

    def __str__(self) -> str:
        return f"{self.path}:{self.node.lineno} {self.node.name}"


def functions_in(path: Path, source: str) -> Iterator[Function]:
    """Yield every function of a module, methods and functions inside functions too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, FunctionNode):
            yield Function(path, node)


def paths(node: ast.AST) -> int:
    """Return what a node itself adds to McCabe's number, as ruff's rule C901 counts statements."""
    match node:
        case ast.If() | ast.For() | ast.AsyncFor() | ast.While() | ast.ExceptHandler():
            return 1
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return 1  # a function inside a function adds its own number to the outer one's
        case ast.Try(orelse=otherwise) | ast.TryStar(orelse=otherwise):
            return 1 if otherwise else 0
        case ast.Match(cases=cases):
            catches_all = isinstance(cases[-1].pattern, ast.MatchAs) and cases[-1].pattern.pattern is None
            return len(cases) - (catches_all and cases[-1].guard is None)
    return 0


def conditions(node: ast.AST) -> int:
    """Return the decisions that a node makes inside an expression, which C901 leaves out."""
    match node:
        case ast.BoolOp(values=values):
            return len(values) - 1
        case ast.IfExp():
            return 1
        case ast.comprehension(ifs=ifs):
            return len(ifs)
    return 0


def complexity(function: FunctionNode, *, with_expressions: bool) -> int:
    """Return McCabe's number of a function, from statements alone or from its expressions too."""
    nodes = list(ast.walk(function))
    return sum(map(paths, nodes)) + (sum(map(conditions, nodes)) if with_expressions else 0)


@pytest.fixture(scope="module")
def functions() -> list[Function]:
    return [
        found
        for room in ROOMS
        for path in sorted((SOURCE / room).rglob("*.py"))
        for found in functions_in(path.relative_to(SOURCE), path.read_text(encoding="utf-8"))
    ]


def test_no_function_is_too_long(functions: list[Function]) -> None:
    assert [f"{f}: {f.n_lines} lines" for f in functions if f.n_lines > MOST_LINES] == []


@pytest.mark.parametrize("with_expressions", [False, True], ids=["statements", "expressions too"])
def test_no_function_has_too_many_branches(functions: list[Function], with_expressions: bool) -> None:
    counted = [(f, complexity(f.node, with_expressions=with_expressions)) for f in functions]
    assert [f"{f}: {number}" for f, number in counted if number > MOST_COMPLEX] == []


def test_the_contract_has_few_names() -> None:
    [home] = [
        path
        for path in (SOURCE / "core").rglob("*.py")
        if any(
            isinstance(node, ast.ClassDef) and node.name == "Algorithm"
            for node in ast.parse(path.read_text(encoding="utf-8")).body
        )
    ]
    module = importlib.import_module(".".join(home.relative_to(SOURCE.parent).with_suffix("").parts))
    spaces = [{*vars(kind), *inspect.get_annotations(kind)} for kind in module.Algorithm.__mro__]
    names = sorted({name for space in spaces for name in space if not name.startswith("_")})
    assert len(names) <= MOST_NAMES, names


def lines_with(words: tuple[str, ...], files: list[Path]) -> list[str]:
    """Return the lines of the package's files in which one of the words stands, alone or inside another."""
    return [
        f"{path.relative_to(SOURCE)}:{number}: {line.strip()[:100]}"
        for path in sorted(files)
        for number, line in enumerate(path.read_bytes().decode("utf-8", errors="ignore").splitlines(), start=1)
        if any(word in line for word in words)
    ]


def test_how_rounds_are_made_fast_is_known_to_one_room() -> None:
    files = [path for path in SOURCE.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert lines_with(FASTER_ROUNDS, [f for f in files if f.relative_to(SOURCE).parts[0] != "accel"]) == []


def test_formulas_do_not_know_where_they_are_computed() -> None:
    assert lines_with(OTHER_DEVICES, list((SOURCE / "maths").rglob("*.py"))) == []


EXAMPLES = '''
def plain(x):
    """A docstring."""
    return x

def expressions(x):
    return [i if i else 1 for i in x if i and x or i]

def handled(x):
    with x:
        pass
    try:
        pass
    except ValueError:
        pass
    except TypeError:
        pass
    else:
        pass
    finally:
        pass

def matched(x):
    match x:
        case 1:
            pass
        case 2 if x > 1:
            pass
        case _:
            pass

def matched_in_part(x):
    match x:
        case 1:
            pass
        case y if y:
            pass

def looped(x):
    for i in x:
        if i:
            continue
        elif x:
            break
    else:
        pass
    while x:
        assert x

def outer(x):
    def inner():
        if x:
            pass
    class Local:
        def method(self):
            if x:
                pass
    return lambda: 1 if x else 2
'''


def test_the_count_agrees_with_ruff(tmp_path: Path) -> None:
    path = tmp_path / "examples.py"
    path.write_text(EXAMPLES, encoding="utf-8")
    where = [path, *(SOURCE / room for room in ROOMS)]
    options = ["--isolated", "--select", "C901", "--config", "lint.mccabe.max-complexity=0", "--ignore-noqa"]
    command = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--no-cache",
        *options,
        "--output-format",
        "json",
        *map(str, where),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    by_ruff = {
        (Path(found["filename"]).resolve(), found["location"]["row"]): int(found["message"].split("(")[1].split()[0])
        for found in json.loads(done.stdout)
    }
    files = [path, *(file for room in where[1:] for file in room.rglob("*.py"))]
    by_us = {
        (file.resolve(), found.node.lineno): complexity(found.node, with_expressions=False)
        for file in files
        for found in functions_in(file, file.read_text(encoding="utf-8"))
    }
    assert by_us == by_ruff


def test_conditions_inside_expressions_are_counted() -> None:
    counts = {
        found.node.name: complexity(found.node, with_expressions=True)
        for found in functions_in(Path("examples.py"), EXAMPLES)
    }
    assert counts["plain"] == 1
    assert counts["expressions"] == 5  # the function, a choice, a filter and its two operators
    assert counts["outer"] == 6
