"""The table of docs/explanation/privacy.md says what messages hold in each mode, no less and no more."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord

from dqnfed import Evaluation, Policy
from dqnfed.algorithms.dqn_fed import DQNFed
from dqnfed.algorithms.fedavg import FedAvg
from dqnfed.algorithms.qffl import QFFL
from dqnfed.core.algorithm import AnyAlgorithm
from dqnfed.flower import Client
from dqnfed.flower.app import client_app, client_number
from dqnfed.flower.strategy import Strategy
from dqnfed.secure.keys import fresh_identities, opened
from dqnfed.secure.noise import Privacy
from dqnfed.secure.pads import Message as Padded
from dqnfed.secure.pads import message_of
from dqnfed.secure.ring import decoded
from tests.helpers.bowls import BOWLS, Case
from tests.helpers.repository import ROOT
from tests.unit.flower.test_secure import Watched

pytest.importorskip("dp_accounting")
PAGE = ROOT / "docs" / "explanation" / "privacy.md"
N_PARAMETERS = 24  # of the model; there are six clients
TITLE = "| mode | a client sends to the server | the server sends to a client |"


class Mode(NamedTuple):
    """A row of the table."""

    method: AnyAlgorithm
    secure: bool = False
    privacy: Privacy | None = None
    metrics: str = "per-client"


MODES = {
    "plain, FedAvg": Mode(FedAvg()),
    "plain, q-FFL": Mode(QFFL()),
    "`secure`, FedAvg (sum)": Mode(FedAvg(), secure=True),
    "`secure`, q-FFL (sum)": Mode(QFFL(), secure=True),
    "`secure`, DQN-Fed (gram)": Mode(DQNFed(), secure=True),
    "`secure`, aggregate-only, FedAvg (sum)": Mode(FedAvg(), secure=True, metrics="aggregate-only"),
    "`secure`, aggregate-only, DQN-Fed (gram)": Mode(DQNFed(), secure=True, metrics="aggregate-only"),
    "`noise = local`, q-FFL": Mode(QFFL(), privacy=Privacy(clip=0.1, noise_multiplier=2.0)),
    "`unit = record`, q-FFL": Mode(QFFL(), privacy=Privacy(clip=0.1, noise_multiplier=2.0, unit="record")),
    "`noise = distributed`, FedAvg": Mode(
        FedAvg(weighting="uniform"), secure=True, privacy=Privacy(clip=0.1, noise_multiplier=2.0, noise="distributed")
    ),
}


def case() -> Case:
    return BOWLS["network"][-1]()


def run_of(mode: Mode) -> Watched:
    bowl = case()
    identities = fresh_identities(bowl.federation.n_clients)

    def describe(context: Context) -> Client:
        number = client_number(context)
        secure = identities[number] if mode.secure else None
        sums_only = mode.metrics == "aggregate-only"
        return Client(mode.method, bowl.problem, bowl.federation.only(number), mode.privacy, secure, sums_only)

    grid = Watched(client_app(describe), bowl.federation.n_clients)
    grid.identities = identities  # type: ignore[attr-defined]
    strategy = Strategy(
        mode.method,
        bowl.problem,
        n_clients=bowl.federation.n_clients,
        evaluation=Evaluation(every=2, participants=False, metrics=mode.metrics),
        policy=Policy(max_update_norm=math.inf),
        wait=0.0,
        secure=mode.secure,
        privacy=mode.privacy,
    )
    strategy.start(grid, num_rounds=2)
    return grid


def held(messages: list[Message], noisy: set[str]) -> str:
    """Return what messages hold beside words about themselves, by kind of message."""
    found: dict[str, set[str]] = {}
    for message in messages:
        kind = str(message.metadata.message_type).partition(".")[0]
        parts = found.setdefault(kind, set())
        for name, kept in message.content.items():
            if isinstance(kept, ArrayRecord):
                parts |= {_array(name, key, array.numpy(), noisy) for key, array in kept.items()}
            elif isinstance(kept, MetricRecord):
                parts |= {f"{name} numbers: {', '.join(sorted(kept))}"}
            elif isinstance(kept, ConfigRecord) and "box" in kept:
                parts.add("sealed key")
            elif isinstance(kept, ConfigRecord) and "boxes" in kept:
                parts.add("sealed keys")
    return "; ".join(f"{kind}: {', '.join(sorted(parts))}" for kind, parts in sorted(found.items()) if parts)


def _array(record: str, key: str, values: np.ndarray[Any, Any], noisy: set[str]) -> str:
    group = key.partition("/")[0] if record == "secure" and "/" in key else key
    name = f"{record} {group.replace('|', ' ')}"
    many = "n " if values.shape[-1:] == (N_PARAMETERS,) else ""
    what = f"{many}words" if values.dtype == np.uint64 else "number" if values.size == 1 else f"{many}numbers"
    return f"{'noisy ' if record in noisy else ''}{name} ({what})"


def lines_of_page() -> dict[str, tuple[str, str]]:
    """Return the table's rows by mode."""
    text = PAGE.read_text(encoding="utf-8")
    assert TITLE in text
    rows = text.split(TITLE)[1].split("\n\n")[0].strip().splitlines()[1:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {mode: (up, down) for mode, up, down in cells}


def row_of(mode: str) -> tuple[str, str]:
    grid = run_of(MODES[mode])
    noisy = {"update"} if MODES[mode].privacy is not None else set()
    return held(grid.received, noisy), held(grid.sent, set())


LONG = "`secure`, aggregate-only, DQN-Fed (gram)"


@pytest.mark.parametrize("mode", [pytest.param(m, marks=pytest.mark.slow) if m == LONG else m for m in MODES])
def test_the_page_lists_what_messages_hold(mode: str) -> None:
    assert lines_of_page()[mode] == row_of(mode)


def test_the_page_has_no_other_modes() -> None:
    assert set(lines_of_page()) == set(MODES)


def test_under_pads_no_reply_holds_a_vector() -> None:
    for mode, (up, _) in lines_of_page().items():
        assert ("(n numbers)" in up) == (not MODES[mode].secure)


def test_for_sums_nothing_that_was_measured_is_in_the_open() -> None:
    for mode, (up, _) in lines_of_page().items():
        assert ("scores" not in up and "evaluation numbers: loss" not in up) == (
            MODES[mode].metrics == "aggregate-only"
        )


def test_a_server_together_with_a_client_has_every_row() -> None:
    """What the page says of level 1: the client opens the key, and the key takes every pad off."""
    grid = run_of(MODES["`secure`, FedAvg (sum)"])
    identities: Any = grid.identities  # type: ignore[attr-defined]
    asked: Any = next(m for m in grid.sent if m.metadata.message_type == "train" and m.metadata.dst_node_id == 102)
    secure, about = asked.content["secure"], asked.content["about"]
    key = opened(identities[2], int(secure["sender"]), 2, bytes(secure["box"]), str(secure["context"]))
    method, bowl = FedAvg(), case()
    sent = method.send(method.init_server(bowl.problem, 6))
    message: Padded = message_of(str(about["run"]), 0, 0, sent, list(secure["asked"]), secure["nonce"])
    reply: Any = next(m for m in grid.received if "padded" in m.content and m.content["about"]["client"] == 4)
    words, norm = (reply.content["padded"][f"delta/{part}"].numpy() for part in ("words", "norm"))
    row = decoded(words - key.pad(message, "delta", 4, len(words))) * norm
    open_grid = run_of(MODES["plain, FedAvg"])
    plain: Any = next(m for m in open_grid.received if "update" in m.content and m.content["about"]["client"] == 4)
    np.testing.assert_allclose(row, plain.content["update"]["delta"].numpy(), rtol=1e-6, atol=1e-9)


if __name__ == "__main__":  # prints the table
    print(TITLE)  # noqa: T201
    print("|---|---|---|")  # noqa: T201
    for name in MODES:
        print(f"| {name} | {' | '.join(row_of(name))} |")  # noqa: T201
