"""The sentences that a report begins with: each says no more than its numbers do."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from dqnfed.report.comparison import Experiment, Method
from dqnfed.report.joining import (
    ALONE,
    POOLED,
    ClientGain,
    Joining,
    joining,
    least_gain,
    means_by_seed,
)
from dqnfed.report.measures import tail_size
from dqnfed.report.reader import Run
from dqnfed.report.significance import ACCEPTED, paired_difference
from dqnfed.report.units import SPACE as SP
from dqnfed.report.units import Unit, unit_of


def findings(experiment: Experiment) -> list[str]:
    """Return what decides, in sentences, the most important first.

    Where clients were also trained alone: what joining brings them, after a warning if another federated method does
    better. Else: which method has the best mean, and which serves the worst-off best.
    """
    found = joining(experiment)
    if not found.has_alone or experiment.methods[experiment.focus].algorithm in (ALONE, POOLED):
        return methods_sentences(experiment)
    return [*behind_sentences(experiment), *joining_sentences(found)]


def joining_sentences(found: Joining) -> list[str]:
    """Return how many clients gain, who gains least, and the means."""
    known = [gain for gain in found.clients if math.isfinite(gain.difference)]
    if not known:
        return [f"What joining brings is not known: no client has a score with {found.method} and alone."]
    if len(found.clients) == 1:
        return [client_sentence(found.clients[0], found)]
    lead = [_one_seed_lead(known, found) if all(g.paired is None for g in known) else _lead(known, found)]
    unknown = len(found.clients) - len(known)
    if unknown:
        lead.append(f"{unknown} of {len(found.clients)} clients have no score in both and do not count.")
    return [*lead, means_sentence(found)]


def _lead(known: Sequence[ClientGain], found: Joining) -> str:
    unit, n = found.unit, len(known)
    verdicts = [gain.verdict(unit) for gain in known]
    gains, losses = verdicts.count("gain"), verdicts.count("loss")
    n_open, n_single, n_alike = (verdicts.count(verdict) for verdict in ("open", "one seed", "alike"))
    seeds = sorted({gain.paired.n_seeds for gain in known if gain.paired is not None})
    over = f"{seeds[0]} seeds" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]} seeds"
    others = "the other " if n_open == n - gains - losses < n else ""
    left = "" if not n_open else f"; for {others}{n_open} the 95{SP}% interval holds 0"
    if n_alike:
        change = "changes" if n_alike == 1 else "change"
        left += f"; {n_alike} {change} by the same with every seed, too few for an interval"
    if n_single:
        left += f"; {n_single} {'has' if n_single == 1 else 'have'} one seed in common and no interval"
    return (
        f"Joining with {found.method} against training alone, {over}: {gains} of {n} clients gain "
        f"({100 * gains / n:.0f}{SP}%) and {losses} lose{left}. {_least(known, unit)}"
    )


def _one_seed_lead(known: Sequence[ClientGain], found: Joining) -> str:
    unit, n = found.unit, len(known)
    better = sum(unit.is_gain(gain.difference) for gain in known)
    same = sum(gain.difference == 0 for gain in known)
    return (
        f"With one seed there is no interval, so this may be chance: with {found.method}, {better} of {n} clients "
        f"score better than alone, {n - better - same} worse and {same} the same. {_least(known, unit)}"
    )


def _least(known: Sequence[ClientGain], unit: Unit) -> str:
    least = least_gain(known, unit)
    oriented = unit.oriented(least[0].difference)
    if len(least) == len(known):
        return f"All of them change by {unit.change(least[0].difference)}." if oriented else "Nobody's score changes."
    if oriented == 0:
        return f"Least gains {least[0].name}, whose score does not change." if len(least) == 1 else _unchanged(least)
    names = ", ".join(gain.name for gain in least[:3]) + (f" and {len(least) - 3} more" if len(least) > 3 else "")
    verb = ("loses" if len(least) == 1 else "lose") if oriented < 0 else ("gains" if len(least) == 1 else "gain")
    which = "most" if oriented < 0 else "least"
    has_interval = len(least) == 1 and least[0].paired is not None and least[0].paired.error > 0
    interval = f" ({interval_text(least[0], unit)})" if has_interval else ""
    change, verdict = unit.change(least[0].difference), least[0].verdict(unit)
    if verdict in ("gain", "loss"):
        return f"{names} {verb} {which}: {change}{interval}."
    chance = "" if has_interval or verdict == "one seed" else ", which may be chance"
    return f"The least favourable change is that of {names}: {change}{interval}{chance}."


def _unchanged(least: Sequence[ClientGain]) -> str:
    return f"The scores of {len(least)} clients do not change, and nobody's falls."


def means_sentence(found: Joining) -> str:
    """Return the means over the clients that have a score in each."""
    unit = found.unit
    parts = [("training alone", "alone"), (found.method, "joined")] + [("all rows pooled", "pooled")] * found.has_pooled
    told = []
    for title, key in parts:
        values = [getattr(gain, key).mean for gain in found.clients]
        finite = [value for value in values if math.isfinite(value)]
        if finite:
            told.append(f"{title} {unit.text(float(np.mean(finite)))}")
    better = "" if unit.higher_is_better else ", lower is better"
    return f"Mean {unit.name} over clients{better}: {', '.join(told)}."


def client_sentence(gain: ClientGain, found: Joining) -> str:
    """Return what joining brings one client: the change with its interval, and the score alone."""
    unit = found.unit
    better = "" if unit.higher_is_better else " (lower is better)"
    if math.isnan(gain.difference):
        return f"{gain.name}: there is no score with {found.method} and alone, so what joining brings is not known."
    text = f"{gain.name}: joining changes your {unit.name}{better} by {unit.change(gain.difference)}"
    n_seeds = 0 if gain.paired is None else gain.paired.n_seeds
    match gain.verdict(unit):
        case "alike":
            text += f" (the same with each of the {n_seeds} seeds, too few for an interval: it may be chance)"
        case "open" if gain.paired is not None and gain.paired.error == 0:
            text = f"{gain.name}: joining changes your {unit.name}{better} with none of the {n_seeds} seeds"
        case "gain" | "loss" as verdict if gain.paired is not None and gain.paired.error == 0:
            text += f" (the same with each of the {n_seeds} seeds), a {verdict}"
        case "one seed":
            text += " (one seed, no interval: it may be chance)"
        case "open":
            text += f" ({interval_text(gain, unit)}, which holds 0: the seeds do not settle whether joining helps)"
        case verdict:
            text += f" ({interval_text(gain, unit)}), a {verdict}"
    text += f"; training alone gives {unit.text(gain.alone.mean)}, joining {unit.text(gain.joined.mean)}"
    if found.has_pooled and math.isfinite(gain.pooled.mean):
        text += f", all rows pooled {unit.text(gain.pooled.mean)}"
    return text + "."


def interval_text(gain: ClientGain, unit: Unit) -> str:
    """Return the interval of a change in words."""
    assert gain.paired is not None
    most = 100.0 if unit.points else math.inf  # scores from 0 to 100 cannot differ by more
    low, high = max(gain.paired.low, -most), min(gain.paired.high, most)
    return f"95{SP}% interval {unit.signed(low)} to {unit.signed(high)}"


def behind_sentences(experiment: Experiment) -> list[str]:
    """Return in which the method in focus is below another federated one by more than a standard error, if any."""
    unit, focus = unit_of(experiment), experiment.methods[experiment.focus]
    rivals = [m for m in experiment.methods if m is not focus and m.algorithm not in (ALONE, POOLED)]
    told = []
    for pick, title in (("mean", f"mean {unit.name}"), ("worst", f"{unit.name} of the worst-off client")):
        mine = means_by_seed(focus, unit, pick)
        found = []
        for rival in rivals:
            theirs = means_by_seed(rival, unit, pick)
            paired = paired_difference(mine, theirs)
            if paired is not None and unit.oriented(paired.difference) < -paired.error:
                found.append((unit.oriented(paired.difference), paired, rival))
        if found:
            _, paired, rival = min(found, key=lambda entry: entry[0])
            told.append(
                f"{focus.label} is behind {rival.label} in the {title}: by {unit.change(paired.difference)} "
                f"(standard error {unit.signed(paired.error).lstrip('+')}, {paired.n_seeds} seeds)."
            )
    return told


def methods_sentences(experiment: Experiment) -> list[str]:
    """Return which method has the best mean and which serves the worst-off best, ties and doubts included."""
    unit = unit_of(experiment)
    means = _averages(experiment, "mean", unit)
    tails = _averages(experiment, "worst10", unit)
    known = [i for i, value in enumerate(means) if math.isfinite(value)]
    if not known:
        return [f"No {unit.name} has been measured yet."]
    who = _worst_off(experiment)
    labels = [method.label for method in experiment.methods]
    if len(known) == 1:
        i = known[0]
        tail = f"; {who} gets {unit.text(tails[i])}" if math.isfinite(tails[i]) else ""
        told = [f"{labels[i]} reaches a mean {unit.name} of {unit.text(means[i])}{tail}."]
    else:
        best = "highest" if unit.higher_is_better else "lowest"
        told = [_best_sentence(experiment, means, "mean", f"the {best} mean {unit.name}", unit)]
        if sum(math.isfinite(value) for value in tails) > 1:
            told.append(_best_sentence(experiment, tails, "worst10", f"the best {unit.name} for {who}", unit))
    silent = [label for label, value in zip(labels, means, strict=True) if not math.isfinite(value)]
    if silent:
        told.append(f"Without a finite {unit.name}: {', '.join(silent)}.")
    if summed := [m.label for m in experiment.methods if any("summed" in run.summary for run in m.runs)]:
        told.append(f"The server had sums of scores alone with {', '.join(summed)}: nobody's own score is known.")
    return told


def _best_sentence(experiment: Experiment, values: Sequence[float], key: str, what: str, unit: Unit) -> str:
    """Return who is best in a measure, as printed: those who share a printed value share the place."""
    known = [i for i, value in enumerate(values) if math.isfinite(value)]
    ranked = sorted(known, key=lambda i: unit.oriented(values[i]), reverse=True)
    top = unit.text(values[ranked[0]])
    best = [i for i in ranked if unit.text(values[i]) == top]
    labels = [experiment.methods[i].label for i in best]
    if len(best) == len(known):
        return f"All methods have the same in {what.removeprefix('the ')}: {top}."
    if len(best) > 1:
        return f"{', '.join(labels[:-1])} and {labels[-1]} share {what} ({top})."
    second = next(i for i in ranked if i not in best)
    doubt = _doubt(experiment.methods[best[0]], experiment.methods[second], key, unit)
    return (
        f"{labels[0]} has {what} ({top}); next is {experiment.methods[second].label} with "
        f"{unit.text(values[second])}{doubt}."
    )


def _doubt(first: Method, second: Method, key: str, unit: Unit) -> str:
    mine, theirs = ({run.seed: _measure(run, key, unit) for run in m.runs} for m in (first, second))
    paired = paired_difference(mine, theirs)
    if paired is None:
        return " (one shared seed: it may be chance)" if set(mine) & set(theirs) else " (no shared seed)"
    return ", which the seeds do not settle" if paired.p >= ACCEPTED else ""


def _averages(experiment: Experiment, key: str, unit: Unit) -> list[float]:
    found = []
    for method in experiment.methods:
        values = [value for value in (_measure(run, key, unit) for run in method.runs) if math.isfinite(value)]
        found.append(float(np.mean(values)) if values else math.nan)
    return found


def _measure(run: Run, key: str, unit: Unit) -> float:
    """Return the mean over a run's clients, or over the worst of them, as it is told; NaN where nothing is known."""
    values = unit.values(run.accuracy)
    values = values[np.isfinite(values)]
    if not values.size:
        return float(unit.values(np.array([run.measures().get(key, math.nan)]))[0])
    if key == "mean":
        return float(values.mean())
    worst_first = np.sort(values) if unit.higher_is_better else -np.sort(-values)
    return float(worst_first[: tail_size(values.size, 0.10)].mean())


def _worst_off(experiment: Experiment) -> str:
    n = len(experiment.runs[0].clients)
    size = tail_size(n, 0.10) if n else 1
    return "the worst-off client" if size == 1 else "the worst tenth of clients"
