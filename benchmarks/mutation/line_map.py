"""Which tests touch which line: the tests run once, traced."""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.mutation.changes import Mutant, named_parts
from benchmarks.mutation.copies import ROOT, copied_package, digest, environment, write_whole

PLUGIN = "benchmarks.mutation.plugin"


class LineMap(NamedTuple):
    """Which tests touch which line."""

    seconds: dict[str, float]  # of every test that passed
    failed: list[str]
    sources: dict[str, str]  # digests of the package's files that it was made of
    files: dict[str, str]  # digests of the test files that it holds
    lines: dict[str, dict[int, frozenset[str]]]  # by file and line, the tests that enter the line

    def save(self, path: Path) -> None:
        """Write it; many lines have the same tests, which are written once."""
        tests = sorted(self.seconds)
        number = {test: i for i, test in enumerate(tests)}
        sets: dict[frozenset[str], int] = {}
        lines = {
            file: {line: sets.setdefault(found, len(sets)) for line, found in by_line.items()}
            for file, by_line in self.lines.items()
        }
        facts = {
            "tests": [[test, round(self.seconds[test], 4)] for test in tests],
            "failed": self.failed,
            "sources": self.sources,
            "files": self.files,
            "sets": [sorted(number[test] for test in found) for found in sets],
            "lines": lines,
        }
        write_whole(path, json.dumps(facts))

    @classmethod
    def load(cls, path: Path) -> LineMap:
        """Read it."""
        if not path.is_file():
            raise SystemExit(f"there is no map in {path.parent}; make it: python benchmarks/mutants.py map")
        facts = json.loads(path.read_text(encoding="utf-8"))
        tests = [test for test, _ in facts["tests"]]
        sets = [frozenset(tests[i] for i in found) for found in facts["sets"]]
        lines = {file: {int(i): sets[s] for i, s in by_line.items()} for file, by_line in facts["lines"].items()}
        return cls(dict(facts["tests"]), facts["failed"], facts["sources"], facts.get("files", {}), lines)

    def touching(self, mutant: Mutant, source: str) -> frozenset[str]:
        """Return the tests that enter what a mutant changes.

        What runs at import (defaults, fields, constants) is entered by no single test: there all those count that enter
        the function, the class, or else the file.
        """
        by_line = self.lines.get(mutant.file, {})
        for lines in lines_around(ast.parse(source), mutant.line, mutant.last_line):
            found = frozenset[str]().union(*(by_line.get(line, frozenset()) for line in lines))
            if found:
                return found
        return frozenset()


def lines_around(tree: ast.Module, first: int, last: int) -> list[set[int]]:
    """Return the lines that run when what stands in these lines has an effect; further sets where that one is empty."""
    around = [node for _, node in named_parts(tree) if node.lineno <= first and last <= (node.end_lineno or 0)]
    inner = around[-1] if around else None
    if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef) and first >= inner.body[0].lineno:
        statements = [
            node
            for node in ast.walk(inner)
            if isinstance(node, ast.stmt) and node.lineno <= first and last <= (node.end_lineno or 0)
        ]
        return [_own_lines(max(statements, key=lambda node: node.lineno)) | set(range(first, last + 1))]
    wider: list[ast.AST] = [*reversed(around), tree]
    return [_lines_inside(node) for node in wider]


def _own_lines(statement: ast.stmt) -> set[int]:
    """Return the lines of a statement without those of the statements in it."""
    body = getattr(statement, "body", None)
    end = body[0].lineno - 1 if body else statement.end_lineno or statement.lineno
    return set(range(statement.lineno, max(end, statement.lineno) + 1))


def _lines_inside(node: ast.AST) -> set[int]:
    """Return the lines of all functions in a node."""
    functions = [part for part in ast.walk(node) if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {line for part in functions for line in range(part.body[0].lineno, (part.end_lineno or 0) + 1)}


def files_of(tests: Sequence[str]) -> dict[str, str]:
    """Return the test files in these paths and digests of their texts."""
    roots = [ROOT / test for test in tests]
    found = sorted({path for root in roots for path in (root.rglob("test_*.py") if root.is_dir() else [root])})
    return {path.relative_to(ROOT).as_posix(): digest(path.read_text(encoding="utf-8")) for path in found}


def without_stale(old: LineMap, sources: Mapping[str, str], files: Mapping[str, str]) -> LineMap:
    """Return what still holds of a map: without the lines of changed sources, and without the tests in files that have
    changed, are gone or touched such a line."""
    changed = {file for file in old.lines if old.sources.get(file) != sources.get(file)}
    touched = {file_of(test) for file in changed for tests in old.lines[file].values() for test in tests}
    gone = {file for file in old.files if not (ROOT / file).is_file()}
    again = touched | gone | {file for file in files if old.files.get(file) != files[file]}
    seconds = {test: lasted for test, lasted in old.seconds.items() if file_of(test) not in again}
    lines = {
        file: {line: found for line, tests in by_line.items() if (found := tests.intersection(seconds))}
        for file, by_line in old.lines.items()
        if file not in changed
    }
    return LineMap(
        seconds,
        [test for test in old.failed if file_of(test) not in again],
        dict(sources),
        {file: text for file, text in old.files.items() if file not in again},
        lines,
    )


def extended(old: LineMap, tests: Sequence[str], workers: int) -> Iterator[LineMap]:
    """Yield the map as it grows: the tests of one folder after the other run, as far as it does not hold them yet."""
    for name in ("coverage", "xdist"):
        if importlib.util.find_spec(name) is None:
            raise SystemExit(f"the map needs {name}, of the extra `dev`: pip install -c constraints.txt -e '.[dev]'")
    with tempfile.TemporaryDirectory() as scratch:
        package = Path(scratch) / "package"
        sources = {file: digest(text) for file, text in copied_package(package).items()}
        files = files_of(tests)
        found = without_stale(old, sources, files)
        yield found
        folders: dict[str, list[str]] = defaultdict(list)
        for file in files:
            if file not in found.files:
                folders[str(Path(file).parent)].append(file)
        for i, part in enumerate(folders.values()):
            notes = Path(scratch) / str(i)
            notes.mkdir()
            run_traced(part, workers, package, notes)
            found = joined(found, read_map(notes, package, sources, {file: files[file] for file in part}))
            yield found


def run_traced(files: Sequence[str], workers: int, package: Path, notes: Path) -> None:
    """Run tests on a copy of the package; each worker writes down which test enters which line."""
    options = ["-q", "-m", "not slow", "-n", str(workers), "-p", "no:cacheprovider", "-p", PLUGIN]
    command = [sys.executable, "-m", "pytest", *options, *files]
    done = subprocess.run(command, cwd=ROOT, env=environment(package, MUTANTS_MAP=str(notes)), check=False)
    if done.returncode not in (0, 1, 5):  # all passed, some failed, none is there that is not slow
        raise SystemExit(f"the tests could not run (pytest ended with {done.returncode}); its message is above.")


def read_map(folder: Path, package: Path, sources: dict[str, str], files: dict[str, str]) -> LineMap:
    """Return what the workers of a test run wrote down."""
    from coverage import CoverageData

    notes = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("tests.*.json"))]
    seconds = {test: float(lasted) for note in notes for test, lasted in note["seconds"].items()}
    failed = sorted({test for note in notes for test in note["failed"]})
    users: dict[str, set[str]] = defaultdict(set)
    for note in notes:
        for fixture, tests in note["users"].items():
            users[fixture].update(tests)
    lines: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for path in sorted(folder.glob("lines.*")):
        data = CoverageData(str(path))
        data.read()
        for measured in data.measured_files():
            file = Path(measured).relative_to((package / "src" / "dqnfed").resolve()).as_posix()
            for line, contexts in data.contexts_by_lineno(measured).items():
                for context in contexts:
                    lines[file][line] |= users.get(context, {context}) if context else set()
    passed = {test: lasted for test, lasted in seconds.items() if test not in set(failed)}
    fixed = {
        file: {line: found for line, tests in by_line.items() if (found := frozenset(tests.intersection(passed)))}
        for file, by_line in lines.items()
    }
    return LineMap(passed, failed, sources, files, fixed)


def joined(old: LineMap, new: LineMap) -> LineMap:
    """Return one map of two that hold different tests."""
    lines: dict[str, dict[int, frozenset[str]]] = {}
    for file in sorted({*old.lines, *new.lines}):
        before, now = old.lines.get(file, {}), new.lines.get(file, {})
        lines[file] = {
            line: before.get(line, frozenset()) | now.get(line, frozenset()) for line in sorted({*before, *now})
        }
    return LineMap(old.seconds | new.seconds, [*old.failed, *new.failed], new.sources, old.files | new.files, lines)


def file_of(test: str) -> str:
    """Return the file in which a test is."""
    return test.partition("::")[0]
