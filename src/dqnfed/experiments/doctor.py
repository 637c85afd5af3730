"""What this installation can do, and what is missing."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

import torch

EXTRAS = {
    "flower": ("flwr",),
    "ray": ("ray",),
    "sweep": ("optuna",),
    "tables": ("pandas", "pyarrow"),
    "images": ("pillow",),
    "onnx": ("onnx", "onnxruntime", "onnxscript"),
    "hub": ("datasets",),
    "torchjd": ("torchjd",),
    "track": ("tensorboard", "mlflow-skinny", "wandb"),
}
CORE = ("torch", "numpy", "scipy", "pydantic", "typer", "rich", "safetensors", "scikit-learn", "matplotlib")


def findings(data_dir: Path | None) -> list[tuple[str, str, bool]]:
    """Return (what, found, fine?) rows; only what stops dqnfed from working is not fine."""
    rows = [("python", platform.python_version(), True)]
    for package in CORE:
        version = _version(package)
        rows.append((package, version or "missing: pip install dqnfed again", version is not None))
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none; runs use the CPU"
    rows += [("threads", str(torch.get_num_threads()), True), ("gpu", gpu, True)]
    for extra, packages in EXTRAS.items():
        missing = [p for p in packages if _version(p) is None]
        found = "installed" if not missing else f"not installed: pip install 'dqnfed[{extra}]'"
        rows.append((f"extra {extra}", found, True))
    folder = data_dir or Path(os.environ.get("DQNFED_DATA", "data"))
    absent = "" if folder.is_dir() else " (not there yet; digits and heart need none)"
    rows.append(("data folder", f"{folder}{absent}", True))
    writable = os.access(Path.cwd(), os.W_OK)
    rows.append(
        ("run folders", "can be written here" if writable else f"{Path.cwd()} is read-only; use --out", writable)
    )
    return rows


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
