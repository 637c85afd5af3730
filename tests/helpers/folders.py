"""What a run folder holds while the run is under way, and at its end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def n_lines(out: Path) -> int:
    """Return how many records the run has written so far."""
    path = out / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def contents(out: Path) -> dict[str, Any]:
    """Return everything that must not depend on how the run came to its end: all but the times."""
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((out / "summary.json").read_text())
    del summary["totals"]["seconds"]
    return {
        "metrics": [{key: value for key, value in record.items() if key != "seconds"} for record in records],
        "clients": (out / "clients.csv").read_bytes(),
        "who": (out / "clients.json").read_bytes(),
        "config": (out / "config.toml").read_bytes(),
        "model": (out / "model.safetensors").read_bytes(),
        "summary": summary,
    }


def newest_checkpoint(out: Path) -> dict[str, Any]:
    """Return the facts of the newest checkpoint."""
    files = (out / "checkpoint").glob("checkpoint-*.json")
    newest = max(files, key=lambda path: int(path.stem.removeprefix("checkpoint-")))
    facts: dict[str, Any] = json.loads(newest.read_text())
    return facts


def newest_tensors(out: Path) -> Path:
    """Return the file with the tensors of the newest checkpoint."""
    return out / "checkpoint" / f"state-{newest_checkpoint(out)['round']}.safetensors"
