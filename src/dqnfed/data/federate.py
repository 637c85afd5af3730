"""From a dataset and a manifest to the federation that the engine trains on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from dqnfed.core.federation import Examples, Federation
from dqnfed.data.features import dataset_preprocessing, dataset_table
from dqnfed.data.manifest import Manifest
from dqnfed.data.raw import RawData


def federation_of(raw: RawData, manifest: Manifest, groups: tuple[str, ...] | None = None) -> Federation:
    """Return the clients' examples, client after client, as the manifest deals them; bytes stay bytes.

    Columns of a table are scaled and encoded here, since that needs to know which rows are for training.
    """
    if raw.columns:
        inputs = dataset_preprocessing(raw, manifest).apply(dataset_table(raw))
        raw = replace(raw, inputs=torch.from_numpy(inputs), columns=())

    def part(rows: list[np.ndarray]) -> Examples:
        order = torch.from_numpy(np.concatenate(rows))
        starts = torch.tensor([0, *(len(mine) for mine in rows)]).cumsum(0)
        return Examples(raw.inputs[order], raw.targets[order], starts)

    has_validation = bool(manifest.sizes[:, 1].any())
    return Federation(
        train=part([client.train for client in manifest]),
        test=part([client.test for client in manifest]),
        validation=part([client.validation for client in manifest]) if has_validation else None,
        names=manifest.names,
        groups=groups,
        n_classes=raw.n_classes or None,
    )
