"""`dqnfed --help` answers at once, and nodes report themselves at once: none of the heavy libraries is loaded."""

import os
import subprocess
import sys
from pathlib import Path

from dqnfed.flower.new_app import new_app

PROBE = """
import sys
sys.argv = ["dqnfed", "--help"]
from dqnfed.cli import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
print("loaded:", *sorted({"torch", "scipy", "sklearn", "matplotlib", "pandas", "flwr", "ray"} & set(sys.modules)))
"""


def test_help_loads_no_heavy_library() -> None:
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].split() == ["loaded:"]


def test_the_package_itself_loads_no_heavy_library() -> None:
    probe = "import sys, dqnfed; print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False", "False"]


CLIENT_PROBE = """
import sys
import flwr.supernode.cli.flwr_clientapp  # what a node's process has loaded before it reads the app
before = set(sys.modules)
from my_app.client_app import app, describe
loaded = set(sys.modules) - before
print("read:", *sorted(name for name in loaded if name.split(".")[0] not in {"my_app", "dqnfed"}))
print("ours:", *sorted(name for name in loaded if name.split(".")[0] == "dqnfed"))

import tomllib
from pathlib import Path
from flwr.app import Context, RecordDict
run_config = tomllib.loads(Path("pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
describe(Context(run_id=1, node_id=1, node_config={"partition-id": 0}, state=RecordDict(), run_config=run_config))
heavy = {"torch", "scipy", "sklearn", "matplotlib", "pandas", "ray", "torch._dynamo", "torch._inductor", "sympy"}
print("answers:", *sorted(heavy & set(sys.modules)))
print("server:", *sorted(name for name in sys.modules if name.startswith("dqnfed.flower.strategy")))
"""


def test_a_clients_app_loads_torch_only_to_answer_a_message(tmp_path: Path) -> None:
    new_app(tmp_path / "my-app", clients=3)
    done = subprocess.run(
        [sys.executable, "-c", CLIENT_PROBE],
        cwd=tmp_path / "my-app",
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path / "my-app"), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    read, ours, answers, server = (line.split()[1:] for line in done.stdout.splitlines()[-4:])
    assert read == []  # reading the app loads no library that Flower has not loaded
    assert ours == ["dqnfed", "dqnfed.flower", "dqnfed.flower.app"]
    assert answers == ["torch"]
    assert server == []
