"""One-time pads: words of AES-128 in counter mode under a key that the server does not have, anew for every message."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch import Tensor

from dqnfed.core.tensors import named_tensors
from dqnfed.secure.ring import Words

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers import CipherContext

KEY_BYTES = 32
AT_ONCE, PADS_AT_ONCE = 16_384, 8  # words of so many pads are made at a time: they stay in the cache meanwhile
ZEROS = bytes(8 * AT_ONCE)
MORE = 15  # bytes that the library wants beyond those that it writes


class Message(NamedTuple):
    """What pads are keyed on: the hash of the whole message to the clients, and whom it was sent to."""

    digest: bytes
    asked: tuple[int, ...]  # clients, ascending


def message_of(run: str, round: int, phase: int, sent: tuple[Any, ...], asked: Sequence[int], nonce: bytes) -> Message:
    """Return the hash of run, round, phase, model and everything else that is sent, clients asked and a fresh nonce.

    Another message has other pads. The nonce makes a repeated message another one: a client that has lost its memory
    would reply to it with another row.
    """
    return _message(run, f"{round}.{phase}", type(sent).__name__, named_tensors(sent), asked, nonce)


def evaluation_of(
    run: str, round: int, question: Sequence[str], models: Mapping[str, Tensor], asked: Sequence[int], nonce: bytes
) -> Message:
    """Return the hash of a question for what clients measure: as `message_of`, and never a message of training."""
    return _message(run, f"{round}", f"evaluation|{'|'.join(question)}", models, asked, nonce)


def _message(
    run: str, moment: str, kind: str, named: Mapping[str, Tensor], asked: Sequence[int], nonce: bytes
) -> Message:
    parts = [run.encode(), moment.encode(), kind.encode(), nonce]
    parts.append(",".join(map(str, asked)).encode())
    for name, tensor in named.items():
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
        for _, block, words in self.blocks(message, name, (client,), n):
            found[block] = words[0]
        return found

    def blocks(
        self, message: Message, name: str, clients: Sequence[int], n: int
    ) -> Iterator[tuple[slice, slice, Words]]:
        """Give the pads of the clients in blocks: whose by place, which words, and these, [clients, words].

        A block may be changed, and is overwritten by the next one.
        """
        most, many = min(n, AT_ONCE), min(len(clients), PADS_AT_ONCE)
        buffer = bytearray(8 * most * many + MORE)
        room = np.frombuffer(buffer, dtype="<u8", count=most * many).astype(np.uint64, copy=False).reshape(many, most)
        rooms = [memoryview(buffer)[8 * most * k : 8 * most * (k + 1) + MORE] for k in range(many)]
        streams = [self._stream((b"pad", message.digest, name.encode(), str(client).encode())) for client in clients]
        for first in range(0, n, AT_ONCE):
            block = slice(first, min(first + AT_ONCE, n))
            size = block.stop - first
            zeros = ZEROS if size == AT_ONCE else ZEROS[: 8 * size]
            for begin in range(0, len(clients), PADS_AT_ONCE):
                group = slice(begin, min(begin + PADS_AT_ONCE, len(clients)))
                for stream, space in zip(streams[group], rooms, strict=False):
                    stream.update_into(zeros, space)
                yield group, block, room[: group.stop - begin, :size]

    def mask(self, message: Message, name: str, one: int, other: int, *, n_bytes: int = 8) -> int:
        """Return the number, of a word or up to four, that two clients add to and take from their corrections."""
        low, high = sorted((one, other))
        parts = (b"mask", message.digest, name.encode(), f"{low}.{high}".encode())
        return int.from_bytes(self._derived(parts)[:n_bytes], "little")

    def _derived(self, parts: tuple[bytes, ...]) -> bytes:
        """Return the keyed hash of the parts, 32 bytes."""
        return hmac.digest(self.secret, _hashed(parts), "sha256")

    def _stream(self, parts: tuple[bytes, ...]) -> CipherContext:
        """Return the counter stream whose key is the hash of the parts under the common key: used for this alone.

        Its blocks 2, 3, ... are what Galois counter mode adds to a text, which libraries compute faster than the plain
        mode; the tag is not used.
        """
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

        return Cipher(algorithms.AES128(self._derived(parts)[:16]), modes.GCM(bytes(12))).encryptor()


def check_installed() -> None:
    """Raise where the library of the ciphers is missing."""
    if find_spec("cryptography") is None:
        raise ValueError("`privacy.secure` needs an extra: pip install 'dqnfed[private]'.")
