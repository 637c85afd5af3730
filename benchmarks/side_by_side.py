"""One round of FedAvg in dqnfed, in its peers and in a plain torch loop, in turns on the same machine.

benchmarks/peers/install.sh                            # once: an environment for each peer
python benchmarks/side_by_side.py --json w.json        # W1 and W2, about five minutes on two cores
python benchmarks/side_by_side.py --workloads W1 --only dqnfed "torch loop" --rounds 30

Every contestant is a process of its own that plays a round when it is asked to and waits otherwise; they are asked in
turn, so that whatever else the machine does hits all of them alike. The first rounds warm up and do not count.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parent / "peers"))
from workloads import WORKLOADS

HERE = Path(__file__).parent
SQUARE = 3000  # side of the matrices whose product gives the machine's GEMM rate


class Contestant(NamedTuple):
    """Whose environment, which script, with which words behind the workload's name."""

    environment: str
    script: str
    words: tuple[str, ...] = ()
    workloads: tuple[str, ...] = ("W1", "W2")
    is_peer: bool = True


CONTESTANTS = {
    "dqnfed": Contestant("", "dqnfed_rounds.py", is_peer=False),
    "dqnfed, DQN-Fed": Contestant("", "dqnfed_rounds.py", ("dqn-fed",), ("W1",), is_peer=False),
    "dqnfed, Ray, 2 workers": Contestant("", "dqnfed_rounds.py", ("fedavg", "ray", "2"), ("W2",), is_peer=False),
    "dqnfed, Ray, 1 worker": Contestant("", "dqnfed_rounds.py", ("fedavg", "ray", "1"), ("W2",), is_peer=False),
    "torch loop": Contestant("", "torch_loop_rounds.py", is_peer=False),
    "pfl": Contestant("pfl", "pfl_rounds.py"),
    "fluke": Contestant("fluke", "fluke_rounds.py"),
    "FedJAX": Contestant("fedjax", "fedjax_rounds.py", workloads=("W1",)),  # W2 takes it minutes a round
    "Flower": Contestant("flower", "flower_rounds.py"),
}


class Running:
    """A contestant's process."""

    def __init__(self, name: str, entry: Contestant, workload: str, environments: Path, log: Path) -> None:
        python = sys.executable if not entry.environment else str(environments / entry.environment / "bin" / "python")
        command = [python, str(HERE / "peers" / entry.script), workload, *entry.words]
        self.name, self.seconds, self.peak = name, [], 0
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
            )

    def answer(self) -> dict[str, float]:
        """Return what the process tells before its first round."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} has ended before its first round")
        return json.loads(line)

    def play(self) -> bool:
        """Play a round and note its time; False if the process has ended."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return False
        line = self.process.stdout.readline()
        if not line:
            return False
        self.seconds.append(json.loads(line)["seconds"])
        self.peak = max(self.peak, proportional_bytes(self.process.pid))
        return True

    def end(self) -> None:
        """Let the process end, and end it if it does not."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()


def proportional_bytes(pid: int) -> int:
    """Return the memory of a process and its descendants, shared pages counted once (Linux; elsewhere 0)."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
        except (OSError, ValueError):
            continue
    total, family = 0, [pid]
    while family:
        one = family.pop()
        family += children.get(one, [])
        try:
            lines = Path(f"/proc/{one}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total


def gemm_seconds(square: torch.Tensor, product: torch.Tensor) -> float:
    """Return the time of one large product with all cores, into memory that is there already."""
    began = time.perf_counter()
    torch.mm(square, square, out=product)
    return time.perf_counter() - began


def measured(workload: str, names: list[str], rounds: int, warm_up: int, environments: Path, log: Path) -> Any:
    """Return every contestant's times and memory, and the floor: the workload's arithmetic at the rate of a product.

    The rate is that of the median product of as many as there are rounds, played in turn with them: what else the
    machine does slows the floor and the contestants alike.
    """
    square, product = torch.ones(SQUARE, SQUARE), torch.empty(SQUARE, SQUARE)
    running = [Running(name, CONTESTANTS[name], workload, environments, log) for name in names]
    products, ended = [], []
    try:
        for round in range(warm_up + rounds):
            products.append(gemm_seconds(square, product))
            for one in list(running):
                if not one.play():
                    running.remove(one)
                    ended.append(one.name)
                    sys.stderr.write(f"{one.name} has ended in round {round}; {log} says why\n")
    finally:
        for one in running:
            one.end()
    rate, best = (2 * SQUARE**3 / seconds for seconds in (statistics.median(products[warm_up:]), min(products)))
    floor = WORKLOADS[workload].flops / rate
    found = {}
    for one in running:
        times = sorted(one.seconds[warm_up:])
        found[one.name] = {
            "median": statistics.median(times),
            "quartiles": [times[len(times) // 4], times[(3 * len(times)) // 4]],
            "first": one.seconds[0],
            "peak_mb": one.peak / 1e6,
            "x_floor": statistics.median(times) / floor,
        }
    return {
        "floor": floor,
        "gflops": rate / 1e9,
        "gflops_best": best / 1e9,
        "rounds": rounds,
        "cores": os.cpu_count(),
        "found": found,
        "ended": ended,
    }


def table(workload: str, result: Any) -> str:
    """Return the result as a Markdown table, fastest first."""
    ours = result["found"].get("dqnfed", {}).get("median")
    lines = [
        f"| {workload}, s a round | median | quartiles | x floor ({result['floor']:.3f} s) | x dqnfed | first | MB |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in sorted(result["found"].items(), key=lambda item: item[1]["median"]):
        low, high = row["quartiles"]
        ratio = f"{row['median'] / ours:.2f}" if ours else ""
        lines.append(
            f"| {name} | {row['median']:.3f} | {low:.3f} - {high:.3f} | {row['x_floor']:.2f} | {ratio} | "
            f"{row['first']:.2f} | {row['peak_mb']:.0f} |"
        )
    if "gflops_best" in result:
        best = result["floor"] * result["gflops"] / result["gflops_best"]
        times = f", and a round of dqnfed takes {ours / best:.2f} times as long" if ours else ""
        lines.append(f"\nAt the rate of the quickest product of this run the floor is {best:.3f} s{times}.")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--only", nargs="+", choices=list(CONTESTANTS), default=None)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--environments", type=Path, default=HERE / "peers" / ".environments")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--log", type=Path, default=Path("side_by_side.log"))
    options = parser.parse_args()
    results = {}
    for workload in options.workloads:
        names = [
            name
            for name, entry in CONTESTANTS.items()
            if workload in entry.workloads
            and (options.only is None or name in options.only)
            and (not entry.environment or (options.environments / entry.environment / ".installed").is_file())
        ]
        rounds = options.rounds if workload == "W1" else max(options.rounds // 3, 3)
        found = measured(
            workload, names, rounds, options.warm_up if workload == "W1" else 1, options.environments, options.log
        )
        results[workload] = found
        sys.stdout.write(table(workload, found) + "\n")
        sys.stdout.flush()
        if options.json:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
