"""The mutation tool: what it changes and leaves alone, where a bug is planted, and which tests run for it."""

import ast
from pathlib import Path

import pytest

from benchmarks.mutants import PLANTED
from benchmarks.mutation.changes import Changes, Mutant, Signatures, drawn, planted
from benchmarks.mutation.copies import package_sources
from benchmarks.mutation.judge import Runner
from benchmarks.mutation.line_map import LineMap, files_of, joined, lines_around, without_stale

EXAMPLE = '''\
"""Words 1 + 1."""

from dataclasses import dataclass

LIMIT = 3


@dataclass(frozen=True)
class Settings:
    """Words 2 < 3."""

    rate: float = 0.5  # 0.7


def ratio(é: "list[2]", b: float, *, scale: float = 1.0, strict: bool = True) -> float:
    """Words 3 * 3."""
    if é is None or b == 0:
        raise ValueError(f"b must not be {0 + 0}, but is " + "4")
    assert b != 5
    return scale * min(b, 6)


def is_small(b: float) -> bool:
    b += 7
    return ratio([], b, scale=8.0) < LIMIT
'''


def changes_of(source: str) -> set[tuple[str, str, str]]:
    text = source.encode()
    found = Changes(source, Signatures([source])).found
    return {(change.kind, text[change.start : change.end].decode(), change.new) for change in found}


def test_every_kind_of_change_is_found_and_words_types_and_messages_stay() -> None:
    assert changes_of(EXAMPLE) == {
        ("constant", "3", "4"),
        ("constant", "0.5", "1.0"),
        ("constant", "1.0", "2.0"),
        ("constant", "True", "False"),
        ("logic", "é is None or b == 0", "(é is None and b == 0)"),
        ("compare", "é is None", "(é is not None)"),
        ("compare", "b == 0", "(b != 0)"),
        ("constant", "0", "1"),
        ("arithmetic", "scale * min(b, 6)", "(scale / min(b, 6))"),
        ("extreme", "min", "max"),
        ("constant", "6", "7"),
        ("arithmetic", "b += 7", "b -= 7"),
        ("constant", "7", "8"),
        ("negated", "ratio([], b, scale=8.0) < LIMIT", "(not ratio([], b, scale=8.0) < LIMIT)"),
        ("compare", "ratio([], b, scale=8.0) < LIMIT", "(ratio([], b, scale=8.0) <= LIMIT)"),
        ("compare", "ratio([], b, scale=8.0) < LIMIT", "(ratio([], b, scale=8.0) > LIMIT)"),
        ("argument", "ratio([], b, scale=8.0)", "ratio([], b)"),
        ("constant", "8.0", "16.0"),
    }


def test_an_argument_without_a_default_is_not_dropped() -> None:
    called = "def f(a, *, b, c=1): ...\nf(a=a, b=b, c=c)\nsorted(x, key=k)\ntorch.ones(n, device=d)\n"
    assert {new for kind, _, new in changes_of(called) if kind == "argument"} == {"f(a=a, b=b)", "sorted(x)"}


@pytest.mark.parametrize("seed", [0, 1])
def test_the_same_seed_draws_the_same_mutants(seed: int) -> None:
    sources = {file: text for file, text in package_sources().items() if file.startswith("maths/")}
    found = drawn(sources, 40, seed)
    assert found == drawn(dict(reversed(sources.items())), 40, seed)
    assert len({mutant.id for mutant in found}) == 40
    assert {mutant.id for mutant in found} != {mutant.id for mutant in drawn(sources, 40, seed + 2)}


def test_drawn_mutants_compile_and_differ_in_one_place() -> None:
    sources = package_sources()
    for mutant in drawn(sources, 60, 7):
        before = sources[mutant.file]
        assert ast.dump(ast.parse(mutant.source)) != ast.dump(ast.parse(before))
        compile(mutant.source, mutant.file, "exec")
        old, new = before.splitlines(), mutant.source.splitlines()
        assert new[: mutant.line - 1] == old[: mutant.line - 1]
        assert new[mutant.last_line - len(old) or len(new) :] == old[mutant.last_line :]


def test_no_more_are_drawn_than_there_are_lines_to_change() -> None:
    found = drawn({"maths/example.py": EXAMPLE}, 1000, 0)
    assert [mutant.line for mutant in found] == [5, 12, 15, 17, 20, 24, 25]


def test_every_planted_bug_is_a_change_of_the_present_sources() -> None:
    assert len(planted(PLANTED, package_sources())) >= 3


def listed(folder: Path, **changes: str) -> Path:
    entry = {"id": "x", "file": "maths/example.py", "old": "b += 7", "new": "b -= 7", "note": "n"} | changes
    path = folder / "list.toml"
    path.write_text("[[mutant]]\n" + "".join(f"{key} = {value!r}\n" for key, value in entry.items()), encoding="utf-8")
    return path


def test_a_planted_bug_is_made_where_it_says(tmp_path: Path) -> None:
    sources = {"maths/example.py": EXAMPLE}
    [found] = planted(listed(tmp_path), sources)
    assert (found.id, found.line, found.source) == ("x", 24, EXAMPLE.replace("b += 7", "b -= 7"))
    [found] = planted(listed(tmp_path, near="is_small", old="ratio", new="max"), sources)
    assert found.source == EXAMPLE.replace("return ratio", "return max")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"file": "maths/other.py"}, "x: there is no file maths/other.py"),
        ({"old": "ratio"}, "x: `old` must occur once in maths/example.py, but occurs 2 times"),
        ({"old": "scale *", "near": "is_small"}, "x: `old` must occur once in is_small, but occurs 0 times"),
        ({"near": "nowhere"}, "x: `near` must name one function, but nowhere names 0"),
        ({"new": "b +="}, "x: with `new` the file does not compile"),
        ({"new": "b  +=  7"}, "x: with `new` the file does not compile or says the same"),
    ],
)
def test_a_planted_bug_that_is_none_is_refused(changes: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=message):
        planted(listed(tmp_path, **changes), {"maths/example.py": EXAMPLE})


def test_what_runs_at_import_counts_for_those_who_enter_the_function_the_class_or_the_file() -> None:
    tree = ast.parse(EXAMPLE)
    assert lines_around(tree, 20, 20) == [{20}]
    assert lines_around(tree, 17, 17) == [{17}]  # the condition alone, not what depends on it
    assert lines_around(tree, 15, 15)[0] == {16, 17, 18, 19, 20}  # a default
    everything = {16, 17, 18, 19, 20, 24, 25}
    assert lines_around(tree, 5, 5) == [everything]
    assert lines_around(tree, 12, 12) == [set(), everything]


def test_own_tests_come_first_then_quick_ones_within_the_budget() -> None:
    seconds = {
        "tests/a/test_gini.py::slow": 5.0,
        "tests/a/test_gini.py::quick": 1.0,
        "tests/b/test_run.py::quick": 0.1,
        "tests/c/test_all.py::medium": 2.0,
        "tests/b/test_run.py::medium": 3.0,
        "tests/c/test_all.py::slow": 100.0,
    }
    runner = Runner(LineMap(seconds, [], {}, {}, {}), budget=20.0)
    own, others = runner.chosen("maths/gini.py", seconds)
    assert own == ["tests/a/test_gini.py::quick", "tests/a/test_gini.py::slow"]
    assert others == ["tests/c/test_all.py::medium", "tests/b/test_run.py::quick", "tests/b/test_run.py::medium"]


HERE = "tests/unit/test_mutants.py"
BESIDE = "tests/unit/test_layers.py"


def example_map() -> LineMap:
    lines = {
        "maths/a.py": {20: frozenset({f"{HERE}::1", f"{BESIDE}::1"}), 24: frozenset({f"{HERE}::1"})},
        "maths/b.py": {7: frozenset({f"{BESIDE}::1"})},
    }
    sources = {"maths/a.py": "0", "maths/b.py": "0"}
    return LineMap({f"{HERE}::1": 1.0, f"{BESIDE}::1": 2.0}, [f"{HERE}::2"], sources, files_of([HERE, BESIDE]), lines)


def test_a_map_comes_back_from_its_file(tmp_path: Path) -> None:
    whole = example_map()
    without_stale(whole, whole.sources, whole.files).save(tmp_path / "map.json")
    found = LineMap.load(tmp_path / "map.json")
    assert found == whole
    mutant = Mutant("x", "maths/a.py", 20, 20, "", "", "", "")
    assert found.touching(mutant, EXAMPLE) == {f"{HERE}::1", f"{BESIDE}::1"}


def test_only_what_a_change_concerns_is_run_again() -> None:
    whole = example_map()
    assert without_stale(whole, whole.sources, whole.files) == whole
    other_source = without_stale(whole, {**whole.sources, "maths/b.py": "1"}, whole.files)
    assert (set(other_source.files), other_source.seconds) == ({HERE}, {f"{HERE}::1": 1.0})
    assert other_source.lines == {"maths/a.py": dict.fromkeys((20, 24), frozenset({f"{HERE}::1"}))}
    other_test = without_stale(whole, whole.sources, {**whole.files, HERE: "1"})
    assert (set(other_test.files), other_test.failed) == ({BESIDE}, list[str]())
    again = LineMap(
        {f"{HERE}::2": 3.0}, [], whole.sources, {HERE: "1"}, {"maths/a.py": {24: frozenset({f"{HERE}::2"})}}
    )
    both = joined(other_test, again)
    assert both.lines["maths/a.py"] == {20: frozenset({f"{BESIDE}::1"}), 24: frozenset({f"{HERE}::2"})}
    assert (set(both.files), set(both.seconds)) == ({HERE, BESIDE}, {f"{HERE}::2", f"{BESIDE}::1"})
