"""One site of a federation of tables: its folder, a check of its table, its node."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from dqnfed.cli.common import app, console

site = typer.Typer(no_args_is_help=True, help="A site that trains on its own table, without code.")
app.add_typer(site, name="site")

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The site's folder.")]


@site.command("init")
def init(
    folder: Folder,
    data: Annotated[Path, typer.Option("--data", help="This site's table: CSV, Parquet or NPZ. It stays where it is.")],
    schema: Annotated[Path, typer.Option("--schema", help="The schema that all sites agreed on.")],
    name: Annotated[str, typer.Option("--name", help="Of this site, as in the report.")],
    number: Annotated[int, typer.Option("--number", min=0, help="Of this site, counted from 0.")],
) -> None:
    """Make a site's folder: who it is, the agreed schema, and a new key for its node.

    Example:  dqnfed site init avon --data patients.csv --schema schema.toml --name Avon --number 0
    """
    from dqnfed.experiments.site import init_site

    for path in init_site(folder, data=data, schema=schema, name=name, number=number):
        console.print(escape(str(path)), soft_wrap=True)
    console.print(escape(f"send {folder / 'key.pub'} to the server; {folder / 'key'} stays here"), soft_wrap=True)


@site.command("check")
def check(folder: Folder) -> None:
    """Check the table against the schema, and list everything that will leave this site. Nothing is sent.

    Example:  dqnfed site check avon
    """
    print_leaving(folder)


def print_leaving(folder: Path) -> int:
    """Print what leaves the site, and return its number."""
    from dqnfed.experiments.site import leaving_lines, load_site, statistics_of

    found = load_site(folder)
    for line in leaving_lines(found, statistics_of(found)):
        console.print(escape(line), soft_wrap=True, highlight=False)
    return found.number


@site.command("run")
def run(
    folder: Folder,
    superlink: Annotated[str, typer.Option("--superlink", help="Where the server's proxy listens, as HOST:PORT.")],
    authority: Annotated[Path, typer.Option("--ca", help="The server's ca.crt.")] = Path("ca.crt"),
    port: Annotated[int, typer.Option("--port", help="Of this node, on loopback; one for each node here.")] = 9094,
) -> None:
    """List what leaves this site, then start its node; Ctrl-C ends it.

    Example:  dqnfed site run avon --superlink fed.example.org:8443 --ca ca.crt
    """
    if not authority.is_file():
        raise FileNotFoundError(f"{authority} does not exist; the server's administrator has it, and it is no secret.")
    command = Path(sys.executable).parent / "flower-supernode"
    if not command.is_file():
        raise ImportError("a site's node needs Flower; install it with `pip install 'dqnfed[flower]'`.")
    number, home = print_leaving(folder), folder.absolute()
    sys.stdout.flush()
    node_config = f"partition-id={number} site='{home}' memory-dir='{home / 'memory'}'"
    words = [
        str(command), "--root-certificates", str(authority), "--superlink", superlink, "--host", "127.0.0.1",
        "--port", str(port), "--auth-supernode-private-key", str(home / "key"), "--node-config", node_config,
    ]  # fmt: skip
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    os.execve(command, words, {"FLWR_HOME": str(home / "flwr"), **quiet, **os.environ})
