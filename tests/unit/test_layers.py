"""The layer law: which room of the package may import which, and where heavy third parties may be imported."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.helpers.repository import SOURCE

# maths < core < algorithms, data, models, secure < accel < sim < flower < experiments < cli; rooms of one floor do not
# see each other, and `accel` is imported by no other room: `sim/accelerate.py` loads it where it is installed.
ROOMS = (
    {"maths"},
    {"core"},
    {"algorithms", "data", "models", "secure"},
    {"accel"},
    {"sim"},
    {"flower"},
    {"experiments"},
)
FLOOR = {room: floor for floor, rooms in enumerate(ROOMS) for room in rooms}
TOP = {"cli", "__main__"}  # see every room
REPORT_SEES = ("dqnfed.core.checksums", "dqnfed.core.result", "dqnfed.maths.fairness", "dqnfed.experiments.paper")


class Import(NamedTuple):
    path: Path  # relative to the package
    line: int
    target: str  # absolute dotted name, the imported member included

    @property
    def room(self) -> str:
        return self.path.parts[0].removesuffix(".py")

    def __str__(self) -> str:
        return f"{self.path}:{self.line} imports {self.target}"


def imports_of(path: Path, source: str) -> Iterator[Import]:
    """Yield every import of the module, those inside functions and TYPE_CHECKING blocks too."""
    package = ("dqnfed", *path.parent.parts)
    for node in ast.walk(ast.parse(source, filename=str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(path, node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else ()
            base = ".".join([*above, node.module] if node.module else above)
            for alias in node.names:
                yield Import(path, node.lineno, f"{base}.{alias.name}")


def is_under(target: str, *modules: str) -> bool:
    return any(target == module or target.startswith(f"{module}.") for module in modules)


def breaks_the_law(found: Import) -> bool:
    """Return whether an import inside the package crosses a floor upwards or sideways."""
    if not is_under(found.target, "dqnfed") or found.path == Path("__init__.py") or found.room in TOP:
        return False
    parts = found.target.split(".")
    imported = parts[1] if len(parts) > 1 else ""
    if imported in {"__version__", found.room}:
        return False
    if imported == "accel":
        return True
    if found.room == "report":
        return not is_under(found.target, *REPORT_SEES)
    return FLOOR.get(imported, len(FLOOR)) >= FLOOR[found.room]


@pytest.fixture(scope="module")
def imports() -> list[Import]:
    return [
        found
        for path in sorted(SOURCE.rglob("*.py"))
        for found in imports_of(path.relative_to(SOURCE), path.read_text(encoding="utf-8"))
    ]


def test_every_module_has_a_room() -> None:
    rooms = {path.relative_to(SOURCE).parts[0].removesuffix(".py") for path in SOURCE.rglob("*.py")}
    assert rooms <= {*FLOOR, *TOP, "report", "__init__"}


def test_rooms_import_only_lower_floors(imports: list[Import]) -> None:
    assert [str(found) for found in imports if breaks_the_law(found)] == []


def test_maths_needs_tensors_only(imports: list[Import]) -> None:
    allowed = {"dqnfed", "torch", "numpy", "scipy", "threadpoolctl", *sys.stdlib_module_names}
    assert [str(f) for f in imports if f.room == "maths" and f.target.split(".")[0] not in allowed] == []


def test_third_parties_stay_in_their_room(imports: list[Import]) -> None:
    for library, room in {"flwr": "flower", "matplotlib": "report"}.items():
        assert [str(found) for found in imports if is_under(found.target, library) and found.room != room] == []
    assert len({found.path for found in imports if is_under(found.target, "ray")}) <= 1
    assert [str(found) for found in imports if is_under(found.target, "torchvision")] == []


@pytest.mark.parametrize(
    ("path", "source", "is_breach"),
    [
        ("core/problem.py", "from dqnfed.maths import fairness", False),
        ("core/problem.py", "import dqnfed.sim.engine", True),
        ("core/problem.py", "from dqnfed import run", True),
        ("core/problem.py", "from dqnfed import __version__", False),
        ("core/problem.py", "from ..sim import engine", True),
        ("core/problem.py", "from .tensors import rows", False),
        ("core/problem.py", "from . import tensors", False),
        ("core/problem.py", "def late():\n    from dqnfed.algorithms import REGISTRY", True),
        ("algorithms/fedavg.py", "from dqnfed.models.mlp import MLP", True),
        ("data/readers/idx.py", "from ...core.federation import Federation", False),
        ("accel/threads.py", "from dqnfed.core.runners import looped", False),
        ("accel/features.py", "from dqnfed.models.layers import Normalise", False),
        ("accel/threads.py", "from dqnfed.sim.engine import run", True),
        ("accel/kernels.py", "from dqnfed.accel.graphs import GraphedFunction", False),
        ("sim/accelerate.py", "from dqnfed.accel import Accelerated", True),
        ("core/problem.py", "from dqnfed.accel.kernels import FastKernels", True),
        ("experiments/sweep.py", "from dqnfed.sim.engine import run", False),
        ("experiments/sweep.py", "from dqnfed.report import tables", True),
        ("report/tables.py", "from dqnfed.core.result import RunResult", False),
        ("report/tables.py", "from dqnfed.core import result", False),
        ("report/tables.py", "from dqnfed.core.problem import Problem", True),
        ("cli/results.py", "from dqnfed.report import page", False),
        ("maths/gramian.py", "import torch", False),
    ],
)
def test_the_law_itself(path: str, source: str, is_breach: bool) -> None:
    assert any(breaks_the_law(found) for found in imports_of(Path(path), source)) is is_breach
