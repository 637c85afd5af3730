"""Time and memory of the server's step, next to what the machine needs to read the rows twice and to multiply them.

python benchmarks/server_step.py                 # 50 clients, 11 million parameters, as many threads as cores
python benchmarks/server_step.py --clients 10 --parameters 657000
"""

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from dqnfed.core.replies import Replies
from dqnfed.maths.directions import at_least_weights, rate_matching_weights
from dqnfed.maths.gramian import gramian
from dqnfed.maths.quasi_newton import Pairs, compact_inverse, lbfgs_inverse_product, metric_gramian
from dqnfed.sim.accelerate import acceleration

SQUARE = 3000  # side of the matrices whose product gives the machine's GEMM rate


def shortest_times(
    actions: dict[str, Callable[[], object]], n_times: int, clock: Callable[[], float]
) -> dict[str, float]:
    """Return the shortest of several interleaved runs of each action: the machine's other work only ever adds time."""
    times = dict.fromkeys(actions, float("inf"))
    for _ in range(n_times):
        for name, action in actions.items():
            start = clock()
            action()
            times[name] = min(times[name], clock() - start)
    return times


def peak_bytes() -> int:
    """Return the most memory this process ever held."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Gradients(NamedTuple):
    gradient: torch.Tensor  # [K, n]


def exact_step(replies: Replies[Gradients], d: torch.Tensor) -> torch.Tensor:
    """Return the step that gives every client its rate."""
    return replies.combine("gradient", rate_matching_weights(replies.gram("gradient"), d.numpy()))


def at_least_step(replies: Replies[Gradients], d: torch.Tensor) -> torch.Tensor:
    """Return the step that gives every client its rate or more."""
    return replies.combine("gradient", at_least_weights(replies.gram("gradient"), d.numpy()).weights)


def metric_step(replies: Replies[Gradients], d: torch.Tensor, pairs: Pairs) -> torch.Tensor:
    """Return the "at least" step in the metric of the server's limited memory."""
    K, rows = len(replies), torch.cat([pairs.s, pairs.y])
    products = replies.gram("gradient", rows)
    inverse = compact_inverse(gramian(rows).numpy(), int(pairs.n_pairs))
    weights = at_least_weights(metric_gramian(products[:, :K], products[:, K:], inverse), d.numpy()).weights
    return lbfgs_inverse_product(pairs, replies.combine("gradient", weights))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--parameters", type=int, default=11_000_000)
    parser.add_argument("--pairs", type=int, default=10, help="pairs in the server's memory")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--cpu-time", action="store_true", help="for one thread on a busy machine: OMP_NUM_THREADS=1")
    parser.add_argument("--json", type=Path, help="where to write the numbers, too")
    options = parser.parse_args()
    K, n, m = options.clients, options.parameters, options.pairs

    generator = torch.Generator().manual_seed(0)
    G = torch.empty(K, n).normal_(generator=generator)
    G += torch.empty(n).normal_(generator=generator)
    d = torch.rand(K, generator=generator, dtype=torch.float64) + 0.1
    moves = torch.empty(m, n).normal_(generator=generator)
    curvatures = torch.rand(n, generator=generator) + 0.5
    pairs = Pairs(moves, moves * curvatures, torch.tensor(m))
    replies = acceleration().replies(Gradients(G))
    ones, square = torch.ones(K), torch.randn(SQUARE, SQUARE, generator=generator)

    clock = time.process_time if options.cpu_time else time.perf_counter
    references: dict[str, Callable[[], object]] = {"read": lambda: ones @ G, "multiply": lambda: square @ square}
    with_pairs = f"at least, {m} pairs"
    steps: dict[str, Callable[[], object]] = {
        "exactly": lambda: exact_step(replies, d),
        "at least": lambda: at_least_step(replies, d),
        with_pairs: lambda: metric_step(replies, d, pairs),
    }
    shortest_times(references, 1, clock)  # warm up
    before = peak_bytes()
    times = shortest_times(references | steps, options.repeat, clock)
    extra = peak_bytes() - before

    rows_bytes = G.numel() * G.element_size()
    gemm_rate = 2 * SQUARE**3 / times["multiply"]
    read_twice, multiply = 2 * times["read"], 2 * K * K * n / gemm_rate
    out = sys.stdout.write
    out(f"{K} clients x {n} float32 parameters, {rows_bytes / 1e9:.2f} GB, {torch.get_num_threads()} threads\n")
    out(f"read the rows twice    {read_twice:7.3f} s  ({2 * rows_bytes / read_twice / 1e9:.1f} GB/s)\n")
    out(f"flops at GEMM rate     {multiply:7.3f} s  ({gemm_rate / 1e9:.0f} Gflop/s)\n")
    floor = max(read_twice, multiply)
    for name in steps:
        out(f"{name:22s} {times[name]:7.3f} s  {times[name] / floor:.2f} x the larger of these\n")
    # the metric multiplies the rows with its 2m vectors too, and these with each other
    own_floor = max(read_twice * (K + 2 * m) / K, multiply * (K + 2 * m) ** 2 / K**2)
    out(f"... the same with the products of the pairs counted: {times[with_pairs] / own_floor:.2f} x\n")
    out(f"peak memory beyond the rows and the pairs: {extra / rows_bytes:.3f} x the rows\n")
    out(f"peak memory of the process: {peak_bytes() / 1e9:.2f} GB\n")
    if options.json:
        facts = {"clients": K, "parameters": n, "read_twice": read_twice, "multiply": multiply, "peak": peak_bytes()}
        steps_found = {name: {"seconds": times[name], "x_floor": times[name] / floor} for name in steps}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(
            json.dumps({**facts, "threads": torch.get_num_threads(), "steps": steps_found}, indent=1)
        )


if __name__ == "__main__":
    main()
