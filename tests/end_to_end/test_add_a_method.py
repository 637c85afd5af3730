"""The guide "Add a method", followed in a copy of the repository: its commands, and its code in the files it names.

A third method stays as the generator writes it. The command `make test` of the guide is the suite that this belongs to.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.pages import blocks_of
from tests.helpers.repository import ROOT, copy_of

GUIDE = ROOT / "docs" / "how-to" / "add-a-method.md"
BLOCKS = blocks_of(GUIDE)
COMMANDS = [line for block in BLOCKS if block.language == "bash" for line in block.code.splitlines()]
FILES = {block.title: block.code for block in BLOCKS if block.title}
UNTOUCHED = "trimmed-mean"
NAMES = ("fed-median", "quantile-clipping", UNTOUCHED)
NEW_FILES = [
    path
    for name in NAMES
    for path in (
        f"src/dqnfed/algorithms/{name.replace('-', '_')}.py",
        f"tests/unit/algorithms/test_{name.replace('-', '_')}.py",
    )
]
COPIED = (
    "src", "tests", "docs", "pyproject.toml", "constraints.txt", "Makefile", "mkdocs.yml", "README.md",
    "CONTRIBUTING.md", "CHANGELOG.md", "CITATION.cff", "LICENSE",
)  # fmt: skip


def run_in(clone: Path, command: str) -> str:
    """Return what the command prints; fails with everything it said."""
    environment = {**os.environ, "PYTHONPATH": str(clone / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command], cwd=clone, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the repository after the generator's commands, with the guide's code in its files."""
    folder = copy_of(COPIED, tmp_path_factory.mktemp("clone"))
    (folder / ".venv").symlink_to(sys.prefix)  # what `make setup` makes
    generated = [command for command in COMMANDS if " new-method " in command]
    assert len(generated) == len(NAMES) - 1
    for command in (*generated, f".venv/bin/dqnfed new-method {UNTOUCHED}"):
        run_in(folder, command)
    for name, code in FILES.items():
        assert (folder / name).is_file(), f"the guide has code for {name}, which the generator does not write"
        (folder / name).write_text(code, encoding="utf-8")
    return folder


def test_the_guide_changes_no_file_but_those_of_the_generator() -> None:
    assert set(FILES) <= set(NEW_FILES)
    assert set(NEW_FILES[:2]) <= set(FILES)


@pytest.mark.slow
def test_the_new_methods_are_clean_and_pass_their_own_tests(clone: Path) -> None:
    run_in(clone, f".venv/bin/ruff check --no-cache src/dqnfed/algorithms/__init__.py {' '.join(NEW_FILES)}")
    run_in(clone, f".venv/bin/ruff format --no-cache --check src/dqnfed/algorithms/__init__.py {' '.join(NEW_FILES)}")
    printed = run_in(clone, f".venv/bin/python -m pytest -p no:cacheprovider -q {' '.join(NEW_FILES[1::2])}")
    assert " passed" in printed
    assert "skipped" not in printed


@pytest.mark.slow
def test_the_new_methods_are_typed(clone: Path) -> None:
    run_in(clone, f".venv/bin/mypy src/dqnfed/algorithms/__init__.py {' '.join(NEW_FILES)}")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_new_methods_keep_the_contract(clone: Path, name: str) -> None:
    """With the command that the generator prints, which for the first method is the guide's."""
    module = name.replace("-", "_")
    command = (
        f'.venv/bin/python -m pytest tests/unit/algorithms/test_{module}.py tests/contract -k "{name} or {module}"'
    )
    assert name != NAMES[0] or command in COMMANDS
    printed = run_in(clone, f"{command} -p no:cacheprovider")
    assert " passed" in printed
    assert "skipped" not in printed


@pytest.mark.slow
def test_the_new_methods_have_pages_and_nothing_is_left_to_edit(clone: Path) -> None:
    """`make reference` writes all that the tests about pages, lists and tables want of a new method."""
    assert "make reference" in COMMANDS
    run_in(clone, "make --assume-old=.venv/.installed reference")
    index = (clone / "docs/reference/methods/index.md").read_text(encoding="utf-8")
    for name in NAMES:
        assert f"[{name}]({name}.md)" in index
        assert f"# {name}" in (clone / f"docs/reference/methods/{name}.md").read_text(encoding="utf-8")
    about = (
        "tests/unit/experiments/test_method_docs.py tests/unit/test_readme.py tests/unit/experiments/test_settings.py"
    )
    run_in(clone, f'.venv/bin/python -m pytest -p no:cacheprovider -q -m "not slow" {about}')


@pytest.mark.slow
def test_the_new_method_is_compared_as_the_guide_says(clone: Path) -> None:
    [command] = [command for command in COMMANDS if " compare " in command]
    assert "fed-median" in run_in(clone, command)
