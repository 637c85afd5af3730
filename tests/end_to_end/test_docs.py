"""Every Python block of README.md and docs/ runs, and so does every command marked `<!-- run -->`.

The blocks of one page share a namespace and a temporary working folder. `<!-- not executed: reason -->` above a block
leaves it out; it is then counted among the skipped tests, with its reason. A block with a title is the content of that
file: test_add_a_method.py puts it there and runs what is about it.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.pages import Block, blocks_of
from tests.helpers.repository import ROOT

BLOCKS = {page: blocks_of(page) for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]}
PAGES = [page for page, blocks in BLOCKS.items() if any(b.is_executed_python or b.is_executed_command for b in blocks)]
LONG = (
    "deploy",
    "use-a-model",
    "four-hospitals",
    "who-takes-part",
    "wrong-labels",
    "report",
    "datasets",
    "convex-workbench",
    "theorems",
)  # in `make test-all`
LEFT_OUT = [block for blocks in BLOCKS.values() for block in blocks if block.reason_not_executed]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def run_python(block: Block, namespace: dict[str, object]) -> None:
    """Execute the block; its line numbers, in tracebacks too, are those of the page."""
    exec(compile("\n" * block.line + block.code, str(block.page), "exec"), namespace)


def run_commands(block: Block, folder: Path) -> None:
    """Execute the block in bash with the tested environment's `dqnfed` first on the path."""
    where = f"{block.page}:{block.line}"
    assert block.code.startswith("dqnfed "), f"{where}: only blocks that start with `dqnfed ` are run"
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.code],
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{where}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize(
    "page",
    [pytest.param(p, id=name_of(p), marks=[pytest.mark.slow] if p.stem in LONG else []) for p in PAGES],
)
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__page__"}
    for block in BLOCKS[page]:
        if block.is_executed_python:
            run_python(block, namespace)
        elif block.is_executed_command:
            run_commands(block, tmp_path)


@pytest.mark.parametrize("block", LEFT_OUT, ids=lambda block: f"{name_of(block.page)}:{block.line}")
def test_a_block_left_out(block: Block) -> None:
    pytest.skip(f"not executed: {block.reason_not_executed}")


def test_blocks_with_a_title_are_those_of_one_guide() -> None:
    """Others would not be executed."""
    titled = {name_of(page) for page, blocks in BLOCKS.items() if any(block.title for block in blocks)}
    assert titled == {"docs/how-to/add-a-method.md"}


def written(folder: Path, text: str) -> Path:
    page = folder / "page.md"
    page.write_text(text, encoding="utf-8")
    return page


def test_blocks_carry_their_language_comment_and_line(tmp_path: Path) -> None:
    page = written(
        tmp_path,
        "# Title\n\n```python\nx = 1\n```\n\n<!-- not executed: needs a GPU -->\n\n```python\nx = 2\n```\n\n"
        "- item\n\n  <!-- run -->\n  ```bash\n  dqnfed list presets\n  ```\n\n<!-- run -->\nwords\n```bash\nrm\n```\n",
    )
    first, second, third, fourth = blocks_of(page)
    assert first == Block(page, 3, "python", "x = 1\n", "")
    assert first.is_executed_python
    assert second.reason_not_executed == "needs a GPU"
    assert not second.is_executed_python
    assert third == Block(page, 16, "bash", "dqnfed list presets\n", "run")
    assert third.is_executed_command
    assert not fourth.is_executed_command  # the comment belongs to the words


def test_a_block_with_a_title_is_a_file(tmp_path: Path) -> None:
    plain, file = blocks_of(written(tmp_path, '```python\nx = 1\n```\n\n```python title="a/b.py"\ny = 2\n```\n'))
    assert (plain.title, plain.is_executed_python) == ("", True)
    assert (file.title, file.code, file.is_executed_python) == ("a/b.py", "y = 2\n", False)


def test_a_failure_points_at_the_page(tmp_path: Path) -> None:
    (block,) = blocks_of(written(tmp_path, "words\n\n```python\nx = 1\nraise RuntimeError(x)\n```\n"))
    with pytest.raises(RuntimeError) as caught:
        run_python(block, {})
    assert (Path(caught.traceback[-1].path), caught.traceback[-1].lineno + 1) == (block.page, 5)


def test_an_open_fence_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"page\.md:2: this code block is never closed"):
        blocks_of(written(tmp_path, "words\n```python\nx = 1\n"))
