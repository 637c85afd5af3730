"""Wrong labels on Fashion MNIST: four methods, two partitions, five seeds, several runs side by side.

    PYTHONPATH=src python benchmarks/label_noise.py --data-dir DATA --out OUT --jobs 15
    PYTHONPATH=src python benchmarks/label_noise.py --out OUT --table       # the tables of the finished runs, Markdown
    PYTHONPATH=src python benchmarks/label_noise.py --out OUT --table --page docs/results/label-noise.md

Runs the preset `fashion-mnist-noisy` into OUT/<partition>/<method>/<seed>. What is finished is kept and what was
stopped goes on, so the same command continues; OUT/table.md and OUT/table.json are written anew after every run.
`--page` puts the tables in the place of those of a page, under the headings that it has for the two partitions.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

METHODS = ("dqn-fed", "fedavg", "fedcorr+dqn-fed", "fedcorr+fedavg")
PARTITIONS = {"iid": [], "dirichlet": ["data.partition=dirichlet", "data.beta=1.0"]}
HEADINGS = {"iid": "Clients with the same label mix", "dirichlet": "Label mixes drawn from Dirichlet(1.0)"}
COLUMNS = {"mean": "mean", "std": "std", "worst10": "worst 10 %", "best10": "best 10 %"}
FOUND = {
    "f1": "F1 of noisy clients",
    "before": "wrong labels before, %",
    "after": "after, %",
    "right": "changes right, %",
}


def main() -> None:
    options = arguments()
    if options.rebuild:
        rows = json.loads(options.rebuild.with_suffix(".json").read_text())
        options.rebuild.write_text(with_tables(options.rebuild.read_text(), rows))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    if options.worker:
        worker(json.loads(options.worker))
        return
    if not options.table:
        started = time.monotonic()
        jobs = list(planned(options))
        with ThreadPoolExecutor(options.jobs) as pool:
            for label, seconds, code in pool.map(played, jobs):
                sys.stdout.write(f"{time.monotonic() - started:6.0f} s  {label}: {seconds:.0f} s, exit code {code}\n")
                sys.stdout.flush()
                write_tables(options.out)
    sys.stdout.write(write_tables(options.out) + "\n")
    if options.page:
        rows = (options.out / "table.json").read_text()
        options.page.with_suffix(".json").write_text(rows)  # from which a test makes the page's tables again
        options.page.write_text(with_tables(options.page.read_text(), json.loads(rows)))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("runs/label-noise"))
    parser.add_argument("--data-dir", type=Path, default=Path(os.environ.get("DQNFED_DATA", "data")))
    parser.add_argument("--preset", default="fashion-mnist-noisy")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--partitions", default=",".join(PARTITIONS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--plain-rounds", type=int, default=137, help="of methods without label correction")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--set", dest="changes", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--table", action="store_true", help="only the tables of what is finished")
    parser.add_argument("--page", type=Path, help="page whose tables are to be those of what is finished")
    parser.add_argument("--rebuild", type=Path, help="only write this page's tables from its stored runs")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def planned(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield every run; methods without label correction get as many client visits as FedCorr, so fewer rounds."""
    for method in options.methods.split(","):
        for partition in options.partitions.split(","):
            for seed in range(options.seeds):
                yield {
                    "preset": options.preset,
                    "method": method,
                    "out": str(options.out / partition / method / str(seed)),
                    "changes": [
                        *PARTITIONS[partition],
                        f"run.seed={seed}",
                        f'run.device="{options.device}"',
                        'run.cohort="looped"' if options.device == "cpu" else 'run.cohort="auto"',
                        "run.threads=1",
                        "eval.every=25",
                        "eval.participants=false",
                        f"data.dir={json.dumps(str(options.data_dir))}",
                        *options.changes,
                        *([] if method.startswith("fedcorr") else [f"train.rounds={options.plain_rounds}"]),
                    ],
                }


def played(job: dict[str, Any]) -> tuple[str, float, int]:
    """Run one experiment in a process of its own, with one thread."""
    started = time.monotonic()
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    command = [sys.executable, __file__, "--out", job["out"], "--worker", json.dumps(job)]
    done = subprocess.run(command, env={**os.environ, **threads}, capture_output=True, text=True)
    if done.returncode:
        sys.stderr.write(done.stderr[-2000:])
    return "/".join(Path(job["out"]).parts[-3:]), time.monotonic() - started, done.returncode


def worker(job: dict[str, Any]) -> None:
    from dqnfed.experiments.config import read_config
    from dqnfed.experiments.experiment import run_experiment
    from dqnfed.experiments.planned import is_finished, was_started

    config = read_config(job["preset"], job["changes"]).with_algorithm(job["method"])
    folder = Path(job["out"])
    if not is_finished(folder, config):
        run_experiment(config, folder, resume=was_started(folder, config))


def write_tables(out: Path) -> str:
    """Write and return the tables of all finished runs: mean ± standard deviation over seeds."""
    rows: list[dict[str, Any]] = []
    lines: list[str] = []
    for partition in PARTITIONS:
        lines += [
            f"\n{partition}\n",
            "| method | seeds | " + " | ".join([*COLUMNS.values(), *FOUND.values()]) + " | passes | seconds |",
            "|---" * (4 + len(COLUMNS) + len(FOUND)) + "|",
        ]
        for method in METHODS:
            found = [json.loads(path.read_text()) for path in sorted((out / partition / method).glob("*/summary.json"))]
            values = [
                measured(summary) for summary in found if "noise" in summary and summary["status"] != "interrupted"
            ]
            if values:
                rows.append({"partition": partition, "method": method, "runs": values})
                keys = [*COLUMNS, *FOUND, "passes", "seconds"]
                cells = [over_seeds([v[key] for v in values], key) for key in keys]
                lines.append(f"| `{method}` | {len(values)} | " + " | ".join(cells) + " |")
    (out / "table.json").write_text(json.dumps(rows) + "\n")
    text = "\n".join(lines)
    (out / "table.md").write_text(text + "\n")
    return text


def with_tables(page: str, rows: list[dict[str, Any]]) -> str:
    """Return the page with the tables under its headings replaced; a partition without finished runs keeps its own."""
    for partition, heading in HEADINGS.items():
        found = [row for row in rows if row["partition"] == partition]
        if not found:
            continue
        before, heading, after = page.partition(f"## {heading}\n\n")
        if not heading:
            raise ValueError(
                f"the page has no heading '## {HEADINGS[partition]}' to put the table of {partition} under."
            )
        rest = after[after.index("\n\n") :]  # a table ends at the first empty line
        page = before + heading + page_table(found) + rest
    return page


def page_table(rows: list[dict[str, Any]]) -> str:
    titles = "mean | std over clients | worst 10 % | best 10 % | F1 of noisy clients | lowest F1"
    lines = [
        f"| method | {titles} | wrong labels, before → after | changes that are right | seeds |",
        "|---" * 10 + "|",
    ]
    for row in rows:
        runs = row["runs"]
        cells = [over_seeds([run[key] for run in runs], key) for key in (*COLUMNS, "f1")]
        before, after, right = (over_seeds([run[key] for run in runs], key) for key in ("before", "after", "right"))
        known = [run["f1"] for run in runs if run["f1"] is not None]
        cells += [f"{min(known):.2f}" if known else "-", f"{before} → {after} %" if known else f"{before} %"]
        lines.append(
            f"| `{row['method']}` | " + " | ".join([*cells, f"{right} %" if known else "-", str(len(runs))]) + " |"
        )
    return "\n".join(lines)


def measured(summary: dict[str, Any]) -> dict[str, float | None]:
    """Return what a row of a run's method is made of; None: there is no such number without label correction."""
    noise = summary["noise"]
    clients, corrections = noise.get("clients", {}), noise.get("corrections", {})
    return {
        **{key: summary["accuracy"][key] for key in COLUMNS},
        "f1": clients.get("f1"),
        "before": 100 * noise["wrong_before"] / noise["labels"],
        "after": 100 * noise["wrong_after"] / noise["labels"],
        "right": 100 * corrections["precision"] if corrections.get("precision") is not None else None,
        "passes": summary["totals"]["passes"],
        "seconds": summary["totals"]["seconds"],
    }


def over_seeds(values: list[float | None], key: str) -> str:
    known = np.array([v for v in values if v is not None])
    if not len(known):
        return "-"
    digits = {"passes": 0, "seconds": 0, "f1": 2, "std": 2}.get(key, 1)
    spread = f" ± {known.std(ddof=1):.{digits}f}" if len(known) > 1 and key not in ("passes", "seconds") else ""
    return f"{known.mean():.{digits}f}{spread}"


if __name__ == "__main__":
    main()
