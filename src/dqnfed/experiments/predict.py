"""A trained model used: predictions for new data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn

import dqnfed.models  # noqa: F401  a loaded run builds its module with these
from dqnfed.core.result import RunResult
from dqnfed.data.table import read_table
from dqnfed.experiments.own_data import FEATURES_FILE, load_columns


def read_inputs(path: Path, input_shape: tuple[int, ...]) -> torch.Tensor:
    """Return the examples of an .npy, .npz (array `x`) or .csv file, shaped as the model wants them."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}.")
    match path.suffix:
        case ".npy":
            array = np.load(path, allow_pickle=False)
        case ".npz":
            with np.load(path, allow_pickle=False) as archive:
                if "x" not in archive:
                    raise ValueError(f"{path} has the arrays {archive.files}, but predictions need one called 'x'.")
                array = archive["x"]
        case ".csv":
            array = np.atleast_2d(np.genfromtxt(path, delimiter=",", dtype=np.float32))
            if np.isnan(array[0]).all():
                array = array[1:]  # a header
            if np.isnan(array).any():
                row = int(np.isnan(array).any(1).argmax())
                raise ValueError(f"{path}: row {row + 1} is not all numbers; predictions need numeric columns.")
        case suffix:
            raise ValueError(f"predictions read .npy, .npz and .csv, but {path.name} is '{suffix}'.")
    inputs = torch.as_tensor(array)
    if inputs[0].numel() != int(np.prod(input_shape)):
        raise ValueError(
            f"{path.name} has {inputs[0].numel()} numbers an example, but the model was trained on {input_shape}."
        )
    return inputs.reshape(-1, *input_shape)


@torch.no_grad()
def predictions(run: Path, data: Path) -> np.ndarray:
    """Return the predicted class (or value) of every example.

    A model trained on your own table reads a table with the same columns, and answers with the names of the classes.
    """
    result = RunResult.load(run)
    if result.model_spec is None:
        raise ValueError(f"{run} was trained on a module of your own; use RunResult.load(...).model(MyModule()).")
    module = result.model()
    if (run / FEATURES_FILE).is_file():
        learnt = load_columns(run)
        outputs = outputs_of(module, torch.from_numpy(learnt.preprocessing.apply(read_table(data))))
        if learnt.classes:
            return np.take(np.array(learnt.classes), outputs.argmax(-1).numpy())
        values: np.ndarray = outputs.squeeze(-1).double().numpy() * learnt.target_std + learnt.target_mean
        return values
    outputs = outputs_of(module, read_inputs(data, tuple(result.model_spec["input_shape"])))
    chosen = outputs.argmax(-1) if outputs.shape[-1] > 1 else outputs.squeeze(-1)
    return np.asarray(chosen.numpy())


def outputs_of(module: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    if inputs.is_floating_point():
        inputs = inputs.to(next(module.parameters()).dtype)
    return torch.cat([module(part) for part in inputs.split(4096)])
