"""How much slower FedNL is than the arithmetic it must do, on w8a: 142 clients, 300 parameters, 50 rounds.

    python benchmarks/fednl.py [--data-dir DIR] [--rounds 50]

For Rank-1 and Top-8n compression it prints the CPU seconds of the real run and, next to it, those of its unavoidable
parts, each measured alone on this machine: the clients' Hessians (one GEMM each), their eigen-decompositions (LAPACK)
or top-k selections, and one pass over the estimates at the speed of memory. Numbers depend on the machine; only the
ratio means something. Without the file a synthetic problem of the same size is used.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from dqnfed.algorithms.fednl import FedNL
from dqnfed.data.raw import DataError
from dqnfed.experiments.convex_problems import ConvexProblem, client_losses, libsvm_rows, solved, synthetic_rows
from dqnfed.maths.symmetric import n_packed
from dqnfed.sim.rounds import run_round
from dqnfed.sim.setup import fresh_state, set_up
from dqnfed.sim.state import Evaluation


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--data-dir", type=Path)
    arguments.add_argument("--rounds", type=int, default=50)
    chosen = arguments.parse_args()
    logging.basicConfig(level=logging.WARNING)
    convex = w8a_or_like(chosen.data_dir)
    n, n_clients = convex.problem.n_parameters, convex.federation.n_clients
    n_each = int(convex.federation.n_examples[0])
    out = sys.stdout.write
    out(f"{convex.name}: {n_clients} clients x {n_each} rows x {n} features, {torch.get_num_threads()} threads\n")

    A = convex.federation.train.inputs[: n_clients * n_each].view(n_clients, n_each, n)
    hessians = seconds(lambda: (A * 0.25).transpose(1, 2) @ A)
    H = (A * 0.25).transpose(1, 2) @ A / n_each
    eigenpairs = seconds(lambda: torch.linalg.eigh(H), repeats=1)
    triangles = torch.randn(n_clients, n_packed(n), dtype=torch.float64)
    selections = seconds(lambda: torch.topk(triangles.abs(), 8 * n))
    estimates = seconds(lambda: triangles + triangles)
    parts = {"rank": eigenpairs, "top": selections}
    out(f"a round must: Hessians {hessians:.3f} s, eigenpairs {eigenpairs:.3f} s or top-k {selections:.3f} s, ")
    out(f"estimates read and written {estimates:.3f} s\n")
    for kind, size in (("rank", 1), ("top", 8 * n)):
        algorithm = FedNL(compressor=kind, size=size, step="regularisation", start="zero")
        taken, gap = played(convex, algorithm, chosen.rounds)
        needed = chosen.rounds * (hessians + parts[kind] + estimates)
        out(f"FedNL {kind}-{size}: {chosen.rounds} rounds in {taken:.1f} s, arithmetic {needed:.1f} s, ")
        out(f"ratio {taken / needed:.2f} (gap {gap:.1e})\n")


def played(convex: ConvexProblem, algorithm: FedNL, rounds: int) -> tuple[float, float]:
    """Return the CPU seconds that the engine takes for the rounds, and the gap that is left."""
    problem, federation = convex.problem, convex.federation
    off = Evaluation(every=rounds + 2, participants=False)
    setup, _ = set_up(algorithm, problem, federation, rounds=rounds + 1, evaluation=off)
    state = fresh_state(setup)
    started = time.process_time()
    for _ in range(rounds):
        run_round(setup, state)
    taken = time.process_time() - started
    return taken, float(client_losses(problem, federation, state.server.theta).mean()) - convex.best_loss


def w8a_or_like(data_dir: Path | None) -> ConvexProblem:
    """Return w8a, or where it is missing a synthetic problem of its size."""
    try:
        return solved("w8a", *libsvm_rows("w8a", data_dir))
    except DataError as error:
        logging.getLogger("dqnfed").warning("%s", error)
        return solved("like w8a", *synthetic_rows(n_clients=142, n_each=350, n_features=300))


def seconds(work: Callable[[], Tensor | tuple[Tensor, ...]], *, repeats: int = 3) -> float:
    """Return the CPU seconds of one call, the best of several."""
    times = []
    for _ in range(repeats):
        started = time.process_time()
        work()
        times.append(time.process_time() - started)
    return min(times)


if __name__ == "__main__":
    main()
