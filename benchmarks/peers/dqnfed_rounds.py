"""The same rounds in dqnfed: dqnfed_rounds.py W1 [fedavg | dqn-fed] [auto | threads | looped | vectorised | ray N]."""

import sys

import torch
from dqnfed.sim.automatic import automatic
from dqnfed.sim.cohort import CohortRunner
from dqnfed.sim.feed import Feed
from workloads import LEARNING_RATE, WORKLOADS, Pulse, examples, torch_model

from dqnfed import DQNFed, Evaluation, FedAvg, Federation, Policy, Problem, looped, threads, vectorised
from dqnfed.sim.engine import fresh_state, play_round
from dqnfed.sim.state import Setup


def chosen(words: list[str], algorithm: FedAvg | DQNFed, problem: Problem, federation: Federation) -> CohortRunner:
    """Return the runner that the words name."""
    match words:
        case ["threads"]:
            return threads()
        case ["looped"]:
            return looped()
        case ["vectorised"]:
            return vectorised()
        case ["ray", workers]:
            from dqnfed.sim.ray_cluster import over_cluster

            return over_cluster(federation, workers=int(workers))
        case _:
            return automatic(algorithm, problem, federation)


def main(name: str, method: str = "fedavg", *words: str) -> None:
    pulse, workload = Pulse(), WORKLOADS[name]
    inputs, labels = (torch.from_numpy(a) for a in examples(workload))
    tests = [(inputs[c][:1].clone(), labels[c][:1].clone()) for c in range(workload.n_clients)]
    federation = Federation.from_clients(list(zip(inputs, labels, strict=True)), test=tests)
    del inputs, labels
    problem = Problem.from_module(torch_model(name))
    algorithm: FedAvg | DQNFed = DQNFed()
    if method == "fedavg":
        algorithm = FedAvg(lr=LEARNING_RATE, batch_size=workload.batch_size)
    algorithm = algorithm.prepare(problem, workload.n_clients, workload.cohort)
    setup = Setup(
        algorithm,
        problem,
        federation,
        10**9,
        workload.cohort,
        0,
        chosen(list(words), algorithm, problem, federation),
        Evaluation(every=10**9, participants=False),
        Policy(),
        Feed(federation, problem, algorithm, 0),
    )
    state = fresh_state(setup)
    pulse.serve(lambda round: play_round(setup, state))


main(*sys.argv[1:])
