"""The common key of deployed clients: drawn by one, sealed for each, relayed by a server that cannot read it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dqnfed.secure.pads import KEY_BYTES, PadKey, check_installed

NONCE_BYTES = 12
PURPOSE = b"dqnfed common pad key, version 1"


@dataclass(frozen=True)
class Identity:
    """A client's own private key (X25519) and the public keys of all clients, by number, known beforehand."""

    private: bytes = field(repr=False)
    roster: tuple[str, ...]  # hexadecimal

    @classmethod
    def read(cls, file: Path, roster: Sequence[str]) -> Identity:
        """Return the identity whose private key is in a file that `dqnfed deploy pad-key` wrote."""
        if not file.is_file():
            raise ValueError(f"there is no key file {file}; write one with `dqnfed deploy pad-key {file}`.")
        try:
            private = bytes.fromhex(file.read_text(encoding="utf-8").strip())
        except ValueError as error:
            raise ValueError(f"{file} is no key file of `dqnfed deploy pad-key`: {error}.") from error
        return cls(private, tuple(roster))

    def check(self, client: int) -> None:
        """Refuse a roster that does not name this client's own key at its place."""
        if not 0 <= client < len(self.roster) or self.roster[client] != public_key(self.private):
            raise ValueError(
                f"the roster (`privacy.roster`) does not name the key of client {client} at its place; its public key "
                f"is {public_key(self.private)}. Correct the roster, or the `partition-id` of this node."
            )


def fresh_identities(n_clients: int) -> list[Identity]:
    """Return clients with fresh keys that know each other."""
    private = [new_private_key() for _ in range(n_clients)]
    roster = tuple(public_key(each) for each in private)
    return [Identity(each, roster) for each in private]


def new_private_key() -> bytes:
    """Return a fresh private key."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.generate().private_bytes_raw()


def write_private_key(file: Path) -> str:
    """Write a fresh private key to a new file that only its owner may read, and return the public key."""
    check_installed()
    private = new_private_key()
    if file.exists():
        raise FileExistsError(f"{file} exists, and a key is not overwritten; choose another name, or delete it.")
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as opened_file:
        opened_file.write(private.hex() + "\n")
    return public_key(private)


def public_key(private: bytes) -> str:
    """Return the public key of a private one, in hexadecimal."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw().hex()


def sealed(identity: Identity, sender: int, receiver: int, key: PadKey, context: str) -> bytes:
    """Return the common key, encrypted and authenticated for one client in one run and membership (`context`)."""
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    nonce = secrets.token_bytes(NONCE_BYTES)
    shared = _shared_key(identity, receiver, sender, receiver, context)
    return nonce + ChaCha20Poly1305(shared).encrypt(nonce, key.secret, _about(sender, receiver, context))


def opened(identity: Identity, sender: int, receiver: int, box: bytes, context: str) -> PadKey:
    """Return the common key from what the sender sealed for this client; refuses anything else."""
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    shared = _shared_key(identity, sender, sender, receiver, context)
    try:
        secret = ChaCha20Poly1305(shared).decrypt(
            box[:NONCE_BYTES], box[NONCE_BYTES:], _about(sender, receiver, context)
        )
    except InvalidTag:
        raise ValueError(
            f"the common key was not sealed by client {sender} of the roster for client {receiver} in this run; the "
            "message was changed on its way, or the rosters differ."
        ) from None
    return PadKey(secret)


def _shared_key(identity: Identity, other: int, sender: int, receiver: int, context: str) -> bytes:
    """Return the key that two clients have from each other's public keys, for one context."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    theirs = X25519PublicKey.from_public_bytes(bytes.fromhex(identity.roster[other]))
    agreed = X25519PrivateKey.from_private_bytes(identity.private).exchange(theirs)
    derived = HKDF(hashes.SHA256(), KEY_BYTES, salt=None, info=_about(sender, receiver, context))
    return derived.derive(agreed)


def _about(sender: int, receiver: int, context: str) -> bytes:
    return PURPOSE + f"|{sender}|{receiver}|{context}".encode()
