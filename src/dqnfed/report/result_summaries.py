"""What is kept of a finished run for the pages of results: small enough for the repository, all that a page shows."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from dqnfed.report.run_files import block as part_of
from dqnfed.report.run_files import read_client_rows, read_clients, read_json, read_records, read_toml

Json = dict[str, Any]
CURVE_POINTS = 50
MAX_NAMED = 12  # clients; of more, only the distribution of accuracies is of interest


def collected(
    runs: Iterable[Json], *, table: str, command: str, hardware: str, commit: str, algorithms: Sequence[str] = ()
) -> Json:
    """Return the summary of finished runs for one page; of a run that is there twice, the later one counts.

    A method whose seeds were run with different settings is refused: its mean would be nobody's.
    """
    found: dict[tuple[str, str, int], Json] = {}
    for run in runs:
        if not algorithms or run["algorithm"] in algorithms:
            found[run["experiment"], run["algorithm"], run["seed"]] = run
    if not found:
        raise ValueError(f"there is no finished run for the table '{table}'; give the folder that holds them.")
    _check_settings(found.values())
    _check_numerics(found.values())
    experiments = list(dict.fromkeys(experiment for experiment, _, _ in found))
    ordered = sorted(found, key=lambda key: (experiments.index(key[0]), *key[1:]))
    runs = [found[key] for key in ordered]
    return {"table": table, "command": command, "hardware": hardware, "commit": commit, "runs": runs}


def summaries_in(source: Path) -> list[Json]:
    """Return the summaries of runs: of a folder's finished runs, of a page's stored ones (.json), or of lines (.jsonl).

    A line of a .jsonl file is what `run_summary` returned, perhaps on another machine; what else it says is left out,
    and so are lines that say `error` in place of a result.
    """
    if source.suffix == ".json":
        stored: list[Json] = json.loads(source.read_text(encoding="utf-8"))["runs"]
        return stored
    if source.suffix == ".jsonl":
        lines = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines() if line.strip()]
        return [{key: line[key] for key in KEPT if key in line} for line in lines if "error" not in line]
    return [run_summary(folder) for folder in finished_runs(source)]


def finished_runs(above: Path) -> list[Path]:
    """Return the folders of finished runs at or below a folder."""
    return sorted(path.parent for path in above.rglob("summary.json") if (path.parent / "metrics.jsonl").is_file())


KEPT = (
    "experiment",
    "algorithm",
    "seed",
    "settings",
    "train",
    "rounds",
    "status",
    "participants",
    "accuracy",
    "late",
    "train_loss",
    "improved",
    "improved_late",
    "seconds",
    "passes",
    "bytes_up",
    "curve",
    "improved_curve",
    "clients",
    "client_names",
    "numerics",
)


def run_summary(folder: Path) -> Json:
    """Return what is kept of one run: settings, last scores, cost, and the curves and accuracies that figures need."""
    said: list[str] = []
    summary, config = read_json(folder / "summary.json", said), read_toml(folder / "config.toml", said)
    records = [r for r in read_records(folder / "metrics.jsonl", said) if r["round"] >= 0]
    if said or not records:
        raise ValueError(f"{folder} is no whole run: {'; '.join(said) or 'it has no rounds'}; run it again.")
    evaluated = [r for r in records if r["accuracy"] is not None]
    clients, names = _final_accuracies(folder, evaluated, summary.get("kept_round"))
    return _kept(summary, config, records, clients, names, read_json(folder / "env.json", []).get("numerics"))


def _kept(
    summary: Mapping[str, Any],
    config: Mapping[str, Any],
    records: Sequence[Mapping[str, Any]],
    clients: list[float],
    names: list[str],
    numerics: int | None,
) -> Json:
    with_accuracy = [r for r in records if r["accuracy"] is not None and r["accuracy"]["mean"] is not None]
    late = [r["rho"] for r in records[len(records) // 2 :] if r["rho"] is not None]
    scores = [r["accuracy"] for r in records if r["accuracy"] is not None]
    if summary.get("select", "last") != "last":  # the model that was kept, and not the last ones
        scores = [summary["accuracy"]]
    train = part_of(config, "train")
    kept = {
        "experiment": summary["name"],
        "algorithm": summary["algorithm"],
        "seed": summary["seed"],
        "settings": _settings(config, summary["algorithm"]),
        "train": {k: train.get(k) for k in ("rounds", "epochs", "batch_size", "lr", "participation")},
        "rounds": summary["rounds"],
        "status": summary["status"],
        "participants": fmean(len(r["clients"]) for r in records),
        "accuracy": _rounded(summary["accuracy"]),
        "late": last_quarter(scores),
        "train_loss": _rounded(summary["train_loss"]),
        "improved": None if summary["rho_mean"] is None else round(summary["rho_mean"], 4),
        "improved_late": round(fmean(late), 4) if late else None,
        "seconds": round(summary["totals"]["seconds"], 2),
        "passes": summary["totals"]["passes"],
        "bytes_up": summary["totals"]["bytes_up"],
        "curve": [[r["round"] + 1, round(r["accuracy"]["mean"], 2)] for r in _thinned(with_accuracy)],
        "improved_curve": binned([(r["round"] + 1, r["rho"]) for r in records if r["rho"] is not None]),
    }
    if clients:
        kept["clients"] = clients
    if 0 < len(names) <= MAX_NAMED:
        kept["client_names"] = names
    if numerics is not None:
        kept["numerics"] = numerics
    return kept


def last_quarter(scores: Sequence[Mapping[str, float | None]]) -> Json:
    """Return the means of all measures over the last quarter of the evaluations; None where one of them has none."""
    chosen = scores[-max(1, len(scores) // 4) :]
    found: dict[str, float | None] = {}
    for key in chosen[-1] if chosen else ():
        values = [math.nan if (value := score.get(key)) is None else value for score in chosen]
        found[key] = fmean(values)
    return _rounded(found)


def binned(points: Sequence[tuple[int, float]], n_bins: int = CURVE_POINTS) -> list[list[float]]:
    """Return means over at most `n_bins` neighbouring groups of (round, value), each at its middle round."""
    if not points:
        return []
    groups = np.array_split(np.array(points, dtype=np.float64), min(n_bins, len(points)))
    return [[float(round(group[:, 0].mean())), round(float(group[:, 1].mean()), 4)] for group in groups]


def _check_settings(runs: Iterable[Json]) -> None:
    first: dict[tuple[str, str], Json] = {}
    for run in runs:
        other = first.setdefault((run["experiment"], run["algorithm"]), run)
        for part in ("settings", "train"):
            if run[part] != other[part]:
                raise ValueError(
                    f"the runs of {run['algorithm']} on {run['experiment']} make one row, but seed {other['seed']} "
                    f"has the {part} {other[part]} and seed {run['seed']} {run[part]}; give all seeds with the same."
                )


def _check_numerics(runs: Iterable[Json]) -> None:
    first: Json | None = None
    for run in runs:
        first = first or run
        if run.get("numerics") != first.get("numerics"):
            was, now = (str(one.get("numerics", "not recorded")) for one in (first, run))
            raise ValueError(
                f"a page's rows share one NUMERICS, but that of {first['algorithm']}, seed {first['seed']}, is {was}, "
                f"and that of {run['algorithm']}, seed {run['seed']}, is {now}; run the older rows again."
            )


def _thinned(evaluated: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return about `CURVE_POINTS` of the evaluated rounds, the last one among them."""
    chosen = list(evaluated[:: max(1, math.ceil(len(evaluated) / CURVE_POINTS))])
    return chosen if not evaluated or chosen[-1] is evaluated[-1] else [*chosen, evaluated[-1]]


def _settings(config: Mapping[str, Any], algorithm: str) -> Json:
    """Return what the experiment says of the method, beside the method's defaults."""
    filed = part_of(part_of(config, "algorithms"), algorithm)
    return {k: v for k, v in {**filed, **part_of(config, "algorithm")}.items() if k != "name"}


def _final_accuracies(
    folder: Path, evaluated: Sequence[Mapping[str, Any]], kept_round: int | None
) -> tuple[list[float], list[str]]:
    """Return the clients' accuracies with the kept model, else the last one, and their names; nothing where none are
    stored.
    """
    if not evaluated or not (folder / "clients.csv").is_file():
        return [], []
    record = next((r for r in evaluated if r["round"] == kept_round), evaluated[-1])
    round_ = record["round"]
    rows = read_client_rows(folder / "clients.csv", {round_: len(record.get("silent") or ())}, [])
    found = rows.values.get("accuracy", {}).get(round_, {})
    known = {client.client: client.name for client in read_clients(folder / "clients.json", [])}
    return [round(found[k], 2) for k in sorted(found)], [known[k] for k in sorted(found) if k in known]


def _rounded(values: Mapping[str, float | None]) -> Json:
    """Return the values with four digits; what is no number, in a run that diverged, is null in the files."""
    return {
        key: None if value is None or not math.isfinite(value) else round(value, 4) for key, value in values.items()
    }
