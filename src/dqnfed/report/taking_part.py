"""Who took part: in how many rounds each client was asked, how often it was left out, how large rounds were."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

MOST_ROWS = 40


class Part(NamedTuple):
    """What one run's records say about it."""

    n_rounds: int
    asked: Counter[int]  # rounds by client
    left_out: Counter[int]  # rounds in which its reply was missing, late or refused
    fewest: int  # clients that were asked in a round
    most: int
    n_empty: int  # rounds with nobody


def part_of(records: Sequence[Mapping[str, Any]]) -> Part | None:
    """Return who took part; None where the records do not say."""
    rounds = [record for record in records if record.get("round", -1) >= 0 and isinstance(record.get("clients"), list)]
    if not rounds:
        return None
    sizes = [len(record["clients"]) for record in rounds]
    asked = Counter(client for record in rounds for client in record["clients"])
    left_out = Counter(client for record in rounds for client in _left_out(record))
    return Part(len(rounds), asked, left_out, min(sizes), max(sizes), sum(size == 0 for size in sizes))


def _left_out(record: Mapping[str, Any]) -> set[int]:
    found = record.get("dropped")
    drops = [drop for drop in found if isinstance(drop, Mapping)] if isinstance(found, list) else []
    return {int(drop["client"]) for drop in drops if "client" in drop}


def taking_part_html(parts: Sequence[Part], names: Sequence[str]) -> str:
    """Return the section of an experiment's runs; nothing where everybody took part in every round of all of them."""
    n_rounds = sum(part.n_rounds for part in parts)
    asked, left_out = Counter[int](), Counter[int]()
    for part in parts:
        asked.update(part.asked)
        left_out.update(part.left_out)
    if not parts or (not left_out and all(asked[c] == n_rounds for c in range(len(names)))):
        return ""
    fewest, most = min(part.fewest for part in parts), max(part.most for part in parts)
    sizes = f"{fewest}" if fewest == most else f"{fewest} to {most}"
    empty = sum(part.n_empty for part in parts)
    nobody = f" {empty} of {n_rounds} rounds had nobody, and kept the model." if empty else ""
    never = [names[c] for c in range(len(names)) if not asked[c]]
    missed = f" Never asked: {', '.join(never[:10])}{' and more' if len(never) > 10 else ''}." if never else ""
    said = f"{sizes} of {len(names)} clients were asked in a round, counted over all runs.{nobody}{missed}"
    order = sorted(range(len(names)), key=lambda c: (asked[c] - left_out[c], c))[:MOST_ROWS]
    rows = "".join(
        f"<tr><td>{escape(names[c])}</td><td>{100 * asked[c] / n_rounds:.1f} %</td><td>{left_out[c]}</td></tr>"
        for c in order
    )
    shown = f"<p>The {MOST_ROWS} that took part least:</p>" if len(names) > MOST_ROWS else ""
    return (
        f"<h3>Who took part</h3><p>{escape(said)}</p><details><summary>Rounds of each client</summary>{shown}"
        "<table><thead><tr><th>client</th><th>rounds in which it was asked</th><th>left out of them</th></tr></thead>"
        f"<tbody>{rows}</tbody></table></details>"
    )
