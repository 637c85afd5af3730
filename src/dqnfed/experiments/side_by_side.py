"""Runs side by side, each in a process with its share of the cores."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

import torch

from dqnfed.core.host_memory import free_bytes
from dqnfed.experiments.planned import Ending, Planned
from dqnfed.experiments.progress import RunBoard
from dqnfed.experiments.worker import Advanced, Broken, Logged, Message, serve
from dqnfed.sim.engine import interrupt_flag

logger = logging.getLogger("dqnfed")
BYTES_A_JOB = 3 * 2**30  # of free memory for each run at a time, where nobody says how many
SECONDS = 0.05  # after which somebody looks whether Ctrl-C was pressed


def automatic_jobs(runs: Sequence[Planned]) -> int:
    """Return how many runs go side by side: on a CPU as many as there are cores and memory for, else one.

    Who gives a run's threads, a cluster or a GPU has shared out the machine already.
    """
    settings = [run.config.run for run in runs]
    on_cpu = all(s.device == "cpu" or (s.device == "auto" and not torch.cuda.is_available()) for s in settings)
    if not on_cpu or any(s.threads is not None or s.cohort == "ray" for s in settings):
        return 1
    return max(1, int(min(len(runs), n_cores(), free_bytes() / BYTES_A_JOB)))


def n_cores() -> int:
    """Return how many cores this process may use; OMP_NUM_THREADS bounds them."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(allowed, torch.get_num_threads())


def threads_a_job(jobs: int) -> int:
    """Return each job's share of the cores, at least one."""
    return max(1, n_cores() // jobs)


@dataclass(eq=False)
class Worker:
    """A process, our end of its pipe, and what it plays."""

    process: SpawnProcess
    connection: Connection
    run: Planned | None = None
    is_alive: bool = True
    is_told: bool = False  # to stop

    @property
    def is_free(self) -> bool:
        return self.is_alive and self.run is None

    def begin(self, run: Planned) -> None:
        self.run = run
        self._send(run)

    def stop(self) -> None:
        """Let the run end after its round, saved."""
        if not self.is_told:
            self._send(None)
            self.is_told = True

    def _send(self, message: Planned | None) -> None:
        with suppress(OSError):  # a process that has died is noticed by the end of what it sends
            self.connection.send(message)

    def receive(self) -> Message | None:
        """Return the next message, or None where the process has died."""
        try:
            message: Message = self.connection.recv()
        except (EOFError, OSError):
            self.is_alive = False
            return None
        return message

    def how_it_died(self) -> str:
        self.process.join()  # its pipe has ended, and so will it
        code = self.process.exitcode
        return f"by {signal.Signals(-code).name}" if code is not None and code < 0 else f"with exit code {code}"


def finished_side_by_side(runs: Sequence[Planned], jobs: int, board: RunBoard) -> list[Planned]:
    """Return the runs that came to their end; workers take them in the order of the plan.

    A method that cannot run is reported, and so is a run whose process dies: the other runs go on. At Ctrl-C all end
    after their rounds, saved; a second one stops them at once.
    """
    waiting, done = deque(runs), list[Planned]()
    is_interrupted, broken = False, None
    with board, interrupt_flag() as flag, crew_of(jobs) as crew:
        board.expect(len(runs))
        while True:
            if flag.is_set() or is_interrupted or broken is not None:
                for worker in crew:
                    worker.stop()
            else:
                for worker in crew:
                    if waiting and worker.is_free:
                        worker.begin(waiting.popleft())
            busy = [(worker, worker.run) for worker in crew if worker.run is not None]
            if not busy:
                break
            ready = wait([worker.connection for worker, _ in busy], timeout=SECONDS)
            for worker, run in busy:
                if worker.connection not in ready:
                    continue
                match worker.receive():
                    case Advanced(n_played, rounds, numbers):
                        board.advance(run.label, n_played, rounds, numbers)
                    case Logged(name, level, text):
                        logging.getLogger(name).log(level, "%s: %s", run.name, text)
                    case ending:
                        worker.run = None
                        board.end(run.label)
                        match ending:
                            case Ending("finished"):
                                done.append(run)
                            case Ending("interrupted"):
                                is_interrupted = True
                            case Ending(_, why):
                                say_impossible(run, why)
                            case Broken(error):
                                broken = broken or error
                            case None:
                                say_lost(run, worker.how_it_died())
    if broken is not None:
        raise broken
    if is_interrupted or (waiting and flag.is_set()):
        raise KeyboardInterrupt
    if waiting:
        logger.error("no process is left for %s; the same command again runs them", ", ".join(r.name for r in waiting))
    return done


def say_impossible(run: Planned, why: str) -> None:
    logger.error("%s with seed %d could not run: %s", run.config.algorithm.name, run.config.run.seed, why)


def say_lost(run: Planned, how: str) -> None:
    logger.error(
        "the process of %s was ended %s: if too little memory is the reason, use --jobs 1; the other runs go on, and "
        "the same command again goes on with this one where it was stopped",
        run.name,
        how,
    )


@contextmanager
def crew_of(n: int) -> Iterator[list[Worker]]:
    """Give n workers; at the end they are gone, those that still play at once."""
    crew: list[Worker] = []
    threads, level = threads_a_job(n), logger.getEffectiveLevel()
    try:
        with deaf_to_interrupts():
            for _ in range(n):
                crew.append(started(threads, level))
        yield crew
    finally:
        for worker in crew:
            worker.connection.close()
            if worker.run is not None:
                worker.process.kill()  # a run bears that at any moment
        for worker in crew:
            worker.process.join()


def started(threads: int, level: int) -> Worker:
    context = multiprocessing.get_context("spawn")  # a fork would copy torch's threads half alive
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, threads, level), daemon=True)
    process.start()
    theirs.close()  # so that the end of the process is the end of the pipe
    return Worker(process, ours)


@contextmanager
def deaf_to_interrupts() -> Iterator[None]:
    """Let the processes that are started here hear no Ctrl-C, not even while they import; ours waits until the end."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # which would lift the mask
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
