"""One-time pads: words of AES-128 in counter mode under a key that the server does not have, anew for every message."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np

from dqnfed.core.tensors import named_tensors
from dqnfed.secure.ring import Words

KEY_BYTES = 32
AT_ONCE = 32_768  # words of a pad that are made at a time: they stay in the cache while they are used
ZEROS = bytes(8 * AT_ONCE)


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
        found = np.empty(n, dtype=np.uint64)
        for first, words in self.pieces(message, name, client, n):
            found[first : first + len(words)] = words
        return found

    def pieces(self, message: Message, name: str, client: int, n: int) -> Iterator[tuple[int, Words]]:
        """Give the same pad piece by piece, each with its first place; a piece is overwritten by the next one."""
        yield from self._pieces((b"pad", message.digest, name.encode(), str(client).encode()), n)

    def mask(self, message: Message, name: str, one: int, other: int) -> int:
        """Return the word that two clients add to and subtract from their correction terms."""
        low, high = sorted((one, other))
        parts = (b"mask", message.digest, name.encode(), f"{low}.{high}".encode())
        return next(int(words[0]) for _, words in self._pieces(parts, 1))

    def _pieces(self, parts: tuple[bytes, ...], n: int) -> Iterator[tuple[int, Words]]:
        """Give n words of the counter stream whose key is the hash of the parts under the common key."""
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

        key = hmac.new(self.secret, _hashed(parts), hashlib.sha256).digest()[:16]  # used for this one stream
        stream = Cipher(algorithms.AES128(key), modes.CTR(bytes(16))).encryptor()
        buffer = bytearray(8 * min(n, AT_ONCE) + 15)  # the library wants a block more than it writes
        words = np.frombuffer(buffer, dtype="<u8", count=min(n, AT_ONCE)).astype(np.uint64, copy=False)
        for first in range(0, n, AT_ONCE):
            size = min(AT_ONCE, n - first)
            stream.update_into(ZEROS if size == AT_ONCE else ZEROS[: 8 * size], buffer)
            yield first, words[:size]


def check_installed() -> None:
    """Raise where the library of the ciphers is missing."""
    if find_spec("cryptography") is None:
        raise ValueError("`privacy.secure` needs an extra: pip install 'dqnfed[private]'.")
