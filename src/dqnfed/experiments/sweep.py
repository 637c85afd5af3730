"""Hyper-parameter search on Optuna: every method gets its best settings, chosen on validation data, before the test."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import multiprocessing
import tomllib
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast, get_args

import torch

from dqnfed.core.result import RunResult
from dqnfed.core.run_folder import write_atomically
from dqnfed.experiments.config import AlgorithmBlock, Config, ConfigError
from dqnfed.experiments.config import ValidationMeasure as Select
from dqnfed.experiments.experiment import build_algorithm, run_experiment
from dqnfed.experiments.grids import PAPER_GRIDS
from dqnfed.experiments.planned import Planned, is_finished, placed, was_started
from dqnfed.experiments.side_by_side import threads_a_job

if TYPE_CHECKING:
    from optuna import Study, Trial

logger = logging.getLogger("dqnfed")

Grid = Mapping[str, list[Any]]
Sampler = Literal["grid", "tpe"]
VALIDATION_SHARE = 0.1  # of each client's examples, where the experiment holds none out itself
N_TPE_TRIALS = 20
RESULT_FILE = "sweep.json"


@dataclass(frozen=True)
class Plan:
    """What is searched, how, and where the results go."""

    config: Config
    algorithms: tuple[str, ...]
    seeds: tuple[int, ...]
    out: Path
    grids: Mapping[str, Grid]
    sampler: Sampler = "grid"
    n_trials: int = N_TPE_TRIALS  # of TPE, for each method; a grid is tried whole
    select: Select = "mean"  # which number of the validation scores is made as large as possible
    storage: str | None = None  # an Optuna URL, for several machines; default: SQLite in `out`
    jobs: int = 1  # processes on this machine

    @property
    def storage_url(self) -> str:
        return self.storage or f"sqlite:///{(self.out / 'sweep.db').resolve()}"


class Tried(NamedTuple):
    """One point of the search."""

    settings: dict[str, Any]
    score: float | None  # mean over seeds of the selected validation number; None: it could not run
    scores: dict[str, float]  # by seed
    why: str  # it could not run


class Found(NamedTuple):
    """What the search found for one method."""

    algorithm: str
    best: dict[str, Any]
    score: float | None
    tried: tuple[Tried, ...]


def search(plan: Plan) -> list[Found]:
    """Return the best settings of every method; what an earlier search of the same plan has tried is not tried again.

    Points are scored on each client's validation examples, never on test examples. Several machines that share a
    storage URL and a file system share the work.
    """
    optuna_or_explain()
    for name in plan.algorithms:
        for point in grid_points(plan.grids.get(name, {})):
            build_algorithm(with_settings(plan.config, name, point))  # bad keys are refused before anything runs
    plan.out.mkdir(parents=True, exist_ok=True)
    for name in plan.algorithms:
        if plan.grids.get(name):
            prepare_study(plan, name)
    if plan.jobs == 1:
        work(plan)
    else:
        spawn, share = multiprocessing.get_context("spawn"), threads_a_job(plan.jobs)
        with ProcessPoolExecutor(plan.jobs, spawn, initializer=torch.set_num_threads, initargs=(share,)) as pool:
            for finished in [pool.submit(work, plan) for _ in range(plan.jobs)]:
                finished.result()
    found = [found_for(plan, name) for name in plan.algorithms]
    write_atomically(plan.out / RESULT_FILE, json.dumps(as_json(plan, found), indent=1))
    write_atomically(plan.out / "sweep.md", as_markdown(plan, found))
    return found


def checked_plan(
    config: Config,
    algorithms: Sequence[str],
    seeds: Sequence[int],
    out: Path,
    grids: Mapping[str, Grid],
    *,
    sampler: str = "grid",
    n_trials: int = N_TPE_TRIALS,
    select: str = "mean",
    storage: str | None = None,
    jobs: int = 1,
) -> Plan:
    """Return the plan, or refuse a word that means nothing."""
    if sampler not in get_args(Sampler):
        raise ConfigError(f"the sampler is one of {', '.join(get_args(Sampler))}, but '{sampler}' was asked for.")
    if select not in get_args(Select):
        raise ConfigError(f"settings are selected by one of {', '.join(get_args(Select))}, not by '{select}'.")
    return Plan(
        config,
        tuple(algorithms),
        tuple(seeds),
        out,
        grids,
        cast(Sampler, sampler),
        n_trials,
        cast(Select, select),
        storage,
        jobs,
    )


def final_runs(plan: Plan, found: Sequence[Found]) -> list[Planned]:
    """Return every method at its best with every seed, into OUT/best/<method>/<seed>."""
    return placed(
        [
            (final_config(plan, f).with_seed(seed), plan.out / "best" / f.algorithm / str(seed))
            for f in found
            for seed in plan.seeds
        ]
    )


def final_config(plan: Plan, found: Found) -> Config:
    """Return the experiment with the settings that were found: the same training data, evaluated on the test data."""
    config = with_settings(held_out(plan.config), found.algorithm, found.best)
    return config.model_copy(update={"eval": config.eval.model_copy(update={"part": "test"})})


def chosen_grids(config: Config, grid: str) -> dict[str, Grid]:
    """Return the grids by method: the paper's ("paper", with what the experiment says beside it), or those of a TOML
    file.
    """
    if grid == "paper":
        return {**PAPER_GRIDS, **config.grids}
    path = Path(grid)
    if not path.is_file():
        raise ConfigError(
            f"--grid is 'paper' or a TOML file with a table [method] of lists, but there is no file {grid}."
        )
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{grid} is not valid TOML: {error}.") from error
    for name, table in content.items():
        if not isinstance(table, dict) or not all(isinstance(values, list) and values for values in table.values()):
            raise ConfigError(f"{grid}: [{name}] must hold lists of values, as in q = [0.1, 1].")
    return content


def grid_points(grid: Grid) -> list[dict[str, Any]]:
    """Return every combination of a grid's values; one empty point for an empty grid."""
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def held_out(config: Config) -> Config:
    """Return the experiment with validation examples in every client."""
    if config.data.validation > 0:
        return config
    return config.model_copy(update={"data": config.data.model_copy(update={"validation": VALIDATION_SHARE})})


def with_settings(config: Config, algorithm: str, settings: Mapping[str, Any]) -> Config:
    """Return the experiment with this method at these settings."""
    base = config.with_algorithm(algorithm)
    block = {**base.algorithm.model_dump(), **settings}
    return base.model_copy(update={"algorithm": AlgorithmBlock.model_validate(block)})


def optuna_or_explain() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise ConfigError("sweeps need Optuna; install it with `pip install dqnfed[sweep]`.") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def open_study(plan: Plan, algorithm: str) -> Study:
    optuna = optuna_or_explain()
    sampler = optuna.samplers.TPESampler(seed=plan.config.run.seed)
    study: Study = optuna.create_study(
        study_name=f"{plan.config.name}/{algorithm}/{plan.sampler}/{question_of(plan)}",
        storage=plan.storage_url,
        sampler=sampler,
        direction="maximize",
        load_if_exists=True,
    )
    return study


def question_of(plan: Plan) -> str:
    """Return a short name of what is asked, so that scores of another question are never taken for answers."""
    asked = {"config": held_out(plan.config).as_dict(), "seeds": list(plan.seeds), "select": plan.select}
    return hashlib.blake2b(json.dumps(asked, sort_keys=True).encode(), digest_size=6).hexdigest()


def prepare_study(plan: Plan, algorithm: str) -> None:
    """Put into the study's queue every grid point that is neither tried nor waiting, those that were cut short too."""
    state = optuna_or_explain().trial.TrialState
    study = open_study(plan, algorithm)
    if plan.storage is None:  # nobody else works on this file, so what seems to run is dead
        for trial in study.get_trials(states=[state.RUNNING], deepcopy=False):
            study.tell(trial.number, state=state.FAIL)
    if plan.sampler == "grid":
        settled_states = (state.COMPLETE, state.WAITING, state.RUNNING)
        known = [
            trial.user_attrs.get("point")
            for trial in study.get_trials(deepcopy=False)
            if trial.state in settled_states or "why" in trial.user_attrs
        ]
        for point in grid_points(plan.grids[algorithm]):
            if point not in known:
                study.enqueue_trial(point, user_attrs={"point": point})


def work(plan: Plan) -> None:
    """Try points until none is left; run by every process and every machine of a search."""
    state = optuna_or_explain().trial.TrialState
    for name in plan.algorithms:
        if not plan.grids.get(name):
            continue
        study = open_study(plan, name)
        while n_left(plan, study) > 0:
            trial = study.ask()
            if plan.sampler == "grid" and "point" not in trial.user_attrs:
                study.tell(trial, state=state.PRUNED)  # another process took the last point in this very moment
                break
            try:
                score = validated(plan, name, trial)
            except (ValueError, RuntimeError) as error:
                logger.error("%s at %s could not run: %s", name, point_name(trial.params), error)
                trial.set_user_attr("why", str(error))
                study.tell(trial, state=state.FAIL)
            except BaseException:
                study.tell(trial, state=state.FAIL)  # cut short: the next search tries it again
                raise
            else:
                study.tell(trial, score)


def n_left(plan: Plan, study: Study) -> int:
    """Return how many points have not been started."""
    state = optuna_or_explain().trial.TrialState
    trials = study.get_trials(deepcopy=False)
    if plan.sampler == "grid":
        return sum(trial.state == state.WAITING for trial in trials)
    started = sum(t.state in (state.COMPLETE, state.RUNNING) or "why" in t.user_attrs for t in trials)
    return plan.n_trials - started


def validated(plan: Plan, algorithm: str, trial: Trial) -> float:
    """Return the mean over seeds of a point's validation number; every run is kept, and resumed if it was cut."""
    settings = {key: suggested(trial, key, values, plan.sampler) for key, values in plan.grids[algorithm].items()}
    config = with_settings(held_out(plan.config), algorithm, settings)
    config = config.model_copy(update={"eval": config.eval.model_copy(update={"part": "validation"})})
    scores = {}
    for seed in plan.seeds:
        folder = plan.out / "trials" / algorithm / point_name(settings) / str(seed)
        scores[str(seed)] = validation_score(config.with_seed(seed), folder, plan.select)
    trial.set_user_attr("scores", scores)
    return sum(scores.values()) / len(scores)


def validation_score(config: Config, folder: Path, select: Select) -> float:
    if is_finished(folder, config):
        result = RunResult.load(folder)
    else:
        result = run_experiment(config, folder, resume=was_started(folder, config))
    if result.summary["status"] == "interrupted":
        raise KeyboardInterrupt
    score = result.summary["accuracy"][select]
    if score is None or not math.isfinite(score):
        raise ValueError(f"its validation number '{select}' is not finite")
    return float(score)


def suggested(trial: Trial, key: str, values: list[Any], sampler: str) -> Any:
    """Return the trial's value: one of the list, or with TPE anything between its ends where they are positive
    numbers.
    """
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
    if sampler == "grid" or not numbers or min(values) <= 0 or len(values) < 2:
        return trial.suggest_categorical(key, values)
    if all(isinstance(v, int) for v in values):
        return trial.suggest_int(key, min(values), max(values), log=max(values) / min(values) >= 10)
    return trial.suggest_float(key, float(min(values)), float(max(values)), log=max(values) / min(values) >= 10)


def point_name(settings: Mapping[str, Any]) -> str:
    return ",".join(
        f"{key}={value:.6g}" if isinstance(value, float) else f"{key}={value}" for key, value in settings.items()
    )


def found_for(plan: Plan, algorithm: str) -> Found:
    """Return what the study of a method holds, best first; a method without a grid keeps its defaults."""
    if not plan.grids.get(algorithm):
        return Found(algorithm, {}, None, ())
    optuna = optuna_or_explain()
    complete = optuna.trial.TrialState.COMPLETE
    tried = []
    for trial in open_study(plan, algorithm).get_trials(deepcopy=False):
        if trial.state == complete:
            tried.append(Tried(dict(trial.params), trial.value, trial.user_attrs["scores"], ""))
        elif "why" in trial.user_attrs:
            tried.append(Tried(dict(trial.params), None, {}, trial.user_attrs["why"]))
    tried.sort(key=lambda t: -float("inf") if t.score is None else t.score, reverse=True)
    if not tried or tried[0].score is None:
        why = tried[0].why if tried else "nothing was tried"
        raise ConfigError(f"no setting of {algorithm} could run: {why}")
    return Found(algorithm, tried[0].settings, tried[0].score, tuple(tried))


def as_json(plan: Plan, found: Sequence[Found]) -> dict[str, Any]:
    return {
        "experiment": plan.config.name,
        "part": "validation",
        "select": plan.select,
        "sampler": plan.sampler,
        "seeds": list(plan.seeds),
        "algorithms": {
            f.algorithm: {"best": f.best, "score": f.score, "tried": [t._asdict() for t in f.tried]} for f in found
        },
    }


def as_markdown(plan: Plan, found: Sequence[Found]) -> str:
    """Return the best settings and the whole grid as Markdown."""
    seeds = f"{len(plan.seeds)} seeds" if len(plan.seeds) > 1 else "1 seed"
    lines = [f"# {plan.config.name}: settings chosen on validation data ({plan.select}, {seeds})", ""]
    for f in found:
        if not f.tried:
            lines += [f"## {f.algorithm}", "", "Nothing to choose; defaults.", ""]
            continue
        lines += [f"## {f.algorithm}: {point_name(f.best)}", "", "| setting | validation | by seed |", "|---|---|---|"]
        for t in f.tried:
            score = f"{t.score:.2f}" if t.score is not None else f"could not run: {t.why}"
            lines.append(f"| {point_name(t.settings)} | {score} | {', '.join(f'{s:.2f}' for s in t.scores.values())} |")
        lines.append("")
    return "\n".join(lines)
