"""TorchJD's weightings: what they promise about the step, and what is said where TorchJD is missing."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor

from dqnfed.algorithms import OPTIONAL, REGISTRY
from dqnfed.algorithms.fedavg import FedAvgServer, FedAvgUpdate
from dqnfed.algorithms.jacobian_descent import JD_METHODS, JacobianDescent, JDAlignedMTL, JDCAGrad, JDDualProj, JDUPGrad
from dqnfed.core.replies import Replies
from dqnfed.experiments.experiment import method_named
from tests.helpers.baselines import GRADIENTS, bowl_problem, bowls, cohort_of
from tests.helpers.play import play
from tests.helpers.rows import gaussian_rows

needs_torchjd = pytest.mark.skipif(find_spec("torchjd") is None, reason="the extra `torchjd` is not installed")
needs_cvxpy = pytest.mark.skipif(find_spec("cvxpy") is None, reason="CAGrad needs cvxpy, part of the extra `torchjd`")


def step_of(algorithm: JacobianDescent, rows: Tensor) -> Tensor:
    before = FedAvgServer(torch.zeros_like(rows[0]))
    return -algorithm.server_step(before, Replies(FedAvgUpdate(rows)), cohort_of((1,) * len(rows))).server.theta


def projection_on_dual_cone(v: Tensor, rows: Tensor) -> Tensor:
    """Return argmin ||u - v|| subject to rows @ u >= 0, by a general solver."""
    target, G = v.numpy(), rows.numpy()
    found = minimize(
        lambda u: ((u - target) ** 2).sum() / 2,
        target,
        jac=lambda u: u - target,
        constraints=[{"type": "ineq", "fun": lambda u: G @ u, "jac": lambda u: G}],
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 500},
    )
    return torch.from_numpy(np.asarray(found.x))


@needs_torchjd
@pytest.mark.parametrize("seed", range(3))
def test_upgrad_and_dualproj_are_projections(seed: int) -> None:
    rows = gaussian_rows(4, 6, seed=seed)
    mean = rows.mean(0)
    dual = step_of(JDDualProj(), rows)
    torch.testing.assert_close(dual, projection_on_dual_cone(mean, rows), rtol=1e-2, atol=2e-3)  # TorchJD's ridge 1e-4
    projected = torch.stack([projection_on_dual_cone(row, rows) for row in rows]).mean(0)
    torch.testing.assert_close(step_of(JDUPGrad(), rows), projected, rtol=1e-2, atol=2e-3)


@needs_torchjd
@pytest.mark.parametrize("seed", range(3))
def test_aligned_mtl_gives_all_singular_values_the_smallest_one(seed: int) -> None:
    rows = gaussian_rows(4, 6, seed=seed)
    left, values, right = torch.linalg.svd(rows, full_matrices=False)
    aligned = values[-1] * left @ right
    torch.testing.assert_close(step_of(JDAlignedMTL(), rows), aligned.mean(0), rtol=1e-8, atol=1e-10)


@needs_torchjd
@pytest.mark.parametrize("name", sorted(set(JD_METHODS) - {"jd-cagrad"}))
def test_the_server_rate_scales_the_step(name: str) -> None:
    one, third = (step_of(JD_METHODS[name](server_lr=rate), GRADIENTS) for rate in (1.0, 1 / 3))
    torch.testing.assert_close(third, one / 3, rtol=1e-14, atol=0)


@needs_torchjd
@needs_cvxpy
def test_cagrad_stays_in_its_ball_and_helps_the_worst() -> None:
    mean = GRADIENTS.mean(0)
    step = step_of(JDCAGrad(c=0.4), GRADIENTS)
    assert float((step - mean).norm()) <= 0.4 * float(mean.norm()) * (1 + 1e-6)
    assert float((GRADIENTS @ step).min()) > float((GRADIENTS @ mean).min())
    torch.testing.assert_close(step_of(JDCAGrad(c=0.0), GRADIENTS), mean, rtol=1e-6, atol=1e-8)


@needs_torchjd
@pytest.mark.parametrize("name", sorted(set(JD_METHODS) - {"jd-cagrad"}))
def test_the_step_scales_with_the_updates(name: str) -> None:
    """Small updates (a small lr) must not fall below a solver's absolute tolerance."""
    algorithm = JD_METHODS[name]()
    small = step_of(algorithm, 1e-6 * GRADIENTS)
    torch.testing.assert_close(1e6 * small, step_of(algorithm, GRADIENTS), rtol=1e-9, atol=1e-12)


@needs_torchjd
@pytest.mark.parametrize("name", sorted(set(JD_METHODS) - {"jd-cagrad"}))
def test_they_go_downhill(name: str) -> None:
    problem, federation, _ = bowls(3, spread=0.3, start=2.0)
    played = play(JD_METHODS[name](lr=0.3), problem, federation, rounds=5)
    assert played.records[-1]["loss_after"] < played.records[0]["loss_before"]


def test_registered_exactly_where_torchjd_is() -> None:
    assert (set(JD_METHODS) <= set(REGISTRY)) is (find_spec("torchjd") is not None)
    assert all(OPTIONAL[name] == "torchjd" for name in JD_METHODS)


def test_without_torchjd_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchjd", None)
    monkeypatch.setitem(sys.modules, "torchjd.aggregation", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'dqnfed\[torchjd\]'"):
        JDUPGrad().prepare(bowl_problem(2), 3, 3)


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match=r"JDCAGrad: `c` must be in \[0, inf\), but is -1.0"):
        JDCAGrad(c=-1.0)
    with pytest.raises(ValueError, match=r"JDUPGrad: `server_lr` must be in \(0, inf\), but is 0.0"):
        JDUPGrad(server_lr=0.0)


def test_asking_for_one_by_name_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(REGISTRY, "jd-upgrad", raising=False)
    with pytest.raises(ValueError, match=r"the method 'jd-upgrad' needs an extra: pip install 'dqnfed\[torchjd\]'"):
        method_named("jd-upgrad")
