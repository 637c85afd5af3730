"""Products in a form: exact where terms cancel, and of single products with the vectors nothing can be told."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats

from dqnfed.algorithms.dqn_fed import DQNFed
from dqnfed.secure.forms import Form, PaddedProducts, form_of, form_products, padded_products
from dqnfed.secure.pads import Message, PadKey
from dqnfed.secure.queries import Claims, Query, Refusal
from dqnfed.secure.ring import RingOverflow
from dqnfed.secure.wholes import wholes_of
from tests.helpers.bowls import BOWLS
from tests.helpers.secure import Wire, secure_run

FloatArray = NDArray[np.float64]
KEY = PadKey(bytes(range(32)))
ASKED = (1, 4, 5, 7, 8)


def replied(G: FloatArray, form: Form, asked: tuple[int, ...] = ASKED) -> list[PaddedProducts]:
    message, norms = Message(b"\x01" * 32, asked), np.linalg.norm(G, axis=1)
    return [
        padded_products(KEY, message, "g", row, float(norm), client, form)
        for client, row, norm in zip(asked, G, norms, strict=True)
    ]


def drawn(K: int, n: int, R: int, seed: int) -> tuple[FloatArray, torch.Tensor, FloatArray]:
    rng = np.random.default_rng(seed)
    G = rng.standard_normal((K, n)) * 10.0 ** rng.uniform(-6, 6, (K, 1))
    V = rng.standard_normal((R, n)) * 10.0 ** rng.uniform(-4, 4, (R, 1))
    C = rng.standard_normal((R, R)) / np.linalg.norm(V, axis=1)
    return G, torch.from_numpy(V), (C + C.T) / 2


@pytest.mark.parametrize(("n", "R"), [(1, 1), (7, 20), (300, 6)])
@pytest.mark.parametrize("seed", range(3))
def test_products_are_those_of_float64(n: int, R: int, seed: int) -> None:
    G, V, C = drawn(5, n, R, seed)
    form, norms = form_of(V, C), np.linalg.norm(G, axis=1)
    found = form_products(replied(G, form), norms, range(5), form)
    P = G @ V.numpy().T
    terms = np.abs(P) @ np.abs(C) @ np.abs(P).T
    lengths = np.linalg.norm(V.numpy(), axis=1)
    whole = lengths @ np.abs(C) @ lengths * np.outer(norms, norms)  # of which products may be a small part
    assert (np.abs(found - P @ C @ P.T) <= 1e-14 * terms + 1e-15 * (n + R) * whole).all()


def test_terms_that_cancel_leave_what_they_should() -> None:
    """A metric of condition 10^10, in which rows along its short axis are 10^5 times shorter."""
    rng, n = np.random.default_rng(0), 50
    v = torch.from_numpy(np.linalg.qr(rng.standard_normal((n, 1)))[0].T)
    G = rng.standard_normal((5, 1)) * v.numpy()
    form = form_of(v, np.array([[-1.0 + 1e-10]]))  # to be added to the identity
    found = G @ G.T + form_products(replied(G, form), np.linalg.norm(G, axis=1), range(5), form)
    np.testing.assert_allclose(found, 1e-10 * G @ G.T, rtol=1e-4)


def test_corrections_are_masked_in_all_their_words() -> None:
    """Another message has other pads and masks, so that not even the highest of four words is the same."""
    G, V, C = drawn(5, 40, 4, 0)
    form, norms = form_of(V, C), np.linalg.norm(G, axis=1)
    zeros = np.zeros_like(G[0])
    for digest in (b"\x01", b"\x02"):
        message = Message(digest * 32, ASKED)
        corrections = padded_products(KEY, message, "g", zeros, float(norms[0]), ASKED[-1], form).corrections[:-1]
        masks = [KEY.mask(message, "g|products in a form", ASKED[-1], other, n_bytes=32) for other in ASKED[:-1]]
        assert [(whole + mask) % 2**256 for whole, mask in zip(wholes_of(corrections), masks, strict=True)] == [0] * 4
        assert corrections[:, 3].min() > 0


def test_who_is_silent_needs_no_recovery() -> None:
    G, V, C = drawn(5, 40, 4, 0)
    form, kept = form_of(V, C), [0, 2, 3, 4]
    there = [replied(G, form)[k] for k in kept]
    found = form_products(there, np.linalg.norm(G[kept], axis=1), kept, form)
    P = G[kept] @ V.numpy().T
    np.testing.assert_allclose(found, P @ C @ P.T, rtol=1e-9)


def test_other_products_of_the_same_form_give_the_same_numbers_and_random_words() -> None:
    """Rows are turned so that C's form of their products with the vectors stays, and no product does."""
    rng, R = np.random.default_rng(1), 60
    turn = np.linalg.qr(rng.standard_normal((R, R)))[0]
    G = rng.standard_normal((5, R))
    form = form_of(torch.eye(R, dtype=torch.float64), np.eye(R))
    views = [replied(each, form) for each in (G, G @ turn)]
    products = [form_products(view, np.linalg.norm(G, axis=1), range(5), form) for view in views]
    np.testing.assert_allclose(products[0], products[1], atol=1e-12)
    for view in views:
        words = np.concatenate([np.append(each.words, each.corrections[each.corrections != 0]) for each in view])
        assert stats.chisquare(np.bincount(words.view(np.uint8), minlength=256)).pvalue > 1e-4


def test_a_row_without_length_has_no_products() -> None:
    G, V, C = drawn(5, 40, 4, 0)
    G[2] = 0.0
    form = form_of(V, C)
    found = form_products(replied(G, form), np.linalg.norm(G, axis=1), range(5), form)
    assert not found[2].any()


def test_what_has_no_room_is_refused() -> None:
    with pytest.raises(RingOverflow, match="128 vectors, but there are 129"):
        form_of(torch.ones(129, 2), np.eye(129))
    G, V, C = drawn(5, 40, 4, 0)
    with pytest.raises(RingOverflow, match="cannot be padded"):
        replied(np.where(np.arange(40) == 3, np.nan, G), form_of(V, C))


def test_dqn_feds_metric_asks_for_no_product_of_a_single_row() -> None:
    case, wire = BOWLS["network"][-1](), Wire()
    secure_run(DQNFed(), case, wire, rounds=4)
    assert not wire.products
    assert len(wire.forms) == 3, "from the second step on there are pairs"


def test_a_made_up_form_is_refused_by_the_client_whose_row_it_is() -> None:
    def false_form(query: Query, claims: Claims) -> tuple[Query, Claims]:
        return query, claims._replace(forms={field: 1.01 * products for field, products in claims.forms.items()})

    with pytest.raises(Refusal, match="in a form the claimed product of client"):
        secure_run(DQNFed(), BOWLS["network"][-1](), Wire(false_form), rounds=4)
