"""Deploy: a ready Flower app."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dqnfed.cli.common import app, console


@app.command("new-app")
def new_app(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.")],
    clients: Annotated[int, typer.Option("--clients", min=1)] = 3,
    algorithm: Annotated[str, typer.Option("--algorithm", "-a", help="See `dqnfed list algorithms`.")] = "dqn-fed",
    rounds: Annotated[int, typer.Option("--rounds", min=1)] = 10,
) -> None:
    """Write a Flower app that trains on the data of real clients; see "Deploy on Flower" in the docs.

    Example:  dqnfed new-app my-federation --clients 4
    """
    from dqnfed.flower.new_app import new_app as written_app

    for path in written_app(folder, clients=clients, algorithm=algorithm, rounds=rounds):
        console.print(str(path), soft_wrap=True)
