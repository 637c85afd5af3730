"""Groups runs into experiments, methods and seeds, and says where they are not alike."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dqnfed.report.reader import Problem, Run

DISPLAY = {  # names as the papers print them, in the order of a table; a method not listed keeps its own name
    "local-only": "Local only",
    "pooled": "Pooled",
    "fedavg": "FedAvg",
    "fedprox": "FedProx",
    "scaffold": "SCAFFOLD",
    "fedadam": "FedAdam",
    "fedavgm": "FedAvgM",
    "fedvarp": "FedVARP",
    "fedexp": "FedExP",
    "fedyogi": "FedYogi",
    "feddyn": "FedDyn",
    "mifa": "MIFA",
    "qffl": "q-FFL",
    "q-ffl": "q-FFL",
    "q-fedavg": "q-FedAvg",
    "mgda": "MGDA",
    "fedmgda": "FedMGDA",
    "fedmgda-plus": "FedMGDA+",
    "fedheal": "FedHEAL",
    "fedfa": "FedFa",
    "fedfv": "FedFV",
    "fedlf": "FedLF",
    "term": "TERM",
    "ditto": "Ditto",
    "fedrep": "FedRep",
    "fedbn": "FedBN",
    "afl": "AFL",
    "agnostic-fair": "AgnosticFair",
    "fcfl": "FCFL",
    "adafed": "AdaFed",
    "propfair": "PropFair",
    "vred": "VRed",
    "semi-vred": "Semi-VRed",
    "eagle": "EAGLE",
    "gifair": "GIFAIR",
    "feddg-ga": "FedDG-GA",
    "fedgini": "FedGini",
    "drfl": "DRFL",
    "fedism": "FedISM",
    "aaggff": "AAggFF",
    "fedeba-plus": "FedEBA+",
    "fedmdfg": "FedMDFG",
    "fairmoo": "FairMOO",
    "fedce": "FedCE",
    "fedpw": "FedPW",
    "fedcorr": "FedCorr",
    "jd-upgrad": "UPGrad",
    "jd-dualproj": "DualProj",
    "jd-aligned-mtl": "Aligned-MTL",
    "jd-cagrad": "CAGrad",
    "newton": "Newton",
    "distributed-newton": "Distributed Newton",
    "local-newton": "Local Newton",
    "giant": "GIANT",
    "disco": "DiSCO",
    "shed": "SHED",
    "fedns": "FedNS",
    "fedns-ggn": "FedNS-GGN",
    "fednl": "FedNL",
    "fednl-pp": "FedNL-PP",
    "fednl-ls": "FedNL-LS",
    "fednl-cr": "FedNL-CR",
    "fednl-head": "FedNL (head)",
    "fednl-diag": "FedNL (diagonal)",
    "fednew": "FedNew",
    "fednew-cg": "FedNew-CG",
    "q-fednew": "Q-FedNew",
    "server-lbfgs": "Server L-BFGS",
    "dqn-fed-literal": "DQN-Fed (literal)",
    "dqn-fed": "DQN-Fed",
}
ORDER = tuple(DISPLAY)
REFERENCES = ("local-only", "pooled")  # what federated methods are compared with
# what makes a method another method; how often it was measured, and on which machine it ran, does not
METHOD_BLOCKS = ("algorithm", "train", "policy")
METHOD_SETTINGS = {("run", "dtype"), ("eval", "part")}


class Method(NamedTuple):
    """The runs of one method (with one set of settings) in one experiment, by seed."""

    label: str
    algorithm: str
    runs: tuple[Run, ...]


class Experiment(NamedTuple):
    """Methods that were run on the same data and model."""

    name: str
    methods: tuple[Method, ...]

    @property
    def runs(self) -> tuple[Run, ...]:
        """All runs, method by method."""
        return tuple(run for method in self.methods for run in method.runs)

    @property
    def seeds(self) -> tuple[int, ...]:
        """All seeds that occur."""
        return tuple(sorted({run.seed for run in self.runs}))

    @property
    def score(self) -> str:
        """Name of what clients are evaluated by."""
        return self.runs[0].score

    @property
    def focus(self) -> int:
        """Position of the method that the page looks at first: DQN-Fed, or the federated one with the highest mean."""
        names = [method.algorithm for method in self.methods]
        if "dqn-fed" in names:
            return names.index("dqn-fed")
        means = [method.runs[0].measures().get("mean", -math.inf) for method in self.methods]
        federated = [i for i, name in enumerate(names) if name not in REFERENCES] or list(range(len(names)))
        return max(federated, key=lambda i: means[i] if math.isfinite(means[i]) else -math.inf)


class Grouped(NamedTuple):
    """Experiments in order of appearance, and what was noticed while grouping."""

    experiments: tuple[Experiment, ...]
    problems: tuple[Problem, ...]


def group(runs: Iterable[Run], *, expect_running: bool = False) -> Grouped:
    """Return the runs grouped by experiment (same name, data, model and number of clients), method and seed.

    That a run is still in progress is noted as a problem, unless it is what one expects.
    """
    by_key: dict[tuple[str, str, str, int], list[Run]] = defaultdict(list)
    for run in runs:
        by_key[run.experiment, _data_key(run.config), _frozen(run.config.get("model")), len(run.clients)].append(run)
    problems: list[Problem] = []
    experiments = []
    for name, same in zip(_experiment_names([key[0] for key in by_key]), by_key.values(), strict=True):
        methods = tuple(_methods(same, problems))
        experiments.append(Experiment(name, methods))
        problems += _differences(experiments[-1], expect_running=expect_running)
    if len(experiments) > 1:
        first = experiments[0].runs[0].folder
        names = ", ".join(e.name for e in experiments)
        problems.insert(
            0, Problem(first, f"the runs belong to {len(experiments)} experiments ({names}); each is shown on its own")
        )
    return Grouped(tuple(experiments), tuple(problems))


def display(algorithm: str) -> str:
    """Return the name of an algorithm as its paper prints it."""
    return " + ".join(DISPLAY.get(part, part) for part in algorithm.split("+"))


def settings(config: Mapping[str, Any]) -> dict[tuple[str, str], Any]:
    """Return the settings that make a method what it is, as (block, key) -> value."""
    return {
        (block, key): value
        for block, entries in config.items()
        if isinstance(entries, Mapping)
        for key, value in entries.items()
        if block in METHOD_BLOCKS or (block, key) in METHOD_SETTINGS
    }


def _methods(runs: Sequence[Run], problems: list[Problem]) -> Iterable[Method]:
    by_method: dict[tuple[str, str, str], list[Run]] = defaultdict(list)
    for run in runs:
        by_method[run.algorithm, run.model, _frozen(settings(run.config))].append(run)
    entries = [(algorithm, model, _unique_seeds(same, problems)) for (algorithm, model, _), same in by_method.items()]
    entries.sort(key=lambda entry: (_rank(entry[0]), entry[0], entry[1]))
    for algorithm, model, kept in entries:
        namesakes = [others[0] for name, other, others in entries if (name, other) == (algorithm, model)]
        label = display(algorithm) + (f" ({model} model)" if model else "")
        if len(namesakes) > 1:
            label += f" · {_what_differs(kept[0], namesakes)}"
        yield Method(label + _divergence_mark(kept), algorithm, kept)


def _divergence_mark(runs: Sequence[Run]) -> str:
    """Return what a row says beside its name where runs of it diverged."""
    n = sum(run.status == "diverged" for run in runs)
    if not n:
        return ""
    return " (diverged)" if n == len(runs) else f" ({n} of {len(runs)} diverged)"


def _data_key(config: Mapping[str, Any]) -> str:
    """Return what makes the data of two runs the same; in which folder they lay, and what is reported, do not count."""
    data = dict(config["data"]) if isinstance(config.get("data"), Mapping) else {}
    places = {key: Path(str(data[key])).name for key in ("file", "manifest") if key in data}
    return _frozen({key: value for key, value in {**data, **places}.items() if key not in ("dir", "breakdown")})


def _unique_seeds(runs: Sequence[Run], problems: list[Problem]) -> tuple[Run, ...]:
    by_seed: dict[int, Run] = {}
    for run in sorted(runs, key=lambda run: str(run.env.get("started", ""))):
        older = by_seed.get(run.seed)
        if older is not None and not run.model:
            problems.append(
                Problem(
                    older.folder,
                    f"{run.algorithm} with seed {run.seed} was run again in {run.folder}; the newer counts",
                )
            )
        by_seed[run.seed] = run
    return tuple(by_seed[seed] for seed in sorted(by_seed))


def _what_differs(run: Run, namesakes: Sequence[Run]) -> str:
    mine, others = settings(run.config), [settings(other.config) for other in namesakes]
    keys = [key for key in mine if any(other.get(key) != mine[key] for other in others)]
    return ", ".join(f"{key}={mine[block, key]}" for block, key in keys) or "other settings"


def _differences(experiment: Experiment, *, expect_running: bool) -> Iterable[Problem]:
    every = set(experiment.seeds)
    for method in experiment.methods:
        mine = {run.seed for run in method.runs}
        if mine != every:
            missing = ", ".join(map(str, sorted(every - mine)))
            yield Problem(
                method.runs[0].folder,
                f"{method.label} has no run with seed {missing}: its means are over fewer seeds than the others'",
            )
        for run in method.runs:
            expected = run.status == "finished" or (expect_running and run.status == "running")
            if not run.model and not expected:
                yield Problem(run.folder, f"{method.label}, seed {run.seed}: {_progress(run)}")
    plans = {run.planned_rounds for run in experiment.runs}
    if len(plans) > 1:
        yield Problem(
            experiment.runs[0].folder,
            f"methods were given different numbers of rounds ({', '.join(map(str, sorted(plans)))})",
        )


def _progress(run: Run) -> str:
    done = f"{run.n_rounds} of {run.planned_rounds} rounds are done"
    if run.status == "running":
        return f"{done}; in progress, or ended without a summary"
    reason = run.summary.get("reason")
    return f"{run.status} after {run.n_rounds} of {run.planned_rounds} rounds" + (f" ({reason})" if reason else "")


def _experiment_names(names: Sequence[str]) -> list[str]:
    seen: dict[str, int] = defaultdict(int)
    named = []
    for name in names:
        seen[name] += 1
        named.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return named


def _rank(algorithm: str) -> float:
    # methods without a place of their own stand before DQN-Fed and its ablations, which close the table as in the paper
    if "+" in algorithm:  # fedcorr+NAME comes after NAME
        return _rank(algorithm.partition("+")[2]) + 0.25
    return ORDER.index(algorithm) if algorithm in ORDER else ORDER.index("server-lbfgs") - 0.5


def _frozen(value: object) -> str:
    if isinstance(value, Mapping):
        return repr(sorted((str(k), _frozen(v)) for k, v in value.items()))
    return repr(value)
