"""DQN-Fed: one step for everybody, every client's decrease tied to its own quasi-Newton decrement."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import exp, isfinite, isnan, nan
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from dqnfed.algorithms.parts import length as phases
from dqnfed.algorithms.parts import messages as msg
from dqnfed.algorithms.parts.cache import Cache, Cut
from dqnfed.algorithms.parts.length import Length, Parts, Step
from dqnfed.algorithms.parts.messages import DescentMemory, DescentServer
from dqnfed.algorithms.parts.metric import Metric, Rows, gathered_rows, step_notes
from dqnfed.algorithms.parts.rates import MAX_HESSIAN, RULES, Here, Rates
from dqnfed.algorithms.parts.settings import DescentSettings
from dqnfed.algorithms.parts.votes import Votes
from dqnfed.core.algorithm import Cohort, Info, Status, Theta, check_choice, check_range, check_used
from dqnfed.core.problem import Problem, Task, sampled
from dqnfed.core.replies import FloatArray, Replies
from dqnfed.core.trust import Trust
from dqnfed.maths.directions import rate_matching_weights
from dqnfed.maths.gramian import norm_of
from dqnfed.maths.quasi_newton import probe_length, secant_curvature
from dqnfed.maths.solvers import DEAD, Common, bounded_rates, common_weights, serving_weights
from dqnfed.maths.step_length import mean_step_norm

PROBING = -1  # `Search.trials` while the first step's curvature is measured
ONE_IN, LEAST = 10, 64  # examples of a client's loss before local SGD: compared with themselves, so that few will do
ALLOWANCE = 0.03  # a client may lose half this share of the mean gain by the step's length
LEAST_LENGTH = 0.5  # where replies may be false: of what the median client's curvature allows, whatever others say


@dataclass(frozen=True, kw_only=True)
class DQNFed(DescentSettings):
    r"""Distributed quasi-Newton federated learning (Hamidi & Ye, TMLR 2025), with the safeguards that it needs.

    Objective: a step that lowers every client's loss, client k's at the rate :math:`d_k = g_k^\top H_k g_k`, its own
    Newton decrement with an inverse-Hessian estimate H_k. Where no step helps everybody the default goes on for the
    mean and spares those with a loss above the average if it can; `beyond = "stop"` ends there.

    Client: its gradient g_k by one full pass, its loss f_k and the rate d_k by inverse BFGS on the secant pair of its
    last reply (a probe in the first round). With `local = "sgd"`: f_k on every tenth example, 64 at least, then
    `epochs` of SGD; the change of the model stands for the gradient, its square for the rate, and there is no H_k.

    Server: u = the shortest vector with g_k'u >= d_k for all k, then theta - alpha u. All clients and gradients: u is
    shortest in the L-BFGS metric of the mean loss, and alpha is the longest that no client's curvature forbids. Part of
    the clients, or local SGD: the last rows of absent clients count as cuts, with credit for what was reached since;
    the step is m times as long as the clients' mean step, and log m is learnt: up by the share of clients whose row
    still points along the last step and whose loss has not risen, down by the others (`step = "votes"`). A step after
    which losses jump is taken back, and the run returns to its start if it ends up above it. With gradients there is no
    learning rate.

    State: client, in gradient mode its last model and gradient and one number (or `memory` pairs); server, theta, the
    model before, the first one, three numbers a client, `metric_memory` pairs or the rows of `cached_clients` clients.

    Payload: n + 3 floats up, n + 2 without curvatures, n + 1 with local SGD, n down. The server sees every row.

    Evaluation: the global model.

    Differences: no official code was found. Unlike the paper, rates are lower bounds, since an equality holds back
    clients that would gain more, and lowered by a thousandth of their mean, so that a fitted client does not hold back
    the others; they are capped by 2 f_k, since a Newton decrement cannot be larger; the step length is a rule of its
    own, since the paper's eta diverges on heterogeneous clients; the inverse BFGS recursion is used where the paper
    prints the direct one; H_k keeps no pair but the newest, since five served no better on `digits` and CIFAR-10 Setup
    1; absent clients count (`cached_clients = 0`: they do not); the default goes beyond Pareto-stationary points.
    `dqn-fed-literal` is the paper's box.

    Reference: Hamidi & Ye, Distributed Quasi-Newton Method for Fair and Fast Federated Learning, TMLR 2025.
    """

    info: ClassVar[Info] = Info(
        server=DescentServer,
        memory=DescentMemory,
        messages=(msg.First, Theta, msg.Probe, msg.Trial),
        replies=(msg.DescentUpdate, msg.GradientUpdate, msg.LocalUpdate, msg.ProbeUpdate, msg.TrialUpdate),
        needs=("gram", "rows where absent clients are cached"),
        clip_fields=("gradient", "rate", "curvature"),
        nan_ok_fields=("rate", "curvature", "probed_curvature", "trial_loss"),
        theta_fields=("theta", "theta_before", "theta_start"),
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
        gradients, strict = self.local == "gradient", self.beyond == "stop"
        allowance, least = 0.0 if strict else ALLOWANCE, 0.0 if strict or not self.drop_share else LEAST_LENGTH
        return Parts(
            Rates(self.rates, self.memory),
            Metric(self.metric_memory if self.metric == "lbfgs" else 0, keeps_mean=True),
            Length(self.step, self.step_size, self.growth, allowance=allowance, least=least),
            Cache(self.cached_clients or 0),
            Trust(self.drop_share, self.drop_stretch, checks_rates=self.cap, checks_losses=gradients),
            Votes(self.step_size, gradients, robust=self.drop_share > 0.0),
            goes_beyond=not strict,
            keeps_model=gradients and (self.rates == "bfgs" or self.step in ("curvature", "line-search")),
        )

    @property
    def needs(self) -> str:
        return "rows" if self.cached_clients else "gram"

    @property
    def mode(self) -> str:
        row = "local training" if self.local == "sgd" else "one gradient a round"
        return f"{row}, step={self.step}, metric={self.metric}, {self.cached_clients} cached clients"

    # The client.

    def init_memory(self, problem: Problem, task: Task) -> DescentMemory:
        theta, rates = problem.theta0, Rates("identity") if self.local == "sgd" else self.parts.rates
        kept = theta.new_zeros(len(theta) if self.parts.keeps_model else 0)
        return DescentMemory(rates.init(theta), kept, kept.clone(), theta.new_zeros((), dtype=torch.int64))

    def client_step(self, problem: Problem, task: Task, sent: Any, memory: DescentMemory) -> tuple[Any, DescentMemory]:
        if isinstance(sent, msg.Trial):
            return msg.TrialUpdate(problem.kernels.loss(problem, sent.theta, task)), memory
        if isinstance(sent, msg.Probe):
            (gradient, _), (nearby, loss) = problem.kernels.gradients(problem, (sent.theta, sent.nearby), task)
            move = sent.theta - sent.nearby
            slope = (gradient * move).sum() / torch.linalg.vector_norm(move)
            return msg.ProbeUpdate(secant_curvature(move, gradient - nearby), slope, loss), memory
        if self.local == "sgd":
            loss = problem.kernels.loss(problem, sent.theta, sampled(task, every=ONE_IN, least=LEAST))
            return msg.LocalUpdate(sent.theta - self.local_sgd(problem, task, sent.theta), loss), memory
        ((gradient, loss),) = problem.kernels.gradients(problem, (sent.theta,), task)
        here, kept, curvature = Here(sent.theta, gradient, loss), memory.rates, torch.full_like(loss, nan)
        if isinstance(sent, msg.First) or not self.parts.keeps_model:
            rate = self.parts.rates.first(problem, task, here)
        else:  # a client without a model before has a pair of zeros, which is skipped
            s = torch.where(memory.n_replies > 0, sent.theta - memory.theta, 0.0)
            y = torch.where(memory.n_replies > 0, gradient - memory.gradient, 0.0)
            rate, kept = self.parts.rates.next(problem, task, here, memory.rates, s, y)
            curvature = secant_curvature(s, y)
        if self.cap:
            rate = torch.minimum(rate, 2.0 * (loss - problem.loss_floor))
        memory = memory._replace(rates=kept, n_replies=memory.n_replies + 1)
        if self.parts.keeps_model:
            memory = memory._replace(theta=sent.theta, gradient=gradient)
        if self.parts.length.uses_curvature:
            return msg.DescentUpdate(gradient, rate, loss, curvature), memory
        return msg.GradientUpdate(gradient, rate, loss), memory

    def passes(self, sent: Any) -> float:
        if isinstance(sent, msg.Trial):
            return 0.5  # a forward pass
        if self.local == "sgd":
            return float(self.epochs)  # the loss of a sample costs a few hundredths
        if isinstance(sent, msg.Probe):
            return 2.0
        return 1.0 + self.parts.rates.passes(is_first=isinstance(sent, msg.First))

    # The server.

    def init_server(self, problem: Problem, n_clients: int) -> DescentServer:
        theta, zero, floor = problem.theta0, torch.zeros((), dtype=torch.float64), problem.loss_floor
        _, metric, length, cache, trust, votes, *_ = self.parts
        states = metric.init(theta), length.no_search(theta), trust.init(n_clients, floor), cache.init(theta)
        start, before, voted = theta.clone(), theta.clone(), votes.init(n_clients, floor)
        return DescentServer(theta.clone(), before, start, zero, zero.long(), *states, voted)

    def send(self, server: DescentServer) -> Any:
        if trials := int(server.search.trials):
            candidate = server.theta - float(server.search.length) * server.search.direction
            return msg.Probe(server.theta, candidate) if trials == PROBING else msg.Trial(candidate)
        is_first = int(server.n_steps) == 0 and self.local == "gradient"
        return msg.First(server.theta) if is_first else Theta(server.theta)

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
        _, metric, length, caching, trust, votes, *_ = self.parts
        everyone, all_replies = cohort, replies
        if self.drop_share:
            move = server.theta - server.theta_before
            server = server._replace(trust=trust.check_replies(server.trust, replies, cohort, move))
            replies, cohort = trust.without_untrusted(server.trust, replies, cohort)
            cohort = trust.believed(cohort)
        replies = self._bounded(replies, server.theta) if self.local == "sgd" else replies
        losses = replies.scalars("loss")
        server = server._replace(votes=votes.with_places(server.votes, cohort))
        guarded = self.step in ("votes", "curvature")
        if self.step == "votes" and votes.is_above_start(server.votes, losses, cohort):
            return phases.restarted(self.parts, server)
        if guarded and (factor := votes.retreat_by(server.votes, losses, cohort)) > 1.0:
            here = torch.ones(len(replies), dtype=torch.bool)
            mean = metric.mean(server.metric, replies, cohort, here, everyone.n_clients)
            return phases.retreated(self.parts, server, mean, factor)
        if (change := metric.change(server.metric, replies, cohort)) is not None:
            move = server.theta - server.theta_before
            server = server._replace(metric=metric.learn(server.metric, move, change))
        rows = gathered_rows(self.parts, server, replies, cohort, losses, self.wanted_rates)
        found = self._weights(server, rows, everyone)
        u, on_cached = replies.combine("gradient", found.weights[: rows.K]), found.weights[rows.K :]
        if on_cached.any():
            u = u + caching.combine(server.cache, rows.absent, on_cached)
        u = metric.apply(server.metric, u)
        norm, present = norm_of(u), torch.from_numpy(found.served[: rows.K] | found.beyond)
        if not isfinite(norm):
            return phases.stationary(self.parts, server, everyone, {"infeasible": 1.0})
        if self.drop_share:
            left_out = cohort.clients[~present]
            server = server._replace(trust=trust.record_claims(server.trust, all_replies, everyone, u, left_out))
        mean = metric.mean(server.metric, replies, cohort, present, everyone.n_clients)
        search = server.search._replace(direction=u, norm=torch.tensor(norm, dtype=torch.float64), mean=mean)
        server = server._replace(search=search)
        notes = step_notes(rows, found, norm)
        if length.uses_curvature:
            server = server._replace(votes=votes.record(server.votes, losses, cohort))
            return self._by_curvature(server, replies, everyone, cohort, rows, found, notes)
        return self._by_rule(server, replies, everyone, cohort, rows, found, notes)

    def _bounded(self, replies: Replies[Any], theta: Tensor) -> Replies[Any]:
        """Return the replies, model changes that are longer than the model itself shortened to its length.

        A local training that goes so far has exploded: its learning rate is too large.
        """
        longest, norms = norm_of(theta), replies.norms("gradient")
        if longest == 0.0 or norms.max() <= longest:
            return replies
        return replies.scaled(torch.from_numpy(np.minimum(1.0, longest / norms)), ("gradient",))

    def _weights(self, server: DescentServer, rows: Rows, cohort: Cohort) -> Common:
        """Return the rows' weights in the step, and for which rows it is."""
        everybody = np.ones(len(rows.rates), dtype=np.bool_)
        if self.constraint == "exactly":
            return Common(rate_matching_weights(rows.gram, rows.rates, ridge=self.ridge), everybody, beyond=False)
        kept = everybody
        if self.drop_share:
            kept = self.parts.trust.without_outliers(server.trust, rows.gram, rows.rates, cohort, self.ridge)
            if not self.parts.length.uses_curvature:  # by which a client with a low rate would shorten the step
                rows = rows._replace(rates=self.parts.trust.bounded(rows.gram, rows.rates, kept, cohort, self.ridge))
        if self.beyond == "mean":
            return common_weights(rows.gram, rows.rates, rows.losses, kept, ridge=self.ridge)
        weights, served = serving_weights(rows.gram, rows.rates, kept, rows.K, ridge=self.ridge)
        return Common(weights, served, beyond=False)

    def _by_rule(
        self,
        server: DescentServer,
        replies: Replies[Any],
        everyone: Cohort,
        cohort: Cohort,
        rows: Rows,
        found: Common,
        notes: phases.Notes,
    ) -> Step:
        """Return the step whose length needs no more replies, and credit cached rows with it."""
        _, _, length, caching, _, votes, *_ = self.parts
        K, norm, n_steps = rows.K, float(server.search.norm), int(server.n_steps)
        state, cache, losses = server.votes, server.cache, rows.losses[: rows.K]
        n_known = votes.n_known(state, cohort)
        mean_norm = mean_step_norm(rows.GG[:K, :K], rows.rates[:K])
        if self.step == "votes":
            state, share = votes.counted(state, rows.along, losses, cohort, n_steps, n_known)
            ratio, known = mean_norm / norm if norm > 0.0 else 0.0, {"n_steps": n_steps, "n_known": n_known}
            alpha = votes.length(state, ratio, beyond=found.beyond, **known, cohort=cohort)
            most = votes.longest(state, share, cohort, n_steps)
            if isfinite(most) and norm > 0.0:
                alpha = min(alpha, most * float(server.step_norm) / norm)
            notes = {**notes, "m": self.step_size * exp(float(state.log_m))}
            notes |= {} if isnan(share) else {"votes": share}
        else:
            alpha = length.by_rule(norm, mean_norm, cohort.round)
        if caching.size:
            given, on_cached = alpha * (rows.gram @ found.weights), np.zeros(caching.size)
            on_cached[rows.absent] = given[K:]
            new = Cut(rows.rates[:K], given[:K], losses)
            cache = caching.insert(caching.moved(cache, on_cached), cohort, replies, new, rows.on_cache)
        server = server._replace(cache=cache, votes=votes.record(state, losses, cohort))
        return phases.moved(self.parts, server, alpha, everyone, notes)

    def _by_curvature(
        self,
        server: DescentServer,
        replies: Replies[Any],
        everyone: Cohort,
        cohort: Cohort,
        rows: Rows,
        found: Common,
        notes: phases.Notes,
    ) -> Step:
        """Return the step that the clients' curvatures allow, or the phase in which its length is sought."""
        squares, slopes = np.diagonal(rows.GG), rows.gram @ found.weights
        counted = found.served & (squares > DEAD**2 * squares.max())
        lengths, curvature = np.sqrt(squares), replies.scalars("curvature")
        is_first = int(server.n_steps) == 0 and float(server.search.norm) > 0
        if is_first or self.step == "line-search":
            unknown = torch.full((everyone.n_clients,), nan, dtype=torch.float64)
            claims = (rows.losses, np.where(counted, slopes, nan), lengths)
            losses, known, norms = (unknown.index_copy(0, cohort.clients, torch.from_numpy(v)) for v in claims)
            server = server._replace(search=server.search._replace(losses=losses, slopes=known, lengths=norms))
        if is_first:
            return phases.searching(server, float(probe_length(server.theta, server.search.direction)), PROBING, notes)
        limits = [values[counted] for values in (slopes, curvature, lengths)]
        if found.beyond:  # the mean is one client more
            mean = slopes.mean(), curvature.mean(), norm_of(replies.mean("gradient"))
            limits = [np.append(values, value) for values, value in zip(limits, mean, strict=True)]
        parts = self.parts
        before, now = server.metric.before.members, server.search.mean.members
        if not torch.equal(before, now) and not parts.trust.all_again(before, now):
            parts = parts._replace(length=replace(parts.length, growth=1.0))  # curvatures along a step of other clients
        return phases.lengthened(parts, server, phases.Limits(*limits), everyone, notes)

    def wanted_rates(
        self, replies: Replies[Any], squares: FloatArray, others: FloatArray, losses: FloatArray
    ) -> FloatArray:
        """Return the decreases that the step is to bring, [K]; an update of local SGD asks for its own square."""
        if self.local == "sgd":
            return squares
        rates = bounded_rates(replies.scalars("rate"), squares, self.rate_bounds, others)
        return np.minimum(rates, 2.0 * np.maximum(losses, 0.0)) if self.cap else rates
