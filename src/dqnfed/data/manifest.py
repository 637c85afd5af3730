"""Who holds which example: a partition that can be saved, hashed, shipped and checked again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from dqnfed.data.raw import DataError, RawData

Indices = np.ndarray  # [n] int64 positions in the dataset

FORMAT = "dqnfed-manifest-1"


class ClientIndices(NamedTuple):
    """The positions of one client's examples in the dataset."""

    train: Indices
    validation: Indices
    test: Indices

    @property
    def all(self) -> Indices:
        return np.concatenate(self)


@dataclass(frozen=True)
class Manifest:
    """A partition of a dataset into clients. Straight from a partitioner, all of a client's examples are in `train`;
    `split` shares them out.
    """

    dataset: str
    scheme: str
    seed: int
    settings: dict[str, Any]  # what the partitioner was asked for, JSON values only
    clients: tuple[ClientIndices, ...]
    names: tuple[str, ...]
    n_examples: int  # of the dataset these positions point into
    fingerprint: str  # of the dataset's targets, see `fingerprint`

    def __len__(self) -> int:
        return len(self.clients)

    def __iter__(self) -> Iterator[ClientIndices]:
        return iter(self.clients)

    @property
    def sizes(self) -> np.ndarray:
        """Return [K, 3]: how many training, validation and test examples each client holds."""
        return np.array([[len(part) for part in client] for client in self.clients], dtype=np.int64).reshape(-1, 3)

    def label_counts(self, raw: RawData) -> np.ndarray:
        """Return [K, n_classes]: how many examples of each class each client holds, all parts together."""
        if raw.n_classes == 0:
            raise DataError(f"{raw.name} is a regression dataset; it has no label histogram.")
        owner = np.repeat(np.arange(len(self)), [len(client.all) for client in self.clients])
        labels = raw.labels()[np.concatenate([client.all for client in self.clients])] if len(self) else owner
        cells = owner * raw.n_classes + labels
        return np.bincount(cells, minlength=len(self) * raw.n_classes).reshape(len(self), raw.n_classes)

    def hash(self) -> str:
        """Return a SHA-256 of the assignment: equal exactly when every client holds the same examples in the same
        parts.
        """
        digest = hashlib.sha256(f"{self.dataset}/{self.fingerprint}/{self.n_examples}".encode())
        for name, client in zip(self.names, self.clients, strict=True):
            digest.update(name.encode() + b"\0")
            for part in client:
                digest.update(len(part).to_bytes(8, "little") + part.astype("<i8").tobytes())
        return digest.hexdigest()

    def check(self, raw: RawData) -> None:
        """Raise when this manifest was made for other data than `raw`."""
        if len(raw) != self.n_examples or fingerprint(raw) != self.fingerprint:
            raise DataError(
                f"the manifest was made for {self.dataset} with {self.n_examples} examples and fingerprint "
                f"{self.fingerprint[:12]}, "
                f"but {raw.name} has {len(raw)} examples and fingerprint {fingerprint(raw)[:12]}. "
                "Use the same files, or make a new manifest with `dqnfed partition`."
            )

    def only(self, clients: Indices) -> Manifest:
        """Return the manifest of these clients, in this order."""
        chosen = [int(k) for k in clients]
        return replace(self, clients=tuple(self.clients[k] for k in chosen), names=tuple(self.names[k] for k in chosen))

    def save(self, path: Path) -> None:
        """Write the manifest as one safetensors file: positions and offsets as tensors, the rest as JSON in the
        header.
        """
        flat = [part for client in self.clients for part in client]
        tensors = {
            "indices": torch.from_numpy(np.concatenate([np.empty(0, np.int64), *flat])),
            "lengths": torch.from_numpy(self.sizes),
        }
        header = {
            key: getattr(self, key) for key in ("dataset", "scheme", "seed", "settings", "n_examples", "fingerprint")
        }
        header["names"] = list(self.names)
        save_file(tensors, path, metadata={"format": FORMAT, "manifest": json.dumps(header), "hash": self.hash()})

    @classmethod
    def load(cls, path: Path) -> Manifest:
        """Return the manifest saved at `path`, refusing a file whose contents do not match its own hash."""
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("format") != FORMAT:
                    raise DataError(
                        f"{path} is not a partition manifest (format {metadata.get('format')!r}, expected {FORMAT!r})."
                    )
                indices, lengths = file.get_tensor("indices").numpy(), file.get_tensor("lengths").numpy()
            header = json.loads(metadata["manifest"])
            parts = np.split(indices, np.cumsum(lengths.ravel())[:-1]) if lengths.size else []
            manifest = cls(
                dataset=header["dataset"],
                scheme=header["scheme"],
                seed=header["seed"],
                settings=header["settings"],
                clients=tuple(ClientIndices(*parts[3 * k : 3 * k + 3]) for k in range(len(lengths))),
                names=tuple(header["names"]),
                n_examples=header["n_examples"],
                fingerprint=header["fingerprint"],
            )
            is_whole = manifest.hash() == metadata["hash"]
        except DataError:
            raise
        except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise DataError(
                f"{path} cannot be read as a manifest ({error}); make it again with `dqnfed partition`."
            ) from error
        if not is_whole:
            raise DataError(
                f"{path} does not match its own hash; it was changed or damaged. Make it again with `dqnfed partition`."
            )
        return manifest


def fingerprint(raw: RawData) -> str:
    """Return a SHA-256 of the dataset's targets and natural clients: cheap, and different for any other order or
    selection.
    """
    digest = hashlib.sha256(raw.targets.numpy().tobytes())
    if raw.clients is not None:
        digest.update(raw.clients.numpy().tobytes())
    return digest.hexdigest()
