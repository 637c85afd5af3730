"""The repository speaks of itself alone: no path of one machine, no note to self, nothing about where it was made."""

import re

import pytest

from tests.helpers.repository import ROOT, tracked_files

# Character classes keep these patterns from finding themselves.
MACHINE_PATH = re.compile(r"/(work|root|farm)/|/opt/(wheels|pypi)")
NOTE_TO_SELF = re.compile(r"\b(TOD[O]|FIXM[E]|XX[X]|HAC[K])\b")
DATA_STORE = re.compile(r"shared[/]data")


@pytest.mark.parametrize(
    ("pattern", "exempt"),
    [(MACHINE_PATH, ()), (NOTE_TO_SELF, ()), (DATA_STORE, ("tests/helpers/",))],
    ids=["machine path", "note to self", "data store"],
)
def test_no_tracked_file_says(pattern: re.Pattern[str], exempt: tuple[str, ...]) -> None:
    found = [
        f"{name}:{number}: {line.strip()[:120]}"
        for path in tracked_files()
        if not (name := path.relative_to(ROOT).as_posix()).startswith(exempt)
        for number, line in enumerate(path.read_bytes().decode("utf-8", errors="ignore").splitlines(), start=1)
        if pattern.search(line)
    ]
    assert found == []


def test_the_patterns_find_what_they_forbid() -> None:
    for path in ("/".join(["", "root", "x"]), "/".join(["", "opt", "wheels"])):
        assert MACHINE_PATH.search(path)
    assert NOTE_TO_SELF.search("# " + "todo".upper() + ": later")
    assert DATA_STORE.search("/".join(["..", "shared", "data"]))
