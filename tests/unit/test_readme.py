"""The README names every method of the package, and its links lead somewhere."""

import re

from dqnfed.algorithms import REGISTRY
from tests.helpers.repository import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_method_is_named() -> None:
    named = set(re.findall(r"`([a-z][a-z0-9-]*)`", README))
    own = {name for name, method in REGISTRY.items() if method.__module__.startswith("dqnfed.")}
    assert own - named == set()


def test_every_link_to_a_file_leads_to_one() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", README)
    assert len(links) > 5
    assert [link for link in links if not (ROOT / link).is_file()] == []
