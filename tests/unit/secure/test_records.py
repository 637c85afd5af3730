"""One example as the unit: what leaves a client is noisy, clipped by example, and counted."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.func import grad

from dqnfed import Evaluation, Federation, Policy, Problem, run
from dqnfed.algorithms import REGISTRY
from dqnfed.algorithms.dqn_fed import DQNFed
from dqnfed.algorithms.fedavg import FedAvg
from dqnfed.algorithms.qffl import QFFL
from dqnfed.core.algorithm import AnyAlgorithm
from dqnfed.core.problem import Task
from dqnfed.experiments.config import ConfigError, read_config
from dqnfed.experiments.experiment import build_problem, run_experiment
from dqnfed.experiments.private import privacy_of
from dqnfed.flower.in_process import run_in_process
from dqnfed.secure.accounting import epsilon_spent
from dqnfed.secure.noise import Privacy
from dqnfed.secure.records import LOSS_PART, blind, step_on_records, without_data
from tests.helpers.bowls import BOWLS, Case
from tests.helpers.turns import relative_distance

pytest.importorskip("dp_accounting")
QUIET = Evaluation(every=50, participants=False)
OPEN = Privacy(clip=1e9, noise_multiplier=1e-18, unit="record", loss_clip=1e6)  # clips nothing, hardly any noise


@pytest.fixture(scope="module")
def case() -> Case:
    return BOWLS["network"][-1]()


def task_of(case: Case) -> Task:
    train = case.federation.train
    rows = train.rows(torch.tensor([0]))
    mask = case.problem.theta0.new_ones(len(rows))
    nothing = case.problem.theta0.new_zeros(0)
    lr = case.problem.theta0.new_tensor(0.1)
    return Task(train.inputs[rows], train.targets[rows], mask, torch.zeros(1, 0, dtype=torch.long), nothing, lr)


@pytest.mark.parametrize("batch_size", [None, 4])
@pytest.mark.parametrize("algorithm", [FedAvg(), QFFL(), DQNFed()], ids=lambda a: type(a).__name__)
def test_without_clipping_and_noise_it_is_the_plain_run(
    algorithm: AnyAlgorithm, batch_size: int | None, case: Case
) -> None:
    algorithm = replace(algorithm, batch_size=batch_size, epochs=2)  # type: ignore[call-arg]
    plain = run(algorithm, case.problem, case.federation, rounds=3, evaluation=QUIET)
    found = run(algorithm, case.problem, case.federation, rounds=3, evaluation=QUIET, privacy=OPEN)
    assert relative_distance(found.theta, plain.theta) <= 1e-6


def test_a_gradient_is_the_mean_of_clipped_ones(case: Case) -> None:
    task, clip = task_of(case), 0.05
    hidden, kernels = without_data(case.problem, task, Privacy(clip=clip, unit="record", loss_clip=0.3))
    theta = case.problem.theta0 + 0.1
    ((found, loss),) = kernels.gradients(hidden, [theta], blind(task))
    each, losses = [], []
    for k in range(len(task.inputs)):
        one = task._replace(inputs=task.inputs[k : k + 1], targets=task.targets[k : k + 1], mask=task.mask[k : k + 1])
        g = grad(case.problem.loss)(theta, one)
        each.append(g * min(1.0, clip / float(g.norm())))
        losses.append(min(0.3, float(case.problem.loss(theta, one))))
    torch.testing.assert_close(found, torch.stack(each).mean(0), rtol=1e-9, atol=1e-12)
    assert float(loss) == pytest.approx(float(np.mean(losses)))
    assert kernels.n_releases == 1


def test_the_noise_has_the_stated_spread(case: Case) -> None:
    task, privacy = task_of(case), Privacy(clip=0.05, noise_multiplier=7.0, unit="record", loss_clip=0.3)
    theta, n = case.problem.theta0, len(task.inputs)
    hidden, quiet = without_data(case.problem, task, replace(privacy, noise_multiplier=0.0))
    ((exact, exact_loss),) = quiet.gradients(hidden, [theta], blind(task))
    hidden, kernels = without_data(case.problem, task, privacy)
    drawn = [kernels.gradients(hidden, [theta], blind(task))[0] for _ in range(200)]
    noise = torch.stack([g - exact for g, _ in drawn]).flatten()
    longer = math.hypot(1.0, LOSS_PART)
    assert float(noise.std()) == pytest.approx(7.0 * longer * 0.05 / n, rel=4 / math.sqrt(2 * len(noise)))
    losses = np.array([float(loss) for _, loss in drawn])
    wanted = 7.0 * longer / LOSS_PART * 0.3 / n  # losses below the floor count as the floor, so look above the middle
    above = losses[losses > float(exact_loss)] - float(exact_loss)
    assert float(np.sqrt(np.square(above).mean())) == pytest.approx(wanted, rel=0.3)


def test_one_example_moves_the_clipped_sum_by_no_more_than_the_clip(case: Case) -> None:
    """The sensitivity that the noise is for: an example with an absurd input, and without it."""
    task = task_of(case)
    absurd = task._replace(inputs=torch.cat([task.inputs[:-1], 1e6 * task.inputs[-1:]]))
    without = task._replace(mask=torch.cat([task.mask[:-1], torch.zeros(1, dtype=task.mask.dtype)]))
    clip, n, sums = 0.05, len(task.inputs), []
    for given, count in ((absurd, n), (without, n - 1)):
        hidden, kernels = without_data(case.problem, given, Privacy(clip=clip, unit="record"))
        sums.append(kernels.gradients(hidden, [case.problem.theta0], blind(given))[0][0] * count)
    assert float((sums[0] - sums[1]).norm()) <= clip * (1 + 1e-9)


@pytest.mark.parametrize(
    ("method", "wanted"),
    [
        (FedAvg(), 1),
        (FedAvg(epochs=3), 3),
        (FedAvg(epochs=3, batch_size=4), 3),  # an example is in one batch of an epoch
        (QFFL(epochs=2), 3),  # and in one loss
    ],
)
def test_releases_are_counted_by_example(method: AnyAlgorithm, wanted: int, case: Case) -> None:
    found = run(method, case.problem, case.federation, rounds=2, evaluation=QUIET, privacy=replace(OPEN, clip=1.0))
    assert [record["releases"] for record in found.history[1:]] == [wanted] * 2
    assert found.summary["privacy"]["unit"] == "record"


@pytest.mark.parametrize("name", ["term", "propfair", "agnostic-fair", "fednl", "fedfa", "pooled"])
def test_methods_that_look_at_examples_never_get_them(name: str, case: Case) -> None:
    """They are refused by name, or compute with what the kernels give."""
    from dqnfed.algorithms import method_called

    method = method_called(name)
    assert method is not None
    try:
        run(method(), case.problem, case.federation, rounds=1, evaluation=QUIET, privacy=OPEN)
    except ValueError as refusal:
        assert "privacy.unit" in str(refusal)  # noqa: PT017
    else:
        assert name == "term"


def test_the_method_gets_no_data(case: Case) -> None:
    seen: list[Task] = []

    class Curious(FedAvg):
        def client_step(self, problem, task, sent, memory):  # type: ignore[no-untyped-def]
            seen.append(task)
            return super().client_step(problem, task, sent, memory)

    task = task_of(case)
    memory = FedAvg().init_memory(case.problem, task)
    sent = FedAvg().send(FedAvg().init_server(case.problem, 2))
    step_on_records(Curious(), case.problem, task, sent, memory, OPEN)
    assert seen[0].inputs.tolist() == list(range(len(task.inputs)))
    assert not seen[0].targets.any()


@pytest.mark.parametrize("secure", [False, True])
def test_a_run_stops_before_it_exceeds_its_budget(secure: bool, case: Case) -> None:
    budget = epsilon_spent(5.0, 7, 1e-5) * 1.0001
    privacy = Privacy(clip=0.01, noise_multiplier=5.0, unit="record", epsilon=budget)
    method = FedAvg(epochs=2)
    found = run(method, case.problem, case.federation, rounds=9, evaluation=QUIET, privacy=privacy, secure=secure)
    assert found.summary["status"] == "stopped"
    assert found.summary["privacy"]["releases"] == 6, "one more round has two releases"
    assert "2 more would make it" in found.summary["reason"]


def test_deployed_clients_count_for_themselves(case: Case) -> None:
    budget = epsilon_spent(5.0, 4, 1e-5) * 1.0001
    privacy = Privacy(clip=0.01, noise_multiplier=5.0, unit="record", epsilon=budget)
    given = (FedAvg(epochs=2), case.problem, case.federation)
    found = run_in_process(*given, rounds=5, evaluation=QUIET, policy=Policy(), privacy=privacy)
    assert [record["status"] for record in found.history[1:3]] == ["next", "next"]
    assert len(found.history) <= 5 or all(len(r["dropped"]) == 6 for r in found.history[3:])
    dropped = [each["why"] for record in found.history[3:] for each in record["dropped"]]
    assert found.summary["status"] == "stopped" or any("privacy budget is spent" in why for why in dropped)
    assert found.summary["privacy"]["epsilon"] <= budget


def test_the_budget_sets_the_noise_by_what_the_method_asks() -> None:
    changes = ["privacy.unit='record'", "privacy.clip=1.0", "privacy.epsilon=8.0", "train.rounds=8", "train.epochs=2"]
    config = read_config("bowls", changes).with_algorithm("fedavg")
    found = run_experiment(config, None)
    assert found.summary["rounds"] == 8
    assert found.summary["privacy"]["releases"] == 16
    assert 7.9 < found.summary["privacy"]["epsilon"] <= 8.0
    with pytest.raises(ConfigError, match="noise_multiplier"):
        privacy_of(config)  # of a deployment


def test_images_are_clipped_one_by_one_too() -> None:
    config = read_config("digits", ["model={name='linear'}", "data.clients=4"])
    built = build_problem(config)
    privacy = Privacy(clip=1.0, noise_multiplier=2.0, unit="record")
    found = run(FedAvg(), built.problem, built.federation, rounds=1, evaluation=QUIET, privacy=privacy)
    assert bool(found.theta.isfinite().all())


def test_every_method_that_asks_kernels_alone_runs(case: Case) -> None:
    """Most methods for networks do; the others are refused, and none fails in another way."""
    run_well = set()
    for name in REGISTRY:
        if name == "fedbn":  # for other models, and refused with them: see its own test
            continue
        try:
            run(REGISTRY[name](), case.problem, case.federation, rounds=1, evaluation=QUIET, privacy=OPEN)
        except ValueError as refusal:
            assert "privacy.unit" in str(refusal), name  # noqa: PT017
        else:
            run_well.add(name)
    assert {"fedavg", "qffl", "dqn-fed", "scaffold", "mgda", "fedprox", "afl", "term"} <= run_well
    assert not {"fednl", "newton", "fedcorr", "fcfl"} & run_well


def test_a_federation_of_unequal_clients_is_not_padded() -> None:
    torch.manual_seed(0)
    clients = [(torch.randn(n, 3), torch.randint(0, 2, (n,))) for n in (3, 9, 5)]
    problem = Problem.from_module(torch.nn.Linear(3, 2))
    federation = Federation.from_clients(clients)
    plain = run(FedAvg(epochs=2), problem, federation, rounds=2, evaluation=QUIET)
    found = run(FedAvg(epochs=2), problem, federation, rounds=2, evaluation=QUIET, privacy=OPEN)
    assert relative_distance(found.theta, plain.theta) <= 1e-5
