"""The README names methods that exist, and its links lead somewhere."""

import re

from dqnfed.algorithms import OPTIONAL, REFERENCES, REGISTRY
from tests.helpers.repository import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_method_of_its_table_exists() -> None:
    """The table is a choice; the list of all methods is the index of their pages, which `make reference` writes."""
    table = README.partition("\n## Methods\n")[2].partition("\n## ")[0]
    named = set(re.findall(r"`([a-z][a-z0-9-]*)`", table)) - {"torchjd"}
    assert len(named) > 20
    assert named - set(REGISTRY) - set(OPTIONAL) - set(REFERENCES) == set()
    assert "(docs/reference/methods/index.md)" in table


def test_every_link_to_a_file_leads_to_one() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", README)
    assert len(links) > 5
    assert [link for link in links if not (ROOT / link).is_file()] == []
