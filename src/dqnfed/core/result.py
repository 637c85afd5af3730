"""What a run leaves behind, in memory and in its folder."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dqnfed.core.checksums import refuse_damaged
from dqnfed.core.problem import fill_module
from dqnfed.core.run_folder import ClientRow, RunFolder
from dqnfed.core.tensors import Layout, named_parameters

MODULE_BUILDERS: list[Callable[[dict[str, Any]], nn.Module]] = []  # filled by `dqnfed.models` when it is imported


@dataclass(frozen=True)
class RunResult:
    """The trained model and every number of the run."""

    theta: Tensor  # [n] the method's primary global model; [0] where every client was trained by itself
    layout: Layout
    summary: dict[str, Any]
    history: list[dict[str, Any]] = field(repr=False)  # one record a round; the first, round -1, is the start
    client_rows: list[ClientRow] = field(repr=False)  # as in clients.csv
    columns: tuple[str, ...] = field(repr=False)
    config: dict[str, Any] = field(repr=False)
    clients: list[dict[str, Any]] = field(repr=False)
    environment: dict[str, Any] = field(repr=False)
    module: nn.Module | None = field(default=None, repr=False)
    model_spec: dict[str, Any] | None = field(default=None, repr=False)

    @property
    def accuracy(self) -> dict[str, float]:
        """The fairness summary of the clients' final scores."""
        found: dict[str, float] = self.summary["accuracy"]
        return found

    def model(self, template: nn.Module | None = None) -> nn.Module:
        """Return the trained module; a run loaded from disk needs the template if the module was the user's own."""
        if not self.layout:
            raise ValueError(
                f"{self.summary['algorithm']} trained one model for each client, each by itself, and none for all; "
                "take the model of another method's run."
            )
        if own := self.summary.get("own_part"):
            raise ValueError(
                f"{self.summary['algorithm']} trained the part of a model that clients share, and each of them has "
                f"{own} of its own, so there is no model for all; take the model of another method's run."
            )
        module = copy.deepcopy(template if template is not None else self.module)
        if module is None and self.model_spec is not None and MODULE_BUILDERS:
            module = MODULE_BUILDERS[0](self.model_spec)
        if module is None:
            raise ValueError(
                "this run's module was not built by dqnfed, so it cannot be built from the folder alone; "
                "pass one of the same shape: RunResult.load(DIR).model(MyModule())."
            )
        module = module.to(self.theta.dtype)
        fill_module(module, named_parameters(self.theta, self.layout))
        return module.eval()

    def model_metadata(self) -> dict[str, Any]:
        """Return what a file needs beside the tensors to give the model back."""
        return model_metadata(self.layout, self.model_spec)

    def save(self, path: str | Path) -> Path:
        """Write the run's folder (without a checkpoint) and return its path."""
        folder = RunFolder(Path(path))
        folder.begin(self.config, self.clients, self.environment, self.columns)
        rows: dict[int, list[ClientRow]] = {}
        for row in self.client_rows:
            rows.setdefault(row[0], []).append(row)
        for record in self.history:
            folder.append(record, rows.get(record["round"], []))
        folder.write_model(named_parameters(self.theta, self.layout), self.model_metadata())
        folder.finish(self.summary)
        return folder.path

    @classmethod
    def load(cls, path: str | Path) -> RunResult:
        """Return the run that a folder holds; it must be over or interrupted, not in progress."""
        folder = RunFolder(Path(path))
        if (folder.path / "config.toml").is_file() and not (folder.path / "summary.json").is_file():
            raise FileNotFoundError(
                f"{path} has no summary.json: the run is still going on or was killed; see `dqnfed resume {path}`."
            )
        refuse_damaged(folder.path)
        config, summary = folder.config(), folder.summary()
        assert summary is not None
        parameters, metadata = folder.read_model()
        order = metadata.get("layout") or []
        is_empty = not order and summary.get("training") != "alone"
        if is_empty or not set(order) <= parameters.keys():
            raise ValueError(f"damaged: {folder.path / 'model.safetensors'} does not say which parameters it holds.")
        columns, rows = folder.client_table()
        return cls(
            theta=torch.cat([torch.empty(0), *(parameters[name].reshape(-1) for name in order)]),
            layout=tuple((name, parameters[name].shape) for name in order),
            summary=summary,
            history=folder.metrics(),
            client_rows=rows,
            columns=columns,
            config=config,
            clients=folder.read_json("clients.json"),
            environment=folder.read_json("env.json"),
            model_spec=metadata.get("model"),
        )


def model_metadata(layout: Layout, model_spec: dict[str, Any] | None) -> dict[str, Any]:
    """Return what a model file needs beside its tensors: their order, and how to build the module."""
    return {"layout": [name for name, _ in layout], "model": model_spec}
