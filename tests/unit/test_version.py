"""One version: the package's own, repeated where files of other formats need it."""

import importlib.metadata
import re

import dqnfed
from tests.helpers.repository import ROOT


def test_the_citation_names_the_version_of_the_package() -> None:
    found = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None
    assert found[1] == dqnfed.__version__


def test_the_installed_distribution_has_the_version_of_the_package() -> None:
    assert importlib.metadata.version("dqnfed") == dqnfed.__version__
