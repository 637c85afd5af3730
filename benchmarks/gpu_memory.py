"""Peak GPU memory and seconds of a round under `run.memory`, each run in a process of its own.

python benchmarks/gpu_memory.py                                   # five settings, "4GiB", "8GiB" and what is free
python benchmarks/gpu_memory.py --settings resnet --memory 4GiB 8GiB --rounds 4

Made-up images of the settings' shapes will do (`benchmarks/made_up_cifar10.py`, DQNFED_DATA). The median round leaves
out the first two, which capture, and the one with an evaluation. Scores are there to compare with those of the first
column: results are equal to rounding, which training enlarges.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SETTINGS: dict[str, list[str]] = {
    "resnet": ["cifar10-setup2", "-a", "fedavg"],
    "resnet, bf16": ["cifar10-setup2", "-a", "fedavg", "--set", "run.precision=bf16"],
    "resnet, DQN-Fed": ["cifar10-setup2", "-a", "dqn-fed"],
    "cnn": ["cifar10-setup2-cnn", "-a", "fedavg"],
    "dense": ["cifar10-setup1", "-a", "dqn-fed"],
}


def outcome(words: list[str], memory: str, rounds: int) -> dict[str, Any]:
    """Return peak, seconds of a round, score and what was chosen; or why there was no run."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        given = ["--rounds", str(rounds), "--out", str(out), "--set", f"eval.every={rounds}", "--quiet"]
        limit = [] if memory == "free" else ["--set", f"run.memory={memory}"]
        command = [sys.executable, "-m", "dqnfed", "run", *words, *given, *limit]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return {"error": (done.stderr or done.stdout).strip().splitlines()[-1]}
        summary = json.loads((out / "summary.json").read_text())
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        plain = [line["seconds"] for line in lines[3:-1]] or [line["seconds"] for line in lines[-1:]]
        return {
            "GiB": summary.get("gpu_bytes", math.nan) / 2**30,
            "seconds": statistics.median(plain),
            "score": summary["accuracy"]["mean"],
            "loss": summary["train_loss"]["mean"],
            "chosen": json.loads((out / "machine.json").read_text()),
        }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="*", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--memory", nargs="*", default=["free", "8GiB", "4GiB"])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--set", nargs="*", default=[], dest="changes", metavar="KEY=VALUE")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    changes = [word for change in options.changes for word in ("--set", change)]
    found: dict[str, dict[str, Any]] = {}
    for name in options.settings:
        found[name] = {}
        for memory in options.memory:
            one = found[name][memory] = outcome([*SETTINGS[name], *changes], memory, options.rounds)
            first = found[name][options.memory[0]]
            if "error" in one:
                line = one["error"]
            else:
                ratio = one["seconds"] / first["seconds"] if "seconds" in first else math.nan
                line = (
                    f"{one['GiB']:6.2f} GiB, a round {one['seconds']:.3f} s ({ratio:.2f}), score {one['score']:.2f}, "
                )
                line += f"loss {one['loss']:.5f}, {one['chosen']}"
            sys.stdout.write(f"{name:16s} {memory:>5s}: {line}\n")
            sys.stdout.flush()
        if options.json is not None:
            options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
