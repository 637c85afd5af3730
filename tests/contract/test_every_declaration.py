"""What every registered class declares about itself: fields, kinds, references, exemptions."""

from __future__ import annotations

import dataclasses
import math
import re
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch

from dqnfed.algorithms import REGISTRY
from dqnfed.core.algorithm import LOCAL_WORK
from dqnfed.core.local_work import LocalWork
from tests.helpers.bowls import BOWLS

METHODS = sorted(REGISTRY)
FIELDS = [(name, field.name) for name in METHODS for field in dataclasses.fields(REGISTRY[name]) if field.init]


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
    assert issubclass(algorithm, LocalWork)
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
def test_records_are_named_tuples_of_tensors(name: str) -> None:
    info = REGISTRY[name].info
    for kind in (info.server, info.memory, *info.messages, *info.replies):
        assert only_tensors(kind), f"{kind} must be a NamedTuple of tensors"
    assert "theta" in info.server._fields


@pytest.mark.parametrize("name", METHODS)
def test_named_fields_exist(name: str) -> None:
    info = REGISTRY[name].info
    in_replies = {field for kind in info.replies for field in kind._fields}
    assert {*info.clip_fields, *info.nan_ok_fields} <= in_replies
    assert len(set(info.clip_fields)) == len(info.clip_fields)
    assert "theta" in info.theta_fields
    assert set(info.theta_fields) <= set(info.server._fields)
    assert info.local_work <= set(LOCAL_WORK)
    assert set(info.looped_messages) <= set(info.messages)


@pytest.mark.parametrize("name", METHODS)
def test_phases_are_told_apart_by_the_kind_of_message(name: str) -> None:
    info = REGISTRY[name].info
    for kinds in (info.messages, info.replies):
        assert len({kind.__name__ for kind in kinds}) == len(kinds) >= 1


@pytest.mark.parametrize("name", METHODS)
def test_problem_kinds_can_be_tested(name: str) -> None:
    assert set(BOWLS) & REGISTRY[name].info.problem_kinds
    assert REGISTRY[name].info.problem_kinds <= set(BOWLS)


def contract_tests() -> set[str]:
    """Return the names of all contract tests."""
    files = sorted(Path(__file__).parent.glob("test_*.py"))
    modules = [import_module(f"tests.contract.{file.stem}") for file in files]
    return {name for module in modules for name in vars(module) if name.startswith("test_")}


@pytest.mark.parametrize("name", METHODS)
def test_every_exemption_names_a_contract_test_and_a_reason(name: str) -> None:
    for test, reason in REGISTRY[name].info.exemptions.items():
        assert test in contract_tests(), f"{name} is exempt from '{test}', but there are {sorted(contract_tests())}"
        assert len(reason.split()) >= 3, f"{name} must say why it is exempt from {test}"


@pytest.mark.parametrize(  # of a truth value both are fine
    ("name", "field"), [(n, field) for n, field in FIELDS if not isinstance(getattr(REGISTRY[n](), field), bool)]
)
def test_bad_hyperparameters_are_refused_by_name(name: str, field: str) -> None:
    algorithm = REGISTRY[name]
    default = getattr(algorithm(), field)
    bad: list[Any] = [math.nan]
    if isinstance(default, str):
        bad.append("no such choice")
    elif isinstance(default, int):
        bad.append(-(10**6))
    for value in bad:
        with pytest.raises(ValueError, match=field):
            algorithm(**{field: value})
