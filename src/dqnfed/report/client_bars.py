"""One bar a client, named, over all seeds, and one sentence for each: what joining brings it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from html import escape

from dqnfed.report.comparison import REFERENCES, Experiment
from dqnfed.report.headline import client_sentence
from dqnfed.report.joining import ClientGain, Estimate, Joining, joining

MAX_SENTENCES = 12  # more are folded away
MAX_BARS = 30  # clients shown: those who gain least or, without a reference, those with the lowest scores


def clients_html(experiment: Experiment) -> str:
    """Return the bars of the method in focus and, where clients were also trained alone, a sentence for each."""
    found = joining(experiment)
    known = [gain for gain in found.clients if math.isfinite(gain.joined.mean)]
    if not known:
        return ""
    compares = found.has_alone and experiment.methods[experiment.focus].algorithm not in REFERENCES
    shown = least_first(known, found, compares=compares)[:MAX_BARS]
    if len(known) <= MAX_BARS:
        shown = known
    bars = "".join(_bar(gain, found, _scale(shown, found), compares=compares) for gain in shown)
    first = "those who gain least first" if compares else "the worst-off first"
    rest = "" if len(shown) == len(known) else f" {len(shown)} of {len(known):,} clients, {first}."
    html = f'<p class="caption">{_legend(experiment, found, compares=compares)}{rest}</p><div class="bars">{bars}</div>'
    if compares:
        items = "".join(f"<li>{escape(client_sentence(gain, found))}</li>" for gain in shown)
        told = f'<ul class="told">{items}</ul>'
        if len(shown) > MAX_SENTENCES:
            told = f"<details><summary>One sentence for each of these clients</summary>{told}</details>"
        html += told + _note(shown, found)
    return html


def least_first(gains: Iterable[ClientGain], found: Joining, *, compares: bool) -> list[ClientGain]:
    """Return the clients, those who gain least (or score lowest) first; those without a number last."""

    def key(gain: ClientGain) -> float:
        value = gain.difference if compares else gain.joined.mean
        return math.inf if math.isnan(value) else found.unit.oriented(value)

    return sorted(gains, key=key)


def _legend(experiment: Experiment, found: Joining, *, compares: bool) -> str:
    better = "" if found.unit.higher_is_better else ", lower is better"
    several = len(experiment.seeds) > 1
    over = f", mean over {len(experiment.seeds)} seeds" if several else ", one seed"
    text = f"Bar: {escape(found.method)}, test {escape(found.unit.name)}{better}{over}."
    if several:
        text += " Line: 95&nbsp;% interval."
    if found.unit.spread is not None:
        text += " Error: root of the mean squared error, in the units of the label."
    if compares:
        text += ' <span class="key"><span class="mark alone" aria-hidden="true"></span> trained alone.</span>'
        if found.has_pooled:
            text += ' <span class="key"><span class="mark pooled" aria-hidden="true"></span> all rows pooled.</span>'
    return text


def _note(shown: list[ClientGain], found: Joining) -> str:
    if not any(gain.paired for gain in shown):
        return ""
    return (
        '<p class="hint">Intervals are over seeds, each with its own split of the same rows, start and batches; they '
        "are Student's, paired by seed, 95&nbsp;% for each client by itself, not adjusted for their number.</p>"
    )


def _scale(shown: list[ClientGain], found: Joining) -> tuple[float, float]:
    """Return what the left and the right end of the bars mean."""
    if found.unit.points:
        return 0.0, 100.0
    estimates = [e for gain in shown for e in (gain.joined, gain.alone, gain.pooled)]
    values = [v for e in estimates for v in (e.mean, e.low, e.high) if math.isfinite(v)]
    low = 0.0 if found.unit.spread is not None else min(0.0, *values)  # an error is never below 0, its interval may be
    high = max(0.0, *values)
    return (low, high) if high > low else (low, low + 1.0)


def _bar(gain: ClientGain, found: Joining, scale: tuple[float, float], *, compares: bool) -> str:
    low, high = scale

    def place(value: float) -> float:
        return 100.0 * min(1.0, max(0.0, (value - low) / (high - low)))

    unit, joined = found.unit, gain.joined
    start, end = sorted((place(0.0), place(joined.mean)))
    inner = f'<span class="fill" style="left:{start:.2f}%;width:{end - start:.2f}%"></span>'
    if math.isfinite(joined.low):
        left, right = place(joined.low), place(joined.high)
        inner += f'<span class="reach" style="left:{left:.2f}%;width:{right - left:.2f}%"></span>'
    said = [f"{found.method} {_told(joined, found)}"]
    for title, estimate in (("alone", gain.alone), ("pooled", gain.pooled)) if compares else ():
        if math.isfinite(estimate.mean):
            inner += f'<span class="mark {title}" style="left:{place(estimate.mean):.2f}%"></span>'
            said.append(f"{title} {_told(estimate, found)}")
    label = escape(f"{gain.name}: {', '.join(said)}", quote=True)
    return (
        f'<div class="bar-row"><span class="who">{escape(gain.name)}</span>'
        f'<span class="track" role="img" aria-label="{label}">{inner}</span>'
        f'<span class="amount">{escape(unit.text(joined.mean))}</span></div>'
    )


def _told(estimate: Estimate, found: Joining) -> str:
    text = found.unit.text(estimate.mean)
    if math.isfinite(estimate.low):
        text += f" ({found.unit.text(estimate.low)} to {found.unit.text(estimate.high)})"
    return text
