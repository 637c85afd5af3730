"""`dqnfed --help` answers at once because it loads none of the heavy libraries."""

import subprocess
import sys

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
