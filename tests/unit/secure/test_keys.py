"""The clients' common key: sealed for each of the roster, opened by nobody else, in no other run."""

from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path

import pytest

from dqnfed.secure.keys import (
    Identity,
    fresh_identities,
    new_private_key,
    opened,
    public_key,
    sealed,
    write_private_key,
)
from dqnfed.secure.pads import PadKey


def test_every_client_opens_what_was_sealed_for_it_and_nothing_else() -> None:
    clients, key = fresh_identities(4), PadKey.fresh()
    boxes = [sealed(clients[0], 0, k, key, "run/1") for k in range(4)]
    assert [opened(client, 0, k, boxes[k], "run/1") for k, client in enumerate(clients)] == [key] * 4
    for receiver, box, context in ((2, boxes[1], "run/1"), (1, boxes[1], "run/2"), (1, boxes[1][:-1] + b"\0", "run/1")):
        with pytest.raises(ValueError, match="not sealed by client 0"):
            opened(clients[receiver], 0, receiver, box, context)
    with pytest.raises(ValueError, match="not sealed by client 3"):  # somebody else claims to be the sender
        opened(clients[1], 3, 1, boxes[1], "run/1")
    assert all(key.secret not in box for box in boxes)


def test_a_stranger_cannot_seal_a_key() -> None:
    clients = fresh_identities(3)
    stranger = replace(clients[0], private=new_private_key())
    box = sealed(stranger, 0, 1, PadKey.fresh(), "run/1")
    with pytest.raises(ValueError, match="not sealed by client 0"):
        opened(clients[1], 0, 1, box, "run/1")


def test_the_roster_names_every_client_at_its_place() -> None:
    clients = fresh_identities(3)
    clients[2].check(2)
    for wrong in (1, 3, -1):
        with pytest.raises(ValueError, match="does not name the key of client"):
            clients[2].check(wrong)


def test_key_files_are_private_and_not_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "keys" / "client0.pad"
    public = write_private_key(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    found = Identity.read(file, [public])
    assert public_key(found.private) == public
    assert found.private.hex() not in repr(found)
    with pytest.raises(FileExistsError, match="not overwritten"):
        write_private_key(file)
    with pytest.raises(ValueError, match="there is no key file"):
        Identity.read(tmp_path / "none", [])
    file.write_text("no key")
    with pytest.raises(ValueError, match="is no key file"):
        Identity.read(file, [])
