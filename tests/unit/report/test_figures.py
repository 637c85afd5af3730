"""Figures as files, and colours that everyone can tell apart and read."""

from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from dqnfed.report.figures import COLOURS, spread_apart, write_figures
from dqnfed.report.page import asset
from tests.helpers.colours import VISION, contrast, css_palettes, smallest_distance
from tests.helpers.runs import write_comparison, write_run

PALETTES = css_palettes(asset("page.css"))
SERIES = [f"s{i}" for i in range(8)]
MAGIC = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs")
    write_comparison(out, name="digits / demo", algorithms=("fedavg", "dqn-fed"), seeds=(0, 1), rounds=5)
    return out


def test_every_figure_is_written_in_every_format(runs: Path, tmp_path: Path) -> None:
    files = write_figures([runs], tmp_path / "figures")
    names = [f"digits---demo-{kind}.{form}" for kind in ("convergence", "histogram", "improved") for form in MAGIC]
    assert [file.name for file in files] == names
    for file in files:
        assert file.read_bytes().startswith(MAGIC[file.suffix[1:]])


def test_every_series_is_named_in_the_figure(runs: Path, tmp_path: Path) -> None:
    for file in write_figures([runs], tmp_path, formats=("svg",)):
        texts = [node.text for node in ElementTree.parse(file).iter() if node.tag.endswith("text")]
        assert {"FedAvg", "DQN-Fed"} <= set(texts)


def test_the_same_runs_give_the_same_bytes(runs: Path, tmp_path: Path) -> None:
    first, second = (write_figures([runs], tmp_path / name, formats=("svg",)) for name in "ab")
    for a, b in zip(first, second, strict=True):
        assert a.read_bytes() == b.read_bytes()


def test_a_run_without_client_results_is_drawn_as_far_as_it_goes(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", rounds=3)
    (folder / "clients.csv").unlink()
    assert len(write_figures([folder], tmp_path / "out", formats=("png",))) == 3


def test_bad_requests_say_what_to_do(runs: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="png, svg, pdf"):
        write_figures([runs], tmp_path, formats=("gif",))
    with pytest.raises(ValueError, match="no run to draw"):
        write_figures([tmp_path / "nowhere"], tmp_path)


@pytest.mark.parametrize("seed", range(5))
def test_names_at_line_ends_keep_their_distance_and_order(seed: int) -> None:
    wanted = np.random.default_rng(seed).uniform(0, 10, 8).tolist()
    placed = spread_apart(wanted, 1.0)
    order = np.argsort(wanted)
    assert np.diff(np.array(placed)[order]).min() >= 1.0 - 1e-9
    assert spread_apart([0.0, 5.0, 20.0], 1.0) == [0.0, 5.0, 20.0]
    assert spread_apart([3.0, 3.0], 1.0) == [2.5, 3.5]


def test_figures_use_the_pages_light_colours() -> None:
    assert [PALETTES[0][name] for name in SERIES] == list(COLOURS)


@pytest.mark.parametrize("i", range(len(PALETTES)))
def test_text_and_lines_are_readable_in_every_theme(i: int) -> None:
    palette = PALETTES[0] | PALETTES[i]  # the print rule changes some colours only
    for ground in ("paper", "panel"):
        for name in ("ink", "muted", "accent", *SERIES):
            assert contrast(palette[name], palette[ground]) >= 4.5, (name, ground)
    for name in ("good", "bad"):
        assert contrast(palette[name], palette["paper"]) >= 4.5, name
    assert contrast(palette["ink"], palette["note"]) >= 4.5


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("i", range(len(PALETTES)))
def test_series_can_be_told_apart_by_colour_blind_eyes(i: int, vision: str) -> None:
    """A CIE76 distance of 10 is seen at a glance; about 2 is just noticeable."""
    palette = PALETTES[0] | PALETTES[i]
    assert smallest_distance([palette[name] for name in SERIES], vision) >= 10


def test_both_dark_themes_are_the_same() -> None:
    assert PALETTES[1] == PALETTES[2]
