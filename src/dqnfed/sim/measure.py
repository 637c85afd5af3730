"""What is measured in a round: participants before and after, and from time to time everybody."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.func import vmap

from dqnfed.core.run_folder import CLIENT_COLUMNS, ClientRow
from dqnfed.core.tensors import row
from dqnfed.maths.fairness import fairness_summary, improved_share
from dqnfed.sim.evaluate import judge, judge_personal
from dqnfed.sim.memory import MemoryStore
from dqnfed.sim.state import Record, Setup, State


def participant_losses(setup: Setup, state: State, clients: Tensor) -> Tensor | None:
    """Return the participants' training losses at the present model; known ones are not computed again."""
    if not setup.evaluation.participants:
        return None
    known = state.losses[clients]
    if not bool(known.isnan().any()):
        return known
    return judge(setup.problem, state.server.theta, setup.federation.train, clients, with_score=False).loss


def measured(
    setup: Setup, state: State, clients: Tensor, before: Tensor | None, *, evaluate_all: bool
) -> tuple[Record, list[ClientRow]]:
    """Return the record and the client rows of an evaluation at the present model."""
    problem, federation = setup.problem, setup.federation
    everyone = torch.arange(federation.n_clients)
    record: Record = {"rho": None, "loss_before": None, "loss_after": None, "train_loss": None, "accuracy": None}
    state.losses = torch.full_like(state.losses, torch.nan)
    scores: dict[str, Tensor] = {}
    if evaluate_all:
        state.losses = judge(problem, state.server.theta, federation.train, everyone, with_score=False).loss
        record["train_loss"] = {"mean": float(state.losses.mean()), "max": float(state.losses.max())}
        scores = all_scores(setup, state)
        summaries = {name: score_summary(s, federation.n_examples) for name, s in scores.items()}
        record["accuracy"] = next(iter(summaries.values()))
        if len(summaries) > 1:
            record["models"] = {name: summaries[name] for name in list(summaries)[1:]}
    elif before is not None:
        found = judge(problem, state.server.theta, federation.train, clients, with_score=False)
        state.losses[clients] = found.loss
    if before is not None:
        after = state.losses[clients]
        record["loss_before"], record["loss_after"] = float(before.mean()), float(after.mean())
        record["rho"] = improved_share(before, after)
    started = dict(zip(clients.tolist(), before.tolist(), strict=True)) if before is not None else {}
    rows: list[ClientRow] = []
    for c in everyone.tolist() if evaluate_all else clients.tolist() if before is not None else []:
        columns: list[float | None] = [float(s[c]) for s in scores.values()]
        columns = columns or [None] * len(model_columns(setup)[5:])
        rows.append((state.round, c, int(federation.n_examples[c]), started.get(c), float(state.losses[c]), *columns))
    return record, rows


def score_summary(scores: Tensor, n_examples: Tensor) -> dict[str, float]:
    """Return how evenly the clients are served; NaN throughout when some client's score is not a number."""
    if bool(torch.isfinite(scores).all()):
        return fairness_summary(scores, weights=n_examples)
    return dict.fromkeys(fairness_summary(torch.ones(1)), math.nan)


def all_scores(setup: Setup, state: State) -> dict[str, Tensor]:
    """Return every client's score by model name, the primary model first."""
    algorithm, problem = setup.algorithm, setup.problem
    examples = setup.federation.examples(setup.evaluation.part)  # type: ignore[arg-type]
    everyone = torch.arange(setup.federation.n_clients)
    if not algorithm.is_personal:
        models = algorithm.evaluated(state.server, None)
        return {name: _scores(judge(problem, theta, examples, everyone).score) for name, theta in models.items()}
    scores: dict[str, list[Tensor]] = {}
    for c in everyone.split(16):
        memory = state.memory.get(c, setup.feed.tasks(c, state.round))
        models = vmap(lambda kept: algorithm.evaluated(state.server, kept))(memory)
        for name, thetas in models.items():
            scores.setdefault(name, []).append(_scores(judge_personal(problem, thetas, examples, c).score))
    return {name: torch.cat(parts) for name, parts in scores.items()}


def start_record(setup: Setup, state: State) -> tuple[Record, list[ClientRow]]:
    """Return the record, round -1, of the start model."""
    state.round = -1
    record, rows = measured(setup, state, torch.arange(0), None, evaluate_all=True)
    state.round = 0
    state.start = {"accuracy": record["accuracy"], "train_loss": record["train_loss"]}
    return {"round": -1, "status": "start", "clients": [], **record}, rows


def model_columns(setup: Setup) -> tuple[str, ...]:
    """Return the columns of clients.csv: one accuracy for each model that the method wants judged."""
    server = setup.algorithm.init_server(setup.problem, setup.federation.n_clients)
    if not setup.algorithm.is_personal:
        names = list(setup.algorithm.evaluated(server, None))
    else:
        first = torch.arange(1)
        memory = MemoryStore(setup.algorithm, setup.problem, 1).get(first, setup.feed.tasks(first, 0))
        names = list(setup.algorithm.evaluated(server, row(memory, 0)))
    return (*CLIENT_COLUMNS, *(f"accuracy_{name}" for name in names[1:]))


def _scores(scores: Tensor | None) -> Tensor:
    assert scores is not None
    return scores
