"""Padded rows: the server gets exact products and one sum, and words that nothing tells from random ones."""

from __future__ import annotations

import hashlib
import hmac

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray
from scipy import stats

from dqnfed.core.algorithm import Theta
from dqnfed.secure.pads import AT_ONCE, PADS_AT_ONCE, Message, PadKey, fresh_nonce, message_of
from dqnfed.secure.ring import RingOverflow, product, whole_weights
from dqnfed.secure.rows import PaddedRow, cosines, padded_row, products_with_pads, unpadded_sum, unpadding
from tests.helpers.rows import gaussian_rows

FloatArray = NDArray[np.float64]
KEY = PadKey(bytes(range(32)))


def message(asked: tuple[int, ...], digest: bytes = b"\x01" * 32) -> Message:
    return Message(digest, asked)


def replied(G: FloatArray, asked: tuple[int, ...], digest: bytes = b"\x01" * 32) -> list[PaddedRow]:
    sent = message(asked, digest)
    return [padded_row(KEY, sent, "g", row, client, with_products=True) for client, row in zip(asked, G, strict=True)]


def rows(K: int, n: int, seed: int = 0) -> FloatArray:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((K, n)) * 10.0 ** rng.uniform(-6, 6, (K, 1))


@pytest.mark.parametrize(("K", "n"), [(3, 1), (3, 7), (8, 500), (20, 3000)])
@pytest.mark.parametrize("seed", range(3))
def test_cosines_are_exact_to_rounding(K: int, n: int, seed: int) -> None:
    G = rows(K, n, seed)
    units = G / np.linalg.norm(G, axis=1, keepdims=True)
    found = cosines(replied(G, tuple(range(2, K + 2))), range(K))
    bound = 2.0**-29 * (1 + np.sqrt(n))  # each entry is rounded at 2^-31, and enters a product with a unit vector
    assert np.abs(found - units @ units.T).max() <= bound


@pytest.mark.parametrize("seed", range(3))
def test_the_released_sum_is_the_weighted_sum(seed: int) -> None:
    G, asked = rows(6, 400, seed), (1, 4, 5, 7, 8, 9)
    weights = np.random.default_rng(seed).standard_normal(6)
    norms = np.linalg.norm(G, axis=1)
    whole, scale = whole_weights(weights * norms)
    pads = unpadding(KEY, message(asked), "g", whole, asked, 400)
    found = unpadded_sum(replied(G, asked), whole, pads) * scale
    assert np.linalg.norm(found - weights @ G) <= 1e-7 * np.linalg.norm(weights @ G)


def test_corrections_are_masked_with_what_only_two_clients_know() -> None:
    """Their sum is what products need; one alone is a product with a pad plus a word that the server cannot compute."""
    G, asked = rows(4, 50), (0, 2, 3, 5)
    sent = message(asked)
    for k, row in enumerate(replied(G, asked)):
        own, x = KEY.pad(sent, "g", asked[k], 50), row.words - KEY.pad(sent, "g", asked[k], 50)
        for j, other in enumerate(asked):
            if j == k:
                continue
            pad, mask = KEY.pad(sent, "g", other, 50), KEY.mask(sent, "g", asked[k], other)
            known = product(x + own if k < j else x, pad)
            assert (int(row.corrections[j]) - known) % 2**64 == (mask if k < j else -mask % 2**64) != 0


def test_who_is_silent_needs_no_recovery() -> None:
    G, asked = rows(5, 200), (0, 1, 2, 3, 4)
    kept = [0, 1, 3, 4]
    there = [replied(G, asked)[k] for k in kept]
    units = G[kept] / np.linalg.norm(G[kept], axis=1, keepdims=True)
    assert np.abs(cosines(there, kept) - units @ units.T).max() <= 1e-7


def test_the_same_gramian_gives_a_view_of_the_same_distribution() -> None:
    n, asked = 2000, (0, 1, 2)
    G = rows(3, n)
    Q, _ = np.linalg.qr(np.random.default_rng(5).standard_normal((n, n // 4)))
    turned = G - 2.0 * (G @ Q) @ Q.T  # a reflection: other gradients, same products
    for each in (G, turned):
        replies = replied(each, asked, digest=np.random.default_rng(9).bytes(32))
        words = np.concatenate([np.concatenate([r.words, np.delete(r.corrections, k)]) for k, r in enumerate(replies)])
        counts = np.bincount(words.view(np.uint8), minlength=256)
        assert stats.chisquare(counts).pvalue > 1e-4
    one, other = (cosines(replied(each, asked), range(3)) for each in (G, turned))
    np.testing.assert_allclose(one, other, atol=1e-7)


def test_pads_of_other_messages_fields_and_clients_differ() -> None:
    model = Theta(gaussian_rows(1, 5, seed=0)[0])
    nonce = fresh_nonce()
    first = message_of("run", 0, 0, model, [0, 1, 2], nonce)
    others = [
        message_of("other", 0, 0, model, [0, 1, 2], nonce),
        message_of("run", 1, 0, model, [0, 1, 2], nonce),
        message_of("run", 0, 1, model, [0, 1, 2], nonce),
        message_of("run", 0, 0, Theta(model.theta + 1), [0, 1, 2], nonce),
        message_of("run", 0, 0, model, [0, 1, 3], nonce),
        message_of("run", 0, 0, model, [0, 1, 2], fresh_nonce()),
    ]
    assert len({m.digest for m in [first, *others]}) == 7
    assert message_of("run", 0, 0, model, [0, 1, 2], nonce) == first
    pads = [KEY.pad(m, "g", 0, 4).tobytes() for m in [first, *others]]
    pads += [KEY.pad(first, "h", 0, 4).tobytes(), KEY.pad(first, "g", 1, 4).tobytes()]
    pads += [PadKey.fresh().pad(first, "g", 0, 4).tobytes()]
    assert len(set(pads)) == len(pads)
    assert KEY.mask(first, "g", 1, 2) == KEY.mask(first, "g", 2, 1) != KEY.mask(first, "g", 0, 2)


def test_pads_are_the_counter_stream_of_their_own_key() -> None:
    """An oracle in the plain mode; many clients and a length that is no multiple of a block."""
    n, clients, sent = AT_ONCE + 5, range(PADS_AT_ONCE + 3), message((0, 1, 2))
    rng = np.random.default_rng(0)
    mine = rng.integers(0, 2**64, n, dtype=np.uint64)
    found = products_with_pads(KEY, sent, "g", mine, clients)
    for client in clients:
        parts = [b"pad", sent.digest, b"g", str(client).encode()]
        hashed = hashlib.sha256(b"".join(len(part).to_bytes(8, "big") + part for part in parts)).digest()
        key = hmac.new(KEY.secret, hashed, "sha256").digest()[:16]
        stream = Cipher(algorithms.AES128(key), modes.CTR((2).to_bytes(16, "big"))).encryptor().update(bytes(8 * n))
        words = np.frombuffer(stream, dtype="<u8")
        np.testing.assert_array_equal(KEY.pad(sent, "g", client, n), words)
        assert found[client] == int((mine * words).sum())
    weights = rng.integers(-50, 50, len(clients))
    weights[1] = 0
    pads = [KEY.pad(sent, "g", client, n) for client in clients]
    expected = sum(int(w) * pad.astype(object) for w, pad in zip(weights, pads, strict=True)) % 2**64
    np.testing.assert_array_equal(unpadding(KEY, sent, "g", weights, clients, n).astype(object), expected)


def test_the_key_is_shown_nowhere() -> None:
    assert "\\x" not in repr(KEY)
    with pytest.raises(ValueError, match="32 bytes"):
        PadKey(b"short")


def test_rows_without_length_or_with_infinite_numbers() -> None:
    asked = (0, 1, 2)
    G = rows(3, 10)
    G[1] = 0.0
    found = cosines(replied(G, asked), range(3))
    np.testing.assert_array_equal(found[1], 0.0)
    huge = rows(3, 10) * 1e200  # squares overflow
    assert np.isfinite([row.norm for row in replied(huge, asked)]).all()
    G[1, 3] = np.inf
    with pytest.raises(RingOverflow, match="not finite"):
        replied(G, asked)
