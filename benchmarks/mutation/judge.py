"""Runs the tests that touch a change on a changed copy of the package."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.mutation.changes import Mutant
from benchmarks.mutation.copies import ROOT, copied_package, environment, replace_module
from benchmarks.mutation.line_map import PLUGIN, LineMap, file_of

HANG_SECONDS, HANG_FACTOR = 60.0, 20.0  # a test hangs beyond the first, plus so many times its recorded duration
COLLECT_SECONDS = 300.0  # longer than any import on a busy machine
FIRST_SECONDS = 10.0  # recorded seconds of tests to start with where no test file has the module's name


class Outcome(NamedTuple):
    """How some tests went."""

    n_run: int
    failed: str = ""  # the test that killed
    how: str = ""
    error: str = ""  # why the tests could not run


class Runner:
    """Runs tests on changed copies of the package, one copy a worker."""

    def __init__(self, found: LineMap, budget: float) -> None:
        self._map, self._budget = found, budget
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self.is_over = False

    def stop(self) -> None:
        """End what runs."""
        self.is_over = True
        with self._lock:
            for process in self._running:
                os.killpg(process.pid, signal.SIGKILL)

    def tested(self, mutant: Mutant, scratch: Path) -> dict[str, Any]:
        """Return whether a test notices a mutant, and which; `scratch` holds the worker's copy of the package."""
        began = time.monotonic()
        path = scratch / "src" / "dqnfed" / mutant.file
        source = path.read_text(encoding="utf-8")
        touching = self._map.touching(mutant, source)
        chosen = self.chosen(mutant.file, touching)
        outcome, n_run = Outcome(0), 0
        try:
            replace_module(path, mutant.source)
            for stage in chosen:
                left = self._budget - (time.monotonic() - began)
                if left <= 0 or outcome.failed or outcome.error or self.is_over:
                    break
                outcome = self._run(stage, left, scratch)
                n_run += outcome.n_run
        finally:
            replace_module(path, source)
        status = "killed" if outcome.failed else "error" if outcome.error else "survived" if touching else "untouched"
        facts = mutant._asdict() | {"key": mutant.key, "status": status, "test": outcome.failed}
        del facts["source"], facts["last_line"]
        lasted = round(time.monotonic() - began, 1)
        is_cut = status == "survived" and n_run < len(touching)
        return facts | {
            "how": "the budget is spent" if is_cut else outcome.how or outcome.error,
            "n_run": n_run,
            "n_tests": len(touching),
            "seconds": lasted,
        }

    def chosen(self, file: str, tests: Iterable[str]) -> list[list[str]]:
        """Return the tests to run in one or two stages: the module's own first, then the quickest, within the budget.

        Tests of one file stay together, so that what they share is made once.
        """
        own = f"test_{Path(file).stem}"

        def is_own(test: str) -> bool:
            stem = Path(file_of(test)).stem
            return stem == own or stem.startswith(f"{own}_")

        seconds = self._map.seconds
        ranked = sorted(tests, key=lambda test: (not is_own(test), seconds[test], test))
        taken, spent = list[str](), 0.0
        for test in ranked:
            spent += seconds[test]
            if spent > self._budget and taken:
                break
            taken.append(test)
        first = [test for test in taken if is_own(test)]
        if not first:
            spent = 0.0
            for test in taken:
                spent += seconds[test]
                if spent > FIRST_SECONDS and first:
                    break
                first.append(test)
        rest = taken[len(first) :]
        return [self._by_file(stage) for stage in (first, rest) if stage]

    def _by_file(self, tests: Sequence[str]) -> list[str]:
        total: dict[str, float] = defaultdict(float)
        for test in tests:
            total[file_of(test)] += self._map.seconds[test]
        return sorted(tests, key=lambda test: (total[file_of(test)], file_of(test), tests.index(test)))

    def _run(self, tests: Sequence[str], budget: float, scratch: Path) -> Outcome:
        progress, chosen, log = (scratch / name for name in ("progress", "chosen.json", "log"))
        progress.write_text("")
        chosen.write_text(json.dumps({"tests": tests, "progress": str(progress), "seconds": budget}))
        files = sorted({file_of(test) for test in tests})
        options = ["-x", "-q", "--tb=short", "-p", "no:cacheprovider", "-p", PLUGIN]
        command = [sys.executable, "-m", "pytest", *options, *files]
        with log.open("wb") as out:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment(scratch, MUTANTS_CHOSEN=str(chosen)),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            with self._lock:
                self._running.add(process)
            try:
                return self._followed(process, progress, log)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
                with self._lock:
                    self._running.discard(process)

    def _followed(self, process: subprocess.Popen[bytes], progress: Path, log: Path) -> Outcome:
        test, since, n_run, n_read, is_collected = "", time.monotonic(), 0, 0, False
        while True:
            is_done = process.poll() is not None
            with progress.open(encoding="utf-8") as file:
                lines = [line for line in file if line.endswith("\n")]
            for line in lines[n_read:]:
                what, name, how = json.loads(line)
                n_run += what == "end"
                is_collected |= what == "collected"
                if what == "failed":
                    return Outcome(n_run + is_collected, name, how)
                test, since = (name if what == "start" else "", time.monotonic())
            n_read = len(lines)
            if is_done or self.is_over:
                break
            limit = HANG_SECONDS + HANG_FACTOR * self._map.seconds.get(test, 0.0) if is_collected else COLLECT_SECONDS
            if time.monotonic() - since > limit:
                return Outcome(n_run + 1, test or "(collection)", f"hangs: not over after {limit:.0f} s")
            time.sleep(0.05)
        if test:
            return Outcome(n_run + 1, test, f"the process ended with {process.returncode}")
        if not is_collected or n_run == 0:
            said = log.read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2][:200]
            return Outcome(n_run, error=f"pytest ended with {process.returncode}: {said}")
        return Outcome(n_run)


def results_of(mutants: Sequence[Mutant], found: LineMap, budget: float, workers: int) -> Iterator[dict[str, Any]]:
    """Yield the result of every mutant when it is there; what runs is ended when nobody asks for more."""
    runner = Runner(found, budget)
    with tempfile.TemporaryDirectory() as folder:
        free = [Path(folder) / str(i) for i in range(max(1, min(workers, len(mutants))))]
        for scratch in free:
            copied_package(scratch)

        def one(mutant: Mutant) -> dict[str, Any]:
            scratch = free.pop()
            try:
                return runner.tested(mutant, scratch)
            finally:
                free.append(scratch)

        with ThreadPoolExecutor(len(free)) as pool:
            futures = [pool.submit(one, mutant) for mutant in mutants]
            try:
                for future in as_completed(futures):
                    yield future.result()
            finally:
                runner.stop()
                pool.shutdown(cancel_futures=True)


def line_of(result: Mapping[str, Any]) -> str:
    """Return a result in two lines."""
    what = " ".join(f"{result['old']} -> {result['new']}".split())
    reason = f" by {result['test']}: {result['how']}" if result["test"] else f" {result['how']}".rstrip()
    return (
        f"{result['status']:9s} {result['id']:32s} {result['file']}:{result['line']}  {what}\n"
        f"{'':9s} {result['n_run']} of {result['n_tests']} tests, {result['seconds']} s{reason}\n"
    )


def summary_of(results: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of results, and what was not noticed."""
    count: dict[tuple[str, str], int] = defaultdict(int)
    for result in results:
        count[result["file"].partition("/")[0], result["status"]] += 1
    names = ("killed", "survived", "untouched", "error")
    lines = [f"\n{'room':12s}" + "".join(f"{name:>10s}" for name in names)]
    for room in sorted({room for room, _ in count}):
        lines.append(f"{room:12s}" + "".join(f"{count[room, name]:10d}" for name in names))
    n_killed = sum(result["status"] == "killed" for result in results)
    n_hung = sum(result["how"].startswith("hangs") for result in results)
    lines.append(f"{n_killed} of {len(results)} killed, {n_hung} of these because a test hung")
    left = [result for result in results if result["status"] != "killed"]
    lines += ["not noticed:", *(f"{line_of(result)}{'':9s} {result['note']}" for result in left)] if left else []
    return "\n".join(lines) + "\n"
