"""The same rounds in dqnfed: dqnfed_rounds.py W1 [fedavg | dqn-fed] [auto | threads | looped | vectorised | ray N]."""

import sys

import torch
from workloads import LEARNING_RATE, WORKLOADS, Pulse, examples, torch_model

from dqnfed import DQNFed, Evaluation, FedAvg, Federation, Problem, looped, threads, vectorised
from dqnfed.core.runners import CohortRunner
from dqnfed.sim.accelerate import automatic, ray_cluster
from dqnfed.sim.rounds import run_round
from dqnfed.sim.setup import fresh_state, set_up


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
            return ray_cluster(federation, workers=int(workers))
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
    setup, _ = set_up(
        algorithm,
        problem,
        federation,
        rounds=10**9,
        participation=workload.cohort / workload.n_clients,
        cohort=chosen(list(words), algorithm, problem, federation),
        evaluation=Evaluation(every=10**9, participants=False),
    )
    state = fresh_state(setup)
    pulse.serve(lambda round: run_round(setup, state))


main(*sys.argv[1:])
