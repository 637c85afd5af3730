"""What every registered class says about itself: fields, kinds, references, exemptions."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
from typing import Any, get_type_hints

import pytest
import torch

from dqnfed.algorithms import REGISTRY
from dqnfed.core.algorithm import Algorithm
from tests.contract import test_every_algorithm
from tests.helpers.bowls import BOWLS

METHODS = sorted(REGISTRY)
FIELDS = [(name, field.name) for name in METHODS for field in dataclasses.fields(REGISTRY[name])]


def is_record_type(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")


def only_tensors(kind: Any) -> bool:
    """Return whether the type is a NamedTuple whose every field is a tensor or such a NamedTuple."""
    if not is_record_type(kind):
        return False
    return all(hint is torch.Tensor or only_tensors(hint) for hint in get_type_hints(kind).values())


@pytest.mark.parametrize("name", METHODS)
def test_is_a_frozen_dataclass_of_its_own(name: str) -> None:
    algorithm = REGISTRY[name]
    assert issubclass(algorithm, Algorithm)
    assert "__dataclass_params__" in vars(algorithm), f"{algorithm.__name__} lacks @dataclass(frozen=True)"
    with pytest.raises(dataclasses.FrozenInstanceError):
        algorithm().lr = 1.0  # type: ignore[misc]


@pytest.mark.parametrize("name", METHODS)
def test_name_is_lower_case_words_joined_by_hyphens(name: str) -> None:
    assert re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name)


@pytest.mark.parametrize("name", METHODS)
def test_docstring_cites_its_source(name: str) -> None:
    text = vars(REGISTRY[name]).get("__doc__") or ""
    assert re.search(r"\b(19|20)\d\d\b", text), f"the docstring of {name} must name a paper with its year"
    assert not text.startswith(f"{REGISTRY[name].__name__}("), "this is the signature that @dataclass makes up"


@pytest.mark.parametrize("name", METHODS)
def test_messages_are_named_tuples_of_tensors(name: str) -> None:
    algorithm = REGISTRY[name]
    for kind in (algorithm.Server, algorithm.Memory, *algorithm.Sent, *algorithm.Update):
        assert only_tensors(kind), f"{kind} must be a NamedTuple of tensors"
    assert "theta" in algorithm.Server._fields


@pytest.mark.parametrize("name", METHODS)
def test_screened_fields_exist(name: str) -> None:
    algorithm = REGISTRY[name]
    known = {field for kind in algorithm.Update for field in kind._fields}
    assert {*algorithm.scales, *algorithm.optional} <= known
    assert len(set(algorithm.scales)) == len(algorithm.scales)


@pytest.mark.parametrize("name", METHODS)
def test_suits_a_kind_of_problem_that_we_can_test(name: str) -> None:
    assert set(BOWLS) & REGISTRY[name].suits
    assert REGISTRY[name].suits <= set(BOWLS)


@pytest.mark.parametrize("name", METHODS)
def test_every_exemption_names_a_contract_test_and_a_reason(name: str) -> None:
    tests = {key for key, _ in inspect.getmembers(test_every_algorithm, inspect.isfunction) if key.startswith("test_")}
    for test, reason in REGISTRY[name].exemptions.items():
        assert test in tests, f"{name} is exempt from '{test}', but the contract tests are {sorted(tests)}"
        assert len(reason.split()) >= 3, f"{name} must say why it is exempt from {test}"


@pytest.mark.parametrize(("name", "field"), FIELDS)
def test_bad_hyperparameters_are_refused_by_name(name: str, field: str) -> None:
    algorithm = REGISTRY[name]
    default = getattr(algorithm(), field)
    if isinstance(default, bool):
        pytest.skip("both truth values are fine")
    bad: list[Any] = [math.nan]
    if isinstance(default, str):
        bad.append("no such choice")
    elif isinstance(default, int):
        bad.append(-(10**6))
    for value in bad:
        with pytest.raises(ValueError, match=field):
            algorithm(**{field: value})
