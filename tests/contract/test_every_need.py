"""What a method's server asks of the replies is what the method declares: sums, products or rows."""

from __future__ import annotations

from typing import Any

import pytest

from dqnfed.algorithms import REGISTRY
from dqnfed.sim.setup import cohort_size
from tests.contract.cases import METHODS, suited_case
from tests.helpers.recording import LEVELS, Asked
from tests.helpers.turns import played_turns

# so that four rounds reach the stage that asks most
SHORT_STAGES: dict[str, dict[str, Any]] = {"fcfl": {"minmax_rounds": 2}}


@pytest.mark.parametrize("name", METHODS)
def test_the_first_need_is_that_of_the_default_method(name: str) -> None:
    case = suited_case(name)
    n_clients = case.federation.n_clients
    prepared = REGISTRY[name]().prepare(case.problem, n_clients, n_clients)
    assert prepared.info.needs[0].split()[0] == prepared.needs


@pytest.mark.parametrize("share", [pytest.param(1.0, marks=pytest.mark.slow), 2 / 3])
@pytest.mark.parametrize("name", METHODS)
def test_a_server_asks_exactly_for_what_it_needs(name: str, share: float) -> None:
    case, asked = suited_case(name), Asked()
    n_clients = case.federation.n_clients
    size = cohort_size(share, n_clients)
    algorithm = REGISTRY[name](**SHORT_STAGES.get(name, {}))
    played_turns(algorithm, case, rounds=4, cohort_size=size, replies=asked)
    prepared = algorithm.prepare(case.problem, n_clients, size)
    assert asked.level == prepared.needs
    assert any(need.split()[0] == asked.level for need in prepared.info.needs), "this level is not declared"


@pytest.mark.parametrize("name", METHODS)
def test_needs_start_with_a_known_word(name: str) -> None:
    needs = REGISTRY[name].info.needs
    assert {need.split()[0] for need in needs} <= set(LEVELS)
    assert needs[0] in LEVELS, "the first entry is the level alone; when more or less is asked is said in further ones"
    assert all(len(need.split()) > 1 for need in needs[1:])
