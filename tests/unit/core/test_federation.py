"""Who holds which data: nothing lost, nothing twice, every label shared out alike."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from dqnfed import FedAvg, run
from dqnfed.algorithms.ditto import Ditto
from dqnfed.core.federation import Examples, Federation, Part, split_rows
from tests.helpers.bowls import labelled_clients, network_bowl


def labels(n: int, n_classes: int, seed: int) -> Tensor:
    return torch.as_tensor(np.random.default_rng(seed).integers(0, n_classes, n))


@pytest.mark.parametrize("n", [2, 3, 5, 17, 100, 1001])
@pytest.mark.parametrize("seed", range(3))
def test_splits_are_disjoint_and_complete(n: int, seed: int) -> None:
    parts = split_rows(n, labels(n, 4, seed), {"test": 0.2, "validation": 0.1}, seed=seed, client=1)
    everything = torch.cat(list(parts.values()))
    assert sorted(everything.tolist()) == list(range(n))
    assert len(parts["train"]) >= 1
    assert len(parts["test"]) == max(1, round(0.2 * n))


@pytest.mark.parametrize("n_classes", [1, 2, 10])
@pytest.mark.parametrize("seed", range(5))
def test_every_part_has_the_label_mix(n_classes: int, seed: int) -> None:
    """Evenly spaced places in class order: a class of m rows gives share * m, up to one row at either end."""
    n = 400
    targets = labels(n, n_classes, seed)
    parts = split_rows(n, targets, {"test": 0.25}, seed=seed, client=0)
    for label in range(n_classes):
        expected = 0.25 * int((targets == label).sum())
        assert abs(int((targets[parts["test"]] == label).sum()) - expected) <= 1


def test_the_split_depends_on_seed_and_client_only() -> None:
    targets = labels(50, 3, 0)
    one = split_rows(50, targets, {"test": 0.2}, seed=0, client=0)
    assert torch.equal(one["test"], split_rows(50, targets, {"test": 0.2}, seed=0, client=0)["test"])
    assert not torch.equal(one["test"], split_rows(50, targets, {"test": 0.2}, seed=1, client=0)["test"])
    assert not torch.equal(one["test"], split_rows(50, targets, {"test": 0.2}, seed=0, client=1)["test"])


def test_from_clients_keeps_every_example_with_its_client() -> None:
    clients = [(torch.full((5 + c, 2), float(c)), torch.full((5 + c,), c)) for c in range(3)]
    found = Federation.from_clients(clients, test=0.2, validation=0.2, names=["a", "b", "c"])
    assert found.names == ("a", "b", "c")
    assert found.n_classes == 3
    assert found.validation is not None
    for part in (found.train, found.test, found.validation):
        for c in range(3):
            rows = part.rows(torch.tensor([c]))
            assert (part.inputs[rows] == c).all()
            assert (part.targets[rows] == c).all()
    assert (found.train.sizes + found.test.sizes + found.validation.sizes).tolist() == [5, 6, 7]
    assert found.label_counts() == [{c: int(found.train.sizes[c])} for c in range(3)]


def test_from_arrays_equals_from_clients() -> None:
    rng = np.random.default_rng(0)
    inputs, targets, owner = rng.normal(size=(60, 4)), rng.integers(0, 3, 60), rng.integers(0, 12, 60)
    found = Federation.from_arrays(inputs, targets, owner)
    present = sorted(set(owner.tolist()))  # numbers sort as numbers: 2 before 10
    expected = Federation.from_clients([(inputs[owner == c], targets[owner == c]) for c in present])
    assert found.names == tuple(str(c) for c in present)
    for one, other in ((found.train, expected.train), (found.test, expected.test)):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_from_datasets_equals_from_clients() -> None:
    pairs = [(torch.rand(6 + c, 3), torch.arange(6 + c) % 2) for c in range(2)]
    found = Federation.from_datasets([TensorDataset(x, y) for x, y in pairs])
    expected = Federation.from_clients(pairs)
    assert all(torch.equal(a, b) for a, b in zip(found.train, expected.train, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(found.test, expected.test, strict=True))


def test_from_datasets_takes_targets_of_any_shape() -> None:
    inputs, targets = torch.rand(6, 3), torch.rand(6, 2)
    found = Federation.from_datasets([TensorDataset(inputs, targets)])
    assert found.train.targets.shape[1:] == (2,)
    assert found.n_classes is None


def test_padded_rows_repeat_the_clients_own_first_row() -> None:
    examples = Examples(torch.arange(6.0), torch.arange(6), torch.tensor([0, 1, 4, 6]))
    rows, real = examples.padded_rows(torch.tensor([0, 1, 2]))
    assert rows.tolist() == [[0, 0, 0], [1, 2, 3], [4, 5, 4]]
    assert real.tolist() == [[True, False, False], [True, True, True], [True, True, False]]


def test_rows_are_listed_client_after_client() -> None:
    examples = Examples(torch.arange(6.0), torch.arange(6), torch.tensor([0, 1, 4, 6]))
    assert examples.rows(torch.tensor([2, 0])).tolist() == [4, 5, 0]
    assert examples.rows(torch.tensor([0, 1, 2])).tolist() == list(range(6))


FINE = (torch.rand(5, 2), torch.zeros(5, dtype=torch.long))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"clients": []}, "at least one client"),
        ({"clients": [FINE, FINE], "names": ["x", "x"]}, r"duplicate names \['x'\]"),
        ({"clients": [FINE, FINE], "names": ["x"]}, "2 clients but 1 names"),
        ({"clients": [FINE, FINE], "groups": ["north"]}, "2 clients but 1 groups"),
        ({"clients": [FINE, (FINE[0], FINE[1][:4])]}, "client '1' has 5 inputs but 4 targets"),
        ({"clients": [FINE, (torch.rand(5, 3), FINE[1])]}, r"client '1' has inputs of shape \(3,\)"),
        ({"clients": [FINE, (FINE[0], torch.rand(5, 2))]}, r"client '1' has targets of shape \(2,\)"),
        ({"clients": [(FINE[0][:1], FINE[1][:1])] * 2}, "no client has test examples"),
        ({"clients": [FINE, (FINE[0][:0], FINE[1][:0])]}, "client '1' has no train examples"),
        ({"clients": [(FINE[0][:2], FINE[1][:2])] * 2, "validation": 0.2}, "no client has validation examples"),
        ({"clients": [FINE, FINE], "test": [FINE]}, "2 clients but test examples of 1"),
        ({"clients": [FINE], "test": 1.2}, r"`test` must be a share in \[0, 1\)"),
        ({"clients": [FINE], "test": -0.1}, r"`test` must be a share in \[0, 1\)"),
        ({"clients": [FINE], "test": 0.6, "validation": 0.5}, "leave nothing to train on"),
    ],
)
def test_unusable_clients_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Federation.from_clients(**arguments)  # type: ignore[arg-type]


def test_unequal_arrays_are_refused() -> None:
    with pytest.raises(ValueError, match="3 inputs but 2 client names"):
        Federation.from_arrays(torch.rand(3, 2), torch.zeros(3), ["a", "b"])
    for n in (2, 4):
        with pytest.raises(ValueError, match=f"3 inputs but {n} targets"):
            Federation.from_arrays(torch.rand(3, 2), torch.zeros(n), ["a", "a", "b"])


def test_an_empty_dataset_is_refused_by_number() -> None:
    with pytest.raises(ValueError, match=r"client '1' .* no examples"):
        Federation.from_datasets([TensorDataset(*FINE), TensorDataset(FINE[0][:0], FINE[1][:0])])


def test_given_test_examples_are_used_as_they_are() -> None:
    test = [(torch.rand(3, 2), torch.ones(3, dtype=torch.long)), (torch.rand(1, 2), torch.ones(1, dtype=torch.long))]
    found = Federation.from_clients([FINE, FINE], test=test)
    assert found.test.sizes.tolist() == [3, 1]
    assert found.train.sizes.tolist() == [5, 5]
    assert torch.equal(found.test.inputs, torch.cat([x for x, _ in test]))


def test_no_validation_examples_are_refused_with_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"validation=0\.1"):
        Federation.from_clients([FINE]).examples("validation")


def test_numeric_names_sort_as_numbers() -> None:
    owner = ["10", "9", "b", "a"] * 2
    found = Federation.from_arrays(torch.rand(8, 1), torch.zeros(8, dtype=torch.long), owner)
    assert found.names == ("9", "10", "a", "b")


def test_one_client_of_a_federation_keeps_its_examples_name_and_group() -> None:
    pairs = [(torch.full((4 + c, 2), float(c)), torch.arange(4 + c) % 2) for c in range(3)]
    whole = Federation.from_clients(pairs, names=["a", "b", "c"], groups=["x", "y", "y"], validation=0.25)
    alone = whole.only(1)
    assert (alone.n_clients, alone.names, alone.groups, alone.n_classes) == (1, ("b",), ("y",), 2)
    one = torch.tensor([1])
    parts: tuple[Part, ...] = ("train", "validation", "test")
    for part in parts:
        held, rows = alone.examples(part), whole.examples(part).rows(one)
        assert torch.equal(held.inputs, whole.examples(part).inputs[rows])
        assert torch.equal(held.targets, whole.examples(part).targets[rows])
    with pytest.raises(ValueError, match="there is no client 3: this federation has clients 0 to 2"):
        whole.only(3)


def test_a_federation_elsewhere_is_known_by_its_numbers() -> None:
    far = Federation.elsewhere([5, 7], [1, 2], names=["a", "b"])
    assert far.n_clients == 2
    assert far.n_examples.tolist() == [5, 7]
    assert far.test.sizes.tolist() == [1, 2]
    assert far.label_counts() is None
    assert far.train.inputs.numel() == 0


@pytest.mark.parametrize("low", [-1, -100])
@pytest.mark.parametrize("as_numpy", [False, True])
def test_class_labels_below_zero_are_refused_with_the_way_out(low: int, as_numpy: bool) -> None:
    """They would be taken for padding, and never be learnt."""
    inputs, labels = torch.rand(20, 3), torch.where(torch.arange(20) % 2 == 0, 1, low)
    given = (inputs.numpy(), labels.numpy()) if as_numpy else (inputs, labels)
    message = rf"client '\d' has the class label {low}.*\(y > 0\)\.long\(\).*floats for `loss=\"logistic\"`"
    with pytest.raises(ValueError, match=message):
        Federation.from_clients([given])
    with pytest.raises(ValueError, match=message):
        Federation.from_arrays(given[0], given[1], [k % 3 for k in range(20)])
    with pytest.raises(ValueError, match=message):
        Federation.from_datasets([list(zip(inputs, labels, strict=True))])
    with pytest.raises(ValueError, match=rf"some client has in its train examples the class label {low}"):
        Federation(held := Examples(inputs, labels, torch.tensor([0, 20])), held)
    assert Federation.from_clients([(inputs, (labels > 0).long())]).n_classes == 2
    assert Federation.from_clients([(inputs, labels.float())]).n_classes is None


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 1e19, -1e300])
@pytest.mark.parametrize("part", ["inputs", "targets", "test inputs"])
def test_numbers_that_are_not_finite_are_refused_with_their_place(value: float, part: str) -> None:
    def pair(*, is_bad: bool) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = torch.rand(6, 3, dtype=torch.float64), torch.rand(6, dtype=torch.float64)
        if is_bad and part != "targets":
            inputs[4, 1] = value
        if is_bad and part == "targets":
            targets[4] = value
        return inputs, targets

    clients = [pair(is_bad=False), pair(is_bad=part != "test inputs")]
    test = [pair(is_bad=False), pair(is_bad=part == "test inputs")]
    place = "row 4; 1 such" if part == "targets" else "row 4, column 1; 1 such"
    with pytest.raises(ValueError, match=rf"client '1' has .* in its {part.split()[-1]} \({place}"):
        Federation.from_clients(clients, test=test)


def test_a_client_too_small_to_be_tested_trains_and_is_said_so(caplog: pytest.LogCaptureFixture) -> None:
    """Its loss counts, its score does not exist, and everybody else's numbers are as without it being evaluated."""
    inputs, targets = labelled_clients(1, 4, seed=5)[0]
    clients = [*labelled_clients(3, 4), (inputs[:1], targets[:1])]
    federation = Federation.from_clients(clients, names=["a", "b", "c", "tiny"])
    assert federation.untested == ("tiny",)
    assert "client 'tiny' is too small to be tested: kept for training, without a score" in caplog.text
    problem = network_bowl().problem
    for algorithm in (FedAvg(lr=0.3), Ditto(lr=0.3)):
        result = run(algorithm, problem, federation, rounds=2)
        last = [row for row in result.client_rows if row[0] == 1]
        assert [row[5] is None for row in last] == [False, False, False, True]
        assert all(math.isfinite(row[4]) for row in last)
        assert result.accuracy["mean"] == pytest.approx(sum(row[5] for row in last[:3]) / 3)
        assert result.summary["untested"] == 1
        assert result.summary["status"] == "finished"


def test_clients_without_validation_examples_do_not_choose_the_model() -> None:
    inputs, targets = labelled_clients(1, 4, seed=5)[0]
    clients = [*labelled_clients(3, 4), (inputs[:2], targets[:2])]
    federation = Federation.from_clients(clients, validation=0.2)
    assert federation.validation is not None
    assert (federation.validation.sizes > 0).tolist() == [True, True, True, False]
    result = run(FedAvg(lr=0.3), network_bowl().problem, federation, rounds=3, select="loss")
    assert result.summary["kept_validation"] is not None


def test_tensor_datasets_and_other_datasets_are_clients_as_pairs_are() -> None:
    x, y = torch.randn(30, 4), torch.arange(30) % 3
    pairs = [(x[:10], y[:10]), (x[10:], y[10:])]
    datasets = [TensorDataset(*pair) for pair in pairs]
    subset = Subset(TensorDataset(x, y), range(10, 30))
    expected = Federation.from_clients(pairs)
    given_as: list[list[Any]] = [[*datasets], [datasets[0], subset], [pairs[0], datasets[1]]]
    for clients in given_as:
        assert Federation.from_clients(clients).fingerprint == expected.fingerprint
    given = Federation.from_clients(datasets, test=datasets)
    assert torch.equal(given.test.inputs, x)


def test_a_dataset_that_gives_no_pairs_is_refused_by_client() -> None:
    with pytest.raises(ValueError, match=r"client '1' has a TensorDataset whose examples cannot be read as \(input"):
        Federation.from_clients(
            [(torch.zeros(3, 2), torch.zeros(3)), TensorDataset(torch.zeros(3, 2), torch.zeros(3), torch.zeros(3))]
        )
    with pytest.raises(ValueError, match="client '0' has a dataset with no examples"):
        Federation.from_clients([Subset(TensorDataset(torch.zeros(3, 2), torch.zeros(3)), [])])
