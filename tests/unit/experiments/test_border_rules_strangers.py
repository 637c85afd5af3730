"""Every rule of the border to strangers names a test that exists."""

import ast

import pytest

from dqnfed.experiments.border_rules import Rule
from dqnfed.experiments.border_rules_strangers import RULES
from tests.helpers.repository import ROOT


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.test.split("::")[1])
def test_the_test_of_a_rule_exists(rule: Rule) -> None:
    path, name = rule.test.split("::")
    found = {node.name for node in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(node, ast.FunctionDef)}
    assert name in found
    assert all(rule)  # no empty cell
