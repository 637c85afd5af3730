"""Does a test notice? Breaks the sources on purpose, one small change at a time, and runs the tests that touch it.

python benchmarks/mutants.py map                        # which tests touch which line: runs the tests, many minutes
python benchmarks/mutants.py list --drawn 20            # show the changes and run nothing
python benchmarks/mutants.py judge --drawn 40 --seed 1  # the planted bugs of mutants.toml, and 40 drawn ones
python benchmarks/mutants.py judge --only ID            # one of them, also if it was judged before
python benchmarks/mutants.py judge --drawn 40 --seed 1 --again    # those that no test noticed once more

The map is made one folder of tests after the other. Called again, it goes on where it was stopped, and runs the test
files again that have changed or that touch a source that has; --anew runs all.

A planted bug has an id, a file below src/dqnfed, the old text (which occurs once, or once in the function `near`), the
new text and a note of what breaks. Drawn changes swap operators, change numbers, negate what is returned or drop an
argument, in algorithms, core and maths; texts, annotations and error messages stay.

A change is killed by a test that fails, that hangs (60 s and 20 times its usual time) or that cannot be collected, and
survives if none of the tests that run does. The tests of the module's own name run first, then the others, quick ones
first, as many as fit into the budget. Tests that failed while the map was made, slow ones and what runs in processes of
its own do not take part. Judged changes are kept in FOLDER/results.json; after Ctrl-C the same command goes on there.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for `benchmarks`: a script finds only what is beside it

from benchmarks.mutation.changes import Mutant, drawn, planted  # noqa: E402
from benchmarks.mutation.copies import digest, package_sources, write_whole  # noqa: E402
from benchmarks.mutation.judge import line_of, results_of, summary_of  # noqa: E402
from benchmarks.mutation.line_map import LineMap, extended, files_of  # noqa: E402

PLANTED = ROOT / "benchmarks" / "mutants.toml"
FOLDER = ROOT / ".mutants"
TESTS = ("tests/unit", "tests/contract", "tests/statistical")


def options_of() -> argparse.Namespace:
    """Return what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["map", "list", "judge"])
    parser.add_argument("--planted", type=Path, default=PLANTED, help="the list of planted bugs")
    parser.add_argument("--drawn", type=int, default=0, metavar="N", help="so many drawn changes, too")
    parser.add_argument("--seed", type=int, default=0, help="of the drawing")
    parser.add_argument("--files", nargs="+", default=["*"], metavar="GLOB", help="draw in these alone: 'maths/*'")
    parser.add_argument("--only", nargs="+", metavar="ID", help="these alone")
    parser.add_argument("--again", action="store_true", help="judge what no test noticed once more")
    parser.add_argument("--budget", type=float, default=120.0, help="seconds of tests a mutant; 120")
    parser.add_argument("--workers", type=int, default=2, help="processes; 2")
    parser.add_argument("--tests", nargs="+", default=list(TESTS), help=f"for `map`; {' '.join(TESTS)}")
    parser.add_argument("--anew", action="store_true", help="for `map`: run all tests, the unchanged ones too")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where map and results are kept; .mutants")
    return parser.parse_args()


def chosen_mutants(options: argparse.Namespace) -> list[Mutant]:
    """Return the mutants that the options ask for."""
    sources = package_sources()
    among = {file: text for file, text in sources.items() if any(fnmatch(file, glob) for glob in options.files)}
    found = planted(options.planted, sources) + drawn(among, options.drawn, options.seed)
    if options.only:
        unknown = set(options.only) - {mutant.id for mutant in found}
        if unknown:
            raise SystemExit(
                f"there is no mutant {', '.join(sorted(unknown))}; `list` shows them, and a drawn one needs the same "
                "--drawn, --seed and --files."
            )
        found = [mutant for mutant in found if mutant.id in options.only]
    return found


def make_map(options: argparse.Namespace) -> None:
    """Run the tests that the map does not hold yet, and write down which of them touch which line."""
    path = options.folder / "map.json"
    found = old = LineMap({}, [], {}, {}, {}) if options.anew or not path.is_file() else LineMap.load(path)
    try:
        for found in extended(old, options.tests, options.workers):
            found.save(path)
    except KeyboardInterrupt:
        out("\nstopped; the same command goes on with the tests that are not in the map yet\n")
        raise SystemExit(130) from None
    out(f"{len(found.seconds)} tests touch {sum(map(len, found.lines.values()))} lines; the map is {path}\n")
    if found.failed:
        out("these failed and are left out:\n" + "".join(f"  {test}\n" for test in found.failed))


def show(mutants: Sequence[Mutant]) -> None:
    """Print the mutants, a line each."""
    for mutant in mutants:
        what = " ".join(f"{mutant.old} -> {mutant.new}".split())
        out(f"{mutant.id:32s} {mutant.file}:{mutant.line}  {what}\n")


def judge(mutants: Sequence[Mutant], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the results of the mutants; those that have none yet are tested, and each is written at once."""
    found = LineMap.load(options.folder / "map.json")
    sources = package_sources()
    stale = sorted({m.file for m in mutants if found.sources.get(m.file) != digest(sources[m.file])})
    if stale:
        raise SystemExit(f"{', '.join(stale)} changed since the map was made; renew it: benchmarks/mutants.py map")
    missing = [file for file, text in files_of(options.tests).items() if found.files.get(file) != text]
    if missing:
        out(f"not in the map, and not run: {', '.join(missing)}; `map` adds them\n")
    path = options.folder / "results.json"
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    open_results = ("error", "survived", "untouched") if options.again else ("error",)

    def is_known(mutant: Mutant) -> bool:
        known = results.get(mutant.id, {})
        return not options.only and known.get("key") == mutant.key and known["status"] not in open_results

    waiting = [mutant for mutant in mutants if not is_known(mutant)]
    if len(waiting) < len(mutants):
        out(f"{len(mutants) - len(waiting)} of {len(mutants)} are judged already\n")
    for result in results_of(waiting, found, options.budget, options.workers):
        results[result["id"]] = result
        write_whole(path, json.dumps(results, indent=1))
        out(line_of(result))
    return [results[mutant.id] for mutant in mutants]


def out(text: str) -> None:
    """Print at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def main() -> None:
    """Do what the command line says."""
    options = options_of()
    if options.step == "map":
        make_map(options)
    elif options.step == "list":
        show(chosen_mutants(options))
    else:
        try:
            results = judge(chosen_mutants(options), options)
        except KeyboardInterrupt:
            out("\nstopped; the same command goes on with what is not judged yet\n")
            raise SystemExit(130) from None
        out(summary_of(results))
        raise SystemExit(any(result["status"] != "killed" for result in results))


if __name__ == "__main__":
    main()
