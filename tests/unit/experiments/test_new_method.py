"""`dqnfed new-method` writes three things that need no touch, or nothing; names that cannot work are refused."""

from __future__ import annotations

import ast
import difflib
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dqnfed.algorithms import REGISTRY
from dqnfed.cli import app
from dqnfed.core.algorithm import Info
from dqnfed.core.replies import Replies
from dqnfed.experiments.new_method import REGISTRY_FILE, TEMPLATES, class_name, module_name, new_method, with_entry
from tests.helpers.pages import blocks_of
from tests.helpers.repository import ROOT, copy_of

GUIDE = ROOT / "docs" / "how-to" / "add-a-method.md"
NAMES = [  # first, last and between the others by the alphabet, with numbers, in capitals throughout, and longest
    "a-b", "aardvark", "fed-2", "fed-10", "median9", "median10", "q", "random", "term-2", "trimmed-mean", "x-1-y", "zz",
    "aggregation-of-gradients-by-rank", "s", "t-shirt",
]  # fmt: skip


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Return a folder with those files of this repository that the generator reads."""
    root = copy_of([REGISTRY_FILE.as_posix()], tmp_path / "clone")
    (root / "tests" / "unit" / "algorithms").mkdir(parents=True)
    return root


def content(root: Path) -> dict[str, str]:
    return {path.relative_to(root).as_posix(): path.read_text() for path in root.rglob("*") if path.is_file()}


def added_lines(before: str, after: str) -> list[str]:
    """Return the lines that the second text has more; fails if it lacks any."""
    changes = [line for line in difflib.ndiff(before.splitlines(), after.splitlines()) if line[0] in "+-"]
    assert not [line for line in changes if line[0] == "-"]
    return [line[2:] for line in changes]


@pytest.mark.parametrize("template", TEMPLATES)
def test_it_adds_two_files_and_two_lines(clone: Path, template: str) -> None:
    before = content(clone)
    written = new_method("trimmed-mean", template=template, root=clone)
    after = content(clone)
    assert set(after) - set(before) == {written.method.as_posix(), written.test.as_posix()}
    assert added_lines(before[REGISTRY_FILE.as_posix()], after[REGISTRY_FILE.as_posix()]) == [
        "from dqnfed.algorithms.trimmed_mean import TrimmedMean",
        '    "trimmed-mean": TrimmedMean,',
    ]
    kinds = [node for node in ast.parse(after[written.method.as_posix()]).body if isinstance(node, ast.ClassDef)]
    assert kinds[-1].name == "TrimmedMean"
    for path in (written.method, written.test):
        assert not re.search(r"@\w+@", after[path.as_posix()]), "a word of the template is not filled in"


@pytest.mark.parametrize("template", TEMPLATES)
def test_ruff_finds_nothing_whatever_the_name(tmp_path: Path, template: str) -> None:
    """Import order, line lengths and line breaks depend on the name."""
    clone = copy_of(["src", "tests/helpers", "pyproject.toml"], tmp_path)
    (clone / "tests" / "unit" / "algorithms").mkdir(parents=True)
    written = [new_method(name, template=template, root=clone) for name in NAMES]
    files = [REGISTRY_FILE, *(path for new in written for path in (new.method, new.test))]
    for command in (["check"], ["format", "--check", "--diff"]):
        words = [sys.executable, "-m", "ruff", *command, "--no-cache", *map(str, files)]
        done = subprocess.run(words, cwd=clone, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def import_of(name: str) -> str:
    """Return the line that imports a registered method."""
    return f"from {REGISTRY[name].__module__} import {REGISTRY[name].__name__}\n"


@pytest.mark.parametrize("name", sorted(name for name in REGISTRY if f".{module_name(name)} import" in import_of(name)))
def test_a_method_that_is_taken_out_is_put_back_in_its_place(name: str) -> None:
    """But for the capitals of the class, which its name does not tell."""
    registry, line = (ROOT / REGISTRY_FILE).read_text(), import_of(name)
    if line not in registry:  # more than the class is imported from its module
        start = line.partition(" import ")[0]
        line = next(found for found in registry.splitlines(keepends=True) if found.startswith(f"{start} import"))
    without = registry.replace(line, "").replace(f'    "{name}": {REGISTRY[name].__name__},\n', "")
    place = with_entry(without, name).splitlines().index(f"from {REGISTRY[name].__module__} import {class_name(name)}")
    assert place == registry.splitlines().index(line.rstrip())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Trimmed_Mean", r"lower-case words joined by hyphens.*but is 'Trimmed_Mean'; try 'trimmed-mean'"),
        ("TrimmedMean", "try 'trimmed-mean'"),
        ("trimmed mean", "try 'trimmed-mean'"),
        ("trimmed--mean", "try 'trimmed-mean'"),
        ("trimmed/../mean", "try 'trimmed-mean'"),
        ("fed-007", "no number that starts with 0, but is 'fed-007'; try 'fed-7'"),
        ("2nd", "with a letter first.*but is '2nd'; try a name like"),
        ("médiane", "but is 'médiane'"),
        ("", "but is ''; try a name like 'trimmed-mean'"),
        ("a" * 33, "at most 32 characters, but 'a+' has 33; shorten it"),
        ("lambda", "called lambda; choose another name, such as 'fed-lambda'"),
        ("none", "called None"),
        ("value-error", "called ValueError"),
        ("fedavg", "there is a method 'fedavg' already, see `dqnfed list algorithms`"),
        ("jd-upgrad", "there is a method 'jd-upgrad' already"),
        ("fed-avg", "'fed-avg' would need FedAvg, which"),
        ("theta", "'theta' would need Theta, which"),
        ("server", "'server' would need Server, which"),
        ("entry-points", "'entry-points' would need entry_points, which"),
    ],
)
def test_names_that_cannot_work_are_refused(clone: Path, name: str, message: str) -> None:
    before = content(clone)
    with pytest.raises(ValueError, match=message):
        new_method(name, root=clone)
    assert content(clone) == before


@pytest.mark.parametrize(
    "taken",
    [
        "src/dqnfed/algorithms/trimmed_mean.py",
        "src/dqnfed/algorithms/trimmed_mean/__init__.py",
        "tests/unit/algorithms/test_trimmed_mean.py",
    ],
)
def test_no_file_is_written_over(clone: Path, taken: str) -> None:
    (clone / taken).parent.mkdir(exist_ok=True)
    (clone / taken).write_text("mine")
    before = content(clone)
    with pytest.raises(FileExistsError, match=r"trimmed_mean.* exists already and is never written over"):
        new_method("trimmed-mean", root=clone)
    assert content(clone) == before


def test_the_same_name_twice_is_refused(clone: Path) -> None:
    new_method("trimmed-mean", root=clone)
    before = content(clone)
    with pytest.raises(ValueError, match="there is a method 'trimmed-mean' already"):
        new_method("trimmed-mean", template="two-phase", root=clone)
    assert content(clone) == before


@pytest.mark.parametrize(("action", "fails"), [("open", "test_trimmed_mean.py"), ("replace", "__init__.py")])
def test_nothing_is_left_where_writing_fails(
    clone: Path, monkeypatch: pytest.MonkeyPatch, action: str, fails: str
) -> None:
    before, real = content(clone), getattr(Path, action)

    def broken(self: Path, *words: Any, **more: Any) -> Any:
        if fails in self.name:
            raise OSError("no space left on device")
        return real(self, *words, **more)

    monkeypatch.setattr(Path, action, broken)
    with pytest.raises(OSError, match="no space left"):
        new_method("trimmed-mean", root=clone)
    monkeypatch.undo()
    assert content(clone) == before


@pytest.mark.parametrize(
    ("registry", "message"),
    [
        ("REGISTRY = {\n", "must be Python, but line 1 is not"),
        ("from dqnfed.algorithms.fedavg import FedAvg\n\nREGISTRY = dict(fedavg=FedAvg)\n", "one line each, but it"),
        ("REGISTRY: dict[str, type] = {\n}\n", "must import methods from dqnfed.algorithms"),
        ("from dqnfed.algorithms.x import X\n\nREGISTRY: dict[str, type] = {'x': X}\n", "one line each, but it"),
    ],
)
def test_a_registry_of_another_form_is_left_alone(clone: Path, registry: str, message: str) -> None:
    (clone / REGISTRY_FILE).write_text(registry)
    before = content(clone)
    with pytest.raises(ValueError, match=message):
        new_method("trimmed-mean", root=clone)
    assert content(clone) == before


def test_the_clone_is_looked_for_above_the_folder(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(clone / "tests" / "unit")
    assert new_method("trimmed-mean").root == clone
    monkeypatch.chdir(clone.parent)
    with pytest.raises(FileNotFoundError, match=r"run this inside a clone, or name its root with --root DIR"):
        new_method("median")
    with pytest.raises(FileNotFoundError, match=r"--root must name the root of a clone"):
        new_method("median", root=clone / "src")


def test_an_unknown_template_is_refused(clone: Path) -> None:
    with pytest.raises(ValueError, match="must be one of one-phase, two-phase, but is 'three-phase'"):
        new_method("trimmed-mean", template="three-phase", root=clone)


def test_the_command_prints_what_it_wrote_and_what_to_run(clone: Path) -> None:
    done = CliRunner().invoke(app, ["new-method", "trimmed-mean", "--root", str(clone)])
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert [line.split(": ")[0] for line in lines[:3]] == [
        str(clone / "src/dqnfed/algorithms/trimmed_mean.py"),
        str(clone / "tests/unit/algorithms/test_trimmed_mean.py"),
        str(clone / "src/dqnfed/algorithms/__init__.py"),
    ]
    tests = 'tests/unit/algorithms/test_trimmed_mean.py tests/contract -k "trimmed-mean or trimmed_mean"'
    commands = (f".venv/bin/python -m pytest {tests}", "make reference", "make test")
    assert lines[3:] == [f"next, in {clone}:", *(f"  {command}" for command in commands)]


def test_help_has_examples() -> None:
    shown = " ".join(CliRunner().invoke(app, ["new-method", "--help"], env={"COLUMNS": "200"}).stdout.split())
    assert "dqnfed new-method trimmed-mean" in shown
    assert "--template two-phase" in shown
    assert "--root" in shown


def test_the_guide_shows_what_the_two_phase_template_writes(clone: Path) -> None:
    written = new_method("quantile-clipping", template="two-phase", root=clone)
    [shown] = [block.code for block in blocks_of(GUIDE) if block.title == written.method.as_posix()]
    assert shown == (clone / written.method).read_text()


def test_the_guide_has_the_commands_that_are_printed(clone: Path) -> None:
    commands = "\n".join(new_method("fed-median", root=clone).commands) + "\n"
    assert commands in [block.code for block in blocks_of(GUIDE)]


def test_the_guide_names_what_there_is() -> None:
    """Its tables have every field of `Info`, and calls that `Replies` has."""
    text = GUIDE.read_text(encoding="utf-8")
    table = text.partition("| `info` | |")[2].partition("\n\n")[0]
    named = [re.findall(r"`(\w+)`", line.split("|")[1]) for line in table.splitlines() if line]
    assert {name for names in named for name in names} == {field.name for field in fields(Info)}
    calls = set(re.findall(r"replies\.(\w+)", text))
    assert {"scalars", "gram", "combine", "mean", "rows"} <= calls <= set(vars(Replies))
