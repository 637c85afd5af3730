"""What is measured in a round: participants before and after, and from time to time everybody."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dqnfed.core.run_folder import CLIENT_COLUMNS, ClientRow
from dqnfed.maths.fairness import fairness_summary, improved_share
from dqnfed.sim.clients import Evaluated
from dqnfed.sim.state import NOBODY, Record, Setup, State
from dqnfed.sim.sums import summed_record

FACTOR = 2.0  # a mean training loss above so many times its start is no training
ROUNDING = 1e-6  # by which a loss that starts at its least value may rise


def participant_losses(setup: Setup, state: State, clients: Tensor) -> Tensor | None:
    """Return the participants' training losses at the present model, NaN where a client is silent.

    None in rounds in which they are not asked.
    """
    wanted = setup.evaluation
    if (
        setup.summing is not None
        or not wanted.participants
        or (state.round + 1) % wanted.participants_every
        or not clients.shape[0]
    ):
        return None
    if bool(state.losses.at(clients).isnan().any()):
        found = setup.clients.evaluate(setup, state, clients, with_scores=False)
        state.losses = state.losses.put(found.clients, found.losses)
    return state.losses.at(clients)


def measured(
    setup: Setup, state: State, clients: Tensor, before: Tensor | None, *, evaluate_all: bool
) -> tuple[Record, list[ClientRow]]:
    """Return the record and the client rows of an evaluation at the present model."""
    if setup.summing is not None:
        return summed_record(setup, state, setup.summing, evaluate_all=evaluate_all), []
    federation = setup.federation
    record: Record = {"rho": None, "loss_before": None, "loss_after": None, "train_loss": None, "accuracy": None}
    state.losses = NOBODY
    if not evaluate_all and before is None:
        return record, []
    asked = setup.evaluated if evaluate_all else clients
    found = setup.clients.evaluate(setup, state, asked, with_scores=evaluate_all)
    state.losses = state.losses.put(found.clients, found.losses)
    if len(found.clients) < len(asked):
        record["silent"] = asked[~torch.isin(asked, found.clients)].tolist()
    rows = client_rows(setup, state, clients, before, found)
    if before is not None and len(rest := clients[~torch.isin(clients, asked)]):  # participants outside of a sample
        others = setup.clients.evaluate(setup, state, rest, with_scores=False)
        state.losses = state.losses.put(others.clients, others.losses)
        rows += client_rows(setup, state, clients, before, others)
    if evaluate_all and len(found.clients):
        record["train_loss"] = {"mean": float(found.losses.mean()), "max": float(found.losses.max())}
        if len(asked) < federation.n_clients:
            record["evaluated"] = len(asked)
        tested = federation.examples(setup.evaluation.part).sizes_of(found.clients) > 0  # type: ignore[arg-type]
        sizes = federation.n_examples[found.clients][tested]
        summaries = {name: score_summary(scores[tested], sizes) for name, scores in found.scores.items()}
        record["accuracy"] = next(iter(summaries.values()))
        if len(summaries) > 1:
            record["models"] = {name: summaries[name] for name in list(summaries)[1:]}
    answered = torch.isin(clients, state.losses.clients)
    if before is not None and bool(answered.any()):
        first, after = before[answered], state.losses.at(clients[answered])
        record["loss_before"], record["loss_after"] = float(first.mean()), float(after.mean())
        record["rho"] = improved_share(first, after)
    return record, rows


def client_rows(
    setup: Setup, state: State, clients: Tensor, before: Tensor | None, found: Evaluated
) -> list[ClientRow]:
    """Return the rows of clients.csv for an evaluation; none if only aggregates may be written."""
    if setup.evaluation.metrics == "aggregate-only":
        return []
    started = dict(zip(clients.tolist(), before.tolist(), strict=True)) if before is not None else {}
    asked, sizes = found.clients.tolist(), setup.federation.n_examples[found.clients].tolist()
    tested = (setup.federation.examples(setup.evaluation.part).sizes_of(found.clients) > 0).tolist()  # type: ignore[arg-type]
    columns: list[list[float | None]] = [
        [score if has else None for score, has in zip(scores.tolist(), tested, strict=True)]
        for scores in found.scores.values()
    ]
    columns = columns or [[None] * len(asked)] * len(setup.model_names)
    columns = [[started.get(c) for c in asked], found.losses.tolist(), *columns]
    return [(state.round, *row) for row in zip(asked, sizes, *columns, strict=True)]


def score_summary(scores: Tensor, n_examples: Tensor) -> dict[str, float]:
    """Return how evenly the clients are served; NaN throughout when some client's score is not a number."""
    if bool(torch.isfinite(scores).all()):
        return fairness_summary(scores, weights=n_examples)
    return dict.fromkeys(fairness_summary(torch.ones(1)), math.nan)


def start_record(setup: Setup, state: State) -> tuple[Record, list[ClientRow]]:
    """Return the record, round -1, of the start model."""
    state.round = -1
    record, rows = measured(setup, state, torch.arange(0), None, evaluate_all=True)
    state.round = 0
    state.start = {"accuracy": record["accuracy"], "train_loss": record["train_loss"]}
    if refused := setup.clients.refusals():
        record["refused"] = refused
    return {"round": -1, "status": "start", "clients": [], **record}, rows


def model_columns(setup: Setup) -> tuple[str, ...]:
    """Return the columns of clients.csv: one accuracy for each model that the method evaluates."""
    return (*CLIENT_COLUMNS, *(f"accuracy_{name}" for name in setup.model_names[1:]))


def divergence(history: Sequence[Record]) -> str:
    """Return why the run diverged by its mean training loss at the start and at the end, or nothing."""
    losses = [record["train_loss"]["mean"] for record in history if record.get("train_loss") is not None]
    if len(losses) < 2:
        return ""
    first, last = (math.nan if loss is None else float(loss) for loss in (losses[0], losses[-1]))
    if not math.isfinite(last):
        return "the mean training loss is not finite"
    if math.isfinite(first) and last > first + (FACTOR - 1) * abs(first) + ROUNDING:
        return f"the mean training loss rose from {first:.4g} to {last:.4g}, above {FACTOR:g} times its start"
    return ""
