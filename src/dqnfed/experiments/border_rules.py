"""One rule at a border: what is believed, what is not, and the test that shows it."""

from __future__ import annotations

from typing import NamedTuple


class Rule(NamedTuple):
    """A row of the table of borders."""

    border: str  # the section: strangers, clients or files
    rule: str
    default: str  # what happens unless it is set otherwise
    setting: str  # by which it is changed; empty: it always holds
    test: str  # path/of/test_file.py::name_of_test
