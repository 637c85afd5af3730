"""The paper's grids are settings that the methods accept, and the presets hold no others."""

from __future__ import annotations

import itertools

import pytest

from dqnfed.algorithms import REGISTRY
from dqnfed.experiments.config import preset_names, read_config
from dqnfed.experiments.grids import PAPER_GRIDS


@pytest.mark.parametrize("name", sorted(PAPER_GRIDS))
def test_every_point_of_a_grid_is_accepted(name: str) -> None:
    grid = PAPER_GRIDS[name]
    for values in itertools.product(*grid.values()):
        settings = dict(zip(grid, values, strict=True))
        method = REGISTRY[name](**settings)  # type: ignore[arg-type]
        assert {key: getattr(method, key) for key in grid} == settings


@pytest.mark.parametrize("preset", preset_names())
def test_presets_search_the_papers_grids(preset: str) -> None:
    for name, grid in read_config(preset).grids.items():
        assert grid == PAPER_GRIDS.get(name, grid), f"{preset}: grid of {name}"
