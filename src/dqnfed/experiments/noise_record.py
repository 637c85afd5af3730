"""Wrong labels, found and corrected: what a method made of noise that was put there on purpose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from dqnfed.core.federation import Federation
from dqnfed.core.run_folder import json_text, load_tensors, write_atomically
from dqnfed.data.label_noise import Truth
from dqnfed.sim.checkpoint import newest_state

NOISE_FILE = "noise.json"


def write_noise_record(folder: Path, truth: Truth, federation: Federation, *, per_client: bool) -> dict[str, Any]:
    """Write `noise.json` into a run's folder and return its summary; the labels are those of the last checkpoint."""
    record = noise_record(truth, federation, _last_state(folder))
    if not per_client:
        del record["clients"]
    write_atomically(folder / NOISE_FILE, json_text(record))
    summary: dict[str, Any] = record["summary"]
    return summary


def noise_record(truth: Truth, federation: Federation, state: dict[str, Tensor]) -> dict[str, Any]:
    """Return which clients and labels were wrong, and which of them a label-correcting method found.

    Of a method that corrects no labels there is nothing but what was wrong from the start.
    """
    given, right = federation.train.targets.cpu(), truth.targets.cpu()
    corrects = "server.noise_estimate.score" in state
    now = _labels_now(federation, state) if corrects else given
    detected = state["server.noise_estimate.is_noisy"] if corrects else None
    rows: list[dict[str, Any]] = []
    for c in range(federation.n_clients):
        own = slice(int(federation.train.starts[c]), int(federation.train.starts[c + 1]))
        row = {
            "client": c,
            "level": float(truth.levels[c]),
            "n": own.stop - own.start,
            **_counts(given, right, now, own),
        }
        if detected is not None:
            row["is_detected"] = bool(detected[c])
            row["estimated_level"] = float(state["server.noise_estimate.level"][c])
            row["score"] = float(state["server.noise_estimate.score"][c])
        rows.append(row)
    noise = {"kind": truth.noise.kind, "share": truth.noise.share, "level_low": truth.noise.level_low}
    return {
        "noise": {**noise, "level_high": truth.noise.level_high},
        "summary": _summary(rows, corrects),
        "clients": rows,
    }


def _counts(given: Tensor, right: Tensor, now: Tensor, rows: slice) -> dict[str, int]:
    was_wrong, is_right, changed = given[rows] != right[rows], now[rows] == right[rows], now[rows] != given[rows]
    return {
        "wrong_before": int(was_wrong.sum()),
        "wrong_after": int((~is_right).sum()),
        "changed": int(changed.sum()),
        "changed_to_right": int((changed & is_right).sum()),
        "changed_from_right": int((changed & ~was_wrong).sum()),
    }


def _summary(rows: list[dict[str, Any]], corrects: bool) -> dict[str, Any]:
    total = {key: sum(row[key] for row in rows) for key in ("n", "wrong_before", "wrong_after", "changed")}
    n_noisy = sum(row["level"] > 0 for row in rows)
    found: dict[str, Any] = {"n_clients": len(rows), "n_noisy": n_noisy, "labels": total.pop("n"), **total}
    if not corrects:
        return found
    hits = sum(row["is_detected"] and row["level"] > 0 for row in rows)
    n_detected = sum(row["is_detected"] for row in rows)
    to_right = sum(row["changed_to_right"] for row in rows)
    found["clients"] = {
        "detected": n_detected,
        "precision": _ratio(hits, n_detected),
        "recall": _ratio(hits, n_noisy),
        "f1": _ratio(2 * hits, n_detected + n_noisy),
    }
    found["corrections"] = {
        "precision": _ratio(to_right, total["changed"]),
        "recall": _ratio(to_right, total["wrong_before"]),
        "from_right": sum(row["changed_from_right"] for row in rows),
    }
    return found


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _labels_now(federation: Federation, state: dict[str, Tensor]) -> Tensor:
    """Return the training labels as the clients have them; those of a client that keeps none are as given."""
    train = federation.train
    labels, row_of = train.targets.cpu().clone(), state["memory_row_of"]
    for c in range(federation.n_clients):
        start, end = int(train.starts[c]), int(train.starts[c + 1])
        kept = state.get(f"memory_of.{c}.labels")
        if kept is None and row_of[c] >= 0:
            kept = state["memory.labels"][row_of[c]]
        if kept is not None and len(kept):
            labels[start:end] = kept[: end - start].to(labels)
    return labels


def _last_state(folder: Path) -> dict[str, Tensor]:
    newest = newest_state(folder)
    return {} if newest is None else load_tensors(newest)[0]
