"""The part of a page that is made from the summary of a tuned table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from dqnfed.experiments.paper import PrintedTable
from dqnfed.report.comparison import REFERENCES
from dqnfed.report.impossible import impossible_values
from dqnfed.report.result_summaries import Json
from dqnfed.report.result_tables import (
    MARK,
    by_experiment,
    columns_of,
    decimals_of,
    printed_for,
    range_,
    spread,
    title_of,
    value_of,
)
from dqnfed.report.significance import ACCEPTED, Paired, adjusted, paired_difference

OURS, FEDAVG = "dqn-fed", "fedavg"
FORMS = "dqn-fed-"  # other forms of DQN-Fed: shown, but not what its defaults are compared with
SMOOTHED = 3  # evaluations
FULL_SHARE = 0.5  # of FedAvg's rounds, that DQN-Fed is expected to take at most
EXPECTED_PLACE = 2
Methods = dict[str, list[Json]]


class Standing(NamedTuple):
    """A method's place among those with one model, the best first."""

    place: int
    n: int
    score: float
    best: str
    best_score: float

    def text(self, what: str) -> str:
        """Return it in words."""
        ahead = "" if self.place == 1 else f", behind `{self.best}` ({self.best_score:.1f})"
        return f"number {self.place} of {self.n} in {what} ({self.score:.1f}{ahead})"


def block(data: Json, pictures: Mapping[str, Sequence[str]]) -> str:
    """Return the measured part of a tuned page; `pictures` are the lines of each experiment's figures."""
    experiments = by_experiment(data["runs"])
    lines: list[str] = []
    for name, runs in experiments.items():
        methods = ranked(runs)
        lines += [f"### {name}", ""] if len(experiments) > 1 else []
        lines += [verdict(methods, data["personal"]), ""] if OURS in methods and len(methods) > 1 else []
        lines += [*scores_table(methods, columns_of(data["table"], name, runs)), ""]
        lines += [*differences_table(methods, trials_of(data, name)), "", *pictures.get(name, ())]
        printed = printed_for(data["table"], name)
        lines += [*beside(printed, methods), ""] if printed is not None else []
        lines += trials_lines(trials_of(data, name), methods)
        lines += failed_lines([one for one in data["failed"] if one["experiment"] == name])
    return "\n".join([*lines, meaning(), "", *origin(data)])


def ranked(runs: Sequence[Json]) -> Methods:
    """Return the runs of each method, the best mean first, one that diverged last."""
    found: Methods = {}
    for run in runs:
        found.setdefault(run["algorithm"], []).append(run)
    return dict(sorted(found.items(), key=lambda item: -average(item[1], "mean")))


def late(run: Json, column: str) -> float | None:
    """Return a measure averaged over the last quarter of the evaluations; of a class, and of an older summary, the last
    one.
    """
    if column.startswith("class:"):
        return value_of(run, column)
    scores: Json = run["late"] if "late" in run else run["accuracy"]
    found: float | None = scores.get(column)
    return found


def average(runs: Sequence[Json], column: str) -> float:
    """Return a measure's mean over seeds; -inf where a run has none, having diverged."""
    values = [late(run, column) for run in runs]
    return fmean(v for v in values if v is not None) if None not in values else -math.inf


def verdict(methods: Methods, personal: Sequence[str]) -> str:
    """Return what the table says about DQN-Fed at its defaults, and whether that is what was expected."""
    mean, worst = (standing(methods, personal, column) for column in ("mean", "worst10"))
    share = share_of_rounds(methods[OURS], methods.get(FEDAVG, []))
    places = f"{mean.text('the mean')} and {worst.text('the worst tenth')}"
    said = f"DQN-Fed at its defaults is {places} of the methods with one model"
    if share is None and FEDAVG in methods:
        said += "; with one seed or more it does not reach FedAvg's final mean"
    elif share is not None:
        said += f"; it reaches FedAvg's final mean in {share:.2f} of the rounds that FedAvg needs"
    holds = max(mean.place, worst.place) <= EXPECTED_PLACE and share is not None and share <= FULL_SHARE
    expected = "" if holds else " Expected were first or second place in both, and half of FedAvg's rounds at most."
    n_seeds = {len(runs) for runs in methods.values()}
    single = " One seed each: places may be chance." if n_seeds == {1} else ""
    return f"**{said}.**{expected}{single}"


def standing(methods: Methods, personal: Sequence[str], column: str) -> Standing:
    """Return DQN-Fed's place."""
    others = [m for m in methods if m not in (*personal, *REFERENCES) and not m.startswith(FORMS)]
    scores = {m: average(methods[m], column) for m in others}
    best = max(scores, key=lambda m: scores[m])
    place = 1 + sum(score > scores[OURS] for score in scores.values())
    return Standing(place, len(others), scores[OURS], best, scores[best])


def scores_table(methods: Methods, columns: Sequence[str]) -> list[str]:
    """Return accuracies and costs of every method."""
    titles = [
        "method",
        *(title_of(c) for c in columns),
        "improved",
        "late",
        "rounds",
        "passes",
        "KiB up",
        "seconds",
        "seeds",
    ]
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for name, runs in methods.items():
        n_lost = sum(run["status"] == "diverged" or late(run, "mean") is None for run in runs)
        title = f"`{name}`" + (f" (diverged with {n_lost} of {len(runs)} seeds)" if n_lost else "")
        cells = [title, *(spread([late(run, c) for run in runs], decimals_of(c)) for c in columns)]
        for key in ("improved", "improved_late"):
            known = [run[key] for run in runs if run[key] is not None]
            cells.append(f"{100 * fmean(known):.1f} %" if known else "")
        asked = sum(run["rounds"] * run["participants"] for run in runs)
        cells += [range_([run["rounds"] for run in runs]), f"{sum(run['passes'] for run in runs) / asked:.1f}"]
        cells += [f"{sum(run['bytes_up'] for run in runs) / asked / 1024:.0f}"]
        cells += [f"{fmean(run['seconds'] for run in runs):.1f}", str(len(runs))]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def differences_table(methods: Methods, trials: Mapping[str, list[Json]]) -> list[str]:
    """Return each method's paired differences from FedAvg and from DQN-Fed, its speed and its settings."""
    references = [m for m in (FEDAVG, OURS) if m in methods]
    columns = [(column, reference) for reference in references for column in ("mean", "worst10")]
    names = {FEDAVG: "FedAvg", OURS: "DQN-Fed"}
    titles = ["method", *(f"{title_of(c)} against {names[r]}" for c, r in columns), "share of FedAvg's rounds"]
    titles += ["settings", "trials"]
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    found = {key: differences(methods, *key) for key in columns}
    for name, runs in methods.items():
        share = share_of_rounds(runs, methods.get(FEDAVG, []))
        cells = [difference_text(found[key].get(name)) for key in columns]
        cells += ["" if FEDAVG not in methods else "-" if share is None else f"{share:.2f}"]
        cells += [trial_text(runs[0].get("trial", {})) or "defaults", str(len(trials.get(name, ()))) if trials else ""]
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return lines


def differences(methods: Methods, column: str, reference: str) -> dict[str, Paired]:
    """Return the paired differences from a method, p-values adjusted for their number."""
    base = by_seed(methods[reference], column)
    found = {
        name: paired
        for name, runs in methods.items()
        if name != reference and (paired := paired_difference(by_seed(runs, column), base)) is not None
    }
    return dict(zip(found, adjusted(list(found.values())), strict=True))


def by_seed(runs: Sequence[Json], column: str) -> dict[int, float]:
    """Return a measure of every seed; NaN where the run diverged."""
    return {run["seed"]: math.nan if (v := late(run, column)) is None else v for run in runs}


def difference_text(paired: Paired | None) -> str:
    """Return a difference with its standard error, marked where the paired test accepts it."""
    if paired is None:
        return ""
    return f"{paired.difference:+.1f} ({paired.error:.1f}){' *' if paired.p < ACCEPTED else ''}"


def share_of_rounds(runs: Sequence[Json], reference: Sequence[Json]) -> float | None:
    """Return the rounds to FedAvg's final mean over FedAvg's own rounds to it, the mean over seeds.

    Curves are averaged over three evaluations. None where no seed is shared, or one never gets there.
    """
    theirs = {run["seed"]: smoothed(run["curve"]) for run in reference if run["curve"]}
    shares: list[float] = []
    for run in runs:
        if run["seed"] not in theirs:
            continue
        target = theirs[run["seed"]][-1][1]
        ours = first_round(smoothed(run["curve"]), target)
        if ours is None:
            return None
        shares.append(ours / (first_round(theirs[run["seed"]], target) or math.inf))
    return fmean(shares) if shares else None


def smoothed(curve: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    """Return (round, mean of up to three evaluations)."""
    return [
        (at, fmean(value for _, value in curve[max(0, i - SMOOTHED + 1) : i + 1])) for i, (at, _) in enumerate(curve)
    ]


def first_round(curve: Sequence[tuple[float, float]], target: float) -> float | None:
    """Return the first round with at least this accuracy."""
    return next((at for at, value in curve if value >= target), None)


def beside(printed: PrintedTable, methods: Methods) -> list[str]:
    """Return the paper's values and, after them, ours."""
    lines = [
        f"The paper prints for this setting ({printed.title}), and we measure:",
        "",
        "| method | " + " | ".join(f"{title_of(c)}, printed | ours" for c in printed.columns if c != "seconds") + " |",
        "|---" * (2 * sum(c != "seconds" for c in printed.columns) + 1) + "|",
    ]
    reasons: list[str] = []
    for name, row in printed.rows.items():
        impossible = impossible_values(printed, name)
        ours = next((runs for m, runs in methods.items() if printed.printed_name(m) == name), [])
        cells: list[str] = []
        for column, value in zip(printed.columns, row, strict=True):
            if column != "seconds":
                cells.append("" if value is None else f"{value:g}{MARK if column in impossible else ''}")
                cells.append(spread([late(run, column) for run in ours], decimals_of(column)))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
        reasons += [f"{name}, {column}: {why}" for column, why in impossible.items() if column != "seconds"]
    return [*lines, *(["", f"{MARK} cannot be true: " + "; ".join(reasons) + "."] if reasons else [])]


def failed_lines(failed: Sequence[Json]) -> list[str]:
    """Return which methods could not run, with how many seeds, and the first reason."""
    by_method: dict[str, list[Json]] = {}
    for one in failed:
        by_method.setdefault(one["algorithm"], []).append(one)
    told = [
        f"`{name}` with {len(some)} seed{'s' * (len(some) > 1)} ({some[0]['error']})"
        for name, some in by_method.items()
    ]
    return [f"Could not run: {'; '.join(sorted(told))}.", ""] if told else []


def trials_of(data: Json, experiment: str) -> dict[str, list[Json]]:
    """Return the trials of every method of an experiment."""
    found: dict[str, list[Json]] = {}
    for trial in data["trials"]:
        if trial["experiment"] == experiment:
            found.setdefault(trial["algorithm"], []).append(trial)
    return found


def trials_lines(trials: Mapping[str, list[Json]], methods: Methods) -> list[str]:
    """Return every trial with its validation score, the chosen one in bold."""
    if not trials:
        return []
    lines = [
        "All trials, mean validation accuracy over the last quarter of the evaluations, the chosen one in bold:",
        "",
    ]
    for name in sorted(trials):
        chosen = methods[name][0]["trial"] if name in methods else None
        told = []
        for trial in trials[name]:
            score = "diverged" if trial.get("score") is None else f"{trial['score']:.1f}"
            text = f"{trial_text(trial['trial'])}: {'could not run' if 'error' in trial else score}"
            told.append(f"**{text}**" if trial["trial"] == chosen else text)
        lines.append(f"- `{name}` {'; '.join(told)}")
    return [*lines, ""]


def trial_text(trial: Mapping[str, object]) -> str:
    """Return a trial's settings in short; rates are multiples of the preset's."""
    return ", ".join(f"{key} {'x' if key == 'lr' else ''}{value}" for key, value in trial.items())


def meaning() -> str:
    """Return what the columns are."""
    return (
        "Mean ± standard deviation over seeds of what the last quarter of the evaluations has on average (of the "
        "model that is kept, where the preset keeps the best), accuracy in percent on each client's own test "
        "examples; *improved* is the mean share of participants whose loss a round lowers, *late* the same over the "
        "last half of the rounds; passes and KiB are for one participant and round; *seconds* is a whole run, "
        "evaluations included. Differences are paired by seed, with their standard error; `*`: Student's paired test "
        "with Holm's correction for the number of rows accepts it at 5 %. *Share of FedAvg's rounds*: rounds until "
        "the mean accuracy is FedAvg's final one, over FedAvg's own, curves averaged over three evaluations; a dash "
        "if a seed never gets there. `lr` is a multiple of the preset's."
    )


def origin(data: Json) -> list[str]:
    """Return how, where and with which sources the runs were made."""
    return [
        f"Budget, written first: {data['budget']}.",
        "",
        f"Hardware: {data['hardware']}. Commit: `{data['commit']}`. NUMERICS {data['numerics']} in every row.",
        "",
        "```bash",
        data["command"],
        "```",
    ]
