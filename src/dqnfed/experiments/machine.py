"""Where and how a config's clients are computed: the device, its precision, the runner of a cohort."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dqnfed.core.federation import Federation
from dqnfed.core.local_work import AnyMethod
from dqnfed.core.problem import Problem
from dqnfed.core.runners import CohortRunner, looped, vectorised
from dqnfed.experiments.config import Config, ConfigError
from dqnfed.sim import accelerate
from dqnfed.sim.accelerate import automatic, on_streams, ray_cluster, streams, threads

if TYPE_CHECKING:
    from dqnfed.experiments.experiment import Experiment

MOST_STREAMS = 5  # of a GPU; ten clients, the usual cohort, then share them evenly


def chosen_device(name: str) -> torch.device:
    """Return the device; "auto" takes the GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"run.device is '{name}', but a device is auto, cpu, cuda or cuda:1.") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"run.device is '{name}', but a device is auto, cpu, cuda or cuda:1.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"run.device is '{name}', but torch sees no CUDA device; use device = 'cpu'.")
    return device


def chosen_cohort(experiment: Experiment) -> CohortRunner:
    """Return how the cohort is run; "auto" goes by the machine and the model, and the speed page says by which rule."""
    settings, problem = experiment.config.run, experiment.problem
    device = problem.theta0.device
    if settings.cohort == "streams" and device.type != "cuda":
        raise ConfigError(f"run.cohort is 'streams', which are a GPU's, but the device is '{device}'; use 'auto'.")
    if settings.cohort == "threads" and device.type != "cpu":
        raise ConfigError(
            f"run.cohort is 'threads', which compute on CPUs, but the device is '{device}'; use device = 'cpu', or "
            "cohort = 'auto'."
        )
    if settings.gpu_share is not None and settings.cohort != "ray":
        raise ConfigError("run.gpu_share is what a Ray worker has of a GPU: set run.cohort = 'ray', or leave it out.")
    match settings.cohort:
        case "looped":
            return looped()
        case "threads":
            return threads()
        case "streams":
            return streams(experiment.chosen.streams or MOST_STREAMS)
        case "ray":
            return over_ray(experiment)
    chunk = settings.chunk if settings.chunk is not None else experiment.chosen.chunk
    if settings.cohort == "vectorised" or settings.chunk is not None:
        return vectorised(chunk)
    if device.type == "cuda" and are_apart(experiment.config, experiment.algorithm, problem, experiment.federation):
        return streams(experiment.chosen.streams or MOST_STREAMS)
    if chunk is not None:
        return vectorised(chunk)
    return automatic(experiment.algorithm, problem, experiment.federation)


def are_apart(config: Config, algorithm: AnyMethod, problem: Problem, federation: Federation) -> bool:
    """Return whether a GPU's clients are run one by one, on streams or after each other."""
    if config.run.cohort != "auto" or config.run.chunk is not None:
        return config.run.cohort in ("looped", "streams")
    return config.run.compile or on_streams(algorithm, problem, federation)


def over_ray(experiment: Experiment) -> CohortRunner:
    """Return the runner on a Ray cluster, or say which extra it needs."""
    if find_spec("ray") is None:
        raise ConfigError("run.cohort = 'ray' needs an extra: pip install 'dqnfed[ray]'.")
    settings = experiment.config.run
    if experiment.config.train.late == "partial":
        raise ConfigError("train.late = 'partial' is not for run.cohort = 'ray'; use 'auto', or train.late = 'drop'.")
    own_device = 1.0 if experiment.problem.theta0.is_cuda else 0.0
    share = own_device if settings.gpu_share is None else settings.gpu_share
    given: dict[str, Any] = {"workers": settings.workers, "address": settings.address, "gpu_share": share}
    return ray_cluster(experiment.federation, **given)


def in_precision(problem: Problem, precision: str) -> Problem:
    """Return the problem with products and convolutions in the precision that `run.precision` names."""
    device = problem.theta0.device
    if device.type != "cuda":
        if precision in ("default", "float32"):
            return problem
        raise ConfigError(f"run.precision is '{precision}', for GPUs, but the device is '{device}'; leave it out.")
    # set each time: what another run of this process chose must not hold for this one
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision != "float32"
    return problem.autocast(torch.bfloat16) if precision == "bf16" else problem


def compiled(problem: Problem, cohort: str) -> Problem:
    """Return the problem whose steps are compiled, or say why that cannot be."""
    device = problem.theta0.device
    if device.type != "cuda":
        raise ConfigError(f"run.compile is for GPUs, but the device is '{device}'; leave it out.")
    if not has_images(problem) or cohort not in ("auto", "streams"):
        raise ConfigError(
            "run.compile is for networks with convolutions (nn.Conv2d) whose clients are run on streams "
            f"(run.cohort = 'auto'), but run.cohort is '{cohort}' and the model has "
            f"{'some' if has_images(problem) else 'none'}; leave it out."
        )
    return accelerate.compiled(problem)


def has_images(problem: Problem) -> bool:
    """Return whether the model has convolutions of images, whose clients a GPU runs apart from each other."""
    return any(isinstance(part, nn.Conv2d) for part in (problem.module or nn.Identity()).modules())
