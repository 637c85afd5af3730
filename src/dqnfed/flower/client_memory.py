"""What a client keeps between messages: in Flower's state and, if its node says where, on its disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from flwr.app import ArrayRecord, ConfigRecord, Context
from torch import Tensor

from dqnfed.core.run_folder import load_tensors, save_tensors
from dqnfed.core.tensors import from_named_tensors, named_tensors
from dqnfed.flower.records import array_record, named_arrays

Tag = tuple[int, int]  # round, phase: which reply left the client with this memory
NEVER: Tag = (-1, -1)  # before the first reply that was used
STATE, FACTS = "dqnfed-memory", "dqnfed-facts"


class Tags(NamedTuple):
    """What a message says of the client's memories."""

    used: Tag = NEVER  # after the last reply that was used: the one to go on from
    kept: Tag = NEVER  # of the best model so far, where that is kept (`eval.select`) and clients have their own


class Receipt(NamedTuple):
    """The server's side: which of a client's replies was the last to be used."""

    round: Tensor  # []
    phase: Tensor  # []


def node_file(context: Context, run: str, client: int, ending: str) -> Path | None:
    """Return a file in which a node keeps something of a run over restarts; None where it has no `memory-dir`."""
    folder = context.node_config.get("memory-dir")
    if not folder:
        return None
    if Path(run).name != run:
        raise ValueError(f"the name of a run is that of a folder, but the server calls it {run!r}.")
    return Path(str(folder)) / run / f"client-{client}.{ending}"


class ClientMemory:
    """A client's memory in one run: a version after each reply that the server may still come back to.

    Whether a reply counts is the server's decision: one that is late, dropped or lost with a killed server leaves no
    trace in the run. The server therefore names the last reply that it used, and the client goes on from there. The
    version at the start of the round is kept too, since a killed server runs its last round again, and so is the
    version of the best model so far, where the server names one.
    """

    def __init__(self, context: Context, run: str, client: int, kind: type[Any]) -> None:
        self._context, self._run, self._kind = context, run, kind
        self._file = node_file(context, run, client, "safetensors")
        self._versions: dict[Tag, Any] = {}
        self._round_start: Tag = NEVER
        self._read()

    def after(self, tag: Tag) -> Any:
        """Return the memory after the given reply; None: there is none, or it was lost."""
        return self._versions.get(tag)

    def write(self, tags: Tags, written: Tag, memory: Any) -> None:
        """Keep the memory after a new reply, and the versions that the server may still name."""
        if written[1] == 0:
            self._round_start = tags.used
        needed = {self._round_start, *tags}
        self._versions = {tag: version for tag, version in self._versions.items() if tag in needed}
        self._versions[written] = memory
        named = {
            f"{round}.{phase}/{name}": tensor
            for (round, phase), version in self._versions.items()
            for name, tensor in named_tensors(version).items()
        }
        self._context.state[STATE] = array_record(named)
        self._context.state[FACTS] = ConfigRecord({"run": self._run, "round-start": list(self._round_start)})
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            save_tensors(self._file, named, {"round-start": list(self._round_start)})

    def _read(self) -> None:
        facts, arrays = self._context.state.get(FACTS), self._context.state.get(STATE)
        if isinstance(facts, ConfigRecord) and isinstance(arrays, ArrayRecord) and facts["run"] == self._run:
            self._load(named_arrays(arrays), facts["round-start"])
        elif self._file is not None and self._file.is_file():
            named, metadata = load_tensors(self._file)
            self._load(named, metadata["round-start"])

    def _load(self, named: dict[str, Tensor], round_start: Any) -> None:
        versions: dict[Tag, dict[str, Tensor]] = {}
        for key, tensor in named.items():
            place, _, name = key.partition("/")
            round, _, phase = place.partition(".")
            versions.setdefault((int(round), int(phase)), {})[name] = tensor
        self._versions = {tag: from_named_tensors(self._kind, fields) for tag, fields in versions.items()}
        self._round_start = (int(round_start[0]), int(round_start[1]))
