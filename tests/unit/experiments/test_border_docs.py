"""The page about the borders: made from the rules, up to date, and every rule has a test that exists."""

from __future__ import annotations

import ast
from functools import cache

import pytest

from dqnfed.experiments.border_docs import PAGE, collected_rules, further_sections, page
from tests.helpers.repository import ROOT

RULES = collected_rules()


@cache
def functions_in(file: str) -> frozenset[str]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule[4].rpartition("::")[2])
def test_every_rule_has_a_test(rule: tuple[str, str, str, str, str]) -> None:
    file, _, name = rule[4].partition("::")
    assert name.startswith("test_")
    assert name in functions_in(file)


def test_the_page_is_up_to_date() -> None:
    assert (ROOT / PAGE).read_text(encoding="utf-8") == page(RULES, further_sections()), "run `make reference`"


def test_all_borders_have_rules() -> None:
    assert "Files" in {rule[0] for rule in RULES}
    assert all(text for rule in RULES for text in (rule[0], rule[1], rule[2], rule[4]))
