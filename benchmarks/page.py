"""Write docs/results/speed.md from what the other benchmarks measured: python benchmarks/page.py [folder]."""

import json
import platform
import sys
from math import log
from pathlib import Path
from typing import Any

from side_by_side import table

HERE = Path(__file__).parent
SETTING = """
W1: 100 clients of 500 examples in CIFAR-10's shape, a dense network 3072-200-100-10, 10 clients a round, one epoch of
batches of 64. W2: 100 clients of 200 images of 28 x 28, two convolutions and two dense layers (1.7 million parameters),
10 clients a round, batches of 32. Every contestant is a process of its own, and they play in turn; evaluations are off.
The floor is the arithmetic alone at the rate of one large product with all cores, the median of one a round. `first` is
the first round, with what a framework starts or compiles in it; memory is the largest proportional set size after a
round, workers included.
""".strip()
PAGE = HERE.parent / "docs" / "results" / "speed.md"


def read(folder: Path, name: str) -> Any:
    """Return what a benchmark left, or None if it was not run."""
    path = folder / f"{name}.json"
    return json.loads(path.read_text()) if path.is_file() else None


def side_by_side(found: Any) -> list[str]:
    """Return the section that compares frameworks."""
    lines = ["## A round of FedAvg, side by side", ""]
    lines += [SETTING, ""]
    for workload, result in found.items():
        lines += [table(workload, result)]
        peers = {name: row for name, row in result["found"].items() if not name.startswith(("dqnfed", "torch"))}
        ours = result["found"].get("dqnfed")
        if ours and peers:
            fastest = min(peers, key=lambda name: peers[name]["median"])
            ratio = peers[fastest]["median"] / ours["median"]
            lines += [f"{workload}: {ratio:.2f} times as fast as {fastest}, the fastest other framework.", ""]
        for first, second, text in (
            (
                "dqnfed, DQN-Fed",
                "dqnfed",
                "A round of DQN-Fed (two full gradients a client) takes {:.2f} times as long.",
            ),
            ("dqnfed, Ray, 1 worker", "dqnfed, Ray, 2 workers", "Two Ray workers are {:.2f} times as fast as one."),
        ):
            rows = result["found"]
            if first in rows and second in rows:
                lines += [text.format(rows[first]["median"] / rows[second]["median"]), ""]
        lines += [f"({result['rounds']} rounds each, {result['cores']} cores.)", ""]
    return lines


def growth(found: Any) -> list[str]:
    """Return the section on how rounds grow."""
    lines = ["## How a round grows", "", "The engine alone, 10 parameters and 100 clients who all take part:", ""]
    lines += [f"- {name}: {1e3 * seconds:.2f} ms" for name, seconds in found["overhead"].items()]
    lines += ["", "| one more of | sizes | ms a round | exponent, over all | at the end |", "|---|---|---|---|---|"]
    for curve, row in found["curves"].items():
        sizes, times = row["sizes"], row["seconds"]
        weights = [row["exponents"][k] * _log_ratio(sizes, k) for k in range(len(sizes) - 1)]
        overall = sum(weights) / sum(_log_ratio(sizes, k) for k in range(len(sizes) - 1))
        listed = ", ".join(f"{1e3 * t:.3g}" for t in times)
        counted = ", ".join(f"{s:g}" for s in sizes)
        lines += [f"| {curve} | {counted} | {listed} | {overall:.2f} | {row['exponents'][-1]:.2f} |"]
    return [*lines, "", "An exponent of 1 is growth in proportion.", ""]


def server(found: Any) -> list[str]:
    """Return the section on the server's step."""
    lines = ["## The server's step", ""]
    lines += [
        f"{found['clients']} clients, {found['parameters']:,} parameters, {found['threads']} threads.",
        f"To read the rows twice takes {found['read_twice']:.2f} s, their products {found['multiply']:.2f} s at the",
        f"machine's rate; the process had at most {found['peak'] / 1e9:.2f} GB.",
        "",
        "| step | seconds | x the larger of these |",
        "|---|---|---|",
    ]
    lines += [f"| {name} | {row['seconds']:.2f} | {row['x_floor']:.2f} |" for name, row in found["steps"].items()]
    return [*lines, ""]


def _log_ratio(sizes: list[int], k: int) -> float:
    return log(sizes[k + 1] / sizes[k])


def main() -> None:
    """Write the page."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "results"
    lines = ["# Speed, measured", ""]
    lines += [f"Written by `make bench` ({platform.machine()}, Python {platform.python_version()}).", ""]
    for name, section in (("side_by_side", side_by_side), ("scaling", growth), ("server_step", server)):
        if (found := read(folder, name)) is not None:
            lines += section(found)
    PAGE.write_text("\n".join(lines).rstrip() + "\n")
    sys.stdout.write(f"{PAGE} is written\n")


if __name__ == "__main__":
    main()
