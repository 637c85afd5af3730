"""One step that lowers every participant's loss: the server and the messages of DQN-Fed and AdaFed.

What the two methods differ in is where client k's rate comes from; the rest, from the gradients to the length of the
step, is here.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from math import isfinite, nan
from statistics import median
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dqnfed.algorithms.absentees import bordered, nobody, rows_of_absent, settled, with_present
from dqnfed.algorithms.common_descent_length import PROBING, DescentLength, step_norms, with_search
from dqnfed.algorithms.common_descent_messages import (
    DescentMemory,
    DescentServer,
    DescentUpdate,
    First,
    Here,
    LocalUpdate,
    Model,
    Models,
    Probe,
    ProbeUpdate,
    Search,
    Trial,
    TrialUpdate,
)
from dqnfed.algorithms.testimony import (
    BELIEVED,
    acquitted,
    asserted,
    first_testimony,
    heard,
    left_out,
    n_left_out,
    unclipped,
    without,
)
from dqnfed.core.algorithm import Cohort, ServerStep, Status
from dqnfed.core.digest import Digest, announced, field_gramian, field_numbers, field_products
from dqnfed.core.gradients import gradients_and_values, loss_gradient, loss_gradient_and_value
from dqnfed.core.local_work import local_sgd
from dqnfed.core.problem import Problem, Task
from dqnfed.core.tensors import gather, numbers_on_host
from dqnfed.maths.directions import DEAD, at_least_weights, mean_step, rate_matching_weights, undemanding_rows
from dqnfed.maths.gramian import combination_norm, cross_products
from dqnfed.maths.quasi_newton import (
    MemoryProducts,
    Pairs,
    Secant,
    compact_inverse,
    empty_pairs,
    memory_products,
    metric_combination,
    metric_gramian,
    no_pairs,
    probe_length,
    secant,
    secant_curvature,
    server_remembered,
)
from dqnfed.maths.solvers import load_lapack
from dqnfed.maths.transfer import sent_to

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class CommonDescent(DescentLength):
    r"""A method whose server takes the shortest step u with g_k'u >= d_k (or = d_k), rates d_k from the clients.

    Subclasses say what a client's rate is (`rate`) and what it learns from a secant pair (`learnt_rate`).
    """

    Server: ClassVar[type] = DescentServer
    Memory: ClassVar[type] = DescentMemory
    Sent: ClassVar[tuple[type, ...]] = (First, Model, Models, Probe, Trial)
    Update: ClassVar[tuple[type, ...]] = (DescentUpdate, LocalUpdate, ProbeUpdate, TrialUpdate)
    starts: ClassVar[tuple[str, ...]] = ("theta", "theta_before")
    reuses: ClassVar[tuple[str, ...]] = ("absentees.gradient",)
    scales: ClassVar[tuple[str, ...]] = ("gradient", "rate", "curvature", "gradient_change")
    optional: ClassVar[tuple[str, ...]] = ("rate", "curvature", "probed_curvature", "trial_loss")

    @abstractmethod
    def rate(self, problem: Problem, task: Task, theta: Tensor, gradient: Tensor, loss: Tensor) -> Tensor:
        """Return the decrease that a client asks for which has learnt nothing, [] and positive."""

    def learnt_rate(
        self, problem: Problem, task: Task, here: Here, memory: DescentMemory, pair: Secant
    ) -> tuple[Tensor, DescentMemory]:
        """Return the decrease that a client asks for after a step that changed its gradient, and what it keeps.

        NaN if it cannot say yet; by default it learns nothing.
        """
        return self.rate(problem, task, *here), memory

    def empty_memory(self, theta: Tensor) -> Pairs:
        """Return the client's pairs before it has any."""
        return no_pairs(theta)

    def init_server(self, problem: Problem, n_clients: int) -> DescentServer:
        load_lapack()
        theta = problem.theta0
        n, none = len(theta), theta.new_zeros(0)
        remembers = self.metric == "lbfgs" and self.keeps_model
        searches = self.seeks_length
        per_client = torch.zeros(n_clients if searches else 0, dtype=torch.float64)
        metric = self.metric == "lbfgs"
        return DescentServer(
            theta=theta.clone(),
            theta_before=theta.clone(),
            step_norm=torch.zeros((), dtype=torch.float64),
            n_steps=torch.zeros((), dtype=torch.int64),
            gradient_before=theta.new_zeros(n) if remembers else none,
            answered_before=torch.zeros(n_clients if remembers else 0, dtype=torch.bool),
            metric=empty_pairs(self.metric_memory, n, theta.dtype, theta.device) if metric else no_pairs(theta),
            search=Search(
                direction=theta.new_zeros(n) if searches else none,
                gradient=theta.new_zeros(n) if searches else none,
                members=torch.zeros(n_clients if remembers else 0, dtype=torch.bool),
                losses=per_client,
                slopes=per_client.clone(),
                length=torch.zeros((), dtype=torch.float64),
                trials=torch.zeros((), dtype=torch.int64),
            ),
            testimony=first_testimony(n_clients if self.drop_share > 0.0 else 0, problem.loss_floor),
            absentees=nobody(theta),
        )

    def init_memory(self, problem: Problem, task: Task) -> DescentMemory:
        theta = problem.theta0
        kept = theta.new_zeros(len(theta) if self.keeps_model else 0)
        n_visits = theta.new_zeros(() if self.keeps_model else 0, dtype=torch.int64)
        return DescentMemory(self.empty_memory(theta), theta.new_zeros(()), kept, kept.clone(), n_visits)

    def send(self, server: DescentServer) -> First | Model | Models | Probe | Trial:
        trials = int(server.search.trials)
        if trials:
            candidate = server.theta - float(server.search.length) * server.search.direction
            return Probe(server.theta, candidate) if trials == PROBING else Trial(candidate)
        if int(server.n_steps) == 0:
            return First(server.theta)
        if self.keeps_model or self.local == "sgd":
            return Model(server.theta)
        return Models(server.theta, server.theta_before)

    def passes(self, sent: Any) -> float:
        if isinstance(sent, Trial):
            return 0.5  # a forward pass
        if isinstance(sent, Probe):
            return 1.0 if self.keeps_model else 2.0
        if self.local == "sgd":
            return float(self.epochs)
        return 2.0 if isinstance(sent, Models) else 1.0

    @property
    def gramian_of(self) -> str:
        return "" if self.metric == "lbfgs" else "gradient"  # that metric needs products with its pairs too

    def compared_with(self, server: DescentServer) -> Tensor:
        return server.absentees.gradient

    def tidied(self, server: DescentServer) -> DescentServer:
        return server._replace(absentees=settled(server.absentees))

    def can_begin(self, sent: Any) -> bool:
        return self.local == "gradient" and not self.keeps_model and isinstance(sent, First | Models)

    def beginning(self, problem: Problem, task: Task, sent: Any) -> Tensor:
        return loss_gradient(problem, sent.theta, task)

    def begun(self, sent: Any, memory: DescentMemory, before: Any, beginning: Tensor) -> DescentMemory:
        if not (isinstance(sent, Models) and sent.theta_before is before.theta):  # no step was made meanwhile
            return memory
        return memory._replace(gradient=beginning)

    def client_step(self, problem: Problem, task: Task, sent: Any, memory: DescentMemory) -> tuple[Any, DescentMemory]:
        if isinstance(sent, Trial):
            return TrialUpdate(problem.loss(sent.theta, task)), memory
        if isinstance(sent, Probe):
            before = memory.gradient if self.keeps_model else loss_gradient(problem, sent.theta, task)
            nearby, nearby_loss = loss_gradient_and_value(problem, sent.nearby, task)
            change = nearby - before
            move = sent.theta - sent.nearby
            slope_along = (before @ move) / torch.linalg.vector_norm(move)
            return ProbeUpdate(secant_curvature(move, -change), slope_along, nearby_loss), memory
        if self.local == "sgd":
            local = local_sgd(problem, task, sent.theta, momentum=self.momentum, weight_decay=self.weight_decay)
            return LocalUpdate(sent.theta - local), memory
        knows_before = len(memory.gradient) > 0  # kept by the client, or its beginning
        asked = (sent.theta, sent.theta_before) if isinstance(sent, Models) and not knows_before else (sent.theta,)
        (gradient, loss), *earlier = gradients_and_values(problem, asked, task)
        if self.gramian_of:
            gradient = announced(gradient)
        here, change = Here(sent.theta, gradient, loss), gradient.new_zeros(0)
        if isinstance(sent, First):
            rate, kept = self.rate(problem, task, *here), memory
            curvature = torch.full_like(loss, torch.nan)
        else:
            if isinstance(sent, Models):
                before = memory.gradient if knows_before else earlier[0][0]
                s, y = sent.theta - sent.theta_before, gradient - before
                change = y if self.metric == "lbfgs" else change
            else:
                was_here = memory.n_visits > 0  # a newcomer has no model before: its pair is zero and is skipped
                s = torch.where(was_here, sent.theta - memory.theta, 0.0)
                y = torch.where(was_here, gradient - memory.gradient, 0.0)
            pair = secant(s, y, is_shared=isinstance(sent, Models))
            curvature = pair.curvature
            rate, kept = self.learnt_rate(problem, task, here, memory, pair)
        if self.cap:
            rate = torch.minimum(rate, 2.0 * (loss - problem.loss_floor))
        if self.keeps_model:
            kept = kept._replace(theta=sent.theta, gradient=gradient)
        else:
            kept = kept._replace(gradient=kept.theta)  # nothing, as before the beginning
        return DescentUpdate(gradient, rate, curvature, loss, change), kept._replace(n_visits=memory.n_visits + 1)

    def server_step(self, server: DescentServer, updates: Any, cohort: Cohort) -> ServerStep[DescentServer]:
        if cohort.digest is None:
            updates = numbers_on_host(updates)  # in one transfer
        elif self.drop_share > 0.0:  # testimony looks at them as they are
            updates = numbers_on_host(updates, cohort.digest.numbers)
        if isinstance(updates, TrialUpdate):
            step = self._tried(server, updates, cohort)
        elif isinstance(updates, ProbeUpdate):
            step = self._probed(server, updates, cohort)
        else:
            step = self._directed(server, updates, cohort)
        dropped = () if step.status is Status.AGAIN else left_out(step.server.testimony)
        return step._replace(left_out=dropped) if dropped else step

    def _directed(self, server: DescentServer, updates: Any, cohort: Cohort) -> ServerStep[DescentServer]:
        """Return the step that serves everybody who is believed, or the search for its length."""
        everybody, said = cohort, updates
        server, updates, cohort = self._believed(server, updates, cohort)
        metric = self._learnt_metric(server, updates, cohort)
        G, K = updates.gradient, updates.gradient.shape[0]
        GG, GP, PP = _products(G, metric, cohort.digest)
        rates = self.wanted_rates(updates, np.diagonal(GG), cohort.digest)
        curvature = field_numbers(updates.curvature, cohort.digest, "curvature") if self.seeks_length else rates * nan
        absent, absent_rows, places = server.absentees, np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        if self.absentees:
            absent = settled(absent)
            absent_rows = rows_of_absent(absent, cohort)
            GA = field_products(G, absent.gradient, cohort.digest, "gradient")
            now, places = with_present(absent, cohort, G, rates, curvature, GG, GA, most=self.absentees)
            server = server._replace(absentees=now)
            of_absent = absent.products.numpy().take(absent_rows, 0).take(absent_rows, 1)
            GG = bordered(GG, GA.take(absent_rows, 1), of_absent)
            if GP.size:
                on_pairs = cross_products(torch.cat([metric.s, metric.y]), absent.gradient).numpy()
                GP = np.concatenate([GP, on_pairs[:, absent_rows].T])
            rates = np.concatenate([rates, absent.rate.numpy()[absent_rows]])
            curvature = np.concatenate([curvature, absent.curvature.numpy()[absent_rows]])
        inverse = compact_inverse(PP, int(metric.n_pairs) if PP.size else 0)
        M = metric_gramian(GG, GP, inverse)
        squares = np.diagonal(GG)
        may_drop = self._may_drop(everybody) - n_left_out(server.testimony) if self.drop_share > 0.0 else 0
        weights, kept = self._weights(M, rates, may_drop, K)
        rows, of_rows = G, weights[:K]
        if len(places) and places.min() >= 0:  # one matrix has them all: those of the absent, and the new ones
            rows, of_rows = server.absentees.gradient, np.zeros(server.absentees.gradient.shape[0])
            of_rows[places], of_rows[absent_rows] = weights[:K], weights[K:]
        u = metric_combination(of_rows, rows, GP.T @ weights if GP.size else weights[:0], metric, inverse)
        if rows is G and weights[K:].any():
            shares = np.zeros(absent.gradient.shape[0])
            shares[absent_rows] = inverse.scale * weights[K:]
            u.addmv_(absent.gradient.T, sent_to(u.device, torch.from_numpy(shares), u.dtype))
        slopes = M @ weights
        norm = combination_norm(weights, slopes, squares) if M is GG else nan
        norms = step_norms(server.theta, u, cohort.digest, norm)
        if not isfinite(norms.step):
            return self._stationary(server, cohort, {"infeasible": 1.0})
        server = server._replace(metric=metric)
        counted = kept & (squares > DEAD**2 * squares.max())
        asked = counted & (rates > 0)
        diagnostics = {
            "active": float(np.count_nonzero(weights)),
            "worst_rate_met": float((slopes[asked] / rates[asked]).min()) if norms.step > 0 and asked.any() else 0.0,
        }
        if self.drop_share > 0.0:
            record = without(server.testimony, cohort.clients[torch.from_numpy(~kept[:K])])
            if isinstance(said, DescentUpdate):
                record = asserted(record, everybody.clients, said.loss, unclipped(said.gradient @ u, everybody))
            server = server._replace(testimony=record)
        sought = self._sought(server, updates, cohort, u, slopes[:K], counted[:K], kept[:K])
        if int(server.n_steps) == 0 and self.seeks_length and norms.step > 0:
            length = float(probe_length(server.theta, u))
            return ServerStep(with_search(server, sought, length, PROBING), Status.AGAIN, diagnostics)
        if self.seeks_length:
            return self._lengthened(server, sought, curvature[counted], slopes[counted], norms, cohort, diagnostics)
        alpha = self._free_length(updates, cohort, norms.step)
        return self._stepped(server, sought, alpha, norms, cohort, diagnostics)

    def _believed(self, server: DescentServer, updates: Any, cohort: Cohort) -> tuple[DescentServer, Any, Cohort]:
        """Return the answers of those who do not contradict themselves, with the verdicts on the others."""
        if self.drop_share == 0.0:
            return server, updates, cohort
        if not isinstance(updates, DescentUpdate):
            return server._replace(testimony=acquitted(server.testimony)), updates, cohort
        record = heard(
            server.testimony,
            cohort.clients,
            updates.loss,
            unclipped(updates.rate, cohort) if self.caps_rates else None,
            unclipped(updates.gradient @ (server.theta - server.theta_before), cohort),
            may_drop=self._may_drop(cohort),
        )
        server = server._replace(testimony=record)
        kept = (record.verdicts[cohort.clients] == BELIEVED).nonzero().flatten()
        if len(kept) == len(cohort.clients):
            return server, updates, cohort
        n_clients = cohort.n_clients - (len(cohort.clients) - len(kept))
        digest = None if cohort.digest is None else cohort.digest.chosen(kept.numpy())
        believed = Cohort(cohort.clients[kept], cohort.n_examples[kept], n_clients, cohort.round, digest=digest)
        return server, gather(updates, kept), believed

    def _learnt_metric(self, server: DescentServer, updates: Any, cohort: Cohort) -> Pairs:
        """Return the metric's pairs with this round's, where one is to be had."""
        if self.metric == "identity" or int(server.n_steps) == 0:
            return server.metric
        if len(server.gradient_before):
            again = server.answered_before[cohort.clients]  # the mean before was over these
            if not 0 < int(server.answered_before.sum()) == int(again.sum()):
                return server.metric
            change = mean_step(updates.gradient, again) - server.gradient_before
        elif updates.gradient_change.shape[-1]:
            change = mean_step(updates.gradient_change)
        else:
            return server.metric
        return server_remembered(server.metric, server.theta - server.theta_before, change)

    def wanted_rates(self, updates: Any, squares: FloatArray, digest: Digest | None) -> FloatArray:
        """Return the decreases that the step is to bring, [K]; an update of local SGD asks for its own square."""
        if self.local == "sgd":
            return squares
        return self._trusted_rates(field_numbers(updates.rate, digest, "rate"), squares)

    def _trusted_rates(self, rates: FloatArray, squares: FloatArray) -> FloatArray:
        """Return the rates, unknown ones filled in, held to the cohort's median rate per squared gradient."""
        per_square = rates / np.where(squares > 0, squares, 1.0)
        known = np.isfinite(per_square) & (per_square > 0)
        if not known.any():
            return squares.copy()
        middle = median(per_square[known].tolist())
        least, most = middle / self.rate_bounds, middle * self.rate_bounds
        return np.asarray(np.minimum(np.maximum(np.where(known, per_square, middle), least), most) * squares)

    def _weights(
        self, M: FloatArray, rates: FloatArray, may_drop: int, n_present: int
    ) -> tuple[FloatArray, NDArray[np.bool_]]:
        """Return the weights of the gradients in the step, and which of the clients it is for.

        Those who are absent, after the `n_present` first rows, are left out if no step serves everybody.
        """
        kept = np.ones(len(rates), dtype=np.bool_)
        if self.constraint == "exactly":
            return rate_matching_weights(M, rates, ridge=self.ridge), kept
        if may_drop > 0:
            limits = {"max_share": may_drop / len(rates), "stretch": self.drop_stretch}
            kept = undemanding_rows(M, rates, ridge=self.ridge, **limits)
        if kept.all():
            found = at_least_weights(M, rates, ridge=self.ridge)
            if found.feasible or len(rates) == n_present:
                return found.weights, kept
            kept[n_present:] = False
        found = at_least_weights(M[np.ix_(kept, kept)], rates[kept], ridge=self.ridge)
        weights = np.zeros(len(rates))
        weights[kept] = found.weights
        return weights, kept


def _products(G: Tensor, metric: Pairs, digest: Digest | None) -> MemoryProducts:
    """Return the products of the gradients with each other and with the metric's pairs, where it has room for any."""
    if metric.s.shape[0]:
        return memory_products(G, metric)
    return MemoryProducts(field_gramian(G, digest, "gradient"), np.zeros((G.shape[0], 0)), np.zeros((0, 0)))
