"""The pages that describe the methods say what the methods say."""

import pytest

from dqnfed.core.algorithm import hyperparameters
from tests.helpers.repository import ROOT
from tools import reference

REMEDY = "a method changed: run `make reference` and commit the pages"


def test_the_reference_page_is_up_to_date() -> None:
    assert reference.PAGE.read_text(encoding="utf-8") == reference.page(), REMEDY


def test_the_table_of_the_readme_is_up_to_date() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text == reference.readme(text), REMEDY


@pytest.mark.parametrize("name", sorted(reference.own_methods()))
def test_every_setting_says_what_it_means(name: str) -> None:
    method = reference.own_methods()[name]
    said = reference.comments(method)
    assert [setting for setting in hyperparameters(method) if not said.get(setting)] == []


def test_what_markdown_would_misread_is_escaped() -> None:
    assert reference.markdown("Server: u* = `a_k` and $b_k$, ||c_k||") == (
        r"**Server:** u\* = `a_k` and $b_k$, \|\|c\_k\|\|"
    )
