"""Differential privacy: replies are clipped and Gaussian noise is added, by each client or on the server's sums."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from operator import attrgetter
from typing import Any, NoReturn, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from dqnfed.core.algorithm import AnyAlgorithm, check_choice, check_range, check_types
from dqnfed.core.replies import FloatArray, Replies
from dqnfed.core.tensors import map_tensors, named_tensors, tensors

U = TypeVar("U", bound=tuple[Any, ...])
NOISES = ("local", "central", "distributed")
UNITS = ("client", "record")
LOSSES = ("loss", "probed_loss", "trial_loss")  # fields of replies that are not below the floor of losses


@dataclass(frozen=True, kw_only=True)
class Privacy:
    """The Gaussian mechanism: what changes if all that a client, or one of its examples, contributes were zeros."""

    clip: (
        float  # largest Euclidean norm: local: of a reply; central, distributed: of each vector; record: of a gradient
    )
    noise_multiplier: float = 0.0  # standard deviation of the noise over `clip`; >= 0
    noise: str = (
        "local"  # local: by each client, for itself | central: on the server's sums | distributed: shares of it
    )
    unit: str = "client"  # client: all that it has | record: one of its examples (local noise alone)
    loss_clip: float = 5.0  # record: losses of examples count as at most this, > 0
    epsilon: float | None = None  # the run stops before it spends more; None: it is counted only
    delta: float = 1e-5  # at which epsilon is counted; in (0, 1)

    def __post_init__(self) -> None:
        check_types(self)
        check_range(self, "clip", low=0.0, open_low=True)
        check_range(self, "noise_multiplier", low=0.0)
        check_choice(self, "noise", NOISES)
        check_choice(self, "unit", UNITS)
        check_range(self, "loss_clip", low=0.0, open_low=True)
        check_range(self, "delta", low=0.0, high=1.0, open_low=True, open_high=True)
        if self.unit == "record" and self.noise != "local":
            raise ValueError(
                f"Privacy: `unit` = 'record' hides an example from the server too, with noise at its client, but "
                f"`noise` is '{self.noise}'; use 'local'."
            )
        if self.epsilon is not None:
            check_range(self, "epsilon", low=0.0, open_low=True)
            if self.noise_multiplier == 0.0:
                raise ValueError("Privacy: `epsilon` is a budget for noise, but `noise_multiplier` is 0.")

    def check_method(self, prepared: AnyAlgorithm) -> None:
        """Refuse a method whose server asks for what noise on sums does not cover."""
        if self.noise != "local" and prepared.needs != "sum":
            raise ValueError(
                f"{type(prepared).__name__} cannot be run with `privacy.noise` = '{self.noise}': its server needs "
                f"'{prepared.needs}' of the replies, and the noise is on sums alone. Use 'local', or a method that "
                "needs sums."
            )


def standard_normal(n: int) -> FloatArray:
    """Return n standard normal numbers from the operating system's cryptographic generator."""
    words = np.frombuffer(secrets.token_bytes(8 * n), dtype=np.uint64) >> np.uint64(11)
    uniform = torch.from_numpy((words.astype(np.float64) + 0.5) / 2.0**53)
    found: FloatArray = torch.special.ndtri(uniform).numpy()
    return found


def _normal_like(t: Tensor, generator: torch.Generator | None) -> Tensor:
    if generator is None:
        return torch.from_numpy(standard_normal(t.numel())).view(t.shape).to(t.device, t.dtype)
    return torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.device, t.dtype)


def check_real(update: tuple[Any, ...]) -> None:
    """Refuse a reply with whole numbers, to which Gaussian noise cannot be added."""
    whole = [name for name, t in named_tensors(update).items() if not t.is_floating_point()]
    if whole:
        raise ValueError(
            f"{type(update).__name__} sends whole numbers ({', '.join(whole)}), to which Gaussian noise cannot be "
            "added; choose a method whose replies are real numbers, or switch the noise off."
        )


def noised_rows(updates: U, privacy: Privacy, generator: torch.Generator | None = None, *, floor: float = -inf) -> U:
    """Return stacked replies, each clipped as one vector, with Gaussian noise on every number of them.

    Noisy losses below the floor of losses count as the floor.

    NaN, which says "not known", stays. The noise is drawn from the operating system's generator for every reply: a
    run's seed is known to the server, which could subtract the noise. Give a generator in tests only.
    """
    check_real(updates)
    each = [t.nan_to_num(0.0).flatten(1) if t.dim() > 1 else t.nan_to_num(0.0)[:, None] for t in tensors(updates)]
    squares = [torch.linalg.vector_norm(t, dim=1, dtype=torch.float64).square().cpu() for t in each if t.numel()]
    norms = torch.stack(squares).sum(0).sqrt()
    factors = torch.where(norms > privacy.clip, privacy.clip / norms, torch.ones_like(norms))
    spread = privacy.noise_multiplier * privacy.clip

    def released(t: Tensor) -> Tensor:
        shrunk = factors.to(t.device, t.dtype).view(-1, *[1] * (t.dim() - 1)) * t
        return shrunk + spread * _normal_like(t, generator)

    noisy = map_tensors(released, updates)
    raised = {name: getattr(noisy, name).clamp(min=floor) for name in LOSSES if name in getattr(noisy, "_fields", ())}
    return noisy._replace(**raised) if raised and floor > -inf else noisy  # type: ignore[attr-defined]


def clipped_rows(updates: U, clip: float) -> U:
    """Return stacked replies with every vector clipped by itself; single numbers stay."""

    def clipped(t: Tensor) -> Tensor:
        if t.dim() < 2 or not t.numel():
            return t
        norms = torch.linalg.vector_norm(t.flatten(1), dim=1, dtype=torch.float64)
        factors = torch.where(norms > clip, clip / norms, torch.ones_like(norms))
        return factors.to(t.device, t.dtype).view(-1, *[1] * (t.dim() - 1)) * t

    check_real(updates)
    return map_tensors(clipped, updates)


class NoisySums(Replies[U]):
    """Replies of which the server gets noisy sums and nothing else; `spend` is called before each of them.

    Where sampling amplifies, sums are over the expected number of clients, which does not tell who took part: a client
    that is not drawn is then as good as one whose reply is zero (McMahan et al., ICLR 2018, their fixed denominator).
    """

    def __init__(
        self, updates: U, privacy: Privacy, spend: Callable[[], None], n_expected: float | None = None
    ) -> None:
        super().__init__(updates)
        self._privacy, self._spend, self._n_expected = privacy, spend, n_expected

    def combine(self, field: str, weights: Tensor | FloatArray) -> Tensor:
        if attrgetter(field)(self.updates).dim() < 2:
            self._refuse(f"sum of '{field}'")
        given = torch.as_tensor(weights).double()
        if self._n_expected is not None:
            if float(given.max() - given.min()) > 1e-6 * float(given.abs().max()):
                raise ValueError(
                    "`train.sampling` = 'poisson' with `privacy.noise` = 'central' needs equal weights, since weights "
                    "that depend on who takes part are not counted; set `algorithm.weighting` = 'uniform'."
                )
            given = given * (len(given) / self._n_expected)
        self._spend()
        largest = float(given.abs().max())
        exact = super().combine(field, given)
        return exact + self._privacy.noise_multiplier * self._privacy.clip * largest * _normal_like(exact, None)

    def scalars(self, field: str) -> FloatArray:
        self._refuse(f"numbers '{field}'")

    def norms(self, field: str) -> FloatArray:
        self._refuse(f"norms of '{field}'")

    def gram(self, field: str, extra: Tensor | Sequence[Tensor] | None = None) -> FloatArray:
        self._refuse(f"products of '{field}'")

    def rows(self, field: str) -> Tensor:
        self._refuse(f"rows of '{field}'")

    def take(self, places: Tensor) -> Self:
        self._refuse("part of the replies")

    def replaced(self, field: str, values: Tensor) -> Self:
        self._refuse(f"changed '{field}'")

    def scaled(self, factors: Tensor, fields: tuple[str, ...]) -> Self:
        self._refuse("scaled replies")

    def _refuse(self, what: str) -> NoReturn:
        raise ValueError(
            f"the method's server asks for the clients' {what}, which `privacy.noise` = '{self._privacy.noise}' "
            "does not cover; use 'local' noise, or a method that asks for weighted sums alone (FedAvg, FedProx)."
        )


def released(updates: U, privacy: Privacy, floor: float) -> U:
    """Return stacked replies of clients as the server may have them, before its own noise or the shares of it."""
    if privacy.noise == "local":
        return noised_rows(updates, privacy, floor=floor)
    return clipped_rows(updates, privacy.clip) if privacy.noise == "central" else updates


class SharedNoise(NoisySums[U]):
    """Replies whose sums are noisy before the server has them, by the shares of all clients."""

    def __init__(self, replies: Replies[U], privacy: Privacy, spend: Callable[[], None]) -> None:
        super().__init__(replies.updates, privacy, spend)
        self._replies = replies

    def combine(self, field: str, weights: Tensor | FloatArray) -> Tensor:
        self._spend()
        return self._replies.combine(field, weights)
