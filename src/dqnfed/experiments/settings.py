"""Which settings a config gives to its method, where they stand, and which of them the method does not use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, NamedTuple

from dqnfed.core.algorithm import AnyAlgorithm
from dqnfed.experiments.config import LOCAL_WORK, Config, parts_of


class Given(NamedTuple):
    """A value of a method's setting, and the config's key that holds it."""

    value: Any
    key: str  # as in train.lr or algorithms.qffl.q


def given_settings(config: Config) -> dict[str, Given]:
    """Return what the config sets for its method; what it does not set is left out.

    `algorithm` outranks `algorithms.NAME`, which outranks `train`.
    """
    train = {key: getattr(config.train, key) for key in LOCAL_WORK}
    places: list[tuple[str, Mapping[str, Any]]] = [
        ("train", {key: value for key, value in train.items() if value is not None}),
        *((f"algorithms.{part}", config.algorithms.get(part, {})) for part in parts_of(config.algorithm.name)),
        ("algorithm", config.algorithm.model_extra or {}),
    ]
    return {key: Given(value, f"{place}.{key}") for place, block in places for key, value in block.items()}


def unused_of(algorithm: AnyAlgorithm) -> frozenset[str]:
    """Return the settings of the local work that a prepared method does not use, or does not have."""
    said: frozenset[str] = getattr(algorithm, "unused", frozenset)()
    return said | (frozenset(LOCAL_WORK) - {f.name for f in fields(algorithm)})


def unused_settings(config: Config, algorithm: AnyAlgorithm) -> list[str]:
    """Return the settings of the local work that the config sets and its prepared method does not use."""
    given, unused = given_settings(config), unused_of(algorithm)
    return [name for name in LOCAL_WORK if name in given and name in unused]


def unused_lines(found: Iterable[tuple[Config, list[str]]]) -> list[str]:
    """Return what to tell the user of such settings: one line for all methods of which the same is to be told."""
    methods: dict[str, list[str]] = {}
    for config, names in found:
        if names:
            given = given_settings(config)
            text = f"{', '.join(names)} ({', '.join(given[name].key for name in names)})"
            methods.setdefault(text, []).append(config.algorithm.name)
    return [f"{', '.join(who)} {'does' if len(who) == 1 else 'do'} not use {text}" for text, who in methods.items()]
