"""What the server keeps in a run's folder beside the simulator's files: the run's key and the clients' claims."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from dqnfed.core.checksums import damage_line, damaged_files
from dqnfed.core.run_folder import write_atomically
from dqnfed.flower.roster import Member

FLOWER_FILE = "flower.json"


def kept_key(out: Path, new: str, *, resume: bool) -> str:
    """Return the key of the run in the folder, or the new one, which is written down."""
    file = out / FLOWER_FILE
    if resume and FLOWER_FILE in damaged_files(out):
        raise ValueError(
            f"{out} cannot go on: {damage_line(FLOWER_FILE)}, and without its key clients do not find "
            "their memories of this run. Put it back from a copy, or start a new run in another folder."
        )
    if resume and file.is_file():
        key: str = json.loads(file.read_text(encoding="utf-8"))["run"]
        return key
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps({"run": new}) + "\n")
    return new


def write_claims(out: Path, key: str, claimed: Sequence[int]) -> None:
    """Keep how many training examples each client claims, which `clients.json` has only as they are held."""
    write_atomically(out / FLOWER_FILE, json.dumps({"run": key, "claimed": list(claimed)}) + "\n")


def members_before(out: Path) -> dict[int, Member]:
    """Return the clients of the run in the folder with the sizes that they claimed; none if that is damaged."""
    if "clients.json" in damaged_files(out):
        return {}
    described = json.loads((out / "clients.json").read_text(encoding="utf-8"))
    known = json.loads((out / FLOWER_FILE).read_text(encoding="utf-8"))
    claimed = known.get("claimed", [c["n_train"] for c in described])
    return {
        c["client"]: Member(c["client"], c["name"], c["group"] or "", n, c["n_test"], c.get("n_validation", 0))
        for c, n in zip(described, claimed, strict=True)
    }
