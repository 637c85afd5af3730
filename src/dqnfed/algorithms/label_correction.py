"""FedCorr's stages around a finishing method: sweeps, verdicts, fine-tuning, correction, and then that method."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from dqnfed.algorithms.common_descent_settings import DescentSettings
from dqnfed.algorithms.fedavg import client_weights
from dqnfed.algorithms.fedcorr_labels import (
    check_classes,
    corrected_labels,
    dimension_score,
    mixed_sgd,
    n_real,
    outputs_of,
    probabilities_of,
    suspected_rows,
    two_groups_of_clients,
)
from dqnfed.algorithms.fedcorr_messages import (
    OWN_SENT,
    OWN_UPDATES,
    Correction,
    Greeted,
    Greeting,
    Progress,
    Relabelled,
    Stage,
    Suspicion,
    Verdict,
    Visit,
    Visited,
    noisy_clients,
)
from dqnfed.core.algorithm import (
    Algorithm,
    AnyAlgorithm,
    Cohort,
    ServerStep,
    Status,
    check_choice,
    check_range,
)
from dqnfed.core.problem import Problem, Task, logistic_losses, squared_errors
from dqnfed.core.seeds import numpy_seed_for
from dqnfed.maths.directions import mean_step

SEEDS = 2**24  # whole numbers that single precision can hold


@dataclass(frozen=True, kw_only=True)
class LabelCorrection(Algorithm[Any, Any, Any]):
    """FedCorr with a finishing method `Inner`, whose hyper-parameters stand beside FedCorr's own."""

    Inner: ClassVar[type[AnyAlgorithm]]
    inner_name: ClassVar[str]
    suits: ClassVar[frozenset[str]] = frozenset({"network"})
    exemptions: ClassVar[dict[str, str]] = {
        "test_goes_on_without_a_broken_client": "clients are visited one after the other, so a round that does not ask "
        "the broken one cannot drop it",
    }

    sweeps: int = 5  # T1, visits to every client before the finishing method begins, >= 0; 0: none, labels stay
    visits: int = 1  # clients visited at a time, >= 1; more than one: their models are averaged
    pull: float = 5.0  # beta, pull of the model that was sent on noisy clients' local steps, >= 0
    mixup: float = 1.0  # alpha of the Beta distribution that two examples are mixed in, >= 0; 0: no mixing
    neighbours: int = 20  # k of the local intrinsic dimension, >= 2; fewer where a client has fewer examples
    confidence: float = 0.5  # a label is replaced if the model is more sure than this, in [0, 1]
    relabel_share: float = 0.5  # of a noisy client's doubtful labels that a verdict may replace, in [0, 1]
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
        _ = self.inner  # refuses its own bad hyper-parameters

    @cached_property
    def inner(self) -> AnyAlgorithm:
        """The finishing method with its hyper-parameters."""
        return self.Inner(**{f.name: getattr(self, f.name) for f in fields(self.Inner)})

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
        begun = self.inner
        if isinstance(begun, DescentSettings) and begun.absentees is None:
            begun = replace(begun, absentees=0)  # they spoke of labels that are corrected since
        try:
            inner = begun.prepare(problem, n_clients, min(cohort_size, n_clients - leaves_some_out))
        except ValueError as refusal:
            if leaves_some_out and cohort_size == n_clients:
                raise ValueError(f"FedCorr's fine-tuning asks clean clients only. {refusal}") from refusal
            raise
        return replace(self, **{f.name: getattr(inner, f.name) for f in fields(inner)})

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
        if not bool(progress.has_greeted):
            return Stage.GREETING
        if int(progress.n_sweeps) < self.sweeps:
            return Stage.VERDICT if bool(progress.visited.all()) else Stage.VISIT
        if int(progress.n_fine_tuning) < self.fine_tuning:
            return Stage.FINE_TUNING
        if not bool(progress.is_corrected) and bool(noisy_clients(server.suspicion).any()):
            return Stage.CORRECTION
        return Stage.FINISHING

    def init_server(self, problem: Problem, n_clients: int) -> Any:
        no = torch.tensor(False)
        zero = torch.zeros((), dtype=torch.int64)
        nobody = torch.zeros(n_clients, dtype=torch.float64)
        return self.Server(
            problem.theta0.clone(),
            Progress(no, zero, torch.zeros(n_clients, dtype=torch.bool), zero.clone(), no.clone()),
            Suspicion(
                score=nobody,
                threshold=torch.tensor(torch.inf, dtype=torch.float64),
                is_noisy=torch.zeros(n_clients, dtype=torch.bool),
                level=nobody.clone(),
            ),
            self.inner.init_server(problem, n_clients),
        )

    def init_memory(self, problem: Problem, task: Task) -> Any:
        kept = self.sweeps > 0
        labels, losses = task.targets, torch.zeros_like(task.mask)
        zero = torch.zeros((), dtype=torch.float64, device=losses.device)
        inner = self.inner.init_memory(problem, task)
        return self.Memory(
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

    def cohort(self, server: Any, round: int, sampled: Tensor, n_clients: int) -> Tensor:
        match self.stage(server):
            case Stage.GREETING | Stage.VERDICT:
                return torch.arange(n_clients)
            case Stage.VISIT:
                return self._next_visited(server.progress, round)
            case Stage.FINE_TUNING:
                return self._clean(server.suspicion, round, sampled)
            case Stage.CORRECTION:
                return noisy_clients(server.suspicion).nonzero().flatten()
            case _:
                return self.inner.cohort(server.inner, round, sampled, n_clients)

    def _next_visited(self, progress: Progress, round: int) -> Tensor:
        """Return who is visited now: clients that this sweep has not yet heard of, in a new order every sweep.

        A client that gave no answer is asked again when it is its turn next.
        """
        order = torch.from_numpy(
            numpy_seed_for(0, int(progress.n_sweeps), purpose="fedcorr sweep").permutation(len(progress.visited))
        )
        waiting = order[~progress.visited[order]]
        places = (round + torch.arange(min(self.visits, len(waiting)))) % len(waiting)
        return waiting[places].sort().values

    def _clean(self, suspicion: Suspicion, round: int, sampled: Tensor) -> Tensor:
        """Return as many clean clients as were sampled, the sampled ones first; everybody sampled if none is clean."""
        clean = (suspicion.level <= self.clean_level).nonzero().flatten()
        if not len(clean):
            return sampled
        chosen, others = sampled[torch.isin(sampled, clean)], clean[~torch.isin(clean, sampled)]
        n_more = min(len(sampled) - len(chosen), len(others))
        drawn = numpy_seed_for(0, round, purpose="fedcorr fine-tuning").choice(len(others), n_more, replace=False)
        return torch.cat([chosen, others[torch.from_numpy(drawn)]]).sort().values

    def send(self, server: Any) -> Any:
        match self.stage(server):
            case Stage.GREETING:
                return Greeting(server.theta.new_zeros(0))
            case Stage.VISIT:
                return Visit(server.theta)
            case Stage.VERDICT:
                return Verdict(server.theta, server.suspicion.threshold)
            case Stage.CORRECTION:
                return Correction(server.theta)
            case _:
                return self.inner.send(server.inner)

    # The client.

    def vectorises_for(self, sent: Any) -> bool:
        return not isinstance(sent, OWN_SENT) and self.inner.vectorises_for(sent)

    @property
    def captures(self) -> bool:
        return self.inner.captures

    @property
    def reads_inputs(self) -> bool:
        return self.inner.reads_inputs

    @property
    def gramian_of(self) -> str:
        return self.inner.gramian_of

    def client_step(self, problem: Problem, task: Task, sent: Any, memory: Any) -> tuple[Any, Any]:
        if isinstance(sent, Greeting):
            check_classes(problem, task)
            return Greeted(task.mask.sum()), memory
        if isinstance(sent, Visit):
            return self._visited(problem, task, sent, memory)
        if isinstance(sent, Verdict):
            return self._judged(problem, task, sent, memory)
        if isinstance(sent, Correction):
            labels = corrected_labels(memory.labels, outputs_of(problem, sent.theta, task), self.confidence)
            return Relabelled(memory.level, _n_changed(labels, memory.labels)), memory._replace(labels=labels)
        labels = memory.labels[: len(task.mask)] if self.sweeps else task.targets
        own = task._replace(targets=labels, noise=task.noise[:-1])
        update, inner = self.inner.client_step(problem, own, sent, memory.inner)
        return update, memory._replace(inner=inner)

    def _visited(self, problem: Problem, task: Task, sent: Visit, memory: Any) -> tuple[Visited, Any]:
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
        if not bool(torch.isfinite(outputs).all()):  # such a visit changes nothing, and says nothing
            return Visited(torch.zeros_like(local), torch.full_like(memory.score, torch.nan)), memory
        score = memory.score.new_tensor(dimension_score(probabilities_of(outputs), self.neighbours))
        losses = memory.losses.clone()
        losses[: len(outputs)] = problem.losses(outputs, memory.labels[: len(outputs)])
        return Visited(sent.theta - local, score), memory._replace(
            losses=losses, score=memory.score + score.nan_to_num()
        )

    def _judged(self, problem: Problem, task: Task, sent: Verdict, memory: Any) -> tuple[Relabelled, Any]:
        """Replace the most doubtful labels if the client's score is above the threshold."""
        n, level, labels = n_real(task), 0.0, memory.labels
        is_noisy = self.suspected(memory.score, sent.threshold, memory.is_noisy)
        if bool(is_noisy):
            level, rows = suspected_rows(memory.losses[:n].double().cpu().numpy(), self.relabel_share)
            outputs = outputs_of(problem, sent.theta, task)
            labels = corrected_labels(labels, outputs, self.confidence, torch.from_numpy(rows))
        believed = memory.level.new_tensor(level)
        here = replace(problem, theta0=sent.theta)  # the finishing method begins at this model
        inner = self.inner.init_memory(here, task._replace(targets=labels[: len(task.mask)]))
        kept = memory._replace(labels=labels, is_noisy=is_noisy, level=believed, inner=inner)
        return Relabelled(believed, _n_changed(labels, memory.labels)), kept

    # The server.

    def server_step(self, server: Any, updates: Any, cohort: Cohort) -> ServerStep[Any]:
        if isinstance(updates, Greeted):
            progress = server.progress._replace(has_greeted=torch.tensor(True))
            return ServerStep(server._replace(progress=progress), Status.HOLD)
        if isinstance(updates, Visited):
            return self._swept(server, updates, cohort)
        if isinstance(updates, Relabelled):
            diagnostics = {"relabelled": float(updates.n_changed.sum())}
            changed = (
                self._corrected(server)
                if self.stage(server) is Stage.CORRECTION
                else self._sentenced(server, updates, cohort)
            )
            diagnostics["noisy_clients"] = float(noisy_clients(changed.suspicion).sum())
            return ServerStep(changed, Status.HOLD, diagnostics)
        step = self.inner.server_step(server.inner, updates, cohort)
        server = server._replace(theta=step.server.theta, inner=step.server)
        if self.stage(server) is not Stage.FINE_TUNING or step.status is Status.AGAIN:
            return step._replace(server=server)
        ends = step.status is Status.STOP  # the finishing method may find more to do once everybody takes part again
        done = torch.full_like(server.progress.n_fine_tuning, self.fine_tuning)
        progress = server.progress._replace(n_fine_tuning=done if ends else server.progress.n_fine_tuning + 1)
        status = Status.HOLD if ends else step.status
        return step._replace(server=server._replace(progress=progress), status=status, reason="")

    def _swept(self, server: Any, updates: Visited, cohort: Cohort) -> ServerStep[Any]:
        """Take the visited clients' models over; after the last visit of a sweep, say which scores are too high."""
        step = mean_step(updates.visit_delta, client_weights("examples", cohort))
        suspicion: Suspicion = server.suspicion
        found = updates.score.double().cpu().nan_to_num()
        score = suspicion.score.index_add(0, cohort.clients, found)
        visited = server.progress.visited.index_fill(0, cohort.clients, True)
        suspicion = suspicion._replace(score=score)
        if bool(visited.all()):
            threshold = self.threshold(score)
            is_noisy = self.suspected(score, threshold, suspicion.is_noisy)
            suspicion = suspicion._replace(threshold=threshold, is_noisy=is_noisy)
        changed = server._replace(
            theta=server.theta - step, suspicion=suspicion, progress=server.progress._replace(visited=visited)
        )
        return ServerStep(changed, Status.NEXT, {"dimension": float(found.mean())})

    def threshold(self, scores: Tensor) -> Tensor:
        """Return the score above which a client is noisy, between the two groups of scores; infinity if all are one."""
        # of the logarithms: among the scores themselves one client far above all others is likeliest a group of its own
        scores = scores[scores > 0.0]  # no dimension is less: who has too few examples has no score
        groups = two_groups_of_clients(np.log1p(scores.numpy()))
        is_one = not groups.is_high.any() or bool(groups.is_high.all())
        if is_one or (self.split == "bic" and not groups.prefers_two):
            return torch.full((), torch.inf, dtype=torch.float64)
        is_high = torch.from_numpy(groups.is_high)
        return (scores[is_high].min() + scores[~is_high].max()) / 2

    def suspected(self, score: Tensor, threshold: Tensor, was_noisy: Tensor) -> Tensor:
        """Return who is noisy: whoever is above the threshold, or was found before and has corrected labels since."""
        is_above = score > threshold
        return is_above if self.split == "always" else is_above | was_noisy

    def _sentenced(self, server: Any, updates: Relabelled, cohort: Cohort) -> Any:
        level = server.suspicion.level.index_copy(0, cohort.clients, updates.level.double().cpu())
        n_sweeps = server.progress.n_sweeps + 1
        progress = server.progress._replace(n_sweeps=n_sweeps, visited=torch.zeros_like(server.progress.visited))
        inner = started_at(self.Inner, server.inner, server.theta) if int(n_sweeps) == self.sweeps else server.inner
        return server._replace(progress=progress, suspicion=server.suspicion._replace(level=level), inner=inner)

    def _corrected(self, server: Any) -> Any:
        return server._replace(progress=server.progress._replace(is_corrected=torch.tensor(True)))

    # What is measured.

    def evaluated(self, server: Any, memory: Any) -> dict[str, Tensor]:
        finishes = self.stage(server) in (Stage.FINE_TUNING, Stage.CORRECTION, Stage.FINISHING)
        inner = server.inner if finishes else started_at(self.Inner, server.inner, server.theta)
        return self.inner.evaluated(inner, None if memory is None else memory.inner)

    @property
    def is_personal(self) -> bool:
        return self.inner.is_personal

    def uplink_bits(self, updates: Any) -> int:
        return super().uplink_bits(updates) if isinstance(updates, OWN_UPDATES) else self.inner.uplink_bits(updates)

    def passes(self, sent: Any) -> float:
        if isinstance(sent, OWN_SENT):
            return {Greeting: 0.0, Visit: self.epochs + 0.5, Verdict: 0.5, Correction: 0.5}[type(sent)]
        return self.inner.passes(sent)


def started_at(method: type[AnyAlgorithm], fresh: Any, theta: Tensor) -> Any:
    """Return a server's state before its first round, moved to another start model."""
    return fresh._replace(**{name: theta.clone() for name in method.starts})


def _n_changed(labels: Tensor, before: Tensor) -> Tensor:
    return (labels != before).sum().double()
