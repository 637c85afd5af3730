"""DQN-Fed's settings: what may be chosen, what "auto" means, and what cannot work together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import Any, ClassVar, Self

from dqnfed.algorithms.parts.length import RULES
from dqnfed.core.algorithm import LOCAL_WORK, check_choice, check_range, check_used, default_of
from dqnfed.core.local_work import LocalWork
from dqnfed.core.problem import Problem

CACHE_BYTES = 2**30  # what their gradients may take of the server's memory unless their number is given
NO_GRADIENT = "on updates of local SGD, which are no gradients; use local='gradient' for it"


@dataclass(frozen=True, kw_only=True)
class DescentSettings(LocalWork[Any, Any, Any]):
    """The settings of a server step that lowers every participant's loss."""

    gradient_settings: ClassVar[tuple[str, ...]] = ("cap", "rate_bounds", "rates", "memory")
    local: str = "auto"  # gradient | sgd | auto: gradient for one full-batch epoch, else sgd
    constraint: str = "at-least"  # at-least | exactly
    beyond: str = "mean"  # mean | stop: where no step serves everybody, lower the mean and spare the worse-off, or end
    cap: bool = True  # rates at most 2 (f_k - floor); switch off if labels are noisy
    metric: str = "auto"  # lbfgs | identity | auto: lbfgs for gradients when all clients take part
    metric_memory: int = 10  # pairs of the server's metric, >= 1
    step: str = "auto"  # votes | curvature | line-search | match | fixed | diminishing | paper | auto: of the first two
    step_size: float = 1.0  # eta of fixed, diminishing; match, votes at first: times the clients' mean step; > 0
    growth: float = 3.0  # a step is at most this many times the last one (curvature, line-search), >= 1
    ridge: float = 1e-6  # on the Gramian of the unit rows, >= 0
    rate_bounds: float = 1000.0  # d_k/||g_k||^2 stays within this factor of the cohort's median, >= 1
    cached_clients: int | None = None  # absent clients whose last rows count too; None: 100, or what 1 GiB holds
    absentees: int | None = None  # the old name of `cached_clients`
    drop_share: float = 0.0  # of a cohort that may be left out: inconsistent replies or a distorted step, in [0, 1)
    drop_stretch: float = inf  # a client that makes the step this many times longer may be left out too, > 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "local", ("auto", "gradient", "sgd"))
        check_choice(self, "constraint", ("at-least", "exactly"))
        check_choice(self, "metric", ("auto", "lbfgs", "identity"))
        check_choice(self, "beyond", ("mean", "stop"))
        check_choice(self, "step", RULES)
        for name, low in (("metric_memory", 1), ("ridge", 0.0)):
            check_range(self, name, low=low)
        for name in ("growth", "rate_bounds"):  # inf: no bound
            check_range(self, name, low=1.0, high=inf)
        for name in ("absentees", "cached_clients"):
            if getattr(self, name) is not None:
                check_range(self, name, low=0)
        if self.absentees is not None:
            if self.cached_clients not in (default_of(self, "cached_clients"), self.absentees):
                raise ValueError(
                    f"{type(self).__name__}: `absentees` is the old name of `cached_clients`, but they are "
                    f"{self.absentees} and {self.cached_clients}; set `cached_clients` alone."
                )
            object.__setattr__(self, "cached_clients", self.absentees)
            object.__setattr__(self, "absentees", None)
        check_range(self, "step_size", low=0.0, open_low=True)
        check_range(self, "drop_share", low=0.0, high=1.0, open_high=True)
        check_range(self, "drop_stretch", low=1.0, high=inf, open_low=True)
        check_used(self, "drop_stretch", used=self.drop_share > 0.0, why="while drop_share is 0")
        exact = "with constraint='exactly', which gives everybody its rate"
        for name in ("beyond", "drop_stretch"):
            check_used(self, name, used=self.constraint != "exactly", why=exact)

    def prepare(self, problem: Problem, n_clients: int, cohort_size: int) -> Self:
        is_sgd = self.local == "sgd" or (self.local == "auto" and (self.epochs > 1 or self.batch_size is not None))
        by_curvature = not is_sgd and cohort_size == n_clients
        resolved = {
            "local": "sgd" if is_sgd else "gradient",
            "step": "curvature" if by_curvature else "votes",
            "metric": "lbfgs" if by_curvature and self.step != "votes" else "identity",
        }
        changes: dict[str, Any] = {key: value for key, value in resolved.items() if getattr(self, key) == "auto"}
        changes["cached_clients"] = self._n_cached(problem, n_clients, cohort_size)
        chosen = replace(self, **changes)
        chosen._check_together(n_clients, cohort_size)
        return chosen

    def unused(self) -> frozenset[str]:
        return frozenset(LOCAL_WORK) if self.local == "gradient" else super().unused()

    def _check_together(self, n_clients: int, cohort_size: int) -> None:
        """Refuse resolved settings that contradict each other, and those that have no effect."""
        name, sgd, rule = type(self).__name__, self.local == "sgd", f"with step='{self.step}'"
        if sgd and (self.step in ("curvature", "line-search") or self.metric == "lbfgs"):
            raise ValueError(
                f"{name}: an update of local SGD is no gradient, so step='{self.step}' and metric='{self.metric}' mean "
                "nothing for it; use step='votes' and metric='identity', or local='gradient'."
            )
        if cohort_size < n_clients and (self.step in ("curvature", "line-search") or self.metric == "lbfgs"):
            raise ValueError(
                f"{name}: step='{self.step}' and metric='{self.metric}' compare the same clients' gradients at both "
                f"ends of a step, but only {cohort_size} of {n_clients} clients take part; use step='votes' and "
                "metric='identity', or participation=1."
            )
        for setting in self.gradient_settings:  # which have no effect on updates of local SGD
            check_used(self, setting, used=not sgd, why=NO_GRADIENT)
        check_used(self, "metric_memory", used=self.metric == "lbfgs", why=f"with metric='{self.metric}'")
        check_used(self, "growth", used=self.step in ("curvature", "line-search"), why=rule)
        check_used(self, "step_size", used=self.step in ("votes", "match", "fixed", "diminishing"), why=rule)

    def _n_cached(self, problem: Problem, n_clients: int, cohort_size: int) -> int:
        """Return of how many clients the server keeps the last row."""
        asked, rules_out = self.cached_clients, None
        if cohort_size == n_clients:
            rules_out = f"all {n_clients} clients take part in every round"
        elif self.constraint == "exactly":
            rules_out = "constraint='exactly' gives nobody more than its rate, as cached rows would"
        elif self.drop_share > 0.0:
            rules_out = f"drop_share={self.drop_share:g}, and cached gradients cannot be checked against losses"
        if asked and rules_out is not None:
            raise ValueError(f"{type(self).__name__}: `cached_clients` is {asked}, but {rules_out}; set it to 0.")
        if asked is None:
            n_rows = CACHE_BYTES // (problem.n_parameters * problem.theta0.element_size())
            most = min(100, max(n_rows - cohort_size, n_rows // 2))  # new rows come before old ones go
            asked = 0 if rules_out is not None else most
        return min(asked, n_clients)
