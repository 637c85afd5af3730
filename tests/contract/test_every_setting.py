"""No setting is dead: changed alone from its default it changes the run, or it is refused or named as unused."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap

from dqnfed import Evaluation, Policy, vectorised
from dqnfed.algorithms import REGISTRY
from dqnfed.core.algorithm import LOCAL_WORK, default_of, hyperparameters
from dqnfed.core.local_work import AnyMethod
from dqnfed.core.problem import Problem
from dqnfed.sim.rounds import run_round
from dqnfed.sim.setup import cohort_size, fresh_state
from dqnfed.sim.state import Setup, State
from dqnfed.sim.tasks import TaskBuilder
from tests.contract.cases import METHODS
from tests.helpers.bowls import Case, Client, federation_of, linear_model, normal, normed_network, small_network
from tests.helpers.quick import every
from tests.helpers.recording import LEVELS, Asked, recorded
from tests.helpers.turns import relative_distance

Changes = tuple[tuple[str, Any], ...]
ROUNDS = 20
SHARES = (1.0, 1 / 3)
DIFFERENT = 1e-9  # relative; below this two runs differ by roundings alone

# Methods with stages: so short that `ROUNDS` reach the last one.
BASES: dict[str, dict[str, Any]] = {
    "fcfl": {"minmax_rounds": 3},
    "fedcorr": {"sweeps": 2, "fine_tuning": 2, "neighbours": 4},
}
# Changed values where the rule by type (see `changed_values`) gives none that means anything.
VALUES: dict[str, Any] = {
    "batch_size": 3,
    "momentum": 0.5,
    "weight_decay": 0.1,
    "lr_decay": 0.5,
    "warmup": 6,  # rounds: fedcorr's first ones do not train
    "rate_bounds": 1.1,  # a bound acts where it is exceeded
    "fedfv.alpha": 0.5,  # of six clients
    "disco.rtol": 0.1,
    "sufficient": 0.45,
    "fednl-ls.sufficient": 0.1,
    "qffl.floor": 0.5,
    "fcfl.sensitive": 1,  # the second of two inputs
    "agnostic-fair.n_classes": 3,
    "fcfl.max_disparity": 0.9,
    "fedexp.eps": 0.0,  # above these clients' squared updates the step is FedAvg's
    "fedcorr.relabel_share": 1.0,
    "fedcorr.clean_level": 0.5,
    "propfair.epsilon": 1.5,  # these clients' losses are far below base
    "fedeba-plus.angle": 0.5,  # and nearly equal
    "gifair.groups": "a,a,a,b,b,c",  # of six clients
    "fedmdfg.angle": 0.5,
}
# Modes in which settings have an effect that are refused alone, where no single other change leads there.
MODES: dict[tuple[str, str], Changes] = {
    ("shed", "rest"): (("pairs", 1),),  # the Hessians have two eigenvalues that are not the ridge
}
OLD_NAMES = {"absentees": "cached_clients"}  # which errors say in its place
# Settings that change nothing when changed alone here, and why that is no fault.
EXCEPTIONS: dict[tuple[str, str], str] = {
    ("fedmdfg", "armijo"): "its two conditions differ by 2e-4 of a first-order decrease; the unit test shows where",
    ("fedmgda-plus", "clip_norm"): "its rows have length 1, so that of one step only the direction counts",
}


def clients_at_odds(n_clients: int = 6) -> list[Client]:
    """Return two-class clients of different sizes, half of whose labels follow a rule of their own."""
    clients = []
    for c in range(n_clients):
        inputs = normal(9 + c, 2, seed=c, purpose="inputs")
        common, own = normal(2, seed=99, purpose="rule"), normal(2, seed=c, purpose="rule")
        side = torch.where(torch.arange(len(inputs)) % 2 == 0, inputs @ common, inputs @ own)
        clients.append((inputs, (side > 0).long()))
    return clients


def small_case(module: nn.Module, *, stretch: float = 1.0, ridge: float = 0.0) -> Case:
    """Return a problem in the plane; with `stretch`, from a start so far away that whole steps are too long."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(stretch)
    return Case(Problem.from_module(module, ridge=ridge), federation_of(clients_at_odds()))


def random_network() -> nn.Module:
    """Return the small network with a head that is not zero."""
    module = small_network(2, 3, 2)
    with torch.no_grad():
        for k, parameter in enumerate(module.parameters()):
            parameter.copy_(normal(*parameter.shape, seed=k, purpose="network"))
    return module


CASES: dict[str, tuple[Case, ...]] = {
    "convex": (
        small_case(linear_model(2, 2), ridge=1e-2),
        small_case(linear_model(2, 2, zero=False), stretch=8.0, ridge=1e-2),
    ),
    "network": (small_case(small_network(2, 3, 2)), small_case(random_network(), stretch=3.0)),
    "batch-norm": (small_case(normed_network(2, 3, 2)), small_case(normed_network(2, 3, 2), stretch=3.0)),
}


class Context(NamedTuple):
    """On which problem, and with what share of the clients in a round."""

    kind: str
    place: int  # among the cases of this kind
    share: float


class Snapshot(NamedTuple):
    """What can be seen after a round."""

    models: list[Tensor]  # theta, and what is evaluated for every client
    facts: dict[str, Any]  # status, traffic, who was dropped or clipped
    passes: float


class Trajectory:
    """The rounds of one method in one context, computed as far as they are asked for."""

    def __init__(self, algorithm: AnyMethod, context: Context) -> None:
        case = CASES[context.kind][context.place]
        size = cohort_size(context.share, case.federation.n_clients)
        self.prepared = algorithm.prepare(case.problem, case.federation.n_clients, size)
        self.asked = Asked()  # what the server asks of the replies
        self._rounds: list[Snapshot] = []
        self._more = self._snapshots(case, size)

    def __iter__(self) -> Iterator[Snapshot]:
        place = 0
        while True:
            if place == len(self._rounds):
                following = next(self._more, None)
                if following is None:
                    return
                self._rounds.append(following)
            yield self._rounds[place]
            place += 1

    def _snapshots(self, case: Case, size: int) -> Iterator[Snapshot]:
        problem, federation, _ = case
        setup = Setup(
            recorded(self.prepared, self.asked),
            problem,
            federation,
            10**6,
            size,
            0,
            vectorised(),
            Evaluation(every=10**6, participants=False),
            Policy(),
            TaskBuilder(federation, problem, self.prepared, 0),
        )
        state = fresh_state(setup)
        while not state.stopped:
            record, _ = run_round(setup, state)
            facts = {key: record[key] for key in ("status", "clients", "bytes_up", "bytes_down", "dropped", "clipped")}
            yield Snapshot([state.server.theta, *evaluated_models(setup, state)], facts, record["passes"])


def evaluated_models(setup: Setup, state: State) -> list[Tensor]:
    """Return the models that are evaluated: global ones, or every client's own."""
    algorithm, everyone = setup.algorithm, torch.arange(setup.federation.n_clients)
    if not algorithm.info.personal:
        return list(algorithm.models(state.server, None).values())
    memory = state.memory.get(everyone, setup.tasks.stacked(everyone, state.round))
    return list(vmap(lambda kept: algorithm.models(state.server, kept))(memory).values())


@cache
def trajectory(name: str, context: Context, changes: Changes = ()) -> Trajectory | str:
    """Return the rounds of a method with some settings changed, or why it refuses them."""
    try:
        return Trajectory(made(name, BASES.get(name, {}) | dict(changes)), context)
    except ValueError as refusal:
        return str(refusal)


def contexts(name: str) -> list[Context]:
    kinds = [kind for kind in CASES if kind in REGISTRY[name].info.problem_kinds]
    assert kinds, f"no case suits {name}"
    return [Context(kind, place, share) for place in (0, 1) for share in SHARES for kind in kinds]


def is_close(one: Any, other: Any) -> bool:
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(is_close(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(is_close, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=DIFFERENT) or (math.isnan(one) and math.isnan(other))
    return bool(one == other)


def differs(one: Snapshot, other: Snapshot) -> bool:
    """Return whether a user could tell the rounds apart, by more than roundings."""
    if not is_close(one.facts, other.facts):
        return True
    pairs = zip(one.models, other.models, strict=True)
    return any(not relative_distance(a, b) <= DIFFERENT for a, b in pairs if not torch.equal(a, b))


def has_effect(one: Trajectory, other: Trajectory) -> bool:
    """Return whether the two runs part within a reasonable number of rounds."""
    ended = Snapshot([], {"status": "ended"}, 0.0)
    first, second = iter(one), iter(other)
    for _ in range(ROUNDS):
        a, b = next(first, ended), next(second, ended)
        if a is b:  # both ended
            return False
        if differs(a, b):
            return True
    return False


def is_untouched(one: Trajectory, other: Trajectory, rounds: int = 4) -> bool:
    """Return whether the two runs have the same bits, traffic and passes for some rounds."""
    for _, a, b in zip(range(rounds), one, other, strict=False):
        if a.facts != b.facts or a.passes != b.passes or not all(map(torch.equal, a.models, b.models)):
            return False
    return True


def made(name: str, settings: Mapping[str, Any]) -> AnyMethod:
    return REGISTRY[name](**settings)


def choices_of(name: str, field: str) -> list[str]:
    """Return the values of a named option, from the error message about one that does not exist."""
    try:
        made(name, {field: "no such choice"})
    except ValueError as error:
        found = re.search(rf"`{field}` must be one of (.+), but is", str(error))
        if found:
            return [choice.strip("' ") for choice in found[1].split(",")]
    source = "".join(inspect.getsource(kind) for kind in REGISTRY[name].__mro__ if kind is not object)
    comment = re.search(rf"^    {field}: .*#(.*)$", source, re.MULTILINE)
    assert comment, f"{name}.{field}: neither an error message nor a comment names its choices"
    return [part.split()[0].strip(";,:") for part in re.sub(r"\(.*?\)", "", comment[1]).split("|")]


def changed_values(name: str, field: str) -> list[Any]:
    """Return other values of a setting: floats times 1.7, other whole numbers, the other choices."""
    default = BASES.get(name, {}).get(field, default_of(REGISTRY[name], field))
    for key in (f"{name}.{field}", field):
        if key in VALUES:
            return [VALUES[key]]
    if isinstance(default, bool):
        return [not default]
    if isinstance(default, str):
        return [choice for choice in choices_of(name, field) if choice != default]
    if isinstance(default, int):
        return [in_range(name, field, [default + 1, default - 1] if default < 5 else [2])]
    if isinstance(default, float):
        usual = 0.3 if default == 0 else 2.0 if math.isinf(default) else 1.7 * default
        return [in_range(name, field, [usual, 0.6 * default])]
    annotation = next(str(f.type) for f in fields(REGISTRY[name]) if f.name == field)
    assert default is None, f"{name}.{field}: no rule changes {default!r}; add a value to `VALUES`"
    return [in_range(name, field, [0.3, 3.0] if "float" in annotation else [2, 1])]


def in_range(name: str, field: str, candidates: list[Any]) -> Any:
    """Return the first candidate that is inside the setting's range."""
    for value in candidates:
        try:
            made(name, {field: value})
        except ValueError as error:
            if f"`{field}` must be in" in str(error):
                continue
        return value
    raise AssertionError(f"{name}.{field}: none of {candidates} is in its range; add a value to `VALUES`")


def changes_of(name: str, field: str) -> list[Any]:
    """Return the test cases of a setting; where no other value is found this case fails, not the collection of all."""
    try:
        return [(name, field, value) for value in changed_values(name, field)]
    except Exception as error:
        return [pytest.param(name, field, error, id=f"{name}-{field}-no value")]


OWN = [case for name in METHODS for field in hyperparameters(REGISTRY[name]) for case in changes_of(name, field)]
SHARED = [case for name in METHODS for field in LOCAL_WORK for case in changes_of(name, field)]


def check_effect(name: str, field: str, value: Any, base: Changes = ()) -> str | None:
    """Check that a change has an effect in some context, or is declared unused or refused in all; return a refusal."""
    if isinstance(value, Exception):
        raise value
    refusal, idle = None, []
    for context in contexts(name):
        default, changed = trajectory(name, context, base), trajectory(name, context, (*base, (field, value)))
        if isinstance(default, str):
            continue  # the method is not for this context
        if isinstance(changed, str):
            key = OLD_NAMES.get(field, field)
            named = re.search(rf"`{key}\b|\b{key}=", changed)  # `step` or step='match', not "the first step"
            assert named, f"the refusal does not name `{field}`: {changed}"
            refusal = changed
        elif is_default(default, changed, field, value):
            return None
        elif field in changed.prepared.unused():
            assert is_untouched(default, changed), f"`{field}` is declared unused, but changes the run in {context}"
        elif has_effect(default, changed):
            check_needs(changed)
            return None
        else:
            idle.append(context)
    assert not idle, f"`{field}` = {value!r} changes nothing in {idle}"
    return refusal


def check_needs(run: Trajectory) -> None:
    level, needs = run.asked.level, run.prepared.needs
    assert LEVELS.index(level) <= LEVELS.index(needs), f"the server asks for {level}, but declares {needs}"
    assert needs in {need.split()[0] for need in run.prepared.info.needs}, f"`info.needs` does not name {needs}"


def has_effect_in_a_mode(name: str, field: str, value: Any) -> bool:
    """Return whether the change has an effect after some other one: another choice, or several local steps."""
    others = [(other, v) for other in hyperparameters(REGISTRY[name]) for v in changed_values(name, other)]
    bases: list[Changes] = [MODES[name, field]] if (name, field) in MODES else []
    bases += [(base,) for base in (*others, ("epochs", 2)) if base[0] != field]
    for base in bases:
        for context in contexts(name):
            default, changed = trajectory(name, context, base), trajectory(name, context, (*base, (field, value)))
            if isinstance(default, str) or isinstance(changed, str):
                continue
            if is_default(default, changed, field, value) or has_effect(default, changed):
                check_needs(changed)
                return True
    return False


def is_default(default: Trajectory, changed: Trajectory, field: str, value: Any) -> bool:
    """Return whether the change spells out what the default is resolved to."""
    return default.prepared == changed.prepared and getattr(changed.prepared, field) == value


# Methods whose runs take seconds; their shared settings are tried by `make test-all`.
LONG = ("fednew-cg", "fedcorr", "shed", "fedns-ggn", "fednl-head")


@pytest.mark.parametrize(("name", "field", "value"), OWN)
def test_a_methods_own_setting_has_an_effect_or_is_refused(name: str, field: str, value: Any) -> None:
    """What is refused alone has an effect in another mode: else nobody could use it."""
    if (name, field) in EXCEPTIONS:
        pytest.skip(EXCEPTIONS[name, field])
    refusal = check_effect(name, field, value)
    assert refusal is None or has_effect_in_a_mode(name, field, value), f"of no use in any mode; alone: {refusal}"


# Settings that one helper passes on for every method; `make test` tries them with a few, of other pairs a third.
PASSED_ON = ("optimizer", "nesterov", "clip_norm", "schedule", "schedule_rounds", "warmup")
FEW = ("dqn-fed", "fedavg", "scaffold", "fedmgda-plus", "dqn-fed-literal", "mifa", "ditto")


def is_slow(k: int, name: str, field: str) -> bool:
    return name in LONG or (name not in FEW and (field in PASSED_ON or k % 3 > 0))


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [pytest.param(*case, marks=pytest.mark.slow if is_slow(k, *case[:2]) else []) for k, case in enumerate(SHARED)],
)
def test_a_shared_setting_has_an_effect_or_is_refused_or_named_as_unused(name: str, field: str, value: Any) -> None:
    if (name, field) in EXCEPTIONS:
        pytest.skip(EXCEPTIONS[name, field])
    check_effect(name, field, value)


@pytest.mark.parametrize(
    ("field", "value", "base"),
    [("lr_decay_every", 2, (("lr_decay", 0.5),)), ("momentum", 0.5, (("epochs", 2),))],
    ids=["period of a decay", "momentum of several steps"],
)
@pytest.mark.parametrize("name", every(2, METHODS))
def test_a_shared_setting_that_needs_another_has_an_effect_with_it(
    name: str, field: str, value: Any, base: Changes
) -> None:
    check_effect(name, field, value, base=base)
