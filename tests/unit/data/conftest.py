"""No test touches the user's data or cache folders."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DQNFED_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    return tmp_path / "data"
