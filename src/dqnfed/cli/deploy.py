"""Deploy: a ready Flower app, the proxy in front of the server, and a check of both."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from dqnfed.cli.common import app, console

deploy = typer.Typer(
    no_args_is_help=True, help="The proxy in front of a SuperLink, a check of what passes, keys for secure aggregation."
)
app.add_typer(deploy, name="deploy")

Authority = Annotated[Path, typer.Option("--ca", help="Certificate of the authority, which nodes have.")]


@app.command("new-app")
def new_app(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.")],
    clients: Annotated[int, typer.Option("--clients", min=1)] = 3,
    algorithm: Annotated[str, typer.Option("--algorithm", "-a", help="See `dqnfed list algorithms`.")] = "dqn-fed",
    rounds: Annotated[int, typer.Option("--rounds", min=1)] = 10,
    table: Annotated[
        Path | None,
        typer.Option("--table", metavar="SCHEMA.toml", help="Sites train on such tables, without code."),
    ] = None,
) -> None:
    """Write a Flower app that trains on the data of real clients; see "Deploy on Flower" in the docs.

    Examples:  dqnfed new-app my-federation --clients 4  |  dqnfed new-app clinics --clients 3 --table schema.toml
    """
    from dqnfed.flower.new_app import new_app as written_app

    for path in written_app(folder, clients=clients, algorithm=algorithm, rounds=rounds, table=table):
        console.print(str(path), soft_wrap=True)


@deploy.command("proxy")
def proxy(
    listen: Annotated[str, typer.Option("--listen", help="Where nodes connect, as 0.0.0.0:8443.")],
    superlink: Annotated[str, typer.Option("--superlink", help="The SuperLink, on loopback.")] = "127.0.0.1:8000",
    certificate: Annotated[Path, typer.Option("--certificate", help="Of the server.")] = Path("server.pem"),
    key: Annotated[Path, typer.Option("--key", help="Private key of the certificate.")] = Path("server.key"),
    authority: Authority = Path("ca.crt"),
    out: Annotated[Path, typer.Option("--out", help="Folder for nginx.conf and the proxy's logs.")] = Path("proxy"),
) -> None:
    """Write an nginx.conf that lets nodes' calls through to a SuperLink and refuses everything else.

    Example:  dqnfed deploy proxy --listen 0.0.0.0:8443, then:  nginx -p proxy -c nginx.conf
    """
    from dqnfed.flower.proxy import parse_address, proxy_config, write_proxy

    for path in (certificate, key, authority):
        if not path.is_file():
            raise FileNotFoundError(f'{path} does not exist; see "Deploy on Flower" in the docs for how to make it.')
    config = proxy_config(
        parse_address(listen), parse_address(superlink), certificate=certificate, key=key, authority=authority
    )
    console.print(str(write_proxy(out, config)), soft_wrap=True)


@deploy.command("pad-key")
def pad_key(file: Annotated[Path, typer.Argument(metavar="FILE", help="A new file for the private key.")]) -> None:
    """Write a client's private key for secure aggregation, and print the public one for `privacy.roster`.

    The file stays on the client's node, which is started with --node-config 'pad-key="FILE"'.

    Example:  dqnfed deploy pad-key client0.pad
    """
    from dqnfed.secure.keys import write_private_key

    console.print(write_private_key(file), soft_wrap=True)


@deploy.command("check")
def check(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Where nodes connect.")],
    authority: Authority = Path("ca.crt"),
    certificate: Annotated[Path | None, typer.Option("--certificate", help="The server's, if it lies here.")] = None,
    keys: Annotated[list[Path] | None, typer.Option("--key", help="Private keys that lie here; repeatable.")] = None,
    ports: Annotated[list[int] | None, typer.Option("--port", help="A further port to try; repeatable.")] = None,
    days: Annotated[int, typer.Option("--days", min=0, help="Certificates must be valid for this long.")] = 14,
    planned: Annotated[bool, typer.Option("--planned", help="Nothing runs yet: check the files only.")] = False,
) -> None:
    """Check a deployment as strangers meet it: open ports, what passes, certificates, who may read the keys.

    Run it on the server with --certificate and --key, and on another machine with ca.crt alone. Exit code 1: something
    is wrong.

    Example:  dqnfed deploy check fed.example.org:8443 --ca ca.crt --key client0
    """
    from dqnfed.flower import deployment_check as checks
    from dqnfed.flower.proxy import Address, parse_address

    place = parse_address(address)
    found = list(checks.check_files(place, authority, certificate, keys or [], days=days))
    tried = list(dict.fromkeys([*checks.USUAL_PORTS, *(ports or [])]))
    if planned:
        found += checks.check_ports_free([place, *(Address("127.0.0.1", port) for port in ports or [])])
    else:
        found += checks.check_running(place, authority, days=days, ports=tried)
    colours = {checks.Verdict.FINE: "green", checks.Verdict.NOTE: "yellow", checks.Verdict.WRONG: "red"}
    for finding in found:
        verdict = f"[{colours[finding.verdict]}]{finding.verdict.value:<5}[/]"
        console.print(f"{verdict} {escape(finding.text)}", soft_wrap=True)
    n_wrong = sum(finding.verdict is checks.Verdict.WRONG for finding in found)
    console.print(f"{n_wrong} wrong" if n_wrong else "nothing wrong was found")
    if n_wrong:
        raise typer.Exit(1)
