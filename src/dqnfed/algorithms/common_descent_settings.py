"""The settings of a common descent: what may be chosen, what "auto" means, and what cannot work together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import Self

from dqnfed.algorithms.common_descent_messages import DescentMemory, DescentServer, DescentUpdate
from dqnfed.core.algorithm import Algorithm, check_choice, check_range
from dqnfed.core.problem import Problem

N_ABSENTEES = 50
ABSENTEES_BYTES = 2**30  # what their gradients may take of the server's memory unless their number is said
STEPS = ("auto", "curvature", "line-search", "match", "fixed", "diminishing", "paper")


@dataclass(frozen=True, kw_only=True)
class DescentSettings(Algorithm[DescentServer, DescentMemory, DescentUpdate]):
    """What all methods have in common whose server takes one step that lowers every participant's loss."""

    local: str = "auto"  # gradient | sgd | auto: gradient for one full-batch epoch, else sgd
    constraint: str = "at-least"  # at-least | exactly
    cap: bool = True  # rates at most 2 (f_k - floor); switch off if labels are noisy
    metric: str = "auto"  # lbfgs | identity | auto: lbfgs when at least a quarter of the clients take part
    metric_memory: int = 10  # pairs of the server's metric, >= 1
    previous: str = "auto"  # kept | sent | auto: the model before is kept by clients if everybody takes part, else sent
    step: str = "auto"  # curvature | line-search | match | fixed | diminishing | paper | auto: curvature, sgd: match
    step_size: float = 1.0  # eta of fixed and diminishing; the multiple of FedAvg's length for match; > 0
    growth: float = 2.0  # a step is at most this many times the last one, >= 1
    ridge: float = 1e-6  # on the Gramian of the unit rows, >= 0
    rate_bounds: float = 1000.0  # d_k/||g_k||^2 stays within this factor of the cohort's median, >= 1
    absentees: int | None = 0  # absent clients whom the step serves too, by their last gradients, >= 0
    drop_share: float = 0.0  # of a cohort that may be left out: who contradicts itself or distorts the step, in [0, 1)
    drop_stretch: float = inf  # a client that makes the step this many times longer may be left out too, > 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "local", ("auto", "gradient", "sgd"))
        check_choice(self, "constraint", ("at-least", "exactly"))
        check_choice(self, "metric", ("auto", "lbfgs", "identity"))
        check_choice(self, "previous", ("auto", "kept", "sent"))
        check_choice(self, "step", STEPS)
        check_range(self, "metric_memory", low=1)
        check_range(self, "step_size", low=0.0, open_low=True)
        check_range(self, "growth", low=1.0)
        check_range(self, "ridge", low=0.0)
        check_range(self, "rate_bounds", low=1.0)
        if self.absentees is not None:
            check_range(self, "absentees", low=0)
        check_range(self, "drop_share", low=0.0, high=1.0, open_high=True)
        check_range(self, "drop_stretch", low=1.0, open_low=True)

    def prepare(self, problem: Problem, n_clients: int, cohort_size: int) -> Self:
        local, step, metric, previous = self.local, self.step, self.metric, self.previous
        if local == "auto":
            local = "gradient" if self.epochs == 1 and self.batch_size is None else "sgd"
        if step == "auto":
            step = "match" if local == "sgd" else "curvature"
        if metric == "auto":
            metric = "lbfgs" if local == "gradient" and 4 * cohort_size >= n_clients else "identity"
        if previous == "auto":
            previous = "kept" if cohort_size == n_clients else "sent"
        name = type(self).__name__
        if local == "sgd" and (step in ("curvature", "line-search") or metric == "lbfgs"):
            raise ValueError(
                f"{name}: an update of local SGD is no gradient, so step='{step}' and metric='{metric}' mean nothing "
                "for it; use step='match' and metric='identity', or local='gradient'."
            )
        if local == "gradient" and step == "match":
            raise ValueError(f"{name}: step='match' needs local='sgd', whose updates have a length of their own.")
        if previous == "kept" and metric == "lbfgs" and cohort_size < n_clients:
            raise ValueError(
                f"{name}: the metric needs every participant's gradient at the model before, but previous='kept' and "
                f"only {cohort_size} of {n_clients} clients take part; use previous='sent' or metric='identity'."
            )
        absentees = self._n_absentees(problem, local, n_clients, cohort_size)
        return replace(self, local=local, step=step, metric=metric, previous=previous, absentees=absentees)

    def _n_absentees(self, problem: Problem, local: str, n_clients: int, cohort_size: int) -> int:
        """Return of how many clients the server keeps the last gradient."""
        asked, name = self.absentees, type(self).__name__
        if asked and self.constraint == "exactly":
            raise ValueError(
                f"{name}: absentees={asked} get at least what they asked for, which constraint='exactly' rules out; "
                "use constraint='at-least' or absentees=0."
            )
        if asked and self.drop_share > 0.0:
            raise ValueError(
                f"{name}: what an absent client said cannot be held against its losses, but drop_share="
                f"{self.drop_share:g} and absentees={asked}; set one of them to 0."
            )
        if cohort_size == n_clients or asked == 0:
            return 0
        if asked is None:
            if local == "sgd" or self.constraint == "exactly" or self.drop_share > 0.0:
                return 0
            row = problem.n_parameters * problem.theta0.element_size()
            n_rows = ABSENTEES_BYTES // row
            asked = min(N_ABSENTEES, max(n_rows - cohort_size, n_rows // 2))  # a cohort's rows come before others go
        return min(asked, n_clients)

    @property
    def keeps_model(self) -> bool:
        """Whether clients keep the model they saw last and their gradient there."""
        return self.local == "gradient" and self.previous == "kept"

    @property
    def caps_rates(self) -> bool:
        """Whether no honest client asks for more than twice what its loss can fall by."""
        return self.cap

    @property
    def seeks_length(self) -> bool:
        """Whether the step's length comes from the clients' curvatures."""
        return self.step in ("curvature", "line-search")
