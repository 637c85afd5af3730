"""Evaluation of which the server gets sums alone: with `privacy.secure` where only aggregates may be written."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dqnfed.core.problem import Problem, score_range
from dqnfed.maths.fairness import summary_of_moments
from dqnfed.secure.release import FEWEST
from dqnfed.secure.ring import Words
from dqnfed.secure.sums import FEWEST_SQUARED, Moments, fewest, moments, rounded_score
from dqnfed.sim.choice import LAST, RULES
from dqnfed.sim.clients import SummingClients, SumQuestion, Sums
from dqnfed.sim.state import NOBODY, Known, Record, Setup, State

logger = logging.getLogger("dqnfed")
LOSS, SCORES, SQUARES = "loss", "scores", "squares"  # the training loss; every model's score; squares of the scores
PART_LOSS, PART_SCORE = "part-loss", "part-score"  # of the primary model, on the examples of the scores
PERCENT = (0.0, 100.0)
FROM_SUMS = (LAST, "loss", "mean")  # of `eval.select`
ALL_TOGETHER = torch.tensor([-1])  # in the place of a client, where a mean loss stands for everybody's
NOT_KNOWN = (
    "the server has sums of losses and scores alone, so that the worst and best clients, improved clients (rho) and "
    "participants' losses are not known"
)


def squared_numbers(names: Sequence[str], n_models: int) -> list[bool]:
    """Return for every number of a question, in order, whether its square is summed too."""
    return [name == SCORES and SQUARES in names for name in _each(names, n_models)]


def _each(names: Sequence[str], n_models: int) -> list[str]:
    """Return the name of every number."""
    return [name for name in names if name != SQUARES for _ in range(n_models if name == SCORES else 1)]


def are_enough(setup: Setup, question: SumQuestion, clients: Tensor) -> bool:
    """Return whether these clients are enough for every sum; not all may have examples for scores."""
    least = fewest(squared_numbers(question.names, len(setup.model_names)))
    return min(len(clients), int(_tested(setup, question.part, clients).sum())) >= least


def read_sums(setup: Setup, question: SumQuestion, padded: Mapping[int, Words], pads: Words) -> Sums:
    """Return what follows from the words of those who replied and from the sum of their pads."""
    clients, n_models = torch.tensor(sorted(padded)), len(setup.model_names)
    n_tested = int(_tested(setup, question.part, clients).sum())
    named = _each(question.names, n_models)
    counts = [len(clients) if name == LOSS else n_tested for name in named]
    words = [padded[client] for client in clients.tolist()]
    found = Sums(clients, {name: [] for name in named})
    for name, each in zip(named, moments(words, pads, squared_numbers(question.names, n_models), counts), strict=True):
        found.numbers[name].append(each)
    return found


def check_means(setup: Setup, sums: Sums) -> None:
    """Refuse means that no losses or scores have: some client's number, which nobody sees, is wrong."""
    of_losses, of_scores = (setup.problem.loss_floor, math.inf), score_range(setup.problem.score_name)
    for name, found in sums.numbers.items():
        low, high = of_losses if name in (LOSS, PART_LOSS) else of_scores
        for mean in (each.mean for each in found):
            if not low - 1e-3 <= mean <= high + 1e-3:
                raise ValueError(f"their mean {name} is {mean:g}, but must be in [{low:g}, {high:g}]")


def summed_score(problem: Problem, score: float) -> float:
    """Return a score as it is summed: rounded where it is a share in percent."""
    return rounded_score(score) if score_range(problem.score_name) == PERCENT else score


def without(sums: Sums, are_known: Sequence[bool]) -> Sums:
    """Return the sums with NaN for numbers that some client could not give."""
    known = iter(are_known)
    numbers = {
        name: [each if next(known) else Moments(each.n, math.nan, math.nan) for each in found]
        for name, found in sums.numbers.items()
    }
    return sums._replace(numbers=numbers)


def _tested(setup: Setup, part: str, clients: Tensor) -> Tensor:
    """Return which clients have examples for scores."""
    return setup.federation.examples(part).sizes_of(clients) > 0  # type: ignore[arg-type]


def summed_record(setup: Setup, state: State, clients: SummingClients, *, evaluate_all: bool) -> Record:
    """Return the record of an evaluation at the present model, from sums."""
    record: Record = {"rho": None, "loss_before": None, "loss_after": None, "train_loss": None, "accuracy": None}
    state.losses = NOBODY
    if not evaluate_all:
        return record
    asked = setup.evaluated
    has_spread = int(_tested(setup, setup.evaluation.part, asked).sum()) >= FEWEST_SQUARED
    names = (LOSS, SCORES, SQUARES) if has_spread else (LOSS, SCORES)
    found = clients.sums(setup, state, SumQuestion(names, asked, setup.evaluation.part))
    if found is None:
        return record
    if len(found.clients) < len(asked):
        record["silent"] = asked[~torch.isin(asked, found.clients)].tolist()
    if len(asked) < setup.federation.n_clients:
        record["evaluated"] = len(asked)
    [loss], nonnegative = found.numbers[LOSS], score_range(setup.problem.score_name)[0] >= 0.0
    state.losses = Known(ALL_TOGETHER, torch.tensor([loss.mean], dtype=torch.float64))
    record["train_loss"] = {"mean": loss.mean, "max": math.nan}
    each = [summary_of_moments(m.mean, m.std, m.n, nonnegative=nonnegative) for m in found.numbers[SCORES]]
    summaries = dict(zip(setup.model_names, each, strict=True))
    record["accuracy"] = each[0]
    if len(each) > 1:
        record["models"] = {name: summaries[name] for name in setup.model_names[1:]}
    return record


def validation_means(setup: Setup, state: State, clients: SummingClients) -> tuple[float, float]:
    """Return the mean validation loss and score that the choice of a model or early stopping needs, NaN for neither."""
    wanted = setup.evaluation
    names = [PART_LOSS] if wanted.select == "loss" else []
    names += [PART_SCORE] if wanted.select == "mean" or wanted.patience is not None else []
    asked = setup.evaluated[_tested(setup, "validation", setup.evaluated)]
    found = clients.sums(setup, state, SumQuestion(tuple(names), asked, "validation"))
    means = {} if found is None else {name: numbers[0].mean for name, numbers in found.numbers.items()}
    return means.get(PART_LOSS, math.nan), means.get(PART_SCORE, math.nan)


def check_sums(setup: Setup) -> None:
    """Refuse what sums do not tell, and say what will not be known."""
    if setup.summing is None:
        return
    select, n_clients = setup.evaluation.select, len(setup.evaluated)
    n_tested = int(_tested(setup, setup.evaluation.part, setup.evaluated).sum())
    without = "; set it otherwise, or take `eval.metrics` = 'per-client', where clients evaluate in the open."
    if select not in FROM_SUMS:
        raise ValueError(
            f"`eval.select` = '{select}' ({RULES[select]}) needs every client's score, but with `privacy.secure` and "
            f"`eval.metrics` = 'aggregate-only' the server gets sums: choose one of {', '.join(FROM_SUMS)}{without}"
        )
    if setup.sampling.rule == "power-of-choice":
        raise ValueError(
            "`train.sampling` = 'power-of-choice' asks for single clients' losses, but with `privacy.secure` and "
            f"`eval.metrics` = 'aggregate-only' the server gets sums{without}"
        )
    if min(n_clients, n_tested) < FEWEST:
        raise ValueError(
            f"a sum is over at least {FEWEST} clients, but {n_clients} are evaluated (`eval.clients`), {n_tested} of "
            f"them with {setup.evaluation.part} examples{without}"
        )
    logger.warning("privacy.secure with eval.metrics = 'aggregate-only': %s", NOT_KNOWN)
