"""FedCorr: find clients with wrong labels, correct these labels, then train with any method."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields, make_dataclass
from functools import cache
from typing import Any, ClassVar

from dqnfed.algorithms.fedavg import FedAvg
from dqnfed.algorithms.fedcorr_messages import OWN_MESSAGES, OWN_REPLIES, FedCorrMemory, FedCorrServer, with_inner
from dqnfed.algorithms.label_correction import LabelCorrection, settings_of
from dqnfed.core.algorithm import AnyAlgorithm, Info, hyperparameters

NAME = "fedcorr"
EXEMPTIONS = {
    "test_goes_on_without_a_broken_client": "clients train one after the other, so a round that does not ask the "
    "broken one cannot drop it",
}


def combined_info(inner: Info) -> Info:
    """Return the facts of FedCorr with a finishing method of these facts; its own stages ask for sums alone."""
    return Info(
        server=with_inner(FedCorrServer, inner.server),
        memory=with_inner(FedCorrMemory, inner.memory),
        messages=(*OWN_MESSAGES, *inner.messages),
        replies=(*OWN_REPLIES, *inner.replies),
        needs=inner.needs,
        clip_fields=inner.clip_fields,
        nan_ok_fields=(*inner.nan_ok_fields, "score"),
        problem_kinds=frozenset({"network"}),
        personal=inner.personal,
        looped_messages=(*OWN_MESSAGES, *inner.looped_messages),
        reads_inputs=inner.reads_inputs,  # mixing examples gives the same before and after they are normalised
        asks_alone=True,
        diverges=inner.diverges,
        exemptions={**inner.exemptions, **EXEMPTIONS},
    )


@dataclass(frozen=True, kw_only=True)
class FedCorr(LabelCorrection):
    r"""Corrects wrong labels, then trains as FedAvg, or as any method: fedcorr+NAME (Xu et al., CVPR 2022).

    Objective: that of the finishing method, on labels that are right more often. `fedcorr` finishes with FedAvg,
    `fedcorr+NAME` with the method NAME, whose hyper-parameters stand beside these.

    Client: in its training turns, it trains theta for `epochs` on mixed-up pairs of its examples (Zhang et al., ICLR
    2018), held back by beta mu_k ||v - theta|| with its estimated noise level mu_k; sends the update and the mean local
    intrinsic dimension of its softmax outputs, which is high where labels are wrong; keeps every example's loss. After
    a sweep, if its summed score is above the threshold that it is sent, or was before: mu_k is the share of its losses
    in the higher of two Gaussians, and `relabel_share` of these labels, the largest losses first, become the global
    model's class where its probability is above `confidence`. Afterwards it trains as the finishing method says, on its
    labels as they are.

    Server: `sweeps` times every client has one training turn, one after the other, each from the model of the one
    before; two Gaussians over the summed scores give the threshold, the higher one no narrower than the lower one. Then
    `fine_tuning` rounds of the finishing method with clients of mu_k <= `clean_level`; noisy clients replace all labels
    for which the model's probability is above `confidence`; and the finishing method with all clients to the end. Every
    exchange is a round: of a run's rounds, 1 + sweeps (clients / visits + 1) + fine_tuning + 1 are over when the last
    stage starts.

    State: client, its labels and losses (two numbers an example), its score and mu_k; server, the scores and mu_k. Both
    keep what the finishing method keeps.

    Payload: a training turn n + 1 floats up, n down; a relabelling 2 up, n + 1 down. The server never gets labels, and
    no client another's.

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
    decides anew. The order of the turns is the same in every run, since the seed deals the clients anew. A client
    compares its own score with the threshold, so that no client learns about another. Examples are mixed in training
    turns only; afterwards the local work is the finishing method's. A training turn that ends in numbers that are not
    finite changes nothing and counts as score 0.

    Reference: Xu, Chen, Quek & Chong, FedCorr: Multi-Stage Federated Learning for Label Noise Correction, CVPR 2022.
    """

    Inner: ClassVar[type[AnyAlgorithm]] = FedAvg
    inner_name: ClassVar[str] = "fedavg"
    info: ClassVar[Info] = combined_info(FedAvg.info)

    server_lr: float = 1.0  # of FedAvg, > 0
    weighting: str = "examples"  # of FedAvg: examples | uniform


@cache
def fedcorr_with(inner_name: str, inner: type[AnyAlgorithm]) -> type[LabelCorrection]:
    """Return FedCorr with this finishing method, or refuse one that it cannot be combined with."""
    if inner is FedAvg:
        return FedCorr
    if issubclass(inner, LabelCorrection):
        raise ValueError(f"'{NAME}+{inner_name}' would correct labels twice; name a finishing method such as dqn-fed.")
    if "network" not in inner.info.problem_kinds:
        raise ValueError(
            f"'{NAME}+{inner_name}': {inner_name} is for convex problems with exact Hessians, but labels are found "
            "and corrected by a network that fits them; choose a method for networks, such as dqn-fed or qffl."
        )
    taken = {f.name for f in fields(LabelCorrection)} & set(hyperparameters(inner))
    kinds = {kind.__name__ for kind in (*OWN_MESSAGES, *OWN_REPLIES)}
    if taken or kinds & {kind.__name__ for kind in (*inner.info.messages, *inner.info.replies)}:
        raise ValueError(
            f"'{NAME}+{inner_name}': {inner_name} and FedCorr use the same names for different things"
            f"{': ' + ', '.join(sorted(taken)) if taken else ' in their messages'}; rename those of {inner_name}."
        )
    shared = {f.name: f.default for f in fields(LabelCorrection)}
    own = [f for f in fields(inner) if f.init and (f.name not in shared or f.default != shared[f.name])]
    facts: dict[str, Any] = {
        "__doc__": f"FedCorr (Xu et al., CVPR 2022) that finishes with {inner_name}.",
        "__module__": __name__,
        "Inner": inner,
        "inner_name": inner_name,
        "info": combined_info(inner.info),
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
    return _remade, (method.inner_name, method.Inner, {name: getattr(method, name) for name in settings_of(method)})


def _remade(inner_name: str, inner: type[AnyAlgorithm], settings: dict[str, Any]) -> LabelCorrection:
    return fedcorr_with(inner_name, inner)(**settings)
