"""Commands of `dqnfed` in processes that start in milliseconds: forked from one that has imported everything.

The real command, the real files, and a real SIGKILL; only the imports are not repeated.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self


class ForkServer:
    """A process from which commands are forked."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.fork_server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        assert self._answer() == "ready"

    def start(self, *words: str, log: Path, kill_at: int | None = None) -> int:
        """Start a command and return its process; with `kill_at`, it dies right after replacing so many files."""
        return int(self._ask({"words": [str(word) for word in words], "log": str(log), "kill_at": kill_at}))

    def wait(self, pid: int) -> int:
        """Return the exit code of a command that was started; minus the signal that ended it."""
        return int(self._ask({"wait": pid}))

    def is_running(self, pid: int) -> bool:
        """Return whether a command still runs."""
        return bool(self._ask({"poll": pid}))

    def run(self, *words: str, log: Path, kill_at: int | None = None) -> int:
        """Return the exit code of a command."""
        return self.wait(self.start(*words, log=log, kill_at=kill_at))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _ask(self, question: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


def serve() -> None:
    """Answer questions from standard input until it ends."""
    import dqnfed.cli
    import dqnfed.experiments.data_source
    import dqnfed.experiments.experiment
    import dqnfed.experiments.predict
    import dqnfed.experiments.progress
    import dqnfed.experiments.trackers
    import dqnfed.report.noise
    from dqnfed.experiments.config import read_config

    dqnfed.experiments.experiment.run_experiment(read_config("digits", ["train.rounds=1", "run.threads=1"]), None)
    ended: dict[int, int] = {}
    tell("ready")
    for line in sys.stdin:
        question = json.loads(line)
        if "wait" in question or "poll" in question:
            pid = question.get("wait", question.get("poll"))
            if pid not in ended:
                done, status = os.waitpid(pid, 0 if "wait" in question else os.WNOHANG)
                if done:
                    ended[pid] = os.waitstatus_to_exitcode(status)
            tell(ended.get(pid) if "wait" in question else pid not in ended)
            continue
        pid = os.fork()
        if pid == 0:
            command(question)
        tell(pid)


def tell(answer: Any) -> None:
    """Write one line to standard output."""
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def command(question: dict[str, Any]) -> None:
    """Run the command in this process, which ends with it."""
    code = 99
    try:
        log = os.open(question["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        if question["kill_at"] is not None:
            die_after_replacing(question["kill_at"])
        sys.argv = ["dqnfed", *question["words"]]
        from dqnfed.cli import main

        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def die_after_replacing(n_files: int) -> None:
    """Make this process die by SIGKILL right after its n-th replacement of a file: between two writes to the disk."""
    replace, count = Path.replace, 0

    def counted(path: Path, target: Any) -> Any:
        nonlocal count
        done = replace(path, target)
        count += 1
        if count == n_files:
            os.kill(os.getpid(), signal.SIGKILL)
        return done

    Path.replace = counted  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    serve()
