"""Seconds and bytes of a secure round against a plain one: a gradient over 64 images a client, then the server's step.

python benchmarks/secure_cost.py                              # ResNet-18 with 10 clients, a small CNN with 100
python benchmarks/secure_cost.py --model cnn --clients 10     # one case

A client's two parts, its gradient and its padding, are run in turns; what is printed are medians of processor seconds
of one thread, so that other work on the machine changes little, and the median of each turn's ratio.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from dqnfed.core.gradients import loss_gradient
from dqnfed.core.problem import Problem, Task
from dqnfed.maths.directions import at_least_weights
from dqnfed.maths.gramian import combine, gramian
from dqnfed.models import build
from dqnfed.secure.pads import Message, PadKey
from dqnfed.secure.ring import Words, whole_weights
from dqnfed.secure.rows import PaddedRow, cosines, padded_row, unpadded_sum, unpadding

CASES = (("resnet18", 10), ("cnn", 100))
SETTINGS = {"resnet18": {}, "cnn": {"hidden": 314}, "mlp": {}}  # a CNN of 660,000 parameters
N_IMAGES = 64
T = TypeVar("T")


def timed(action: Callable[[], T]) -> tuple[T, float]:
    """Return what the action returns, and its processor seconds."""
    start = time.process_time()
    found = action()
    return found, time.process_time() - start


def in_turns(actions: Sequence[Callable[[], Any]], n_repeats: int) -> NDArray[np.float64]:
    """Return the processor seconds of the actions, [repeats, actions], one after the other in every repeat."""
    for action in actions:
        action()  # the first time starts threads and caches
    return np.array([[timed(action)[1] for action in actions] for _ in range(n_repeats)])


def measured(model: str, n_clients: int, n_repeats: int) -> dict[str, float]:
    """Return the seconds and bytes of one client and of the server, plain and secure, in one run."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    problem = Problem.from_module(build(model, input_shape=(3, 32, 32), n_outputs=10, settings=SETTINGS[model]))
    theta = problem.theta0
    task = Task(
        torch.randn(N_IMAGES, 3, 32, 32),
        torch.randint(10, (N_IMAGES,)),
        torch.ones(N_IMAGES),
        torch.zeros(1, 0, dtype=torch.long),
        torch.zeros(0),
        torch.tensor(0.1),
    )
    gradient = loss_gradient(problem, theta, task)
    n = len(theta)
    G = gradient[None] + float(gradient.std()) * torch.randn(n_clients, n)
    G[0] = gradient
    rates = G.double().square().sum(1).numpy()
    weights, solved = timed(lambda: at_least_weights(gramian(G).numpy(), rates).weights)
    plain, summed = timed(lambda: combine(torch.from_numpy(weights), G))

    key, message = PadKey.fresh(), Message(bytes(32), tuple(range(n_clients)))
    own = gradient.double().numpy()

    def padding() -> PaddedRow:
        return padded_row(key, message, "gradient", own, 0, with_products=True)

    seconds = in_turns([lambda: loss_gradient(problem, theta, task), padding], n_repeats)
    passed, padded = np.median(seconds, axis=0).tolist()
    first = padding()
    known: dict[int, Words] = {}

    def pad(client: int, size: int) -> Words:
        """Return a pad that is computed once: the other clients' work is not timed."""
        if client not in known:
            known[client] = key.pad(message, "gradient", client, size)
        return known[client]

    others = [
        padded_row(key, message, "gradient", G[k].double().numpy(), k, with_products=True, pads=pad)
        for k in range(1, n_clients)
    ]
    known.clear()
    rows = [first, *others]
    norms = np.array([row.norm for row in rows])
    found, gram_time = timed(lambda: cosines(rows, range(n_clients)) * np.outer(norms, norms))
    secure_weights = at_least_weights(found, rates).weights
    whole, scale = whole_weights(secure_weights * norms)
    pads, unpadded = timed(lambda: unpadding(key, message, "gradient", whole, range(n_clients), n))
    step, added = timed(lambda: unpadded_sum(rows, whole, pads) * scale)
    error = float(np.linalg.norm(step - plain.double().numpy()) / plain.double().norm())
    return {
        "parameters": n,
        "clients": n_clients,
        "client_plain_s": passed,
        "client_secure_s": passed + padded,
        "client_times": float(np.median(seconds.sum(1) / seconds[:, 0])),
        "unpadding_client_s": unpadded,
        "server_plain_s": solved + summed,
        "server_secure_s": gram_time + added,
        "bytes_up_plain": 4.0 * n,
        "bytes_up_secure": 8.0 * n + 8.0 * n_clients + 8.0,
        "bytes_up_unpadding": 8.0 * n,
        "step_error": error,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(SETTINGS))
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=9, help="turns of a client's parts")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    given = parser.parse_args()
    cases = CASES if given.model is None else ((given.model, given.clients),)
    results = [measured(*case, given.repeats) for case in cases]
    for result in results:
        print("  ".join(f"{name} {value:.4g}" for name, value in result.items()))  # noqa: T201
    if given.json is not None:
        given.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
