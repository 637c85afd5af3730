"""One TOML file, one experiment: read, checked, resolved."""

from __future__ import annotations

import copy
import difflib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

# settings of the clients' work that methods share; read here, so that a config is read without torch
LOCAL_WORK = (
    "lr", "epochs", "batch_size", "momentum", "weight_decay", "lr_decay", "lr_decay_every",
    "optimizer", "nesterov", "clip_norm", "schedule", "schedule_rounds", "warmup",
)  # fmt: skip
ValidationMeasure = Literal["mean", "worst10", "worst5", "min"]  # of the clients' validation scores


class Block(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class NoiseBlock(Block):
    """Which training labels are made wrong on purpose; validation and test labels never are."""

    kind: Literal["symmetric", "pairwise", "instance"] = "symmetric"
    share: float = Field(default=1.0, ge=0, le=1)  # probability that a client is noisy
    level_low: float = Field(default=0.0, ge=0, le=1)  # a noisy client's level is uniform between these two
    level_high: float = Field(default=1.0, ge=0, le=1)
    seed: int | None = None  # default: the partition's seed


class DataBlock(Block):
    """Which examples, and who holds them."""

    name: str = "digits"
    dir: str | None = None  # where datasets lie; default: $DQNFED_DATA, else ./data
    keep_classes: tuple[int, ...] = ()  # only these classes, renumbered from 0; empty: all
    pad: int = Field(default=0, ge=0)  # zeros around images, pixels
    limit: int | None = Field(default=None, ge=1)  # examples in all, spread over the dataset: a miniature
    per_class: int | None = Field(default=None, ge=1)  # clothing1m: training images of each noisy class
    side: int | None = Field(default=None, ge=8)  # clothing1m: pixels of an image's side
    manifest: str | None = None  # a saved partition, instead of the rules below
    partition: Literal["shards", "dirichlet", "classes", "natural", "iid", "label"] = "shards"
    clients: int | None = Field(default=None, ge=1)
    shards_per_client: int = Field(default=2, ge=1)
    beta: float = Field(default=0.5, gt=0)
    capped: bool = True  # Dirichlet: a client that has its share gets no more
    presence: float = Field(default=1.0, gt=0, le=1)  # Dirichlet: probability that a client may hold a class at all
    classes_per_client: int = Field(default=5, ge=1)
    min_examples: int = Field(default=10, ge=1)
    max_examples: int | None = Field(default=None, ge=1)
    pool: Literal["all", "train"] = "all"
    split: Literal["label", "order", "official"] = "label"
    test: float = Field(default=0.2, ge=0, lt=1)
    validation: float = Field(default=0.0, ge=0, lt=1)
    gap: int = Field(default=0, ge=0)
    seed: int | None = None  # of the partition; default: the run's seed
    noise: NoiseBlock | None = None  # wrong training labels, on purpose
    file: str | None = None  # your own table (CSV, Parquet, NPZ, or a folder of them) instead of a named dataset
    client: str | None = None  # its column that says who holds a row; None: of a folder, the file is the client
    label: str | None = None  # its column that is to be learnt
    group: str | None = None  # its column of declared groups of clients
    drop: tuple[str, ...] = ()  # its columns to leave out
    task: Literal["auto", "classification", "regression"] = "auto"
    extremes: Literal["refuse", "missing"] = "refuse"  # its numbers that are not finite or absurd
    breakdown: tuple[str, ...] = ()  # columns whose groups of rows are reported: "sex", or "age:45:65" for bands


class ModelBlock(BaseModel):
    """The model's name; its settings stand beside it and are checked by the model."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str = "mlp"


class AlgorithmBlock(BaseModel):
    """The method's name; its hyper-parameters stand beside it and are checked by the method."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str = "dqn-fed"


class TrainBlock(Block):
    """How long, how much local work, how many clients a round.

    What is not set of the local work (None) stays the method's own default: that of the comments, or another one that
    the method's page names, as FedFa's momentum of 0.9.
    """

    rounds: int = Field(default=100, ge=1)
    participation: float = Field(default=1.0, gt=0, le=1)
    sampling: Literal["uniform", "poisson", "size", "power-of-choice", "cyclic"] = "uniform"
    candidates: int | None = Field(default=None, ge=1)  # of power-of-choice; default: twice the clients of a round
    trace: str | None = None  # a CSV file of who is online in which round (`dqnfed data trace`); default: everybody
    deadline: float | None = Field(default=None, gt=0)  # times the median client's time for a round; default: none
    speed_spread: float | None = Field(default=None, ge=0)  # 0.5: of the logarithm of the clients' speed
    speed_jitter: float | None = Field(default=None, ge=0)  # 0: the same of one client's from round to round
    late: Literal["drop", "partial"] | None = None  # drop: what is left of a client that is late
    epochs: int | None = Field(default=None, ge=1)  # 1
    batch_size: int | Literal["full"] | None = None  # full
    lr: float | None = Field(default=None, gt=0, allow_inf_nan=False)  # 0.1
    momentum: float | None = Field(default=None, ge=0, lt=1)  # 0
    weight_decay: float | None = Field(default=None, ge=0, allow_inf_nan=False)  # 0
    lr_decay: float | None = Field(default=None, gt=0, le=1)  # 1
    lr_decay_every: int | None = Field(default=None, ge=1)  # 1
    optimizer: Literal["sgd", "adam", "adamw"] | None = None  # sgd
    nesterov: bool | None = None  # false
    clip_norm: float | None = Field(default=None, gt=0, allow_inf_nan=False)  # none
    schedule: Literal["constant", "step", "cosine"] | None = None  # step, which is constant while lr_decay is 1
    schedule_rounds: int | None = Field(default=None, ge=1)  # of cosine: rounds
    warmup: int | None = Field(default=None, ge=0)  # 0


class EvalBlock(Block):
    """What is measured, and how often."""

    every: int = Field(default=1, ge=1)
    participants: bool = True
    participants_every: int = Field(default=1, ge=1)  # rounds between measurements of the participants' losses
    part: Literal["train", "validation", "test"] = "test"
    metrics: Literal["per-client", "aggregate-only"] = "per-client"
    clients: int | None = Field(default=None, ge=1)  # so many, a stratified sample; default: all, of over 10,000 1,000
    patience: int | None = Field(default=None, ge=1)  # evaluations without a better mean validation score
    select: Literal["last", "loss", ValidationMeasure] = "last"  # the model that is kept: the last, or the best one
    score: Literal["accuracy", "auc", "f1", "loss"] | None = None  # default: accuracy, or the loss of a regression


class PolicyBlock(Block):
    """How the server treats clients that fail, send false values or disappear."""

    on_nonfinite: Literal["drop", "fail"] = "drop"
    max_update_norm: float = Field(default=10.0, ge=1)
    min_replies: int = Field(default=1, ge=1)
    on_missing: Literal["proceed", "fail"] = "proceed"
    timeout: float = Field(default=3600.0, gt=0)  # seconds
    rate_bounds: float | None = Field(default=None, ge=1)
    scalar_bounds: float | None = Field(default=None, ge=1)
    max_size_ratio: float = Field(default=100.0, ge=1)  # times the median of what deployed clients claim
    on_worse: Literal["best", "last"] | None = (
        None  # of a run that ends above its start; null: best on Flower without noise
    )
    drop_share: float | None = Field(default=None, ge=0, lt=1)


class PrivacyBlock(Block):
    """What the server may see: secure aggregation, and Gaussian noise with a budget; off by default."""

    secure: bool = False  # replies under one-time pads: the server sees sums and products, never a reply
    level: Literal[1, 2] = 1  # 1: against a server that works with no client; 2, against one that does: not provided
    roster: tuple[str, ...] = ()  # public keys of deployed clients, by number, as `dqnfed deploy pad-key` prints them
    clip: float | None = Field(default=None, gt=0)  # largest norm of an answer; None: no clipping, no noise
    noise_multiplier: float = Field(default=0.0, ge=0)  # standard deviation of the noise over `clip`
    noise: Literal["local", "central", "distributed"] = "local"  # on every reply, or on the server's sums
    unit: Literal["client", "record"] = "client"  # whose part in the model the noise hides
    loss_clip: float = Field(default=5.0, gt=0)  # unit = "record": an example's loss counts as at most this
    epsilon: float | None = Field(
        default=None, gt=0
    )  # the budget; without `noise_multiplier` the noise follows from it
    delta: float = Field(default=1e-5, gt=0, lt=1)


class RunBlock(Block):
    """Seed, machine and files."""

    seed: int = Field(default=0, ge=0)
    device: str = "auto"  # auto | cpu | cuda | cuda:1
    dtype: Literal["float32", "float64"] = "float32"
    # of products and convolutions on a GPU; default: torch's, whose convolutions of float32 are in TF32
    precision: Literal["default", "float32", "tf32", "bf16"] = "default"
    compile: bool = False  # a convolutional network's step on a GPU: some 40 s at the start, then shorter rounds
    cohort: Literal["auto", "vectorised", "looped", "streams", "threads", "ray"] = "auto"
    workers: int | None = Field(default=None, ge=1)  # of a Ray cluster; default: as many as it has cores
    # of a GPU, that each Ray worker has; default: a whole one where the device is a GPU, else none
    gpu_share: float | None = Field(default=None, gt=0, le=1)
    address: str | None = None  # of a running Ray cluster; default: one of this run's own
    chunk: int | None = Field(default=None, ge=1)  # clients at once
    memory: str | float | None = None  # of a GPU: "4GiB", or a share of what is free; default 0.8
    threads: int | None = Field(default=None, ge=1)
    checkpoint_seconds: float = Field(default=30.0, ge=0)


class TrackBlock(Block):
    """Trackers beside the run folder; all off by default."""

    tensorboard: bool = False
    mlflow: bool = False
    wandb: bool = False


class CompareBlock(Block):
    """What `dqnfed compare` runs when no methods are named."""

    algorithms: tuple[str, ...] = ("dqn-fed", "fedavg", "server-lbfgs")


class EpsilonBlock(Block):
    """What `dqnfed compare --epsilon` changes before it gives every run a budget, and which methods it runs."""

    algorithms: tuple[str, ...] = ("dqn-fed", "fedavg", "qffl")
    set: tuple[str, ...] = ()  # as with --set
    at: dict[str, tuple[str, ...]] = {}  # the same for one budget, after those for all: "3" or "inf"


class Config(Block):
    """A whole experiment."""

    name: str = "experiment"
    description: str = ""
    data: DataBlock = DataBlock()
    model: ModelBlock = ModelBlock()
    algorithm: AlgorithmBlock = AlgorithmBlock()
    train: TrainBlock = TrainBlock()
    eval: EvalBlock = EvalBlock()
    policy: PolicyBlock = PolicyBlock()
    privacy: PrivacyBlock = PrivacyBlock()
    run: RunBlock = RunBlock()
    track: TrackBlock = TrackBlock()
    compare: CompareBlock = CompareBlock()
    epsilon: EpsilonBlock = EpsilonBlock()
    algorithms: dict[str, dict[str, Any]] = {}  # settings that hold when this method is chosen
    grids: dict[str, dict[str, list[Any]]] = {}  # what `dqnfed sweep` tries

    def as_dict(self) -> dict[str, Any]:
        """Return the config as plain data; what has no value is left out, and so is local work that nobody set."""
        plain: dict[str, Any] = self.model_dump(exclude_none=True, mode="json")
        return plain

    def without_method(self) -> dict[str, Any]:
        """Return what the config says beside the method and its settings, as plain data."""
        left_out: Any = {"algorithm": True, "algorithms": True, "train": set(LOCAL_WORK)}
        return self.model_dump(exclude_none=True, mode="json", exclude=left_out)

    def with_algorithm(self, name: str) -> Config:
        """Return the config with this method; hyper-parameters of another method do not follow it."""
        if name == self.algorithm.name:
            return self
        return self.model_copy(update={"algorithm": AlgorithmBlock(name=name)})

    def with_seed(self, seed: int) -> Config:
        return self.model_copy(update={"run": self.run.model_copy(update={"seed": seed})})


class ConfigError(ValueError):
    """The experiment cannot be run as written; the message says what to change."""


def preset_names() -> list[str]:
    """Return the names of the packaged experiments."""
    folder = resources.files("dqnfed.experiments") / "presets"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def read_config(source: str, changes: Sequence[str] = ()) -> Config:
    """Return the experiment of a preset or a TOML file, with `key=value` changes applied."""
    path = Path(source)
    if path.suffix == ".toml" or path.is_file():
        if not path.is_file():
            raise ConfigError(f"there is no file {source}; `dqnfed list presets` shows the packaged experiments.")
        text = text_of(path)
    elif source in preset_names():
        text = (resources.files("dqnfed.experiments") / "presets" / f"{source}.toml").read_text()
    else:
        raise ConfigError(
            f"there is no preset '{source}'{nearest(source, preset_names())}. Presets: {', '.join(preset_names())}; "
            "or give the path of a TOML file."
        )
    try:
        raw = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source} is not valid TOML: {error}.") from error
    return checked(with_changes(raw, changes), source)


def text_of(path: Path) -> str:
    """Return the text of a config file."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a text file in UTF-8 ({error}); TOML is written in UTF-8.") from error


def with_changes(raw: Mapping[str, Any], changes: Sequence[str]) -> dict[str, Any]:
    """Return the raw config with the user's `block.key=value` changes; what they outrank in the file is left out.

    Among the file's own values, and among the user's, `algorithm` outranks `algorithms.NAME`, which outranks `train`;
    every value of the user outranks those of the file. What is left is resolved by the first rule alone, so that the
    config of a run, read again, gives the same run.
    """
    given = [parsed_change(change) for change in changes]
    changed = copy.deepcopy(dict(raw))
    for path, value in given:
        for leaf, last in leaves(path, value):
            drop_outranked(changed, leaf, last)
    for path, value in given:
        put(changed, path, value)
    return changed


def parsed_change(change: str) -> tuple[tuple[str, ...], Any]:
    """Return the path and the value of one `block.key=value`; the value is TOML, or plain text."""
    key, equals, text = change.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"a change reads key=value, as in train.lr=0.3, but '{change}' does not.")
    try:
        value = text.strip() if "\n" in text else tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    return tuple(key.strip().split(".")), value


def leaves(path: tuple[str, ...], value: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Give every path that a value sets: one, or those of a table's entries."""
    if not isinstance(value, dict):
        yield path, value
        return
    for key, entry in value.items():
        yield from leaves((*path, key), entry)


def drop_outranked(raw: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    """Leave out the values of the file that a user's value at this path outranks."""
    own, filed = block_of(raw, "algorithm"), block_of(raw, "algorithms")
    match path:
        case "train", key if key in LOCAL_WORK:
            outranked = [own, *(block_of(filed, name) for name in filed)]
        case "algorithms", name, key:
            outranked = [block_of(filed, other) for other in filed if other != name and name in parts_of(other)]
            if name in parts_of(own.get("name", AlgorithmBlock().name)):
                outranked.append(own)
        case "algorithm", "name":  # hyper-parameters of another method do not follow
            if value != own.get("name", AlgorithmBlock().name):
                own.clear()
            return
        case _:
            return
    for block in outranked:
        block.pop(key, None)


def parts_of(name: Any) -> list[str]:
    """Return under which names of `algorithms` a method's settings stand: FedCorr's and its finishing method's too."""
    first, plus, last = str(name).partition("+")
    return [first, last, str(name)] if plus else [first]


def block_of(raw: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the block itself, or an empty one; what is there in place of a block is refused later."""
    found = raw.get(key)
    return found if isinstance(found, dict) else {}


def put(raw: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    """Put the value at its place in the raw config."""
    *blocks, last = path
    place = raw
    for block in blocks:
        place = place.setdefault(block, {})
        if not isinstance(place, dict):
            raise ConfigError(f"'{'.'.join(path)}' reaches into '{block}', which is a value, not a block.")
    place[last] = value


def checked(raw: Mapping[str, Any], source: str) -> Config:
    """Return the config, or refuse it and say which key is wrong and what is near it."""
    try:
        return Config.model_validate(dict(raw))
    except ValidationError as error:
        raise ConfigError("\n".join([f"{source} cannot be used:", *_explained(error)])) from error


def _explained(error: ValidationError) -> list[str]:
    lines = []
    for problem in error.errors():
        place = [str(part) for part in problem["loc"]]
        if problem["type"] == "extra_forbidden":
            known = _known_keys(place[:-1])
            lines.append(
                f"  unknown key '{'.'.join(place)}'{nearest(place[-1], known)}; known here: {', '.join(known)}"
            )
        else:
            lines.append(f"  {'.'.join(place)}: {problem['msg']}, but it is {problem['input']!r}")
    return lines


def _known_keys(path: Sequence[str]) -> list[str]:
    model: Any = Config
    for part in path:
        annotation = model.model_fields[part].annotation
        annotation = next((a for a in get_args(annotation) if a is not type(None)), annotation)
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    return list(model.model_fields)


def nearest(word: str, words: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, words, n=1, cutoff=0.5)
    return f" (did you mean '{close[0]}'?)" if close else ""
