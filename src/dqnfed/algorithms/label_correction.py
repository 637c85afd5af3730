"""FedCorr's stages around a finishing method: sweeps, relabelling, fine-tuning, correction, and then that method."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from dqnfed.algorithms.fedavg import client_weights
from dqnfed.algorithms.fedcorr_labels import (
    check_classes,
    corrected_labels,
    dimension_score,
    doubtful_labels,
    mixed_sgd,
    n_real,
    outputs_of,
    probabilities_of,
    two_groups_of_clients,
)
from dqnfed.algorithms.fedcorr_messages import (
    OWN_MESSAGES,
    OWN_REPLIES,
    CopyLabels,
    FinalRelabel,
    LabelCount,
    NoiseEstimate,
    NoiseReport,
    Progress,
    Relabel,
    Stage,
    TrainTurn,
    TurnUpdate,
)
from dqnfed.core.algorithm import (
    LOCAL_WORK,
    AnyAlgorithm,
    Cohort,
    ServerStep,
    Status,
    check_choice,
    check_range,
    check_used,
)
from dqnfed.core.local_work import LocalWork
from dqnfed.core.problem import Problem, Task, logistic_losses, squared_errors
from dqnfed.core.replies import Replies
from dqnfed.core.seeds import numpy_seed_for

SEEDS = 2**24  # whole numbers that single precision can hold
CORRECTING = (  # settings that need a sweep
    "visits",
    "pull",
    "mixup",
    "neighbours",
    "confidence",
    "relabel_share",
    "split",
    "fine_tuning",
    "clean_level",
)


@dataclass(frozen=True, kw_only=True)
class LabelCorrection(LocalWork[Any, Any, Any]):
    """FedCorr with a finishing method `Inner`, whose hyper-parameters stand beside FedCorr's own."""

    Inner: ClassVar[type[AnyAlgorithm]]
    inner_name: ClassVar[str]

    sweeps: int = 5  # T1, training turns of every client before the finishing method, >= 0; 0: none, labels stay
    visits: int = 1  # clients that train at a time in a sweep, >= 1; more than one: their models are averaged
    pull: float = 5.0  # beta, pull of the model that was sent on noisy clients' local steps, >= 0
    mixup: float = 1.0  # alpha of the Beta distribution that two examples are mixed in, >= 0; 0: no mixing
    neighbours: int = 20  # k of the local intrinsic dimension, >= 2; fewer where a client has fewer examples
    confidence: float = 0.5  # a label is replaced if the model's probability is above this, in [0, 1]
    relabel_share: float = 0.5  # of a noisy client's doubtful labels that may be replaced after a sweep, in [0, 1]
    split: str = "bic"  # bic | always: when clients are split in two, if that explains the scores better | always
    fine_tuning: int = 10  # T2, rounds of the finishing method with clean clients only, >= 0
    clean_level: float = 0.1  # estimated noise level up to which a client takes part in fine-tuning, in [0, 1]

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "sweeps", low=0)
        check_range(self, "visits", low=1)
        check_range(self, "pull", low=0.0)
        check_range(self, "mixup", low=0.0)
        check_range(self, "neighbours", low=2)
        check_range(self, "confidence", low=0.0, high=1.0)
        check_range(self, "relabel_share", low=0.0, high=1.0)
        check_choice(self, "split", ("bic", "always"))
        check_range(self, "fine_tuning", low=0)
        check_range(self, "clean_level", low=0.0, high=1.0)
        for name in CORRECTING:
            check_used(self, name, used=self.sweeps > 0, why="with sweeps=0, where no labels are scored or corrected")
        why = "with sweeps=1, since it is multiplied by noise levels that the first sweep estimates"
        check_used(self, "pull", used=self.sweeps > 1, why=why)
        one_step = self.epochs == 1 and self.batch_size is None
        check_used(self, "pull", used=not one_step, why="with one full-batch step a round, which starts at the anchor")
        check_used(self, "clean_level", used=self.fine_tuning > 0, why="with fine_tuning=0")
        _ = self.inner  # refuses its own bad hyper-parameters

    @cached_property
    def inner(self) -> AnyAlgorithm:
        """The finishing method with its hyper-parameters."""
        return self.Inner(**{name: getattr(self, name) for name in settings_of(self.Inner)})

    def prepare(self, problem: Problem, n_clients: int, cohort_size: int) -> Self:
        if n_clients < 2:
            raise ValueError(
                "FedCorr: noisy clients are found by comparing clients, but there is only one; it needs at least two, "
                "and does well with ten or more."
            )
        if problem.losses in (squared_errors, logistic_losses):
            raise ValueError(
                f"FedCorr: labels are corrected to the class with the largest probability, but the loss is "
                f"'{problem.losses.__name__}', which has no class probabilities; it needs a model with one output for "
                "each class and the cross-entropy."
            )
        leaves_some_out = self.sweeps > 0 and self.fine_tuning > 0
        chosen = without_cached_clients(self.inner) if self.sweeps > 0 else self.inner
        try:
            inner = chosen.prepare(problem, n_clients, min(cohort_size, n_clients - leaves_some_out))
        except ValueError as refusal:
            if leaves_some_out and cohort_size == n_clients:
                raise ValueError(f"FedCorr's fine-tuning asks clean clients only. {refusal}") from refusal
            raise
        return replace(self, **{name: getattr(inner, name) for name in settings_of(inner)})

    @property
    def needs(self) -> str:
        return self.inner.needs  # the stages before it ask for sums

    def unused(self) -> frozenset[str]:
        if self.sweeps > 0:
            return super().unused()
        return self.inner.unused() if isinstance(self.inner, LocalWork) else frozenset(LOCAL_WORK)

    # Where the run stands.

    def rounds_before_finishing(self, n_clients: int) -> int:
        """Return how many rounds the stages before the last one take at most."""
        if self.sweeps == 0:
            return 0
        return 1 + self.sweeps * (-(-n_clients // self.visits) + 1) + self.fine_tuning + 1

    def stage(self, server: Any) -> Stage:
        """Return what the next message is for."""
        progress: Progress = server.progress
        if self.sweeps == 0:
            return Stage.FINISHING
        if not bool(progress.is_set_up):
            return Stage.SETUP
        if int(progress.n_sweeps) < self.sweeps:
            return Stage.RELABELLING if bool(progress.has_trained.all()) else Stage.TRAINING_TURN
        if int(progress.n_fine_tuning) < self.fine_tuning:
            return Stage.FINE_TUNING
        if not bool(progress.is_corrected) and bool(server.noise_estimate.is_noisy.any()):
            return Stage.CORRECTION
        return Stage.FINISHING

    def init_server(self, problem: Problem, n_clients: int) -> Any:
        no = torch.tensor(False)
        zero = torch.zeros((), dtype=torch.int64)
        zeros = torch.zeros(n_clients, dtype=torch.float64)
        return self.info.server(
            problem.theta0.clone(),
            Progress(no, zero, torch.zeros(n_clients, dtype=torch.bool), zero.clone(), no.clone()),
            NoiseEstimate(
                score=zeros,
                threshold=torch.tensor(torch.inf, dtype=torch.float64),
                is_noisy=torch.zeros(n_clients, dtype=torch.bool),
                level=zeros.clone(),
            ),
            self.inner.init_server(problem, n_clients),
        )

    def init_memory(self, problem: Problem, task: Task) -> Any:
        kept = self.sweeps > 0
        labels, losses = task.targets, torch.zeros_like(task.mask)
        zero = torch.zeros((), dtype=torch.float64, device=losses.device)
        inner = self.inner.init_memory(problem, task)
        return self.info.memory(
            labels=labels if kept else labels[:0],
            losses=losses if kept else losses[:0],
            score=zero,
            is_noisy=torch.zeros_like(zero, dtype=torch.bool),
            level=zero.clone(),
            inner=inner,
        )

    def noise(self, problem: Problem, generator: torch.Generator) -> Tensor:
        drawn = self.inner.noise(problem, generator)
        if drawn.dim() != 1:
            raise ValueError(f"FedCorr: {self.inner_name} must draw its noise as a vector, not as {drawn.dim()}-d.")
        seed = torch.randint(SEEDS, (1,), generator=generator)
        return torch.cat([drawn, seed.to(drawn.device, drawn.dtype)])

    def select(self, server: Any, round: int, sampled: Tensor, n_clients: int) -> Tensor:
        match self.stage(server):
            case Stage.SETUP | Stage.RELABELLING:
                return torch.arange(n_clients)
            case Stage.TRAINING_TURN:
                return self._next_in_sweep(server.progress, round)
            case Stage.FINE_TUNING:
                return self._clean_clients(server.noise_estimate, round, sampled)
            case Stage.CORRECTION:
                noisy: Tensor = server.noise_estimate.is_noisy.nonzero().flatten()
                return noisy
            case _:
                return self.inner.select(server.inner, round, sampled, n_clients)

    def _next_in_sweep(self, progress: Progress, round: int) -> Tensor:
        """Return who trains now: clients that have not yet trained in this sweep, in a new order every sweep.

        A client that did not reply is asked again in a later round of the sweep.
        """
        order = torch.from_numpy(
            numpy_seed_for(0, int(progress.n_sweeps), purpose="fedcorr sweep").permutation(len(progress.has_trained))
        )
        waiting = order[~progress.has_trained[order]]
        places = (round + torch.arange(min(self.visits, len(waiting)))) % len(waiting)
        return waiting[places].sort().values

    def _clean_clients(self, estimate: NoiseEstimate, round: int, sampled: Tensor) -> Tensor:
        """Return as many clean clients as were sampled, the sampled ones first; all that were sampled if none is."""
        clean = (estimate.level <= self.clean_level).nonzero().flatten()
        if not len(clean):
            return sampled
        chosen, others = sampled[torch.isin(sampled, clean)], clean[~torch.isin(clean, sampled)]
        n_more = min(len(sampled) - len(chosen), len(others))
        drawn = numpy_seed_for(0, round, purpose="fedcorr fine-tuning").choice(len(others), n_more, replace=False)
        return torch.cat([chosen, others[torch.from_numpy(drawn)]]).sort().values

    def send(self, server: Any) -> Any:
        match self.stage(server):
            case Stage.SETUP:
                return CopyLabels(server.theta.new_zeros(0))
            case Stage.TRAINING_TURN:
                return TrainTurn(server.theta)
            case Stage.RELABELLING:
                return Relabel(server.theta, server.noise_estimate.threshold)
            case Stage.CORRECTION:
                return FinalRelabel(server.theta)
            case _:
                return self.inner.send(server.inner)

    # The client.

    def client_step(self, problem: Problem, task: Task, sent: Any, memory: Any) -> tuple[Any, Any]:
        if isinstance(sent, CopyLabels):
            check_classes(problem, task)
            return LabelCount(task.mask.sum()), memory
        if isinstance(sent, TrainTurn):
            return self._train_and_score(problem, task, sent, memory)
        if isinstance(sent, Relabel):
            return self._relabel_if_noisy(problem, task, sent, memory)
        if isinstance(sent, FinalRelabel):
            labels = corrected_labels(memory.labels, outputs_of(problem, sent.theta, task), self.confidence)
            return NoiseReport(memory.level, _n_changed(labels, memory.labels)), memory._replace(labels=labels)
        labels = memory.labels[: len(task.mask)] if self.sweeps else task.targets
        own = task._replace(targets=labels, noise=task.noise[:-1])
        reply, inner = self.inner.client_step(problem, own, sent, memory.inner)
        return reply, memory._replace(inner=inner)

    def _train_and_score(self, problem: Problem, task: Task, sent: TrainTurn, memory: Any) -> tuple[TurnUpdate, Any]:
        """Train on the labels as they are now, then score them and every example's loss with the trained model."""
        local = mixed_sgd(
            problem,
            task,
            memory.labels,
            sent.theta,
            pull=self.pull * float(memory.level),
            mixup=self.mixup,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            seed=int(task.noise[-1]),
        )
        outputs = outputs_of(problem, local, task)
        if not bool(torch.isfinite(outputs).all()):  # such a turn changes nothing and has no score
            return TurnUpdate(torch.zeros_like(local), torch.full_like(memory.score, torch.nan)), memory
        score = memory.score.new_tensor(dimension_score(probabilities_of(outputs), self.neighbours))
        losses = memory.losses.clone()
        losses[: len(outputs)] = problem.losses(outputs, memory.labels[: len(outputs)])
        kept = memory._replace(losses=losses, score=memory.score + score.nan_to_num())
        return TurnUpdate(sent.theta - local, score), kept

    def _relabel_if_noisy(self, problem: Problem, task: Task, sent: Relabel, memory: Any) -> tuple[NoiseReport, Any]:
        """Replace the most doubtful labels if the client's score is above the threshold."""
        n, level, labels = n_real(task), 0.0, memory.labels
        is_noisy = self.is_noisy(memory.score, sent.threshold, memory.is_noisy)
        if bool(is_noisy):
            level, rows = doubtful_labels(memory.losses[:n].double().cpu().numpy(), self.relabel_share)
            outputs = outputs_of(problem, sent.theta, task)
            labels = corrected_labels(labels, outputs, self.confidence, torch.from_numpy(rows))
        estimated = memory.level.new_tensor(level)
        here = replace(problem, theta0=sent.theta)  # the finishing method starts from this model
        inner = self.inner.init_memory(here, task._replace(targets=labels[: len(task.mask)]))
        kept = memory._replace(labels=labels, is_noisy=is_noisy, level=estimated, inner=inner)
        return NoiseReport(estimated, _n_changed(labels, memory.labels)), kept

    # The server.

    def server_step(self, server: Any, replies: Replies[Any], cohort: Cohort) -> ServerStep[Any]:
        if replies.kind is LabelCount:
            progress = server.progress._replace(is_set_up=torch.tensor(True))
            return ServerStep(server._replace(progress=progress), Status.HOLD)
        if replies.kind is TurnUpdate:
            return self._after_turn(server, replies, cohort)
        if replies.kind is NoiseReport:
            is_final = self.stage(server) is Stage.CORRECTION
            changed = self._after_correction(server) if is_final else self._after_sweep(server, replies, cohort)
            diagnostics = {
                "relabelled": float(replies.scalars("n_changed").sum()),
                "noisy_clients": float(changed.noise_estimate.is_noisy.sum()),
            }
            return ServerStep(changed, Status.HOLD, diagnostics)
        return self._inner_step(server, replies, cohort)

    def _inner_step(self, server: Any, replies: Replies[Any], cohort: Cohort) -> ServerStep[Any]:
        step = self.inner.server_step(server.inner, replies, cohort)
        server = server._replace(theta=step.server.theta, inner=step.server)
        if self.stage(server) is not Stage.FINE_TUNING or step.status is Status.AGAIN:
            return step._replace(server=server)
        ends = step.status is Status.STOP  # the finishing method may find more to do once all clients take part again
        done = torch.full_like(server.progress.n_fine_tuning, self.fine_tuning)
        progress = server.progress._replace(n_fine_tuning=done if ends else server.progress.n_fine_tuning + 1)
        status = Status.HOLD if ends else step.status
        return step._replace(server=server._replace(progress=progress), status=status, reason="")

    def _after_turn(self, server: Any, replies: Replies[TurnUpdate], cohort: Cohort) -> ServerStep[Any]:
        """Take the trained model over; after the last turn of a sweep, compute the threshold."""
        step = replies.combine("turn_delta", client_weights("examples", cohort))
        found = torch.from_numpy(replies.scalars("score")).nan_to_num()
        estimate: NoiseEstimate = server.noise_estimate
        score = estimate.score.index_add(0, cohort.clients, found)
        has_trained = server.progress.has_trained.index_fill(0, cohort.clients, True)
        estimate = estimate._replace(score=score)
        if bool(has_trained.all()):
            threshold = self.threshold(score)
            is_noisy = self.is_noisy(score, threshold, estimate.is_noisy)
            estimate = estimate._replace(threshold=threshold, is_noisy=is_noisy)
        progress = server.progress._replace(has_trained=has_trained)
        changed = server._replace(theta=server.theta - step, noise_estimate=estimate, progress=progress)
        return ServerStep(changed, Status.NEXT, {"dimension": float(found.mean())})

    def threshold(self, scores: Tensor) -> Tensor:
        """Return the score above which a client is noisy, between the two groups of scores; infinity if all are one."""
        # of the logarithms: among the scores themselves one client far above all others is likeliest a group of its own
        scores = scores[scores > 0.0]  # no dimension is less: a client with too few examples has no score
        groups = two_groups_of_clients(np.log1p(scores.numpy()))
        is_one = not groups.is_high.any() or bool(groups.is_high.all())
        if is_one or (self.split == "bic" and not groups.prefers_two):
            return torch.full((), torch.inf, dtype=torch.float64)
        is_high = torch.from_numpy(groups.is_high)
        return (scores[is_high].min() + scores[~is_high].max()) / 2

    def is_noisy(self, score: Tensor, threshold: Tensor, was_noisy: Tensor) -> Tensor:
        """Return which clients are noisy: above the threshold, or found before, since they have corrected labels."""
        is_above = score > threshold
        return is_above if self.split == "always" else is_above | was_noisy

    def _after_sweep(self, server: Any, replies: Replies[NoiseReport], cohort: Cohort) -> Any:
        reported = torch.from_numpy(replies.scalars("level"))
        level = server.noise_estimate.level.index_copy(0, cohort.clients, reported)
        n_sweeps, has_trained = server.progress.n_sweeps + 1, torch.zeros_like(server.progress.has_trained)
        is_last = int(n_sweeps) == self.sweeps
        return server._replace(
            progress=server.progress._replace(n_sweeps=n_sweeps, has_trained=has_trained),
            noise_estimate=server.noise_estimate._replace(level=level),
            inner=started_at(self.Inner, server.inner, server.theta) if is_last else server.inner,
        )

    def _after_correction(self, server: Any) -> Any:
        return server._replace(progress=server.progress._replace(is_corrected=torch.tensor(True)))

    # What is measured.

    def models(self, server: Any, memory: Any) -> dict[str, Tensor]:
        finishes = self.stage(server) in (Stage.FINE_TUNING, Stage.CORRECTION, Stage.FINISHING)
        inner = server.inner if finishes else started_at(self.Inner, server.inner, server.theta)
        return self.inner.models(inner, None if memory is None else memory.inner)

    def uplink_bits(self, reply: Any) -> int:
        return super().uplink_bits(reply) if isinstance(reply, OWN_REPLIES) else self.inner.uplink_bits(reply)

    def passes(self, sent: Any) -> float:
        if isinstance(sent, OWN_MESSAGES):
            return {CopyLabels: 0.0, TrainTurn: self.epochs + 0.5, Relabel: 0.5, FinalRelabel: 0.5}[type(sent)]
        return self.inner.passes(sent)


def settings_of(method: AnyAlgorithm | type[AnyAlgorithm]) -> list[str]:
    """Return the names of all settings that a method is made with."""
    return [f.name for f in fields(method) if f.init]


def without_cached_clients(method: AnyAlgorithm) -> AnyAlgorithm:
    """Return the method with cached_clients=0 if it has that setting and it is auto: cached gradients of labels that
    were corrected since would mislead it.
    """
    is_auto = any(name == "cached_clients" and getattr(method, name) is None for name in settings_of(method))
    changes: dict[str, Any] = {"cached_clients": 0}
    return replace(method, **changes) if is_auto else method


def started_at(method: type[AnyAlgorithm], fresh: Any, theta: Tensor) -> Any:
    """Return a server's state before its first round, moved to another start model."""
    return fresh._replace(**{name: theta.clone() for name in method.info.theta_fields})


def _n_changed(labels: Tensor, before: Tensor) -> Tensor:
    return (labels != before).sum().double()
