"""Clients that are read when they are asked are the same clients, and cost what the cohort costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dqnfed import DQNFed, Evaluation, FedAvg, Federation, Problem, RunResult, looped, run, threads
from dqnfed.algorithms.ditto import Ditto
from dqnfed.core import federation as federations
from dqnfed.core import host_memory, shares
from dqnfed.core.examples import Examples
from dqnfed.core.local_work import AnyMethod
from dqnfed.core.run_folder import load_tensors
from dqnfed.core.seeds import numpy_seed_for
from dqnfed.sim import memory, sample
from dqnfed.sim.rounds import run_round
from dqnfed.sim.setup import fresh_state, set_up
from tests.helpers.folders import newest_tensors

N_INPUTS, N_CLASSES = 4, 3


def arrays(sizes: list[int], seed: int = 0) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return inputs, classes and the client of every example, in no order."""
    rng = np.random.default_rng(seed)
    owner = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    labels = rng.integers(0, N_CLASSES, len(owner))
    inputs = rng.normal(size=(len(owner), N_INPUTS)) + labels[:, None]
    return inputs.astype(np.float32), labels, owner


def problem() -> Problem:
    torch.manual_seed(0)
    return Problem.from_module(nn.Sequential(nn.Linear(N_INPUTS, 5), nn.Tanh(), nn.Linear(5, N_CLASSES)))


def mapped(values: np.ndarray[Any, Any], path: Path) -> np.ndarray[Any, Any]:
    """Return the array, read-only in a file."""
    np.save(path, values)
    found: np.ndarray[Any, Any] = np.load(path, mmap_mode="r")
    return found


def assert_same_clients(found: Federation, expected: Federation) -> None:
    assert found.names == expected.names
    assert found.n_classes == expected.n_classes
    for one, other in ((found.train, expected.train), (found.test, expected.test)):
        for c in range(expected.n_clients):
            chosen = torch.tensor([c])
            assert all(torch.equal(a, b) for a, b in zip(one.taken(chosen), other.taken(chosen), strict=True))
    assert found.label_counts() == expected.label_counts()


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let more than twenty clients be very many."""
    for module in (shares, federations, memory, sample):
        monkeypatch.setattr(module, "MANY", 20)


SIZES = [3, 8, 2, 5, 12, 1, 7]


def test_mapped_arrays_are_the_same_clients_and_are_not_copied(tmp_path: Path) -> None:
    inputs, labels, owner = arrays(SIZES)
    found = Federation.from_arrays(mapped(inputs, tmp_path / "x.npy"), mapped(labels, tmp_path / "y.npy"), owner)
    assert found.train.is_lazy
    assert not found.train.inputs.numel()
    assert_same_clients(found, Federation.from_arrays(inputs, labels, owner))


def test_offsets_and_a_function_are_the_same_clients() -> None:
    inputs, labels, owner = arrays(SIZES)
    order, starts = np.argsort(owner, kind="stable"), np.append(0, np.cumsum(SIZES))
    x, y = inputs[order], labels[order]
    expected = Federation.from_arrays(inputs, labels, owner)
    assert_same_clients(Federation.from_offsets(x, y, starts), expected)
    asked: list[int] = []

    def load(client: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        asked.append(client)
        return x[starts[client] : starts[client + 1]], y[starts[client] : starts[client + 1]]

    found = Federation.from_function(load, SIZES, n_classes=N_CLASSES)
    assert asked == [0]  # for shapes and types
    found.train.taken(torch.tensor([4]))
    found.test.taken(torch.tensor([4]))
    assert asked == [0, 4]
    assert_same_clients(found, expected)


@pytest.mark.parametrize("runner", [None, looped(), threads()], ids=["vmap", "looped", "threads"])
@pytest.mark.parametrize("algorithm", [DQNFed(lr=0.3, batch_size=4), Ditto(lr=0.3)], ids=["dqn-fed", "ditto"])
def test_a_run_is_the_same(runner: Any, algorithm: AnyMethod, tmp_path: Path) -> None:
    inputs, labels, owner = arrays(SIZES)
    lazy = Federation.from_arrays(mapped(inputs, tmp_path / "x.npy"), labels, owner)

    def result(clients: Federation) -> RunResult:
        return run(algorithm, problem(), clients, rounds=4, participation=0.5, cohort=runner)

    found, expected = result(lazy), result(Federation.from_arrays(inputs, labels, owner))
    torch.testing.assert_close(found.theta, expected.theta, rtol=1e-5, atol=1e-6)
    assert found.accuracy == pytest.approx(expected.accuracy, rel=1e-4)


@pytest.mark.parametrize("seed", range(3))
def test_many_clients_are_split_by_the_same_rule(seed: int) -> None:
    """Every part is disjoint, complete and as large as `split_rows` makes it, and classes have their shares."""
    sizes = np.random.default_rng(seed).integers(1, 40, 60)
    starts = torch.from_numpy(np.append(0, sizes.cumsum()))
    labels = torch.from_numpy(np.random.default_rng(seed + 1).integers(0, 3, int(starts[-1])))
    order, wanted = torch.randperm(int(starts[-1]), generator=torch.Generator().manual_seed(seed)), {}
    wanted = {"test": 0.25, "validation": 0.1}
    found = shares.split_block(order.numpy(), starts.numpy(), labels, wanted, seed=seed, block=0)  # type: ignore[arg-type]
    for c, size in enumerate(sizes.tolist()):
        mine = order[starts[c] : starts[c + 1]]
        alone = shares.split_rows(size, labels[mine], dict(wanted), seed=seed, client=c)  # type: ignore[arg-type]
        rows = {}
        for part, (all_rows, counts) in found.items():
            rows[part] = all_rows[counts[:c].sum() : counts[: c + 1].sum()]
            assert len(rows[part]) == len(alone[part])
        assert sorted(np.concatenate(list(rows.values())).tolist()) == sorted(mine.tolist())
        for label in range(3):
            expected = len(rows["test"]) / size * int((labels[mine] == label).sum())
            assert abs(int((labels[rows["test"]] == label).sum()) - expected) <= 1


@pytest.mark.usefixtures("many")
def test_blocks_of_many_clients_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "BLOCK", 50)
    sizes = [1 + c % 9 for c in range(60)]
    inputs, labels, owner = arrays(sizes)
    found = Federation.from_arrays(inputs, labels, owner, test=0.3)
    assert found.train.is_lazy
    assert (found.train.sizes + found.test.sizes).tolist() == sizes
    for c in range(60):
        mine = [part.taken(torch.tensor([c])) for part in (found.train, found.test)]
        held = np.concatenate([x.numpy() for x, _ in mine])
        assert sorted(held.tolist()) == sorted(inputs[owner == c].tolist())
    again = Federation.from_clients([(inputs[owner == c], labels[owner == c]) for c in range(60)], test=0.3)
    assert_same_clients(found, again)  # by the same rule


class Largest(TorchDispatchMode):
    """Notes how many numbers the largest tensor has that an operation makes; views are not made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numel = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, Tensor)}
        for t in found if isinstance(found, tuple | list) else [found]:
            if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in given:
                self.numel = max(self.numel, t.numel())
        return found


def five_examples(client: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    rng = numpy_seed_for(client)
    return rng.normal(size=(5, N_INPUTS)).astype(np.float32), rng.integers(0, N_CLASSES, 5)


@pytest.mark.parametrize(
    "algorithm", [FedAvg(lr=0.1), DQNFed(lr=0.1, batch_size=3), DQNFed(local="gradient")], ids=["fedavg", "sgd", "full"]
)
def test_no_tensor_of_a_round_grows_with_the_clients(algorithm: AnyMethod) -> None:
    """The largest tensor that a round makes, participants' losses included."""
    largest = []
    for n_clients in (15_000, 150_000):
        clients = Federation.from_function(five_examples, np.full(n_clients, 5), n_classes=N_CLASSES)
        evaluation = Evaluation(every=10**9)
        given: dict[str, Any] = {"rounds": 10**9, "participation": 20 / n_clients, "evaluation": evaluation}
        setup, _ = set_up(algorithm, problem(), clients, **given)
        state = fresh_state(setup)
        run_round(setup, state)  # room for memories is made in the first one
        with Largest() as noted:
            for _ in range(3):
                run_round(setup, state)
        largest.append(noted.numel)
    assert largest[1] == largest[0]


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize("runner", [None, threads()], ids=["vmap", "threads"])
def test_many_clients_memories_go_to_a_file_and_a_resumed_run_has_the_same_bits(
    runner: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "SMALL", 0)
    monkeypatch.setattr(host_memory, "free_bytes", lambda: 0.0)
    inputs, labels, owner = arrays([4] * 60)
    clients = Federation.from_arrays(inputs, labels, owner)

    def result(rounds: int, out: Path | None = None, **more: Any) -> RunResult:
        given: dict[str, Any] = {"participation": 0.1, "cohort": runner, "out": out, **more}
        return run(Ditto(lr=0.2), problem(), clients, rounds=rounds, evaluation=Evaluation(clients=10), **given)

    whole = result(8)
    result(4, tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    stored, _ = load_tensors(newest_tensors(tmp_path / "run"))
    resumed = result(8, tmp_path / "run", resume=True)
    assert torch.equal(resumed.theta, whole.theta)
    assert resumed.accuracy == whole.accuracy
    assert "memory_row_of" not in stored
    assert len(stored["memory_seen"]) <= 4 * 6


def test_memories_of_many_clients_are_as_those_of_few(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, labels, owner = arrays([4] * 60)
    clients = Federation.from_arrays(inputs, labels, owner)
    expected = run(Ditto(lr=0.2), problem(), clients, rounds=8, participation=0.2)
    monkeypatch.setattr(memory, "MANY", 20)
    found = run(Ditto(lr=0.2), problem(), clients, rounds=8, participation=0.2)
    assert torch.equal(found.theta, expected.theta)
    assert found.client_rows == expected.client_rows


def test_data_that_are_not_what_was_said_are_refused() -> None:
    x, y = np.zeros((3, 2), dtype=np.float32), np.array([0, 1, 2])
    with pytest.raises(ValueError, match="say how many, `n_classes`"):
        Federation.from_function(lambda _: (x, y), [3, 3])
    with pytest.raises(ValueError, match="client 1 has 0 examples by `sizes`"):
        Federation.from_function(lambda _: (x, y), [3, 0], n_classes=3)
    for sizes, n_classes, message in (([3, 4], 3, "said to have 4 examples"), ([3, 3], 2, "has the class 2, but")):
        found = Federation.from_function(lambda _: (x, y), sizes, n_classes=n_classes)
        with pytest.raises(ValueError, match=message):
            found.train.taken(torch.tensor([1]))
    for starts in ([1, 3], [0, 3, 3], [0], [[0, 3]]):
        with pytest.raises(ValueError, match="must begin with 0 and rise"):
            Federation.from_offsets(x, y, starts)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`starts` ends with 2"):
        Federation.from_offsets(x, y, [0, 2])


def test_a_bad_number_in_stored_rows_is_refused_with_its_client(tmp_path: Path) -> None:
    inputs, labels, owner = arrays(SIZES)
    inputs[np.flatnonzero(owner == 4), 2] = np.inf
    found = Federation.from_arrays(mapped(inputs, tmp_path / "x.npy"), labels, owner)
    found.train.taken(torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="client '4' has inf in its inputs"):
        found.train.taken(torch.tensor([1, 4]))


def test_names_keep_their_order_whatever_they_are() -> None:
    inputs = np.zeros((6, 1), dtype=np.float32)
    labels = np.arange(6) % 2
    for owner, names in (
        (["b", "10", "2", "a", "b", "2"], ("2", "10", "a", "b")),
        (np.array([10, 2, 2, 10, 3, 3]), ("2", "3", "10")),
        (np.array([-1, 2, 2, -1, 10, 10]), ("2", "10", "-1")),
        (np.array([1.5, 1.5, 0.5, 0.5, 2.5, 2.5]), ("0.5", "1.5", "2.5")),
        (torch.tensor([1, 1, 1, 0, 0, 0]), ("0", "1")),
    ):
        assert Federation.from_arrays(inputs, labels, owner).names == names


def test_one_client_alone_and_the_fingerprint(tmp_path: Path) -> None:
    inputs, labels, owner = arrays(SIZES)
    lazy = Federation.from_arrays(mapped(inputs, tmp_path / "x.npy"), labels, owner)
    whole = Federation.from_arrays(inputs, labels, owner)
    assert_same_clients(lazy.only(4), whole.only(4))
    assert isinstance(lazy.only(4).train, Examples)
    assert not lazy.only(4).train.is_lazy
    assert lazy.fingerprint == Federation.from_arrays(mapped(inputs, tmp_path / "z.npy"), labels, owner).fingerprint
    other = Federation.from_arrays(mapped(inputs + 1, tmp_path / "w.npy"), labels, owner)
    assert lazy.fingerprint != other.fingerprint
