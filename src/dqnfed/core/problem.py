"""What is learnt, independent of who holds the data."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from dqnfed.core.kernels import PLAIN, Kernels
from dqnfed.core.norms import BATCH_NORMS, Norms, norms_of, with_client_norms
from dqnfed.core.tensors import Layout, module_layout, module_theta, named_parameters


class Task(NamedTuple):
    """All that one client uses in one round."""

    inputs: Tensor  # [N, ...] padded
    targets: Tensor  # [N, ...] padded
    mask: Tensor  # [N]      1 = a real example
    batches: Tensor  # [S, B] rows of each local step; -1 = nothing; B = 0 means every step uses all examples
    noise: Tensor  # what the algorithm declared it needs, drawn on the host: the same wherever it runs
    lr: Tensor  # []       the local learning rate of this round


def sampled(task: Task, *, every: int, least: int) -> Task:
    """Return the task with one in `every` of its examples, `least` at least, evenly spaced: always the same ones."""
    most = max(least, len(task.mask) // every)  # padding included: the other tasks of a cohort have the same shape
    if len(task.mask) <= most:
        return task
    n_examples, places = task.mask.sum().long(), torch.arange(most, device=task.mask.device)
    size = (n_examples // every).clamp(min=least)
    rows = torch.where(n_examples > size, places * n_examples // size, places).clamp(max=len(task.mask) - 1)
    mask = torch.where(places < size, task.mask[rows], torch.zeros_like(task.mask[rows]))
    inputs = task.inputs.index_select(0, rows)  # which copies whole images; an index in brackets copies their numbers
    return task._replace(inputs=inputs, targets=task.targets[rows], mask=mask)


def cross_entropies(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy of every example; outputs are logits [N, classes]."""
    if outputs.dim() != 2 or targets.dim() != 1 or targets.is_floating_point():
        return F.cross_entropy(outputs, targets, reduction="none")
    # as F.cross_entropy does, which under vmap takes a detour that first imports torch's compiler
    chances = torch.log_softmax(outputs, dim=1).gather(1, targets.clamp(min=0)[:, None])[:, 0]
    return torch.where(targets >= 0, -chances, torch.zeros_like(chances))


def squared_errors(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return half the squared error of every example, summed over its outputs."""
    found, wanted = outputs.reshape(len(targets), -1), targets.reshape(len(targets), -1)
    if found.shape != wanted.shape:
        raise ValueError(
            f"the model has {found.shape[1]} outputs for each example, but its target has {wanted.shape[1]} numbers; "
            "give the model as many outputs."
        )
    return 0.5 * (found - wanted.to(found.dtype)).square().sum(1)


def logistic_losses(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the logistic loss of every example; outputs [N] are margins before the sign, targets are -1 or +1."""
    margins = outputs.reshape(-1) * targets.to(outputs.dtype)
    return F.softplus(-margins, threshold=40.0)  # beyond torch's own 20 the loss would be off by 2e-9


def accuracy(outputs: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    """Return the percentage of real examples whose largest output is the target class."""
    hits = (outputs.argmax(-1) == targets).to(mask.dtype)
    return 100.0 * (hits * mask).sum() / mask.sum().clamp(min=1)


def sign_accuracy(outputs: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    """Return the percentage of real examples whose output has the sign of the target."""
    hits = (outputs.reshape(-1) * targets.to(outputs.dtype) > 0).to(mask.dtype)
    return 100.0 * (hits * mask).sum() / mask.sum().clamp(min=1)


def negative_loss(outputs: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    """Return minus the mean squared error over real examples: a score for regression (higher is better)."""
    return -(2.0 * squared_errors(outputs, targets) * mask).sum() / mask.sum().clamp(min=1)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross-entropy": cross_entropies,
    "squared-error": squared_errors,
    "logistic": logistic_losses,
}
SCORES: dict[str, tuple[str, Callable[[Tensor, Tensor, Tensor], Tensor]]] = {
    "cross-entropy": ("accuracy", accuracy),
    "squared-error": ("negative squared error", negative_loss),
    "logistic": ("accuracy", sign_accuracy),
}
BATCH_NORM = "batch-norm"  # the kind of problem whose model has BatchNorm layers
PERCENT = ("accuracy", "auc", "f1")  # scores from 0 to 100


def score_range(score_name: str) -> tuple[float, float]:
    """Return the lowest and the highest value of a score; those of a user's own are not known."""
    if any(score_name.startswith(name) for name in PERCENT):
        return 0.0, 100.0
    return (-inf, 0.0) if score_name.startswith("negative") else (-inf, inf)


@dataclass(frozen=True)
class ModuleModel:
    """A module as a function of its parameters: the `predict` of problems made from modules."""

    module: nn.Module
    layout: Layout
    autocast: torch.dtype | None = None  # the precision of products and convolutions; None: that of theta

    def __call__(self, theta: Tensor, inputs: Tensor) -> Tensor:
        return self.outputs(named_parameters(theta, self.layout), cast_inputs(inputs, theta.dtype))

    def outputs(self, parameters: dict[str, Tensor], inputs: Tensor) -> Tensor:
        """Return the outputs with the named parameters; the module is borrowed meanwhile, so one thread at a time."""
        if self.autocast is None:
            found: Any = functional_call(self.module, parameters, (inputs,))
            return found if isinstance(found, Tensor) else logits_in(found)
        dtype = next(iter(parameters.values())).dtype
        with torch.autocast(inputs.device.type, self.autocast):
            found = functional_call(self.module, parameters, (inputs,))
        return (found if isinstance(found, Tensor) else logits_in(found)).to(dtype)


def logits_in(found: Any) -> Tensor:
    """Return the logits of a model that returns a dict, or an object, which holds them."""
    logits = found.get("logits") if isinstance(found, Mapping) else getattr(found, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    held = f" with {', '.join(map(repr, found))}" if isinstance(found, Mapping) else ""
    raise TypeError(
        f"the model returns a {type(found).__name__}{held}, and not a tensor, nor a dict or an object with `logits`; "
        "wrap it in a module whose forward returns the outputs alone"
    )


def cast_inputs(inputs: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the inputs in the model's precision; whole numbers (bytes of images, characters) stay as they are."""
    return inputs.to(dtype) if inputs.is_floating_point() else inputs


@dataclass(frozen=True)
class Problem:
    """A model, a loss and a score, with the model's parameters as one vector theta."""

    theta0: Tensor  # [n] the start
    layout: Layout  # named tensors inside theta: layer-wise methods, heads, files
    predict: Callable[[Tensor, Tensor], Tensor]  # theta, inputs [N, ...] -> outputs [N, ...]
    losses: Callable[[Tensor, Tensor], Tensor]  # outputs, targets -> [N]
    score: Callable[[Tensor, Tensor, Tensor], Tensor]  # outputs, targets, mask -> [], higher is better
    score_name: str = "accuracy"
    ridge: float = 0.0  # every client's loss has ridge/2 ||theta||^2 inside
    loss_floor: float = 0.0  # no client's loss can be below this; caps DQN-Fed's rates
    module: nn.Module | None = field(default=None, repr=False)
    model_spec: dict[str, Any] | None = field(default=None, repr=False)  # how to build the module again from a file
    kernels: Kernels = field(default=PLAIN, repr=False, compare=False)  # how gradients and local SGD are computed
    norms: Norms | None = None  # of a model with BatchNorm, the parts of theta; their clients keep all but the first

    @property
    def n_parameters(self) -> int:
        return len(self.theta0)

    def loss(self, theta: Tensor, task: Task) -> Tensor:
        """Return the client's mean training loss at theta."""
        losses = self.losses(self.predict(theta, task.inputs), task.targets)
        return self.regularised(theta, (losses * task.mask).sum() / task.mask.sum().clamp(min=1))

    def batch_loss(self, theta: Tensor, task: Task, batch: Tensor) -> Tensor:
        """Return the mean loss over the rows that the batch names; entries of -1 are no rows."""
        mask = (batch >= 0).to(task.mask.dtype)
        rows = batch.clamp(min=0)
        losses = self.losses(self.predict(theta, task.inputs[rows]), task.targets[rows])
        return self.regularised(theta, (losses * mask).sum() / mask.sum().clamp(min=1))

    def regularised(self, theta: Tensor, loss: Tensor) -> Tensor:
        """Return a client's loss with the ridge in it."""
        if not self.ridge:
            return loss
        trained = theta if self.norms is None else theta[: self.norms.n_trained]
        return loss + 0.5 * self.ridge * trained.square().sum()

    def to(self, device: torch.device | str) -> Problem:
        """Return the same problem with theta and the module's buffers on the device."""
        if self.module is None:
            return _replaced(self, theta0=self.theta0.to(device))
        moved = Problem.from_module(
            copy.deepcopy(self.module).to(device),
            losses=self.losses,
            score=self.score,
            score_name=self.score_name,
            ridge=self.ridge,
            loss_floor=self.loss_floor,
            model_spec=self.model_spec,
        )
        moved = _replaced(moved, theta0=self.theta0.to(device), kernels=self.kernels.fresh())
        autocast = self.predict.autocast if isinstance(self.predict, ModuleModel) else None
        return moved if autocast is None else moved.autocast(autocast)

    @classmethod
    def from_module(
        cls,
        module: nn.Module,
        *,
        loss: str = "cross-entropy",  # cross-entropy | squared-error | logistic; `losses` replaces it
        losses: Callable[[Tensor, Tensor], Tensor] | None = None,
        score: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
        score_name: str | None = None,
        ridge: float = 0.0,
        loss_floor: float = 0.0,
        model_spec: dict[str, Any] | None = None,
    ) -> Problem:
        """Return the problem of training an ordinary module; dropout is off, buffers stay as they are.

        The statistics of BatchNorm layers are part of theta, at its end; methods that do not keep these layers with
        each client refuse the problem when a run begins.
        """
        if not isinstance(module, nn.Module):
            raise ValueError(f"`module` must be a torch.nn.Module, but is a {type(module).__name__}: {module!r}.")
        loss = _loss_name(loss)
        _refuse_mixed_examples(module)
        _refuse_frozen_parameters(module)
        template = copy.deepcopy(module).eval()
        if not any(True for _ in template.parameters()):
            raise ValueError(f"{type(module).__name__} has no parameters, so there is nothing to train.")
        layout, theta0, norms = norms_of(template) or (module_layout(template), module_theta(template), None)

        default_name, default_score = SCORES[loss]
        return cls(
            theta0=theta0,
            layout=layout,
            predict=ModuleModel(template if norms is None else with_client_norms(template), layout),
            losses=losses or LOSSES[loss],
            score=score or default_score,
            score_name=score_name or ("score" if score else default_name),
            ridge=ridge,
            loss_floor=loss_floor,
            module=template,
            model_spec=model_spec,
            norms=norms,
        )

    def replica(self) -> Problem:
        """Return the same problem with a module of its own, for another thread."""
        if not isinstance(self.predict, ModuleModel):
            return self
        module = copy.deepcopy(self.predict.module)
        model = replace(self.predict, module=module)
        own = module if self.norms is None else self.module
        return _replaced(self, predict=model, module=own, kernels=self.kernels.fresh())

    def autocast(self, dtype: torch.dtype | None) -> Problem:
        """Return the same problem with products and convolutions in another precision; theta keeps its own."""
        if not isinstance(self.predict, ModuleModel):
            raise ValueError("only problems made from modules can be computed in another precision than theta's.")
        return _replaced(self, predict=replace(self.predict, autocast=dtype), kernels=self.kernels.fresh())

    def module_at(self, theta: Tensor) -> nn.Module:
        """Return a copy of the module with theta as its parameters, in evaluation mode."""
        if self.module is None:
            raise ValueError("this problem was not made from a module, so there is none to return; use `theta`.")
        module = copy.deepcopy(self.module)
        fill_module(module, named_parameters(theta, self.layout))
        return module


def check_fit(problem: Problem, inputs: Tensor, targets: Tensor) -> None:
    """Raise where the model, its loss and the data do not fit: what a run would meet in its first round.

    `inputs` and `targets` are all examples; the first two are passed through the model.
    """
    few, wanted = inputs[:2].to(problem.theta0.device), targets[:2].to(problem.theta0.device)
    try:
        with torch.no_grad():
            outputs: Any = problem.predict(problem.theta0, few)
    except Exception as error:  # whatever a module of somebody else raises
        raise ValueError(
            f"the model cannot read the clients' inputs of shape {tuple(inputs.shape[1:])} and type {inputs.dtype} "
            f"({type(error).__name__}: {error}); give it inputs that it was made for."
        ) from error
    _check_outputs(problem, outputs, len(few), targets)
    try:
        with torch.no_grad():
            losses = problem.losses(outputs, wanted)
    except Exception as error:
        raise ValueError(
            f"the loss cannot compare outputs of shape {tuple(outputs.shape)} with targets of shape "
            f"{tuple(wanted.shape)} and type {wanted.dtype} ({type(error).__name__}: {error}); whole numbers are "
            'classes, for "squared-error" and "logistic" give floats.'
        ) from error
    found: Any = losses
    if not isinstance(found, Tensor) or found.shape != (len(few),):
        shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise ValueError(
            f"the loss must return one number for each of {len(few)} examples, shape ({len(few)},), but returns "
            f'{shape}; do not take its mean (reduction="none").'
        )


def _check_outputs(problem: Problem, outputs: Any, n_examples: int, targets: Tensor) -> None:
    """Raise where the outputs are not one row an example, or fewer than there are classes."""
    if not isinstance(outputs, Tensor) or outputs.dim() == 0 or len(outputs) != n_examples:
        what = f"of shape {tuple(outputs.shape)}" if isinstance(outputs, Tensor) else f"a {type(outputs).__name__}"
        raise ValueError(
            f"the model must return one row of outputs for each of {n_examples} examples, but returns {what}."
        )
    if problem.losses is not cross_entropies or targets.dim() != 1 or targets.is_floating_point():
        return
    n_outputs, largest = outputs.shape[1] if outputs.dim() > 1 else 1, int(targets.max())
    if largest >= n_outputs:
        raise ValueError(
            f"the model has {n_outputs} outputs, but the clients have the class {largest}; it needs at least "
            f"{largest + 1}."
        )


def fill_module(module: nn.Module, parameters: dict[str, Tensor]) -> None:
    """Copy the named parameters, and statistics of BatchNorm, into the module, which must have these and no others."""
    held: dict[str, Tensor] = dict(module.named_parameters())
    if found := norms_of(module):
        held |= {name: module.get_buffer(name) for name, _ in found[0] if name not in held}
    more = parameters.keys() - held.keys()
    with torch.no_grad():
        for name, parameter in held.items():
            if name not in parameters:
                raise ValueError(f"the saved model has no parameter '{name}'; it has {sorted(parameters)}.")
            if parameters[name].shape != parameter.shape:
                raise ValueError(
                    f"parameter '{name}' has shape {tuple(parameter.shape)} in the module but "
                    f"{tuple(parameters[name].shape)} in the saved model; build the module as it was trained."
                )
            parameter.copy_(parameters[name])
    if more:
        raise ValueError(f"the saved model has more parameters than the module: {', '.join(map(repr, sorted(more)))}.")


def _loss_name(loss: Any) -> str:
    """Return the loss's name as in LOSSES; cross_entropy and "Cross Entropy" are cross-entropy."""
    if not isinstance(loss, str):
        what = "a function" if callable(loss) else f"a {type(loss).__name__}"
        raise ValueError(
            f"`loss` must be a name, one of {sorted(LOSSES)}, but is {what}: {loss!r}. Pass a function of your own as "
            '`losses=`; it returns one number an example, as nn.CrossEntropyLoss(reduction="none") does.'
        )
    name = loss.lower().replace("_", "-").replace(" ", "-")
    if name not in LOSSES:
        close = difflib.get_close_matches(name, LOSSES, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"loss must be one of {sorted(LOSSES)}, but is {loss!r}.{hint} Or pass `losses=`, a function.")
    return name


def _refuse_mixed_examples(module: nn.Module) -> None:
    """Refuse layers whose output for one example depends on others: the padded ones, or another client's."""
    for name, part in module.named_modules():
        is_batch_norm = isinstance(part, nn.modules.batchnorm._BatchNorm)
        if is_batch_norm and getattr(part, "running_mean", None) is None:
            fault = "takes statistics over the whole batch, so one client's examples change another's outputs"
        elif type(part) in BATCH_NORMS:
            continue
        elif getattr(part, "running_mean", None) is not None:
            fault = "keeps running statistics, which have no meaning across clients with different data"
        else:
            continue
        instead = "nn.BatchNorm1d to 3d with running statistics, which `fedbn` trains, or " if is_batch_norm else ""
        raise ValueError(
            f"'{name or type(part).__name__}' ({type(part).__name__}) {fault}. Use {instead}nn.GroupNorm instead."
        )


def check_norms(problem: Problem, method: str, kinds: frozenset[str]) -> None:
    """Refuse a model with BatchNorm for a method that does not keep these layers with each client."""
    if problem.norms is None or BATCH_NORM in kinds:
        return
    name = next(name for name, _ in problem.layout if name.endswith("running_mean")).rpartition(".")[0]
    raise ValueError(
        f"'{name}' of the model is a BatchNorm layer, whose running statistics have no meaning across clients with "
        f"different data, so {method} cannot train it. Use the method `fedbn`, whose clients keep their BatchNorm "
        "layers, or a model with nn.GroupNorm."
    )


def _refuse_frozen_parameters(module: nn.Module) -> None:
    frozen = [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
    if frozen:
        raise ValueError(
            f"{len(frozen)} parameters are frozen ('{frozen[0]}' first), but every parameter is trained. Call "
            "requires_grad_(True) on them, or keep them as buffers (register_buffer), which stay as they are."
        )


def _replaced(problem: Problem, **changes: Any) -> Problem:
    return replace(problem, **changes)
