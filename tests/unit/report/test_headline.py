"""The first sentences of a report are true: checked on random scores against scipy and plain counting."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from dqnfed.report.client_bars import clients_html
from dqnfed.report.headline import client_sentence, findings
from dqnfed.report.joining import joining
from dqnfed.report.measures import Floats
from dqnfed.report.significance import Paired, adjusted
from dqnfed.report.units import MINUS
from tests.helpers.score_tables import experiment_of, name_of

MANY = range(60)


def drawn(seed: int) -> dict[str, Floats]:
    """Return random scores of three methods: few or many seeds and clients, ties, large and tiny effects, holes."""
    rng = np.random.default_rng(seed)
    n_seeds, n_clients = int(rng.choice([1, 2, 3, 5, 20])), int(rng.choice([1, 2, 4, 7, 25]))
    base = 60 + 15 * rng.normal(size=(n_seeds, n_clients))
    effect = rng.choice([0.0, 0.02, 1.0, 10.0]) * rng.normal(size=n_clients)
    noise = rng.choice([0.0, 0.5, 5.0])
    found = {
        "local-only": base,
        "pooled": base + rng.normal(size=base.shape),
        "fedavg": base + noise * rng.normal(size=base.shape),
        "dqn-fed": base + effect + noise * rng.normal(size=base.shape),
    }
    if rng.random() < 0.3:
        found["local-only"] = np.where(rng.random(base.shape) < 0.3, np.nan, base)
    if rng.random() < 0.3:  # scores of few test rows are multiples of some step
        found = {name: np.round(values / 10) * 10 for name, values in found.items()}
    return {name: np.clip(values, 0, 100) for name, values in found.items()}


def verdicts(joined: Floats, alone: Floats) -> list[str]:
    """Return gain, loss, open, alike, single or none for every client, by scipy's paired test."""
    found = []
    for mine, theirs in zip(joined.T, alone.T, strict=True):
        both = np.isfinite(mine) & np.isfinite(theirs)
        differences = (mine - theirs)[both]
        if both.sum() == 0:
            found.append("none")
        elif both.sum() == 1:
            found.append("single")
        elif np.ptp(differences) < 1e-9:
            mean = differences.mean()
            few = both.sum() < 6  # an interval of no width says nothing where so few seeds happen to agree
            found.append("open" if abs(mean) < 1e-9 else "alike" if few else "gain" if mean > 0 else "loss")
        else:
            interval = stats.ttest_rel(mine[both], theirs[both]).confidence_interval(0.95)
            found.append("gain" if interval.low > 0 else "loss" if interval.high < 0 else "open")
    return found


@pytest.mark.parametrize("seed", MANY)
def test_the_lead_counts_gains_and_losses_as_a_paired_test_does(seed: int) -> None:
    scores = drawn(seed)
    experiment = experiment_of(scores)
    text = " ".join(findings(experiment))
    wanted = verdicts(scores["dqn-fed"], scores["local-only"])
    if len(wanted) == 1:
        assert text.startswith((name_of(0), "DQN-Fed is behind", "What joining brings is not known"))
        return
    known = [verdict for verdict in wanted if verdict != "none"]
    if not known:
        assert "not known" in text
    elif set(known) == {"single"}:
        assert "With one seed there is no interval" in text
        changes = (scores["dqn-fed"] - scores["local-only"]).T
        means = np.array([mine[np.isfinite(mine)].mean() for mine in changes if np.isfinite(mine).any()])
        found = re.search(r"(\d+) of (\d+) clients score better than alone, (\d+) worse and (\d+) the same", text)
        assert found is not None
        assert [int(n) for n in found.groups()] == [
            int((means > 0).sum()), len(known), int((means < 0).sum()), int((means == 0).sum())
        ]  # fmt: skip
    else:
        found = re.search(r"(\d+) of (\d+) clients gain \((\d+)\s%\) and (\d+) lose", text)
        assert found is not None
        gains, n, share, losses = (int(number) for number in found.groups())
        assert (gains, n, losses) == (known.count("gain"), len(known), known.count("loss"))
        assert share == round(100 * gains / n)
        if n_open := known.count("open"):
            assert re.search(rf"for (the other )?{n_open} the 95\s% interval holds 0", text)
        if n_alike := known.count("alike"):
            verb = "changes" if n_alike == 1 else "change"
            assert f"{n_alike} {verb} by the same with every seed, too few for an interval" in text


@pytest.mark.parametrize("seed", MANY)
def test_the_client_named_gains_least_and_every_client_is_told_its_own_numbers(seed: int) -> None:
    scores = drawn(seed)
    experiment = experiment_of(scores)
    found = joining(experiment)
    wanted = verdicts(scores["dqn-fed"], scores["local-only"])
    changes = {}
    for c, (gain, verdict) in enumerate(zip(found.clients, wanted, strict=True)):
        text = client_sentence(gain, found)
        assert text.startswith(f"{name_of(c)}: ")
        if verdict == "none":
            assert "not known" in text
            continue
        both = np.isfinite(scores["local-only"][:, c])
        changes[c] = float((scores["dqn-fed"][both, c] - scores["local-only"][both, c]).mean())
        assert ("holds 0" in text or "with none of the" in text) == (verdict == "open")
        assert ("may be chance" in text) == (verdict in ("single", "alike"))
        assert ("), a gain;" in text) == (verdict == "gain")
        assert ("), a loss;" in text) == (verdict == "loss")
        told = re.search(r"training alone gives ([\d.]+)", text)
        assert told is not None
        assert float(told[1]) == pytest.approx(scores["local-only"][both, c].mean(), abs=0.051)
    text = " ".join(findings(experiment))
    lowest = min(changes.values(), default=math.nan)
    least = {name_of(c): wanted[c] for c, change in changes.items() if abs(change - lowest) < 1e-9}
    if len(changes) > 1 and (named := re.search(r"\. ([^.:]*?) (gains?|loses?|lose) (least|most): ", text)):
        assert least[named[1].split(",")[0].split(" and ")[0]] in ("gain", "loss")
        assert (named[2][0] == "l") == (lowest < 0)
        assert (named[3] == "most") == (lowest < 0)
    if open_one := re.search(
        r"The least favourable change is that of ([^.:]*?): ", text
    ):  # nobody is said to lose by it
        assert least[open_one[1].split(",")[0].split(" and ")[0]] in ("open", "alike", "single")


@pytest.mark.parametrize("seed", MANY)
def test_without_references_the_best_is_the_best_as_printed(seed: int) -> None:
    scores = {name: values for name, values in drawn(seed).items() if name in ("fedavg", "dqn-fed", "pooled")}
    scores = {"qffl" if name == "pooled" else name: values for name, values in scores.items()}
    experiment = experiment_of(scores)
    first = findings(experiment)[0]
    printed = {m.label: f"{scores[m.algorithm].mean(1).mean():.1f}" for m in experiment.methods}
    top = max(printed.values(), key=float)
    best = {label for label, text in printed.items() if text == top}
    assert top in first
    if len(best) == len(printed):
        assert first.startswith("All methods have the same")
    elif len(best) > 1:
        assert "share the highest mean accuracy" in first
        assert all(label in first for label in best)
    else:
        assert first.startswith(f"{best.pop()} has the highest mean accuracy")
    assert "worst tenth" not in " ".join(findings(experiment)) or scores["fedavg"].shape[1] >= 20


def test_a_tie_is_called_a_tie() -> None:
    scores = np.full((3, 4), 88.9)
    assert findings(experiment_of({"fedavg": scores, "dqn-fed": scores}))[0].startswith("All methods have the same")
    both = findings(experiment_of({"local-only": scores, "dqn-fed": scores}))
    assert "0 of 4 clients gain" in both[0]
    assert "Nobody's score changes" in both[0]


def test_the_same_change_with_two_seeds_is_no_certainty() -> None:
    """Two test sets of 40 rows may gain one row each: Student's interval has no width then, and says nothing."""
    alone = np.full((2, 2), 90.0)
    few = experiment_of({"local-only": alone, "dqn-fed": alone + np.array([2.5, 0.0])})
    assert "0 of 2 clients gain" in findings(few)[0]
    found = joining(few)
    assert "the same with each of the 2 seeds, too few for an interval" in client_sentence(found.clients[0], found)
    assert "joining changes your accuracy with none of the 2 seeds" in client_sentence(found.clients[1], found)
    many = experiment_of({"local-only": np.full((8, 2), 90.0), "dqn-fed": np.full((8, 2), 90.0) + np.array([2.5, 0])})
    assert "1 of 2 clients gain" in findings(many)[0]


@pytest.mark.parametrize("sign", [1, -1])
def test_a_regression_speaks_in_the_targets_units_and_lower_is_better(sign: int, tmp_path: Path) -> None:
    """Scores are minus the squared error of standardised targets: errors of 0.5 and 0.4 at a spread of 20 are 10, 8."""
    alone = -((0.5 ** np.ones((6, 4)) + 0.001 * np.arange(6)[:, None]) ** 2)
    joined = -(((0.5 - sign * 0.1) * np.ones((6, 4)) + 0.001 * np.arange(6)[:, None]) ** 2)
    experiment = experiment_of(
        {"local-only": alone, "dqn-fed": joined, "pooled": joined}, score="loss", folder=tmp_path, spread=20.0
    )
    text = " ".join(findings(experiment))
    assert f"{4 if sign > 0 else 0} of 4 clients gain" in text
    assert "Mean error of pressure over clients, lower is better: training alone 10.0" in text
    found = joining(experiment)
    said = client_sentence(found.clients[0], found)
    assert ("a gain" if sign > 0 else "a loss") in said
    assert f"by {MINUS if sign > 0 else '+'}2.0 (" in said


def test_who_loses_is_told_first() -> None:
    rng = np.random.default_rng(0)
    base = 80 + rng.normal(size=(10, 4))
    worse = experiment_of({"fedavg": base + 3, "dqn-fed": base, "local-only": base - 1, "pooled": base})
    assert findings(worse)[0].startswith(f"DQN-Fed is behind FedAvg in the mean accuracy: by {MINUS}3.0")
    better = experiment_of({"fedavg": base - 3, "dqn-fed": base, "local-only": base - 1, "pooled": base})
    assert findings(better)[0].startswith("Joining with DQN-Fed against training alone, 10 seeds: 4 of 4 clients gain")


def test_nothing_finite_is_not_a_result() -> None:
    nothing = np.full((2, 3), math.nan)
    assert findings(experiment_of({"fedavg": nothing, "dqn-fed": nothing})) == ["No accuracy has been measured yet."]
    some = findings(experiment_of({"fedavg": nothing, "dqn-fed": np.full((2, 3), 50.0)}))
    assert some[0].startswith("DQN-Fed reaches a mean accuracy of 50.0")
    assert some[1] == "Without a finite accuracy: FedAvg."
    lost = findings(experiment_of({"local-only": nothing, "dqn-fed": np.full((2, 3), 50.0)}))
    assert "not known" in lost[0]


def test_an_interval_that_leaves_0_out_is_not_printed_with_0() -> None:
    alone = np.full((2, 2), 50.0)
    joined = alone + np.array([[0.004], [0.0041]])
    found = joining(experiment_of({"local-only": alone, "dqn-fed": joined}))
    text = client_sentence(found.clients[0], found)
    assert "+0.004" in text
    assert "interval +0.003 to +0.005), a gain" in text


@pytest.mark.parametrize("seed", range(40))
def test_adjusted_intervals_leave_0_out_exactly_where_p_is_below_a_twentieth(seed: int) -> None:
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(int(rng.integers(1, 8))):
        n = int(rng.integers(2, 12))
        values = rng.normal(rng.choice([0, 0.5, 1.5]), 1, size=n)
        test = stats.ttest_1samp(values, 0)
        interval = test.confidence_interval(0.95)
        error = float(values.std(ddof=1) / math.sqrt(n))
        found.append(Paired(float(values.mean()), interval.low, interval.high, float(test.pvalue), n, error))
    for before, after in zip(found, adjusted(found), strict=True):
        assert (after.low > 0 or after.high < 0) == (after.p < 0.05)
        assert after.low <= before.low + 1e-12
        assert after.high >= before.high - 1e-12


@pytest.mark.parametrize("seed", range(10))
def test_every_client_has_a_named_bar(seed: int) -> None:
    scores = drawn(seed)
    html = clients_html(experiment_of(scores))
    n = scores["dqn-fed"].shape[1]
    assert html.count('class="bar-row"') == n
    assert all(f'<span class="who">{name_of(c)}</span>' in html for c in range(n))
    widths = [float(w) for w in re.findall(r'class="fill" style="left:0.00%;width:([\d.]+)%', html)]
    assert widths == pytest.approx(scores["dqn-fed"].mean(0).tolist(), abs=0.01)
