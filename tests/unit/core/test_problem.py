"""The loss of a client is the mean over its own real examples, however they are padded."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad

from dqnfed import DQNFed, Federation, run
from dqnfed.core.problem import LOSSES, SCORES, Problem, Task, sampled
from tests.helpers.bowls import linear_model, normal, small_network, task_of


def padded(task: Task, n: int) -> Task:
    """Return the same task with n rows of noise behind the real ones."""
    junk = 1e3 * normal(n, *task.inputs.shape[1:], seed=5)
    return task._replace(
        inputs=torch.cat([task.inputs, junk]),
        targets=torch.cat([task.targets, task.targets[:1].expand(n, *task.targets.shape[1:])]),
        mask=torch.cat([task.mask, task.mask.new_zeros(n)]),
    )


def example(loss: str) -> tuple[Problem, Task]:
    inputs = normal(7, 4, seed=0)
    n_outputs = {"cross-entropy": 3, "squared-error": 2, "logistic": 1}[loss]
    targets: Tensor = {
        "cross-entropy": torch.arange(7) % 3,
        "squared-error": normal(7, 2, seed=1),
        "logistic": torch.tensor([1, -1, 1, 1, -1, -1, 1]),
    }[loss]
    problem = Problem.from_module(linear_model(4, n_outputs, zero=False), loss=loss, ridge=0.1)
    return problem, task_of((inputs, targets), problem)


@pytest.mark.parametrize("loss", LOSSES)
def test_masked_loss_equals_the_loss_of_the_unpadded_data(loss: str) -> None:
    problem, task = example(loss)
    theta = problem.theta0
    more = padded(task, 5)
    torch.testing.assert_close(problem.loss(theta, more), problem.loss(theta, task), rtol=1e-14, atol=0)
    torch.testing.assert_close(grad(problem.loss)(theta, more), grad(problem.loss)(theta, task), rtol=1e-13, atol=1e-15)


def test_losses_are_those_of_torch() -> None:
    for loss, by_hand in (
        ("cross-entropy", lambda out, y: nn.functional.cross_entropy(out, y)),
        ("squared-error", lambda out, y: nn.functional.mse_loss(out, y) * out.shape[1] / 2),
        ("logistic", lambda out, y: torch.log1p(torch.exp(-y * out.squeeze(1))).mean()),
    ):
        problem, task = example(loss)
        theta = problem.theta0
        expected = by_hand(problem.predict(theta, task.inputs), task.targets) + 0.05 * theta @ theta
        torch.testing.assert_close(problem.loss(theta, task), expected, rtol=1e-13, atol=0)


def test_outputs_that_do_not_match_their_targets_are_refused() -> None:
    """Three outputs against one number would be compared with that number three times, without a word."""
    problem = Problem.from_module(linear_model(4, 3), loss="squared-error")
    with pytest.raises(ValueError, match="3 outputs for each example, but its target has 1 numbers"):
        problem.loss(problem.theta0, task_of((normal(5, 4, seed=0), normal(5, seed=1)), problem))


def test_batch_loss_is_the_mean_over_the_named_rows() -> None:
    problem, task = example("cross-entropy")
    theta = problem.theta0
    chosen = torch.tensor([4, 1, 6])
    alone = task_of((task.inputs[chosen], task.targets[chosen]), problem)
    short = torch.tensor([4, 1, 6, -1, -1])
    torch.testing.assert_close(problem.batch_loss(theta, task, short), problem.loss(theta, alone), rtol=1e-14, atol=0)
    whole = torch.arange(7)
    torch.testing.assert_close(problem.batch_loss(theta, task, whole), problem.loss(theta, task), rtol=1e-14, atol=0)


def test_an_empty_batch_has_the_gradient_of_the_ridge_alone() -> None:
    problem, task = example("squared-error")
    slope = grad(problem.batch_loss)(problem.theta0, task, torch.full((3,), -1))
    torch.testing.assert_close(slope, 0.1 * problem.theta0)


@pytest.mark.parametrize("loss", SCORES)
def test_scores_ignore_padding(loss: str) -> None:
    problem, task = example(loss)
    more = padded(task, 6)
    for t in (task, more):
        outputs = problem.predict(problem.theta0, t.inputs)
        expected = problem.score(problem.predict(problem.theta0, task.inputs), task.targets, task.mask)
        torch.testing.assert_close(problem.score(outputs, t.targets, t.mask), expected)


@pytest.mark.parametrize(
    "layer",
    [nn.SyncBatchNorm(3), nn.BatchNorm1d(3, track_running_stats=False), nn.InstanceNorm1d(3, track_running_stats=True)],
    ids=["synchronised batch norm", "batch norm without running statistics", "instance norm with running statistics"],
)
def test_layers_that_mix_examples_are_refused_with_the_way_out(layer: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"'1' \(\w+\) .*nn\.GroupNorm"):
        Problem.from_module(nn.Sequential(nn.Linear(4, 3), layer))


@pytest.mark.parametrize("layer", [nn.GroupNorm(1, 3), nn.LayerNorm(3), nn.InstanceNorm1d(3)])
def test_layers_that_see_one_example_at_a_time_are_fine(layer: nn.Module) -> None:
    assert Problem.from_module(nn.Sequential(nn.Linear(4, 3), layer)).n_parameters >= 15


def test_frozen_parameters_are_refused_by_name() -> None:
    module = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    module[0].weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"0\.weight.*requires_grad"):
        Problem.from_module(module)


def test_a_module_without_parameters_and_an_unknown_loss_are_refused() -> None:
    with pytest.raises(ValueError, match="ReLU has no parameters"):
        Problem.from_module(nn.ReLU())
    with pytest.raises(ValueError, match=r"cross-entropy.*logistic.*squared-error.*'hinge'"):
        Problem.from_module(nn.Linear(2, 2), loss="hinge")


def test_predict_is_the_modules_forward_in_evaluation_mode() -> None:
    module = nn.Sequential(small_network(4, 3, 3), nn.Dropout(0.9))
    problem = Problem.from_module(module)
    theta = normal(problem.n_parameters, seed=3)
    inputs = normal(5, 4, seed=4)
    torch.testing.assert_close(problem.predict(theta, inputs), problem.module_at(theta)(inputs))
    torch.testing.assert_close(problem.predict(theta, inputs.float()), problem.predict(theta, inputs.float().double()))


def test_the_users_module_is_neither_changed_nor_shared() -> None:
    module = linear_model(4, 3, zero=False).train()
    before = [p.clone() for p in module.parameters()]
    problem = Problem.from_module(module)
    problem.theta0.add_(1.0)
    problem.module_at(problem.theta0)
    assert all(torch.equal(p, b) for p, b in zip(module.parameters(), before, strict=True))
    assert module.training
    with torch.no_grad():
        next(module.parameters()).zero_()
    assert problem.module is not None
    assert torch.equal(next(problem.module.parameters()), before[0])


def test_moving_a_problem_keeps_its_start() -> None:
    problem = Problem.from_module(linear_model(4, 3), ridge=0.5, loss_floor=0.1)
    problem.theta0.add_(1.0)
    moved = problem.to("cpu")
    assert torch.equal(moved.theta0, problem.theta0)
    assert (moved.ridge, moved.loss_floor, moved.score_name) == (0.5, 0.1, "accuracy")


class Wrapped(nn.Module):
    """A module that returns its logits inside something else, as those of Hugging Face do."""

    def __init__(self, wrap: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.wrap = wrap

    def forward(self, inputs: Tensor) -> object:
        return self.wrap(self.linear(inputs))


@pytest.mark.parametrize(
    "wrap",
    [lambda x: {"loss": None, "logits": x}, lambda x: SimpleNamespace(logits=x)],
    ids=["dict", "object"],
)
def test_models_that_return_their_logits_inside_something_train_as_the_bare_model(
    wrap: Callable[[Tensor], object],
) -> None:
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    federation = Federation.from_clients([(x[:20], (x[:20, 0] > 0).long()), (x[20:], (x[20:, 1] > 0).long())])
    module = Wrapped(wrap)
    bare = Wrapped(lambda outputs: outputs)
    bare.load_state_dict(module.state_dict())
    found, expected = (run(DQNFed(), Problem.from_module(m), federation, rounds=4, seed=0) for m in (module, bare))
    assert torch.equal(found.theta, expected.theta)


def test_what_holds_no_logits_is_refused_with_its_keys() -> None:
    federation = Federation.from_clients([(torch.zeros(8, 3), torch.arange(8) % 2)])
    with pytest.raises(ValueError, match=r"returns a dict with 'scores', and not a tensor.*wrap it in a module"):
        run(DQNFed(), Problem.from_module(Wrapped(lambda x: {"scores": x})), federation, rounds=1)


def test_losses_are_named_freely_and_wrong_names_get_the_nearest() -> None:
    module = nn.Linear(3, 2)
    assert Problem.from_module(module, loss="cross_entropy").losses is Problem.from_module(module).losses
    with pytest.raises(ValueError, match=r"but is 'squared-eror'\. Did you mean 'squared-error'"):
        Problem.from_module(module, loss="squared-eror")
    with pytest.raises(ValueError, match=r"must be a name.*Pass a function of your own as `losses=`"):
        Problem.from_module(module, loss=nn.CrossEntropyLoss())  # type: ignore[arg-type]


def made_up_task(n: int, padded: int) -> Task:
    """Return a task whose inputs are its examples' numbers, with so many rows of padding behind them."""
    places = torch.arange(padded)
    return Task(places[:, None].float(), places, (places < n).float(), places[None], torch.zeros(0), torch.tensor(0.1))


@pytest.mark.parametrize(
    ("n", "expected"),
    [(3, 3), (8, 8), (9, 8), (40, 8), (79, 8), (90, 9), (1000, 100)],
)
def test_a_sample_is_evenly_spaced_and_does_not_depend_on_padding(n: int, expected: int) -> None:
    """One in ten, eight at least."""
    chosen = []
    for padded in (n, n + 1, 3 * n, 5000):
        found = sampled(made_up_task(n, padded), every=10, least=8)
        used = found.mask > 0
        assert len(found.mask) <= max(8, padded // 10, n if padded == n and n <= 8 else 0)
        assert torch.equal(found.inputs[:, 0].long(), found.targets)
        chosen.append(found.targets[used].tolist())
    assert all(places == chosen[0] for places in chosen)
    assert len(set(chosen[0])) == len(chosen[0]) == expected
    gaps = torch.tensor(chosen[0]).diff()
    assert gaps.max() - gaps.min() <= 1
    assert n - max(chosen[0]) < n / expected + 1
