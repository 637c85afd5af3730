"""The page about the borders: which rule is applied where something comes in from outside, and which test shows it.

`python -m dqnfed.experiments.border_docs` writes it. The rules stand in modules of their own, one a border.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

PAGE = Path("docs/reference/borders.md")
MODULES = ("border_rules_strangers", "border_rules_clients", "border_rules_files")
NOTICE = "<!-- Made by `make reference` from src/dqnfed/experiments/border_rules_*.py; change these instead. -->"
INTRODUCTION = "What comes in from outside is checked before it is used. Each rule has a test that shows it."


def collected_rules() -> list[tuple[str, str, str, str, str]]:
    """Return the rules, border by border."""
    modules = [import_module(f"dqnfed.experiments.{name}") for name in MODULES]
    return [tuple(rule) for module in modules for rule in module.RULES]


def page(rules: Sequence[tuple[str, str, str, str, str]], sections: Iterable[str] = ()) -> str:
    """Return the page: a table for every border, then further sections, which end in no newline."""
    parts = [f"{NOTICE}\n\n# Borders\n\n{INTRODUCTION}"]
    for border in dict.fromkeys(rule[0] for rule in rules):
        lines = [f"## {border}", "", "| rule | default | setting | test |", "|---|---|---|---|"]
        for _, rule, default, setting, test in (each for each in rules if each[0] == border):
            file, _, name = test.partition("::")
            cells = (_cell(rule), _cell(default), _cell(setting) or "none", f"`{name}` in `{file}`")
            lines.append(f"| {' | '.join(cells)} |")
        parts.append("\n".join(lines))
    return "\n\n".join([*parts, *sections]) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def further_sections() -> list[str]:
    """Return the sections that modules of rules write beside their table: `sections()`, where they have one."""
    found: list[str] = []
    for name in MODULES:
        if find_spec(f"dqnfed.experiments.{name}") is not None:
            module = import_module(f"dqnfed.experiments.{name}")
            found += getattr(module, "sections", list)()
    return found


if __name__ == "__main__":
    PAGE.write_text(page(collected_rules(), further_sections()), encoding="utf-8")
