"""From a config to something that runs: data, model, method, engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dqnfed.algorithms import OPTIONAL, REFERENCES, REGISTRY, method_called
from dqnfed.algorithms.label_correction import LabelCorrection
from dqnfed.core.algorithm import hyperparameters
from dqnfed.core.checksums import damage_line, damaged_files
from dqnfed.core.federation import Federation
from dqnfed.core.local_work import AnyMethod
from dqnfed.core.problem import BATCH_NORM, Problem
from dqnfed.core.result import RunResult
from dqnfed.core.run_folder import RunFolder
from dqnfed.core.screening import Policy
from dqnfed.core.seeds import seed_number
from dqnfed.data.cache import default_data_dir
from dqnfed.data.catalogue import DATASETS, dataset_called
from dqnfed.data.label_noise import Truth
from dqnfed.experiments.breakdown import check_breakdown, write_breakdown
from dqnfed.experiments.config import LOCAL_WORK, Config, ConfigError, checked, nearest
from dqnfed.experiments.data_source import data_source
from dqnfed.experiments.machine import are_apart, chosen_cohort, chosen_device, compiled, in_precision
from dqnfed.experiments.memory import MACHINE_FILE, NOTHING_CHOSEN, Chosen, chosen_again, chosen_before, chosen_now
from dqnfed.experiments.noise_record import write_noise_record
from dqnfed.experiments.own_data import FEATURES_FILE, OwnFederation
from dqnfed.experiments.participants import expected_size, sampling_of, stragglers_of
from dqnfed.experiments.private import privacy_of
from dqnfed.experiments.settings import given_settings, unused_lines, unused_settings
from dqnfed.experiments.synthetic import bowls
from dqnfed.models import build
from dqnfed.secure.methods import secure_method
from dqnfed.sim import accelerate
from dqnfed.sim.accelerate import with_features
from dqnfed.sim.engine import run
from dqnfed.sim.state import Evaluation

logger = logging.getLogger("dqnfed")
Score = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Experiment:
    """Everything that `run` needs, on its device."""

    config: Config
    algorithm: AnyMethod
    problem: Problem
    federation: Federation
    kind: str  # network | convex | batch-norm
    own: OwnFederation | None = None  # what was learnt about the columns of the user's table
    truth: Truth | None = None  # where labels were made wrong on purpose; no part of the training
    fingerprint: Mapping[str, str] | None = None  # of the data, where the run is to be kept
    chosen: Chosen = NOTHING_CHOSEN  # what is done at once on this machine


class Built(NamedTuple):
    """A problem, the clients' data, and what was learnt about the columns where these are the user's own."""

    problem: Problem
    federation: Federation
    own: OwnFederation | None = None
    truth: Truth | None = None


def build_experiment(config: Config, *, is_kept: bool = False, before: Chosen | None = None) -> Experiment:
    """Return the experiment that a config describes, or refuse it before anything is computed.

    Of one that is kept in a folder, the data have a fingerprint: taken here, before the device has its say. What a run
    that goes on has chosen `before` counts.
    """
    algorithm = build_algorithm(config)
    problem, federation, own, truth = build_problem(config)
    fingerprint: Mapping[str, str] | None = federation.fingerprint if is_kept else None
    if is_kept and own is not None and own.fingerprint is not None:
        fingerprint = own.fingerprint
    check_breakdown(
        config.data.breakdown, has_table=own is not None, metrics=config.eval.metrics, part=config.eval.part
    )
    device = chosen_device(config.run.device)
    kind = problem_kind(config)
    problem = in_precision(problem.to(device), config.run.precision)
    if config.run.compile:
        problem = compiled(problem, config.run.cohort)
    federation = federation.to(device)
    if not algorithm.info.reads_inputs:
        problem, federation = with_features(problem, federation)
    if before is None:
        chosen = chosen_for(config, algorithm, problem, federation)
    else:
        chosen = chosen_again(before, config.run.memory, device)
    if chosen.evaluated is not None:
        problem = accelerate.evaluating(problem, chosen.evaluated)
    return Experiment(config, algorithm, problem, federation, kind, own, truth, fingerprint, chosen)


def chosen_for(config: Config, algorithm: AnyMethod, problem: Problem, federation: Federation) -> Chosen:
    """Return what is done at once, so that the run takes no more of a GPU's memory than it may."""
    if not accelerate.is_installed():
        return Chosen(torch.get_num_threads())
    size, is_on_gpu = expected_size(config, federation.n_clients), problem.theta0.is_cuda
    prepared = quietly_prepared(algorithm, problem, federation.n_clients, size) if is_on_gpu else algorithm
    apart = is_on_gpu and are_apart(config, prepared, problem, federation)
    try:
        return chosen_now(config.run.memory, problem, federation, prepared, size, on_streams=apart)
    except MemoryError as error:
        raise ConfigError(str(error)) from error


def method_named(name: str) -> type[AnyMethod]:
    """Return the class of a registered method, or say which name or which extra is meant."""
    try:
        found = method_called(name)
    except ValueError as refusal:
        raise ConfigError(str(refusal)) from refusal
    if found is not None:
        return found
    last = name.removeprefix("fedcorr+")
    if last in OPTIONAL:
        raise ConfigError(f"the method '{last}' needs an extra: pip install 'dqnfed[{OPTIONAL[last]}]'.")
    if last in REFERENCES:
        raise ConfigError(f"{last} is a reference for comparisons, which fedcorr cannot finish with; name a method.")
    known = [*REGISTRY, *REFERENCES]
    raise ConfigError(f"there is no method '{last}'{nearest(last, known)}; see `dqnfed list algorithms`.")


def build_algorithm(config: Config) -> AnyMethod:
    """Return the method with what the config sets; what it does not set is the method's own default."""
    name = config.algorithm.name
    kind = method_named(name)
    given, own, shared = given_settings(config), hyperparameters(kind), ", ".join(LOCAL_WORK)
    for key, setting in given.items():
        if key not in own and key not in LOCAL_WORK:
            raise ConfigError(
                f"unknown key '{setting.key}' for {name}{nearest(key, [*own, *LOCAL_WORK])}; it has "
                f"{', '.join(own) or 'no hyper-parameters of its own'}, and of the local work {shared}."
            )
    values = {f.name: given[f.name].value for f in fields(kind) if f.name in given}
    if values.get("batch_size") == "full":
        values["batch_size"] = None
    if values.get("schedule") == "cosine":
        values.setdefault("schedule_rounds", config.train.rounds)
    return kind(**values)


def build_problem(config: Config) -> Built:
    """Return the model with its loss and the clients' data, both drawn from the seeds that the config names."""
    data, seed = config.data, config.run.seed
    dtype = getattr(torch, config.run.dtype)
    if data.name == "bowls":
        if data.noise is not None:
            raise ConfigError("data.noise replaces labels, but bowls have none; leave the block out.")
        drawn = seed if data.seed is None else data.seed
        problem, federation = bowls(n_clients=data.clients or 8, seed=drawn, validation=data.validation)
        return Built(cast_problem(problem, dtype), federation)
    source = data_source(data, seed, config.eval.score)
    problem = module_problem(
        config,
        source.input_shape,
        source.n_outputs,
        source.loss,
        (source.score_name, source.score),
        settings=source.settings,
    )
    return Built(problem, source.federation, source.own, source.truth)


def module_problem(
    config: Config,
    input_shape: tuple[int, ...],
    n_outputs: int,
    loss: str,
    score: tuple[str, Score],
    *,
    settings: Mapping[str, Any] | None = None,
) -> Problem:
    """Return the config's model with fresh weights of the run's seed, and how it is trained and scored."""
    spec: dict[str, Any] = {
        "name": config.model.name,
        "input_shape": list(input_shape),
        "n_outputs": n_outputs,
        "settings": {**(settings or {}), **(config.model.model_extra or {})},
        "dtype": config.run.dtype,
    }
    module = build(
        spec["name"],
        input_shape=input_shape,
        n_outputs=n_outputs,
        settings=spec["settings"],
        seed=seed_number(config.run.seed, purpose="model") % 2**31,
    )
    module = module.to(getattr(torch, config.run.dtype))
    return Problem.from_module(module, loss=loss, score=score[1], score_name=score[0], model_spec=spec)


def cast_problem(problem: Problem, dtype: torch.dtype) -> Problem:
    """Return the problem in another precision."""
    assert problem.module is not None
    return Problem.from_module(
        problem.module.to(dtype), losses=problem.losses, score=problem.score, score_name=problem.score_name
    )


def problem_kind(config: Config) -> str:
    """Return what kind of problem this is, for methods that suit only some."""
    if config.data.name == "bowls":
        return "convex"
    return BATCH_NORM if (config.model.model_extra or {}).get("norm") == "batch" else "network"


def suitable_algorithms(kind: str) -> list[str]:
    """Return the methods that suit the problem and do not declare that they diverge.

    Label correction is asked for by name: its sweeps would fill most of a run that has no wrong labels.
    """
    return [
        name
        for name, method in REGISTRY.items()
        if kind in method.info.problem_kinds and not method.info.diverges and not issubclass(method, LabelCorrection)
    ]


def run_experiment(
    config: Config,
    out: Path | None,
    *,
    observers: Sequence[Any] = (),
    resume: bool = False,
    note: Callable[[str], None] = lambda text: None,
) -> RunResult:
    """Return the result of a config's experiment; settings without effect are noted before the first round."""
    before = chosen_before(out) if resume else None
    if n_threads := config.run.threads or (before.threads if before is not None else 0):
        torch.set_num_threads(n_threads)
    config = with_absolute_paths(config)
    experiment = build_experiment(config, is_kept=out is not None, before=before)
    if config.privacy.secure:
        experiment = secured(experiment)
    privacy = privacy_of(config, experiment)
    warn_of_few_rounds(experiment)
    prepared = prepared_method(experiment)
    if prepared.mode:
        note(f"{config.algorithm.name}: {prepared.mode}")
    if privacy is not None:
        note(f"privacy: {privacy}")
    unused = unused_settings(config, prepared)
    for line in unused_lines([(config, unused)]):
        note(line)

    def completed(outputs: Callable[[], Tensor]) -> dict[str, Any]:
        """Write what is known about groups and wrong labels, and return what the summary says beside the engine's own
        facts.
        """
        own = experiment.own
        if out is not None and own is not None and own.groups:
            write_breakdown(out, own.groups, experiment.problem, experiment.federation.test, outputs(), own.columns)
        if out is None or experiment.truth is None:
            return {"unused": unused}
        per_client = config.eval.metrics == "per-client"
        found = write_noise_record(out, experiment.truth, experiment.federation, per_client=per_client)
        return {"unused": unused, "noise": found}

    return run(
        experiment.algorithm,
        experiment.problem,
        experiment.federation,
        rounds=config.train.rounds,
        participation=config.train.participation,
        sampling=sampling_of(config),
        stragglers=stragglers_of(config),
        seed=config.run.seed,
        cohort=chosen_cohort(experiment),
        evaluation=Evaluation(**config.eval.model_dump(exclude={"score"})),
        policy=Policy(**config.policy.model_dump()),
        out=out,
        checkpoint_seconds=config.run.checkpoint_seconds,
        observers=observers,
        config=config.as_dict(),
        resume=resume,
        fingerprint=experiment.fingerprint,
        files={
            MACHINE_FILE: experiment.chosen.text(),
            **({} if experiment.own is None else {FEATURES_FILE: experiment.own.text()}),
        },
        complete=completed,
        secure=config.privacy.secure,
        privacy=privacy,
    )


def secured(experiment: Experiment) -> Experiment:
    """Return the experiment with its method as it can be run with `privacy.secure`."""
    config, n_clients = experiment.config, experiment.federation.n_clients
    size, policy = expected_size(config, n_clients), Policy(**config.policy.model_dump())
    return replace(
        experiment, algorithm=secure_method(experiment.algorithm, policy, experiment.problem, n_clients, size)
    )


def prepared_method(experiment: Experiment) -> AnyMethod:
    """Return the method as the engine prepares it; the warnings of that are left to the engine."""
    n_clients = experiment.federation.n_clients
    size = expected_size(experiment.config, n_clients)
    return quietly_prepared(experiment.algorithm, experiment.problem, n_clients, size)


def quietly_prepared(algorithm: AnyMethod, problem: Problem, n_clients: int, size: int) -> AnyMethod:
    """Return the method as it is prepared, whose warnings are left to the engine."""
    logger.addFilter(nothing)
    try:
        return algorithm.prepare(problem, n_clients, size)
    finally:
        logger.removeFilter(nothing)


def nothing(record: logging.LogRecord) -> bool:
    """Keep no record of a log."""
    return False


def warn_of_few_rounds(experiment: Experiment) -> None:
    """Say so if the run ends before its method's last stage, or before lr has its value."""
    algorithm, rounds = experiment.algorithm, experiment.config.train.rounds
    if algorithm.warmup >= rounds:
        logger.warning(
            "train.warmup is %d and the run has %d rounds, so the learning rate never reaches its value; raise "
            "train.rounds, or lower train.warmup",
            algorithm.warmup,
            rounds,
        )
    if not isinstance(algorithm, LabelCorrection):
        return
    before = algorithm.rounds_before_finishing(experiment.federation.n_clients)
    if rounds <= before:
        logger.warning(
            "FedCorr's sweeps, fine-tuning and correction take %d rounds with %d clients, so %s never begins in %d; "
            "raise train.rounds, or lower sweeps and fine_tuning",
            before,
            experiment.federation.n_clients,
            algorithm.inner_name,
            rounds,
        )


def resumed_config(folder: Path) -> Config:
    """Return the config of a run folder; data that have moved since are looked for where data are by default."""
    if "config.toml" in damaged_files(folder):
        raise ConfigError(
            f"{folder} cannot go on: {damage_line('config.toml')}, so its settings are not known. Put it back from a "
            "copy, or start a new run in another folder."
        )
    config = checked(RunFolder(folder).config(), str(folder / "config.toml"))
    if config.data.dir is not None and not Path(config.data.dir).is_dir():
        return config.model_copy(update={"data": config.data.model_copy(update={"dir": None})})
    return config


def with_absolute_paths(config: Config) -> Config:
    """Return the config whose data are found from any directory: what was relative to this one is not any more."""
    data = config.data
    named = {"file": data.file, "manifest": data.manifest, "dir": data.dir}
    paths = {key: str(Path(path).expanduser().absolute()) for key, path in named.items() if path is not None}
    is_there = data.file is None and data.name in DATASETS and bool(dataset_called(data.name).folder)
    if is_there and data.dir is None and not default_data_dir().is_absolute():
        paths["dir"] = str(default_data_dir().absolute())
    blocks: dict[str, Any] = {"data": data.model_copy(update=paths)} if paths else {}
    if config.train.trace is not None:
        trace = str(Path(config.train.trace).expanduser().absolute())
        blocks["train"] = config.train.model_copy(update={"trace": trace})
    return config.model_copy(update=blocks) if blocks else config
