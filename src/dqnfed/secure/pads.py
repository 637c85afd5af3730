"""One-time pads: words from ChaCha20 under a key that the server does not have, anew for every message."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np

from dqnfed.core.tensors import named_tensors
from dqnfed.secure.ring import Words

KEY_BYTES = 32


class Message(NamedTuple):
    """What pads are keyed on: the hash of the whole message to the clients, and whom it was sent to."""

    digest: bytes
    asked: tuple[int, ...]  # clients, ascending


def message_of(run: str, round: int, phase: int, sent: tuple[Any, ...], asked: Sequence[int], nonce: bytes) -> Message:
    """Return the hash of run, round, phase, model and everything else that is sent, clients asked and a fresh nonce.

    Another message has other pads. The nonce makes a repeated message another one: a client that has lost its memory
    would reply to it with another row.
    """
    parts = [run.encode(), f"{round}.{phase}".encode(), type(sent).__name__.encode(), nonce]
    parts.append(",".join(map(str, asked)).encode())
    for name, tensor in named_tensors(sent).items():
        array = tensor.detach().cpu().contiguous().numpy()
        parts += [name.encode(), f"{array.dtype.str}{array.shape}".encode(), array.tobytes()]
    return Message(_hashed(parts), tuple(sorted(asked)))


def _hashed(parts: Iterable[bytes]) -> bytes:
    found = hashlib.sha256()
    for part in parts:
        found.update(len(part).to_bytes(8, "big"))
        found.update(part)
    return found.digest()


def fresh_nonce() -> bytes:
    """Return 16 random bytes of the operating system."""
    return secrets.token_bytes(16)


@dataclass(frozen=True)
class PadKey:
    """The clients' common key; `repr` does not show it."""

    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.secret) != KEY_BYTES:
            raise ValueError(f"a pad key has {KEY_BYTES} bytes, but this one has {len(self.secret)}.")

    @classmethod
    def fresh(cls) -> PadKey:
        """Return a key from the operating system's generator."""
        return cls(secrets.token_bytes(KEY_BYTES))

    def pad(self, message: Message, name: str, client: int, n: int) -> Words:
        """Return the pad of a client's field in the reply to a message, n uniform words."""
        return self._words((b"pad", message.digest, name.encode(), str(client).encode()), n)

    def mask(self, message: Message, name: str, one: int, other: int) -> int:
        """Return the word that two clients add to and subtract from their correction terms."""
        low, high = sorted((one, other))
        return int(self._words((b"mask", message.digest, name.encode(), f"{low}.{high}".encode()), 1)[0])

    def _words(self, parts: tuple[bytes, ...], n: int) -> Words:
        """Return n words of the ChaCha20 stream whose key is the hash of the parts under the common key."""
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

        key = hmac.new(self.secret, _hashed(parts), hashlib.sha256).digest()  # used for this one stream
        stream = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
        return np.frombuffer(stream.update(bytes(8 * n)), dtype="<u8").astype(np.uint64, copy=False)


def check_installed() -> None:
    """Raise where the library of the ciphers is missing."""
    if find_spec("cryptography") is None:
        raise ValueError("`privacy.secure` needs an extra: pip install 'dqnfed[private]'.")
