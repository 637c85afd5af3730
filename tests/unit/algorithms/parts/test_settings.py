"""DQN-Fed's settings: what "auto" means, what is refused, and that what is accepted has an effect."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dqnfed.algorithms.adafed import AdaFed
from dqnfed.algorithms.dqn_fed import DQNFed
from dqnfed.sim.engine import run
from tests.helpers.baselines import classes
from tests.helpers.quadratic_clients import consistent_quadratics

PROBLEM = consistent_quadratics(2, 4).problem
SGD: dict[str, Any] = {"epochs": 2}
PART, ALL = (100, 10), (100, 100)  # clients, and how many of them take part


@pytest.mark.parametrize(
    ("settings", "clients", "local", "step", "metric"),
    [
        ({}, ALL, "gradient", "curvature", "lbfgs"),
        ({}, PART, "gradient", "votes", "identity"),
        ({}, (100, 99), "gradient", "votes", "identity"),
        ({}, (1, 1), "gradient", "curvature", "lbfgs"),
        (SGD, ALL, "sgd", "votes", "identity"),
        (SGD, PART, "sgd", "votes", "identity"),
        ({"batch_size": 8}, ALL, "sgd", "votes", "identity"),
        ({"local": "gradient", **SGD}, ALL, "gradient", "curvature", "lbfgs"),
        ({"local": "sgd"}, ALL, "sgd", "votes", "identity"),
        ({"step": "votes"}, ALL, "gradient", "votes", "identity"),
        ({"step": "match"}, ALL, "gradient", "match", "lbfgs"),
        ({"metric": "identity"}, ALL, "gradient", "curvature", "identity"),
        ({"step": "match"}, PART, "gradient", "match", "identity"),
        ({"step": "fixed", **SGD}, PART, "sgd", "fixed", "identity"),
    ],
)
def test_what_auto_means(
    settings: dict[str, Any], clients: tuple[int, int], local: str, step: str, metric: str
) -> None:
    for kind in (DQNFed, AdaFed):
        method = kind(**settings).prepare(PROBLEM, *clients)
        assert (method.local, method.step, method.metric) == (local, step, metric)
        assert method.prepare(PROBLEM, *clients) == method


REFUSED: list[tuple[dict[str, Any], tuple[int, int], str]] = [
    ({"step": "curvature"}, PART, "only 10 of 100 clients take part; use step='votes'"),
    ({"step": "line-search"}, PART, "only 10 of 100 clients take part; use step='votes'"),
    ({"metric": "lbfgs"}, PART, "only 10 of 100 clients take part; .*metric='identity'"),
    ({"step": "curvature", **SGD}, ALL, "local SGD is no gradient"),
    ({"step": "line-search", **SGD}, ALL, "local SGD is no gradient"),
    ({"metric": "lbfgs", **SGD}, ALL, "local SGD is no gradient"),
    ({"growth": 2.0}, PART, "`growth` is 2.0, but has no effect with step='votes'"),
    ({"growth": 2.0, "step": "match"}, ALL, "`growth` is 2.0, but has no effect with step='match'"),
    ({"step_size": 2.0}, ALL, "`step_size` is 2.0, but has no effect with step='curvature'"),
    ({"step_size": 2.0, "step": "paper"}, PART, "`step_size` is 2.0, but has no effect with step='paper'"),
    ({"metric_memory": 3}, PART, "`metric_memory` is 3, but has no effect with metric='identity'"),
    ({"beyond": "stop", "constraint": "exactly"}, ALL, "`beyond` is 'stop', but has no effect with constraint"),
    ({"drop_stretch": 2.0}, ALL, "`drop_stretch` is 2.0, but has no effect while drop_share is 0"),
]
OF_GRADIENTS = [
    ({"cap": False}, "`cap` is False"),
    ({"rate_bounds": 2.0}, "`rate_bounds` is 2.0"),
    ({"rates": "cauchy"}, "`rates` is 'cauchy'"),
    ({"memory": 3}, "`memory` is 3"),
]


@pytest.mark.parametrize(("settings", "clients", "why"), REFUSED)
def test_what_cannot_work_or_has_no_effect_is_refused(
    settings: dict[str, Any], clients: tuple[int, int], why: str
) -> None:
    for kind in (DQNFed, AdaFed):
        with pytest.raises(ValueError, match=f"{kind.__name__}: .*{why}"):
            kind(**settings).prepare(PROBLEM, *clients)


@pytest.mark.parametrize(("settings", "why"), OF_GRADIENTS)
def test_settings_of_rates_are_refused_with_local_sgd(settings: dict[str, Any], why: str) -> None:
    DQNFed(**settings).prepare(PROBLEM, *PART)
    with pytest.raises(ValueError, match=f"{why}, but has no effect on updates of local SGD"):
        DQNFed(**settings, **SGD).prepare(PROBLEM, *PART)


def test_a_setting_that_is_gone_is_unknown() -> None:
    with pytest.raises(TypeError, match="previous"):
        DQNFed(previous="kept")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ({"rates": "newton"}, "rates"),
        ({"constraint": "at-most"}, "constraint"),
        ({"metric": "diag"}, "metric"),
        ({"step": "long"}, "step"),
        ({"beyond": "pareto"}, "beyond"),
        ({"local": "adam"}, "local"),
        ({"memory": 0}, "memory"),
        ({"metric_memory": 0}, "metric_memory"),
        ({"growth": 0.5}, "growth"),
        ({"ridge": -1.0}, "ridge"),
        ({"rate_bounds": 0.5}, "rate_bounds"),
        ({"step_size": 0.0}, "step_size"),
        ({"cached_clients": -1}, "cached_clients"),
        ({"drop_share": 1.0}, "drop_share"),
        ({"drop_stretch": 1.0, "drop_share": 0.1}, "drop_stretch"),
        ({"lr": 0.0}, "lr"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(bad: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"DQNFed: `{named}` must be"):
        DQNFed(**bad)


def test_exact_hessians_are_refused_for_large_models() -> None:
    problem = replace(PROBLEM, theta0=torch.zeros(10_000))
    with pytest.raises(ValueError, match="n <= 5000"):
        DQNFed(rates="hessian").prepare(problem, 1, 1)


ACCEPTED: list[tuple[dict[str, Any], dict[str, Any], float]] = [  # a change, in which mode, and the participation
    ({"beyond": "stop"}, {}, 1.0),
    ({"beyond": "stop"}, {}, 0.5),
    ({"beyond": "stop"}, SGD, 0.5),
    ({"growth": 1.1}, {}, 1.0),
    ({"metric_memory": 1}, {}, 1.0),
    ({"step_size": 0.5}, {}, 0.5),
    ({"step_size": 0.5}, SGD, 1.0),
    ({"cached_clients": 0}, {}, 0.5),
    ({"cached_clients": 1}, SGD, 0.5),
    ({"cap": False}, {}, 0.5),
    ({"rate_bounds": 1.1}, {}, 0.5),
    ({"ridge": 0.1}, {}, 0.5),
    ({"ridge": 0.1}, SGD, 0.5),
    ({"memory": 3}, {}, 0.5),
    ({"rates": "identity"}, {}, 0.5),
    ({"step": "match"}, SGD, 0.5),
    ({"step": "match"}, {}, 0.5),
    ({"constraint": "exactly"}, {}, 1.0),
]


@pytest.mark.parametrize(("change", "mode", "participation"), ACCEPTED)
def test_what_is_accepted_has_an_effect(change: dict[str, Any], mode: dict[str, Any], participation: float) -> None:
    problem, federation = classes(6)
    one, other = (
        run(DQNFed(**settings), problem, federation, rounds=25, participation=participation)
        for settings in (mode, {**mode, **change})
    )
    assert not torch.allclose(one.theta, other.theta, rtol=1e-6, atol=1e-8)


def test_the_default_growth_is_declared_once() -> None:
    """The rule of the length has the default of the method."""
    prepared = DQNFed().prepare(PROBLEM, 2, 2)
    assert prepared.parts.length.growth == prepared.growth
    strict = DQNFed(beyond="stop").prepare(PROBLEM, 2, 2).parts
    assert (strict.length.allowance, strict.goes_beyond) == (0.0, False)
    assert prepared.parts.length.allowance > 0.0
    assert prepared.parts.goes_beyond


def test_batches_alone_make_the_local_work_sgd() -> None:
    assert DQNFed(batch_size=8).prepare(PROBLEM, 3, 3).local == "sgd"
    assert DQNFed(epochs=2).prepare(PROBLEM, 3, 3).local == "sgd"
    assert DQNFed().prepare(PROBLEM, 3, 3).local == "gradient"
    assert replace(DQNFed(), local="gradient", epochs=2).prepare(PROBLEM, 3, 3).local == "gradient"


def test_the_mode_says_what_was_chosen() -> None:
    assert (
        DQNFed().prepare(PROBLEM, *ALL).mode == "one gradient a round, step=curvature, metric=lbfgs, 0 cached clients"
    )
    assert DQNFed(**SGD).prepare(PROBLEM, *PART).mode.startswith("local training, step=votes, metric=identity, 100")
