"""FedCorr: find clients with wrong labels, correct these labels, then train with any method."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields, make_dataclass
from functools import cache
from typing import Any, ClassVar

from dqnfed.algorithms.fedavg import FedAvg
from dqnfed.algorithms.fedcorr_messages import OWN_SENT, OWN_UPDATES, FedCorrMemory, FedCorrServer, with_inner
from dqnfed.algorithms.label_correction import LabelCorrection
from dqnfed.core.algorithm import AnyAlgorithm, hyperparameters

NAME = "fedcorr"


@dataclass(frozen=True, kw_only=True)
class FedCorr(LabelCorrection):
    r"""Corrects wrong labels, then trains as FedAvg, or as any method: fedcorr+NAME (Xu et al., CVPR 2022).

    Objective: that of the finishing method, on labels that are right more often. `fedcorr` finishes with FedAvg,
    `fedcorr+NAME` with the method NAME, whose hyper-parameters stand beside these.

    Client: visited, it trains theta for `epochs` on mixed-up pairs of its examples (Zhang et al., ICLR 2018), held back
    by beta mu_k ||v - theta|| with its estimated noise level mu_k; sends the update and the mean local intrinsic
    dimension of its softmax outputs, which is high where labels are wrong; keeps every example's loss. After a sweep,
    if its summed score is above the threshold that it is sent, or was before: mu_k is the share of its losses in the
    higher of two Gaussians, and `relabel_share` of these labels, the largest losses first, become the global model's
    class where that model is more sure than `confidence`. Afterwards it trains as the finishing method says, on its
    labels as they are.

    Server: `sweeps` times it visits every client once, one after the other, each beginning where the last one ended;
    two Gaussians over the summed scores give the threshold, the higher one no narrower than the lower one. Then
    `fine_tuning` rounds of the finishing method with clients of mu_k <= `clean_level`; noisy clients replace all labels
    that the model is sure of; and the finishing method with everybody to the end. Every exchange is a round: of a run's
    rounds, 1 + sweeps (clients / visits + 1) + fine_tuning + 1 are over when the last stage begins.

    State: client, its labels and losses (two numbers an example), its score and mu_k; server, the scores and mu_k. Both
    keep what the finishing method keeps.

    Payload: a visit n + 1 floats up, n down; a verdict 2 up. The server never sees labels, and no client another's.

    Evaluation: as the finishing method.

    Differences: Unlike the official code, an example's loss is its cross-entropy, not the cross-entropy of its softmax
    output; equal outputs lie 1e-12 apart instead of making the score 0; the pull acts in every step, with gradient 0
    where v = theta; `neighbours` has an effect, and clients with few examples use as many as they have. A score below
    the lower Gaussian's mean is never noisy, however wide the higher one is. Unlike the paper, all clients are clean
    unless two Gaussians explain the scores better than one (Bayesian information criterion), since a mixture splits any
    set of numbers; `split = "always"` is the paper's. Unlike the paper, the Gaussians are fitted to log(1 + score),
    from several starts, and the noisy clients' one is at least as wide as the clean ones': one client far above all
    others, or two that are close, otherwise hide the other noisy ones. Unlike the paper, a client that was found noisy
    stays so: it corrects labels at once, and later scores are of the corrected ones; with `split = "always"` each sweep
    decides anew. The order of visits is the same in every run, since the seed deals the clients anew. A client compares
    its own score with the threshold, so that nobody learns about another. Examples are mixed during visits only;
    afterwards the local work is the finishing method's. A visit that ends outside the numbers changes nothing and
    counts as score 0.

    Reference: Xu, Chen, Quek & Chong, FedCorr: Multi-Stage Federated Learning for Label Noise Correction, CVPR 2022.
    """

    Inner: ClassVar[type[AnyAlgorithm]] = FedAvg
    inner_name: ClassVar[str] = "fedavg"
    Server: ClassVar[type] = FedCorrServer
    Memory: ClassVar[type] = FedCorrMemory
    Sent: ClassVar[tuple[type, ...]] = (*OWN_SENT, *FedAvg.Sent)
    Update: ClassVar[tuple[type, ...]] = (*OWN_UPDATES, *FedAvg.Update)
    scales: ClassVar[tuple[str, ...]] = FedAvg.scales
    optional: ClassVar[tuple[str, ...]] = (*FedAvg.optional, "score")

    server_lr: float = 1.0  # of FedAvg, > 0
    weighting: str = "examples"  # of FedAvg: examples | uniform


@cache
def fedcorr_with(inner_name: str, inner: type[AnyAlgorithm]) -> type[LabelCorrection]:
    """Return FedCorr with this finishing method, or refuse one that it cannot be combined with."""
    if inner is FedAvg:
        return FedCorr
    if issubclass(inner, LabelCorrection):
        raise ValueError(f"'{NAME}+{inner_name}' would correct labels twice; name a finishing method such as dqn-fed.")
    if "network" not in inner.suits:
        raise ValueError(
            f"'{NAME}+{inner_name}': {inner_name} is for convex problems with exact Hessians, but labels are found "
            "and corrected by a network that fits them; choose a method that suits networks, such as dqn-fed or qffl."
        )
    taken = {f.name for f in fields(LabelCorrection)} & set(hyperparameters(inner))
    if taken or {k.__name__ for k in (*OWN_SENT, *OWN_UPDATES)} & {k.__name__ for k in (*inner.Sent, *inner.Update)}:
        raise ValueError(
            f"'{NAME}+{inner_name}': {inner_name} and FedCorr use the same names for different things"
            f"{': ' + ', '.join(sorted(taken)) if taken else ' in their messages'}; rename those of {inner_name}."
        )
    own = [f for f in fields(inner) if f.name in hyperparameters(inner)]
    facts: dict[str, Any] = {
        "__doc__": f"FedCorr (Xu et al., CVPR 2022) that finishes with {inner_name}.",
        "__module__": __name__,
        "Inner": inner,
        "inner_name": inner_name,
        "Server": with_inner(FedCorrServer, inner.Server),
        "Memory": with_inner(FedCorrMemory, inner.Memory),
        "Sent": (*OWN_SENT, *inner.Sent),
        "Update": (*OWN_UPDATES, *inner.Update),
        "scales": inner.scales,
        "optional": (*inner.optional, "score"),
        "diverges": inner.diverges,
        "__reduce__": _as_call,
    }
    return make_dataclass(
        f"FedCorr+{inner.__name__}",
        [(f.name, f.type, _same_default(f)) for f in own],
        bases=(LabelCorrection,),
        namespace=facts,
        frozen=True,
        kw_only=True,
    )


def _same_default(of: Any) -> Any:
    return field(default=of.default) if of.default is not MISSING else field(default_factory=of.default_factory)


def _as_call(method: LabelCorrection) -> tuple[Any, ...]:
    """Return how to make the method again elsewhere, since its class has no name to be found under."""
    return _remade, (method.inner_name, method.Inner, {f.name: getattr(method, f.name) for f in fields(method)})


def _remade(inner_name: str, inner: type[AnyAlgorithm], settings: dict[str, Any]) -> LabelCorrection:
    return fedcorr_with(inner_name, inner)(**settings)
