"""The registry of models and the one function that makes them from a config."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from dqnfed.models.cnn import CNNSettings, cnn
from dqnfed.models.layers import Normalise
from dqnfed.models.linear import LinearSettings, linear
from dqnfed.models.lstm import LSTMSettings, lstm
from dqnfed.models.mlp import MLPSettings, mlp
from dqnfed.models.resnet18 import ResNet18Settings, resnet18
from dqnfed.models.resnet50 import ResNet50Settings, resnet50


class ModelEntry(NamedTuple):
    """A model: its builder (input shape, number of outputs, settings) and the dataclass of its settings."""

    builder: Callable[[tuple[int, ...], int, Any], nn.Module]
    settings: type
    takes: str  # what kind of input, in words


MODELS: dict[str, ModelEntry] = {
    "linear": ModelEntry(linear, LinearSettings, "anything"),
    "mlp": ModelEntry(mlp, MLPSettings, "anything"),
    "cnn": ModelEntry(cnn, CNNSettings, "images"),
    "resnet18": ModelEntry(resnet18, ResNet18Settings, "images"),
    "resnet50": ModelEntry(resnet50, ResNet50Settings, "images"),
    "lstm": ModelEntry(lstm, LSTMSettings, "windows of characters"),
}

# what torch and a dataclass raise for settings of a wrong type or size
BUILD_ERRORS = (
    TypeError, ValueError, RuntimeError, OverflowError, IndexError, KeyError, AttributeError, ZeroDivisionError,
    MemoryError, AssertionError,
)  # fmt: skip
COMMON = ("mean", "std", "double_softmax")  # settings that every model understands


def build(
    name: str, *, input_shape: tuple[int, ...], n_outputs: int, settings: Mapping[str, Any], seed: int = 0
) -> nn.Module:
    """Return the model `name` with fresh weights drawn from `seed`, leaving torch's global random state alone.

    Besides the model's own settings, `mean` and `std` put a `Normalise` layer in front (images as bytes), and
    `double_softmax` ends the model in a softmax although the loss applies one too, as the FedFV records were made.
    """
    if name not in MODELS:
        raise ValueError(f"model {name!r} is unknown{nearest(name, MODELS)}; there are {', '.join(MODELS)}.")
    entry = MODELS[name]
    own = {key: value for key, value in settings.items() if key not in COMMON}
    known = [field.name for field in dataclasses.fields(entry.settings)]
    for key in own:
        if key not in known:
            raise ValueError(
                f"model {name!r} has no setting {key!r}{nearest(key, [*known, *COMMON])}; it has "
                f"{', '.join([*known, *COMMON])}."
            )
    try:
        chosen = entry.settings(**{key: tuple(v) if isinstance(v, list) else v for key, v in own.items()})
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            layers = [entry.builder(input_shape, n_outputs, chosen)]
        if settings.get("mean") is not None:
            layers.insert(0, Normalise(settings["mean"], settings["std"]))
    except BUILD_ERRORS as error:
        given = ", ".join(f"{key} = {value!r}" for key, value in settings.items()) or "its defaults"
        raise ValueError(
            f"model {name!r} cannot be built for inputs of shape {tuple(input_shape)} and {n_outputs} outputs with "
            f"{given} ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no more is known'}); "
            f"its settings are {', '.join([*known, *COMMON])}."
        ) from error
    if settings.get("double_softmax"):
        layers.append(nn.Softmax(dim=-1))
    return layers[0] if len(layers) == 1 else nn.Sequential(*layers)


def nearest(word: str, words: Any) -> str:
    close = difflib.get_close_matches(word, list(words), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
