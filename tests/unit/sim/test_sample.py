"""A sample of clients is evaluated, in which groups and sizes have their shares, and every number says so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dqnfed import Evaluation, FedAvg, Federation, RunResult, run
from dqnfed.sim import sample
from dqnfed.sim.sample import evaluated_clients
from tests.helpers.bowls import labelled_clients, network_bowl


def federation(n_clients: int = 40) -> Federation:
    found = Federation.from_clients(labelled_clients(n_clients, 4), test=0.25)
    return replace(found, groups=tuple("north" if c % 4 else "south" for c in range(n_clients)))


@pytest.mark.parametrize("seed", range(5))
def test_groups_and_sizes_have_their_shares(seed: int) -> None:
    clients = federation()
    chosen = evaluated_clients(clients, "test", 8, seed)
    assert len(chosen) == len(set(chosen.tolist())) == 8
    assert clients.groups is not None
    is_south = torch.tensor([group == "south" for group in clients.groups])
    for group in (is_south, ~is_south):
        for size in range(40):
            in_stratum = group & (clients.n_examples < size)
            assert abs(int(in_stratum[chosen].sum()) - 8 / 40 * int(in_stratum.sum())) < 1.0
    assert torch.equal(chosen, evaluated_clients(clients, "test", 8, seed))


def test_every_client_is_as_likely() -> None:
    """A client is in 8 of 40 samples; over N draws its share differs from a fifth by more than 5 / sqrt(N) never."""
    clients, draws = federation(), 400
    counts = np.bincount(
        np.concatenate([evaluated_clients(clients, "test", 8, s).numpy() for s in range(draws)]), minlength=40
    )
    assert np.abs(counts / draws - 0.2).max() < 5 * 0.4 / np.sqrt(draws)


def test_all_are_evaluated_unless_they_are_very_many(monkeypatch: pytest.MonkeyPatch) -> None:
    clients = federation()
    assert torch.equal(evaluated_clients(clients, "test", None, 0), torch.arange(40))
    assert torch.equal(evaluated_clients(clients, "test", 99, 0), torch.arange(40))
    monkeypatch.setattr(sample, "MANY", 30)
    monkeypatch.setattr(sample, "SAMPLE", 6)
    assert len(evaluated_clients(clients, "test", None, 0)) == 6
    assert len(evaluated_clients(clients, "test", 40, 0)) == 40


def result(clients: int | None, out: Path | None = None) -> RunResult:
    evaluation = Evaluation(clients=clients)
    federated, problem = federation(), network_bowl().problem
    return run(FedAvg(lr=0.2), problem, federated, rounds=3, participation=0.2, evaluation=evaluation, out=out)


def test_summary_and_rows_are_of_the_sample_and_training_is_the_same(tmp_path: Path) -> None:
    whole, found = result(None), result(10, tmp_path / "run")
    assert torch.equal(found.theta, whole.theta)
    chosen = evaluated_clients(federation(), "test", 10, 0).tolist()
    assert found.summary["evaluated"] == 10
    assert "evaluated" not in whole.summary
    last = {row[1]: row for row in found.client_rows if row[0] == 2}
    scored = {c: row[5] for c, row in last.items() if row[5] is not None}
    assert sorted(scored) == chosen
    assert found.accuracy["mean"] == pytest.approx(np.mean(list(scored.values())))
    of_all = {row[1]: row for row in whole.client_rows if row[0] == 2}
    for c, row in last.items():  # participants have their losses, as with everybody
        assert row[3:5] == pytest.approx(of_all[c][3:5], nan_ok=True)
    assert {c for c, row in last.items() if row[3] is not None} == {c for c, r in of_all.items() if r[3] is not None}
    assert found.history[-1]["rho"] == whole.history[-1]["rho"]


def test_a_wrong_number_of_clients_is_refused() -> None:
    with pytest.raises(ValueError, match="clients"):
        Evaluation(clients=0)
