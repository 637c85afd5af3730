"""Inside pytest (-p benchmarks.mutation.plugin): notes the lines that tests enter, or runs chosen tests in order."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.mutation.copies import ROOMS, write_whole

MEMORY = 8 * 2**30  # bytes a test process may hold: a loop that no longer ends must not fill the machine


def pytest_configure(config: pytest.Config) -> None:
    """Note the lines that tests enter, or run chosen tests in a chosen order, as the variables say."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if "MUTANTS_MAP" in os.environ and worker is not None:
        limit_memory()
        config.pluginmanager.register(Recorder(Path(os.environ["MUTANTS_MAP"]), worker))
    elif "MUTANTS_CHOSEN" in os.environ:
        limit_memory()
        config.pluginmanager.register(Chosen(Path(os.environ["MUTANTS_CHOSEN"])))


def limit_memory() -> None:
    """Let what asks for too much memory fail instead of the machine."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, resource.getrlimit(resource.RLIMIT_DATA)[1]))


class Recorder:
    """Notes for every test how long it takes and which lines it enters."""

    def __init__(self, folder: Path, worker: str) -> None:
        from coverage import Coverage

        self._folder, self._worker = folder, worker
        self._seconds: dict[str, float] = defaultdict(float)
        self._failed: set[str] = set()
        self._users: dict[str, list[str]] = defaultdict(list)
        self._test = ""
        package = importlib.util.find_spec("dqnfed")
        assert package is not None
        assert package.origin is not None
        include = [str(Path(package.origin).resolve().parent / room / "*") for room in ROOMS]
        self._coverage = Coverage(data_file=str(folder / f"lines.{worker}"), config_file=False, include=include)
        self._coverage.set_option("run:core", "ctrace")  # the only fast one that tells tests apart
        self._coverage.set_option("run:disable_warnings", ["no-data-collected", "module-not-imported", "trace-changed"])
        self._coverage.start()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        clear_caches()
        self._test = item.nodeid
        for definitions in getattr(item, "_fixtureinfo").name2fixturedefs.values():  # noqa: B009  not public
            for definition in definitions:
                if definition.scope != "function":
                    self._users[fixture_name(definition)].append(item.nodeid)
        self._coverage.switch_context(item.nodeid)
        try:
            return (yield)
        finally:
            self._coverage.switch_context("")

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, object, object]:
        if fixturedef.scope == "function":
            return (yield)
        self._coverage.switch_context(fixture_name(fixturedef))  # for all tests that use it
        try:
            return (yield)
        finally:
            self._coverage.switch_context(self._test)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration
        if report.failed:
            self._failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self._coverage.stop()
        self._coverage.save()
        facts = {"seconds": self._seconds, "failed": sorted(self._failed), "users": self._users}
        write_whole(self._folder / f"tests.{self._worker}.json", json.dumps(facts))


def fixture_name(definition: pytest.FixtureDef[Any]) -> str:
    """Return a name that no test has."""
    return f"fixture {definition.baseid}::{definition.argname}"


def clear_caches() -> None:
    """Forget what earlier tests have computed: else the lines behind it would be entered by the first test only."""
    kind = type(functools.lru_cache(clear_caches))
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("dqnfed", "tests"):
            for value in list(vars(module).values()):
                if isinstance(value, kind):
                    value.cache_clear()


class Chosen:
    """Runs the chosen tests in the chosen order until the time is over, and writes down how it goes."""

    def __init__(self, path: Path) -> None:
        facts = json.loads(path.read_text(encoding="utf-8"))
        self._order = {test: i for i, test in enumerate(facts["tests"])}
        self._progress = Path(facts["progress"])
        self._end = time.monotonic() + facts["seconds"]

    def _note(self, what: str, test: str = "", how: str = "") -> None:
        with self._progress.open("a", encoding="utf-8") as file:
            file.write(json.dumps([what, test, how]) + "\n")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        others = [item for item in items if item.nodeid not in self._order]
        items[:] = sorted((i for i in items if i.nodeid in self._order), key=lambda item: self._order[item.nodeid])
        config.hook.pytest_deselected(items=others)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._note("failed", report.nodeid, f"not collected: {last_line(report.longreprtext)}")

    def pytest_collection_finish(self) -> None:
        self._note("collected")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._note("start", nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._note("failed", report.nodeid, last_line(report.longreprtext))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        found = yield
        self._note("end", item.nodeid)
        if time.monotonic() > self._end:
            item.session.shouldstop = "the budget is spent"
        return found


def last_line(text: str) -> str:
    """Return the line of a failure that says most."""
    errors = [line[2:].strip() for line in text.splitlines() if line.startswith("E ")]
    return next((line for line in errors if line), text.strip().rpartition("\n")[2])[:200]
