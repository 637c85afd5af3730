"""How many functions of the package one round enters, and in how many files: what a reader of a round has to know.

python benchmarks/round_functions.py                                  # DQN-Fed and FedAvg
python benchmarks/round_functions.py --algorithm qffl term --list     # the functions by name, too
python benchmarks/round_functions.py --round 5 --json functions.json

The run is that of `dqnfed run digits` on the CPU, run folder included. Counted is what is entered from the moment at
which the round before has been told to the observers until this one has been; threads count too. Lambdas,
comprehensions and the bodies of classes and modules are parts of the function or file around them and are not counted.
"""

import argparse
import json
import sys
import tempfile
import threading
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import dqnfed
from dqnfed.experiments.config import read_config
from dqnfed.experiments.experiment import run_experiment

PACKAGE = Path(dqnfed.__file__).resolve().parent


class Function(NamedTuple):
    """A function of the package."""

    file: str  # relative to the package
    line: int
    name: str  # with its class


class OneRound:
    """An observer that notes the code entered between the end of one round and the end of the next."""

    def __init__(self, number: int) -> None:
        self._number = number  # the first round is 1
        self._n_told = 0
        self._is_on = False
        self._entered: set[CodeType] = set()

    def start(self, *_: Any) -> None: ...

    def round(self, *_: Any) -> None:
        self._n_told += 1
        self._is_on = self._n_told == self._number - 1
        sys.setprofile(self.note if self._is_on else None)

    def end(self, *_: Any) -> None:
        self._is_on = False
        sys.setprofile(None)

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        """Note a call; threads that live longer than a round have this from their start on."""
        if self._is_on and event == "call":
            self._entered.add(frame.f_code)

    def functions(self) -> list[Function]:
        """Return the package's functions among the code that was entered."""
        named = [(Path(code.co_filename).resolve(), code) for code in self._entered if code.co_name[0] != "<"]
        return sorted(
            Function(path.relative_to(PACKAGE).as_posix(), code.co_firstlineno, code.co_qualname)
            for path, code in named
            if path.is_relative_to(PACKAGE)
        )


def functions_of_a_round(algorithm: str, preset: str = "digits", number: int = 2) -> list[Function]:
    """Return the package's functions that one round of a preset enters."""
    if number < 2:
        raise ValueError(f"the round must be the second or a later one, but is {number}; the first also builds things.")
    config = read_config(preset, [f"train.rounds={number + 1}", "run.device=cpu"]).with_algorithm(algorithm)
    observer = OneRound(number)
    threading.setprofile(observer.note)
    try:
        with tempfile.TemporaryDirectory() as folder:
            run_experiment(config, Path(folder) / "run", observers=[observer])
    finally:
        threading.setprofile(None)
        sys.setprofile(None)
    return observer.functions()


def n_files(functions: Iterable[Function]) -> int:
    """Return in how many files the functions are."""
    return len({function.file for function in functions})


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", nargs="+", default=["dqn-fed", "fedavg"], metavar="NAME")
    parser.add_argument("--preset", default="digits")
    parser.add_argument("--round", type=int, default=2, help="which one; the first is 1")
    parser.add_argument("--list", action="store_true", help="print the functions, too")
    parser.add_argument("--json", type=Path, help="where to write the functions, too")
    options = parser.parse_args()
    out = sys.stdout.write
    # each in a process of its own: what one method's run has cached, the next one's would not enter
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as fresh:
        made = {
            name: fresh.submit(functions_of_a_round, name, options.preset, options.round) for name in options.algorithm
        }
        found = {name: functions.result() for name, functions in made.items()}
    out(f"{'method':24s} {'functions':>9s} {'files':>5s}\n")
    for name, functions in found.items():
        out(f"{name:24s} {len(functions):9d} {n_files(functions):5d}\n")
    if options.list:
        for name, functions in found.items():
            out(f"\n{name}\n")
            for function in functions:
                out(f"  {function.file}:{function.line} {function.name}\n")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({name: [f._asdict() for f in fs] for name, fs in found.items()}, indent=1))


if __name__ == "__main__":
    main()
