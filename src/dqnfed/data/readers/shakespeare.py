"""Shakespeare by speaking role: LEAF's JSON, or plain-text plays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from dqnfed.data.raw import DataError, RawData
from dqnfed.data.readers.files import MissingFiles
from dqnfed.data.readers.leaf import leaf_files, leaf_users
from dqnfed.data.readers.text import ALPHABET, WINDOW, encode, speeches, text_by_role, windows


def read_shakespeare(folder: Path) -> RawData:
    """Return windows of 80 characters, the character that follows each, and the role that speaks (McMahan et al.,
    2017).

    Looks for LEAF's JSON files (`all_data.json`, or folders train and test), then for plays in plain text (`*.txt`).
    """
    files = leaf_files(folder)
    return from_leaf(files) if files else from_text(sorted(folder.glob("*.txt")), folder)


def from_leaf(files: list[tuple[Path, bool | None]]) -> RawData:
    inputs, targets, owners, tests = list[np.ndarray](), list[np.ndarray](), list[int](), list[bool | None]()
    names: dict[str, int] = {}
    for path, is_test in files:
        for user, x, y in leaf_users(path):
            if not all(isinstance(text, str) for text in (*x, *y)):
                raise DataError(f"{path}: every x and y of {user!r} must be text.")
            if any(len(window) != WINDOW for window in x):
                raise DataError(f"{path}: every x of {user!r} must be a window of {WINDOW} characters.")
            if any(len(character) != 1 for character in y):
                raise DataError(f"{path}: every y of {user!r} must be one character.")
            inputs.append(encode("".join(x)).reshape(-1, WINDOW))
            targets.append(encode("".join(y)))
            owners.append(names.setdefault(user, len(names)))
            tests.append(is_test)
    return gathered(inputs, targets, owners, tuple(names), tests)


def from_text(files: list[Path], folder: Path) -> RawData:
    if not files:
        raise MissingFiles(
            f"{folder} holds neither LEAF's JSON (all_data.json, or train/ and test/) nor plays (*.txt)."
        )
    roles: dict[str, str] = {}
    for path in files:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        whole_works = any(line.strip().lower() == "by william shakespeare" for line in lines)
        for role, text in text_by_role(speeches(lines, None if whole_works else path.stem)).items():
            roles[role] = f"{roles[role]} {text}" if role in roles else text
    pairs = {role: windows(encode(text)) for role, text in roles.items()}
    kept = {role: pair for role, pair in pairs.items() if len(pair[1]) >= 2}
    if not kept:
        raise DataError(
            f"no role in {folder} speaks more than {WINDOW + 1} characters, so there is no window to learn from."
        )
    inputs, targets = zip(*kept.values(), strict=True)
    return gathered(list(inputs), list(targets), list(range(len(kept))), tuple(kept), [None] * len(kept))


def gathered(
    inputs: list[np.ndarray],
    targets: list[np.ndarray],
    owners: list[int],
    names: tuple[str, ...],
    tests: list[bool | None],
) -> RawData:
    if not targets:
        raise DataError("the files of Shakespeare hold no windows of characters.")
    counts = np.array([len(y) for y in targets])
    official = not any(is_test is None for is_test in tests)
    return RawData(
        name="shakespeare",
        inputs=torch.from_numpy(np.concatenate(inputs)),
        targets=torch.from_numpy(np.concatenate(targets).astype(np.int64)),
        n_classes=len(ALPHABET),
        clients=torch.from_numpy(np.repeat(np.array(owners, np.int64), counts)),
        client_names=names,
        is_test=torch.from_numpy(np.repeat(np.array(tests, bool), counts)) if official else None,
    )
