"""Every rule of the border to clients names a test that exists and a setting that exists, with its default."""

from __future__ import annotations

import re

import pytest

from dqnfed import Policy
from dqnfed.experiments.border_rules import Rule
from dqnfed.experiments.border_rules_clients import RULES
from tests.helpers.hostile_runs import app_policy
from tests.helpers.repository import ROOT


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.test)
def test_its_test_exists(rule: Rule) -> None:
    file, _, name = rule.test.partition("::")
    assert re.search(rf"^def {name}\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("rule", [rule for rule in RULES if "new apps" in rule.default], ids=lambda rule: rule.setting)
def test_its_default_is_that_of_the_policy_and_of_new_apps(rule: Rule) -> None:
    setting = rule.setting.strip("`").removeprefix("policy.")
    usual, app = rule.default.split("; new apps: ")
    assert getattr(app_policy(), setting) == float(app)
    if setting != "rate_bounds":  # the default is the method's own
        assert getattr(Policy(), setting) == (None if usual == "off" else float(usual))
