"""Every method on Flower: one strategy, one client app, the same algorithm objects as in the simulator."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dqnfed.flower.app import client_app as client_app
    from dqnfed.flower.client import Client as Client
    from dqnfed.flower.in_process import InProcessGrid as InProcessGrid
    from dqnfed.flower.in_process import run_in_process as run_in_process
    from dqnfed.flower.privacy import Privacy as Privacy
    from dqnfed.flower.strategy import Strategy as Strategy

# Flower is an extra, and `dqnfed new-app` must not wait for its import: names are looked up when used.
_HOMES = {
    "Client": "dqnfed.flower.client",
    "InProcessGrid": "dqnfed.flower.in_process",
    "Privacy": "dqnfed.flower.privacy",
    "Strategy": "dqnfed.flower.strategy",
    "client_app": "dqnfed.flower.app",
    "run_in_process": "dqnfed.flower.in_process",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dqnfed.flower' has no attribute '{name}'")
    try:
        return getattr(importlib.import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "flwr":
            raise
        raise ModuleNotFoundError(
            f"dqnfed.flower.{name} needs Flower, which is not installed: pip install 'dqnfed[flower]'.", name="flwr"
        ) from error
