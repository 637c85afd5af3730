"""Models that vectorise over clients, by name."""

from typing import Any

import torch
from torch import nn

from dqnfed.core.result import MODULE_BUILDERS
from dqnfed.models.build import MODELS, build
from dqnfed.models.layers import Normalise

__all__ = ["MODELS", "Normalise", "build", "build_from_spec"]


def build_from_spec(spec: dict[str, Any]) -> nn.Module:
    """Return the untrained module that a model file describes."""
    module = build(
        spec["name"],
        input_shape=tuple(spec["input_shape"]),
        n_outputs=spec["n_outputs"],
        settings=spec["settings"],
    )
    return module.to(getattr(torch, spec["dtype"]))


if build_from_spec not in MODULE_BUILDERS:
    MODULE_BUILDERS.append(build_from_spec)
