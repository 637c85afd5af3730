"""Models without running statistics that vectorise over clients, by name."""

from dqnfed.models.build import MODELS, build
from dqnfed.models.layers import Normalise

__all__ = ["MODELS", "Normalise", "build"]
