"""DQN-Fed: one step for everybody, every client's decrease tied to its own quasi-Newton decrement."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import inf, isfinite, nan
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch

from dqnfed.algorithms.parts import length as phases
from dqnfed.algorithms.parts import messages as msg
from dqnfed.algorithms.parts.cache import Cache, CacheState, IntArray
from dqnfed.algorithms.parts.length import Length, Parts, Step
from dqnfed.algorithms.parts.messages import DescentMemory, DescentServer
from dqnfed.algorithms.parts.metric import Metric
from dqnfed.algorithms.parts.rates import MAX_HESSIAN, RULES, Here, Rates
from dqnfed.algorithms.parts.settings import DescentSettings
from dqnfed.core.algorithm import Cohort, Info, Status, Theta, check_choice, check_range, check_used
from dqnfed.core.problem import Problem, Task
from dqnfed.core.replies import FloatArray, Replies
from dqnfed.core.trust import Trust
from dqnfed.maths.directions import rate_matching_weights
from dqnfed.maths.gramian import bordered, combine, norm_of
from dqnfed.maths.quasi_newton import probe_length, secant_curvature
from dqnfed.maths.solvers import DEAD, BoolArray, bounded_rates, serving_weights

PROBING = -1  # `Search.trials` while the first step's curvature is measured


class Rows(NamedTuple):
    """The rows that the step is made for: K replies, then the cached gradients of absent clients."""

    K: int
    gram: FloatArray  # [K + A, K + A] in the metric
    squares: FloatArray  # [K + A]
    rates: FloatArray  # [K + A]
    curvature: FloatArray  # [K + A]
    absent: IntArray  # [A] rows of the cache


@dataclass(frozen=True, kw_only=True)
class DQNFed(DescentSettings):
    r"""Distributed quasi-Newton federated learning (Hamidi & Ye, TMLR 2025), with the safeguards that it needs.

    Objective: a step that lowers every participant's loss, client k's at the rate :math:`d_k = g_k^\top H_k g_k`, its
    own Newton decrement with an inverse-Hessian estimate H_k; the run ends where no step helps everybody.

    Client: its gradient g_k by one full pass (two when the cohort changes), inverse BFGS on its newest damped secant
    pairs (`memory`), the rate d_k, the curvature c_k along the last step and its loss. With `local = "sgd"`: `epochs`
    of SGD instead; the update stands for the gradient, without H_k.

    Server: u = the shortest vector with g_k'u >= d_k for all k, in the L-BFGS metric of the mean loss; then theta -
    alpha u, alpha the longest step that no client's curvature forbids, at most twice the last one; along the first step
    curvatures are measured in a phase of their own. The last gradients and rates of 50 absent clients count too, unless
    no u serves everybody. With local SGD u is as long as FedAvg's step.

    State: client, one number (or `memory` pairs), and theta and gradient when everybody takes part; server, theta, the
    model before, `metric_memory` pairs and the gradients of `cached_clients` clients.

    Payload: n + 3 floats up, n down; 2n + 3 up with the metric and 2n down when the cohort changes; n up with local
    SGD. The server sees every client's gradient.

    Evaluation: the global model.

    Differences: no official code was found. Unlike the paper, rates are lower bounds, since an equality holds back
    clients that would gain more; they are capped by 2 f_k, since a Newton decrement cannot be larger; the metric is not
    the identity; the step length is a rule of its own, since the paper's eta diverges on heterogeneous clients; the
    inverse BFGS recursion is used where the paper prints the direct one; H_k keeps no pair but the newest, since five
    served no better; absent clients count (`cached_clients = 0`: they do not). `dqn-fed-literal` is the paper's box.

    Reference: Hamidi & Ye, Distributed Quasi-Newton Method for Fair and Fast Federated Learning, TMLR 2025.
    """

    info: ClassVar[Info] = Info(
        server=DescentServer,
        memory=DescentMemory,
        messages=(msg.First, Theta, msg.Models, msg.Probe, msg.Trial),
        replies=(msg.DescentUpdate, msg.LocalUpdate, msg.ProbeUpdate, msg.TrialUpdate),
        needs=("gram", "rows where absent clients are cached"),
        clip_fields=("gradient", "rate", "curvature", "gradient_change"),
        nan_ok_fields=("rate", "curvature", "probed_curvature", "trial_loss"),
        theta_fields=("theta", "theta_before"),
    )

    rates: str = "bfgs"  # bfgs | cauchy | identity | loss | hessian (exact, small models)
    memory: int = 1  # pairs that a client's rate is from, >= 1; of one pair it keeps a single number

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "rates", RULES)
        check_range(self, "memory", low=1)
        check_used(self, "memory", used=self.rates == "bfgs", why=f"with rates='{self.rates}'")

    def prepare(self, problem: Problem, n_clients: int, cohort_size: int) -> Self:
        if self.rates == "hessian" and problem.n_parameters > MAX_HESSIAN:
            n = problem.n_parameters
            raise ValueError(
                f"DQNFed: rates='hessian' needs a model with n <= {MAX_HESSIAN}, but n is {n}; use 'bfgs'."
            )
        return super().prepare(problem, n_clients, cohort_size)

    @cached_property
    def parts(self) -> Parts:
        """The rules of a prepared method."""
        return Parts(
            Rates(self.rates, self.memory),
            Metric(self.metric_memory if self.metric == "lbfgs" else 0, keeps_mean=self.keeps_model),
            Length(self.step, self.step_size, self.growth),
            Cache(self.cached_clients or 0),
            Trust(self.drop_share, self.drop_stretch, checks_rates=self.cap),
        )

    @property
    def keeps_model(self) -> bool:
        """Whether clients keep the model of their last reply and their gradient there."""
        return self.local == "gradient" and self.previous == "kept"

    @property
    def needs(self) -> str:
        return "rows" if self.cached_clients else "gram"

    # The client.

    def init_memory(self, problem: Problem, task: Task) -> DescentMemory:
        theta, rates = problem.theta0, Rates("identity") if self.local == "sgd" else self.parts.rates
        kept = theta.new_zeros(len(theta) if self.keeps_model else 0)
        return DescentMemory(rates.init(theta), kept, kept.clone(), theta.new_zeros((), dtype=torch.int64))

    def client_step(self, problem: Problem, task: Task, sent: Any, memory: DescentMemory) -> tuple[Any, DescentMemory]:
        if isinstance(sent, msg.Trial):
            return msg.TrialUpdate(problem.loss(sent.theta, task)), memory
        if isinstance(sent, msg.Probe):
            (gradient, _), (nearby, loss) = problem.kernels.gradients(problem, (sent.theta, sent.nearby), task)
            move = sent.theta - sent.nearby
            slope = (gradient * move).sum() / torch.linalg.vector_norm(move)
            return msg.ProbeUpdate(secant_curvature(move, gradient - nearby), slope, loss), memory
        if self.local == "sgd":
            return msg.LocalUpdate(sent.theta - self.local_sgd(problem, task, sent.theta)), memory
        models = (sent.theta, sent.theta_before) if isinstance(sent, msg.Models) else (sent.theta,)
        (gradient, loss), *earlier = problem.kernels.gradients(problem, models, task)
        here, change = Here(sent.theta, gradient, loss), gradient.new_zeros(0)
        rate, kept, curvature = here.loss, memory.rates, torch.full_like(loss, nan)
        if isinstance(sent, msg.First):
            rate = self.parts.rates.first(problem, task, here)
        else:
            if isinstance(sent, msg.Models):
                s, y = sent.theta - sent.theta_before, gradient - earlier[0][0]
                change = y if self.metric == "lbfgs" else change
            else:  # a client without a model before has a pair of zeros, which is skipped
                s = torch.where(memory.n_replies > 0, sent.theta - memory.theta, 0.0)
                y = torch.where(memory.n_replies > 0, gradient - memory.gradient, 0.0)
            rate, kept = self.parts.rates.next(problem, task, here, memory.rates, s, y)
            curvature = secant_curvature(s, y)
        if self.cap:
            rate = torch.minimum(rate, 2.0 * (loss - problem.loss_floor))
        memory = memory._replace(rates=kept, n_replies=memory.n_replies + 1)
        if self.keeps_model:
            memory = memory._replace(theta=sent.theta, gradient=gradient)
        return msg.DescentUpdate(gradient, rate, curvature, loss, change), memory

    def passes(self, sent: Any) -> float:
        if isinstance(sent, msg.Trial):
            return 0.5  # a forward pass
        if self.local == "sgd":
            return float(self.epochs)
        if isinstance(sent, msg.Probe | msg.Models):
            return 2.0 + (isinstance(sent, msg.Models) and self.parts.rates.passes(is_first=False))
        return 1.0 + self.parts.rates.passes(is_first=isinstance(sent, msg.First))

    # The server.

    def init_server(self, problem: Problem, n_clients: int) -> DescentServer:
        theta, zero = problem.theta0, torch.zeros((), dtype=torch.float64)
        _, metric, length, cache, trust = self.parts
        claims = trust.init(n_clients, problem.loss_floor)
        states = metric.init(theta), length.no_search(theta), claims, cache.init(theta)
        return DescentServer(theta.clone(), theta.clone(), zero, zero.long(), *states)

    def send(self, server: DescentServer) -> Any:
        if trials := int(server.search.trials):
            candidate = server.theta - float(server.search.length) * server.search.direction
            return msg.Probe(server.theta, candidate) if trials == PROBING else msg.Trial(candidate)
        if int(server.n_steps) == 0:
            return msg.First(server.theta)
        if self.keeps_model or self.local == "sgd":
            return Theta(server.theta)
        return msg.Models(server.theta, server.theta_before)

    def server_step(self, server: DescentServer, replies: Replies[Any], cohort: Cohort) -> Step:
        if replies.kind is msg.TrialUpdate:
            step = phases.tried(self.parts, server, replies, cohort)
        elif replies.kind is msg.ProbeUpdate:
            step = phases.probed(self.parts, server, replies, cohort)
        else:
            step = self._descend(server, replies, cohort)
        if not self.drop_share or step.status is Status.AGAIN:
            return step
        return step._replace(left_out=self.parts.trust.left_out(step.server.trust))

    def _descend(self, server: DescentServer, replies: Replies[Any], cohort: Cohort) -> Step:
        """Find the step u for everybody who is trusted, then its length."""
        _, metric, _, _, trust = self.parts
        everyone, all_replies, move = cohort, replies, server.theta - server.theta_before
        if self.drop_share:
            server = server._replace(trust=trust.check_replies(server.trust, replies, cohort, move))
            replies, cohort = trust.without_untrusted(server.trust, replies, cohort)
        if int(server.n_steps):
            change = metric.change(server.metric, replies, cohort)
            server = server._replace(metric=metric.learn(server.metric, move, change))
        rows, cache = self._rows(server, replies, cohort)
        weights, kept = self._weights(server, rows, everyone)
        u = replies.combine("gradient", weights[: rows.K])
        if weights[rows.K :].any():
            on_cached = np.zeros(len(server.cache.rows))
            on_cached[rows.absent] = weights[rows.K :]
            u = u + combine(torch.from_numpy(on_cached), server.cache.rows)
        u, server = metric.apply(server.metric, u), server._replace(cache=cache)
        if not isfinite(norm := norm_of(u)):
            return phases.stationary(self.parts, server, cohort, {"infeasible": 1.0})
        present = torch.from_numpy(kept[: rows.K])
        if self.drop_share:
            left_out = cohort.clients[~present]
            server = server._replace(trust=trust.record_claims(server.trust, all_replies, everyone, u, left_out))
        mean = metric.mean(server.metric, replies, cohort, present, everyone.n_clients)
        search = server.search._replace(direction=u, norm=torch.tensor(norm, dtype=torch.float64), mean=mean)
        slopes = np.where(kept & (rows.squares > DEAD**2 * rows.squares.max()), rows.gram @ weights, nan)
        asked = rows.rates > 0
        worst = float(np.nanmin(slopes[asked] / rows.rates[asked], initial=inf)) if norm > 0 else 0.0
        notes = {"active": float(np.count_nonzero(weights)), "worst_rate_met": worst if isfinite(worst) else 0.0}
        return self._lengthen(server._replace(search=search), replies, everyone, cohort, rows, slopes, notes)

    def _weights(self, server: DescentServer, rows: Rows, cohort: Cohort) -> tuple[FloatArray, BoolArray]:
        """Return the rows' weights in the step, and which rows it is for."""
        kept = np.ones(len(rows.rates), dtype=np.bool_)
        if self.drop_share:
            kept = self.parts.trust.without_outliers(server.trust, rows.gram, rows.rates, cohort, self.ridge)
        if self.constraint == "exactly":
            return rate_matching_weights(rows.gram, rows.rates, ridge=self.ridge), kept
        return serving_weights(rows.gram, rows.rates, kept, rows.K, ridge=self.ridge)

    def _lengthen(
        self,
        server: DescentServer,
        replies: Replies[Any],
        everyone: Cohort,
        cohort: Cohort,
        rows: Rows,
        slopes: FloatArray,  # [K + A] g_k'u; NaN: does not count
        notes: phases.Notes,
    ) -> Step:
        """Return the step of the right length, or the phase in which that is sought."""
        length, norm = self.parts.length, float(server.search.norm)
        if not length.uses_curvature:
            mean_norm = norm_of(replies.mean("gradient"))
            return phases.moved(self.parts, server, length.by_rule(norm, mean_norm, cohort.round), cohort, notes)
        is_first = int(server.n_steps) == 0 and norm > 0
        if is_first or self.step == "line-search":
            unknown = torch.full((everyone.n_clients,), nan, dtype=torch.float64)
            claims = (replies.scalars("loss"), slopes[: rows.K])
            losses, known = (unknown.index_copy(0, cohort.clients, torch.from_numpy(values)) for values in claims)
            server = server._replace(search=server.search._replace(losses=losses, slopes=known))
        if is_first:
            return phases.searching(server, float(probe_length(server.theta, server.search.direction)), PROBING, notes)
        counted = ~np.isnan(slopes)
        return phases.lengthened(self.parts, server, slopes[counted], rows.curvature[counted], cohort, notes)

    def _rows(self, server: DescentServer, replies: Replies[Any], cohort: Cohort) -> tuple[Rows, CacheState]:
        """Return the rows that the step is made for, and the cache with this round's replies."""
        _, metric, length, caching, _ = self.parts
        cache, K = server.cache, len(replies)
        products = replies.gram("gradient", (cache.rows, server.metric.pairs.s, server.metric.pairs.y))
        on_rows, on_pairs = np.split(products, [K + len(cache.rows)], axis=1)
        rates = self.wanted_rates(replies, np.diagonal(on_rows))
        curvature = replies.scalars("curvature") if length.uses_curvature else np.full(K, nan)
        absent = caching.absent(cache, cohort) if caching.size else np.zeros(0, dtype=np.int64)
        among = cache.products.numpy()[np.ix_(absent, absent)]
        GG = bordered(on_rows[:, :K], on_rows[:, K + absent], among)
        rows = Rows(
            K,
            metric.gram(server.metric, GG, on_pairs, cache.rows, absent),
            np.diagonal(GG),
            np.concatenate([rates, cache.rate.numpy()[absent]]),
            np.concatenate([curvature, cache.curvature.numpy()[absent]]),
            absent,
        )
        if caching.size:
            cache = caching.insert(cache, cohort, replies.rows("gradient"), rates, curvature, on_rows)
        return rows, cache

    def wanted_rates(self, replies: Replies[Any], squares: FloatArray) -> FloatArray:
        """Return the decreases that the step is to bring, [K]; an update of local SGD asks for its own square."""
        return squares if self.local == "sgd" else bounded_rates(replies.scalars("rate"), squares, self.rate_bounds)
