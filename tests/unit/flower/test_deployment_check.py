"""`dqnfed deploy check` against Flower's own server, with a proxy in front and without."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import uvicorn
from fastapi import FastAPI
from flwr.superlink.main import create_app
from typer.testing import CliRunner

from dqnfed.cli import app
from dqnfed.flower import deployment_check
from dqnfed.flower.deployment_check import Finding, Verdict, check_files, check_running
from dqnfed.flower.proxy import Address, proxy_config, write_proxy
from tests.helpers import proxies
from tests.helpers.superlink import PATIENCE, PUBLIC, free_port, is_listening, nginx_command, write_certificates

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Flower's server
NOBODY = Address(PUBLIC, 1)


@contextmanager
def flower(folder: Path | None, host: str = "127.0.0.1", api: FastAPI | None = None) -> Iterator[Address]:
    """Run the interfaces of a SuperLink, with the certificate of the folder or without TLS."""
    address = Address(host, free_port(host))
    files = {} if folder is None else {"ssl_certfile": folder / "server.pem", "ssl_keyfile": folder / "server.key"}
    options = {name: str(path) for name, path in files.items()}
    server = uvicorn.Server(uvicorn.Config(api or create_app(), *address, log_level="error", **options))  # type: ignore[arg-type]
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        wait_for(address, thread)
        yield address
    finally:
        server.should_exit = True
        thread.join(PATIENCE)


@contextmanager
def proxied(folder: Path, superlink: Address, kind: str = "pass-through") -> Iterator[Address]:
    """Run the proxy of `dqnfed deploy proxy` in front of a server."""
    address = Address(PUBLIC, free_port(PUBLIC))
    files = {"certificate": folder / "server.pem", "key": folder / "server.key", "authority": folder / "ca.crt"}
    write_proxy(folder / "proxy", proxy_config(address, superlink, **files))
    with proxies.running(kind, folder / "proxy", *address):
        yield address


def wait_for(address: Address, thread: threading.Thread) -> None:
    end = time.monotonic() + PATIENCE
    while not is_listening(address.port, address.host):
        assert thread.is_alive(), f"the server of {address} ended"
        assert time.monotonic() < end, f"{address} does not listen"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    write_certificates(folder)
    return folder


@pytest.fixture(scope="module")
def superlink(certificates: Path) -> Iterator[Address]:
    with flower(certificates) as address:
        yield address


def running(address: Address, authority: Path, *ports: int, days: int = 14) -> list[Finding]:
    return list(check_running(address, authority, days=days, ports=ports))


def wrongs(findings: list[Finding]) -> str:
    return "\n".join(finding.text for finding in findings if finding.verdict is Verdict.WRONG)


def notes(findings: list[Finding]) -> str:
    return "\n".join(finding.text for finding in findings if finding.verdict is Verdict.NOTE)


@pytest.mark.parametrize("kind", proxies.KINDS)
def test_nothing_is_wrong_behind_the_proxy(certificates: Path, superlink: Address, kind: str) -> None:
    if nginx_command(kind) is None:
        pytest.skip(f"{kind} is not installed")
    with proxied(certificates, superlink, kind) as address:
        found = running(address, certificates / "ca.crt", superlink.port)
    assert {finding.verdict for finding in found} == {Verdict.FINE}
    texts = "\n".join(finding.text for finding in found)
    for part in ("Control API is refused", "Runtime API is refused", "asks for a node's key", f": {superlink.port}"):
        assert part in texts


def test_a_superlink_without_the_proxy_is_wrong(certificates: Path, superlink: Address) -> None:
    found = running(superlink, certificates / "ca.crt")
    for part in ("the Control API is reachable", "the Runtime API is reachable", "--host 127.0.0.1"):
        assert part in wrongs(found)
    assert "--enable-supernode-auth" in notes(found)


def test_asking_changes_nothing(certificates: Path) -> None:
    api = create_app()
    with flower(certificates, api=api) as address:
        assert "the Control API is reachable" in wrongs(running(address, certificates / "ca.crt"))
    linkstate = api.state.linkstate_factory.state()
    assert list(linkstate.get_run_info()) == []
    assert list(linkstate.get_node_info()) == []


def test_a_proxy_without_a_superlink_is_wrong(certificates: Path) -> None:
    with proxied(certificates, Address("127.0.0.1", free_port())) as address:
        assert "the SuperLink behind it does not (502): start it" in wrongs(running(address, certificates / "ca.crt"))


def test_an_address_that_does_not_answer_is_wrong(certificates: Path) -> None:
    assert "does not answer" in wrongs(running(NOBODY, certificates / "ca.crt"))


def test_a_server_without_tls_is_wrong(certificates: Path) -> None:
    with flower(None) as address:
        assert "does not speak TLS" in wrongs(running(address, certificates / "ca.crt"))


def test_another_authority_is_wrong(superlink: Address, tmp_path: Path) -> None:
    write_certificates(tmp_path)
    assert "a certificate that nodes refuse" in wrongs(running(superlink, tmp_path / "ca.crt"))


@pytest.mark.parametrize(
    ("days", "host", "text"),
    [(-1.0, PUBLIC, "certificate has expired"), (5.0, PUBLIC, "expires on"), (90.0, "127.0.0.9", "127.0.0.2")],
    ids=["expired", "expires soon", "other name"],
)
def test_dates_and_names_of_the_certificate(tmp_path: Path, days: float, host: str, text: str) -> None:
    write_certificates(tmp_path, days=days, host=host)
    with flower(tmp_path, PUBLIC) as address:
        assert text in wrongs(running(address, tmp_path / "ca.crt"))
    files = list(check_files(address, tmp_path / "ca.crt", tmp_path / "server.pem", [], days=14))
    assert {"certificate has expired": "expired on"}.get(text, text) in wrongs(files)


def test_flower_past_the_proxy_is_wrong_unless_it_is_on_loopback(
    certificates: Path, superlink: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:
        for folder in (certificates, None):
            other = stack.enter_context(flower(folder, PUBLIC))
            found = running(NOBODY, certificates / "ca.crt", other.port)
            assert f"Flower answers at {other}, on loopback" in notes(found)
            with monkeypatch.context() as patch:
                patch.setattr(deployment_check, "is_loopback", lambda host: False)
                found = running(NOBODY, certificates / "ca.crt", other.port)
            assert f"Flower itself answers at {other}, past the proxy" in wrongs(found)


def test_another_server_on_a_usual_port_is_a_note(certificates: Path) -> None:
    class Other(BaseHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer((PUBLIC, 0), Other) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        found = running(NOBODY, certificates / "ca.crt", server.server_port)
        server.shutdown()
    assert "something that is not Flower answers" in notes(found)


def test_the_files_of_a_planned_deployment(certificates: Path) -> None:
    address = Address(PUBLIC, 8443)
    keys = [certificates / "server.key"]
    found = list(check_files(address, certificates / "ca.crt", certificates / "server.pem", keys, days=14))
    assert {finding.verdict for finding in found} == {Verdict.FINE}
    assert len(found) == 5  # two dates, names, signature, key


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_a_key_that_others_may_read_is_wrong(tmp_path: Path, mode: int) -> None:
    write_certificates(tmp_path)
    (tmp_path / "server.key").chmod(mode)
    found = list(check_files(NOBODY, tmp_path / "ca.crt", None, [tmp_path / "server.key"], days=14))
    assert f"chmod 600 {tmp_path / 'server.key'}" in wrongs(found)


def test_files_that_are_not_what_they_should_be(tmp_path: Path, certificates: Path) -> None:
    write_certificates(tmp_path)
    (tmp_path / "text").write_text("no certificate")
    cases = [
        ((tmp_path / "text", None, []), "is not a certificate in PEM format"),
        ((tmp_path / "none", None, []), "cannot be read"),
        ((tmp_path / "ca.crt", certificates / "server.pem", []), "was not signed by"),
        ((tmp_path / "ca.crt", tmp_path / "ca.crt", []), "names no host under subjectAltName"),
        ((tmp_path / "ca.crt", None, [tmp_path / "server.pem"]), "is not a private key"),
        ((tmp_path / "ca.crt", None, [tmp_path / "none"]), "cannot be read"),
    ]
    for (authority, certificate, keys), text in cases:
        assert text in wrongs(list(check_files(Address(PUBLIC, 1), authority, certificate, keys, days=14)))
    assert "cannot be read as a certificate" in wrongs(running(NOBODY, tmp_path / "text"))


def test_the_command_exits_with_one_if_something_is_wrong(certificates: Path, superlink: Address) -> None:
    ca = str(certificates / "ca.crt")
    with proxied(certificates, superlink) as address:
        good = CliRunner().invoke(app, ["deploy", "check", str(address), "--ca", ca])
    bad = CliRunner().invoke(app, ["deploy", "check", str(superlink), "--ca", ca])
    assert (good.exit_code, bad.exit_code) == (0, 1)
    assert "nothing wrong was found" in good.stdout
    assert "wrong the Control API is reachable" in bad.stdout
    planned = ["deploy", "check", f"{PUBLIC}:{free_port(PUBLIC)}", "--ca", ca, "--planned"]
    assert CliRunner().invoke(app, planned).exit_code == 0
    key = certificates / "client0.pub"
    key.write_text("ecdsa-sha2-nistp384 AAAA")
    assert CliRunner().invoke(app, [*planned, "--key", str(key)]).exit_code == 1


def test_the_proxy_command_names_what_is_missing(tmp_path: Path, certificates: Path) -> None:
    files = ["--certificate", str(certificates / "server.pem"), "--key", str(certificates / "server.key")]
    files += ["--ca", str(certificates / "ca.crt"), "--out", str(tmp_path / "proxy")]
    done = CliRunner().invoke(app, ["deploy", "proxy", "--listen", "0.0.0.0:8443", *files])
    assert done.exit_code == 0, done.output
    assert "listen 0.0.0.0:8443 ssl;" in (tmp_path / "proxy" / "nginx.conf").read_text()
    lost = CliRunner().invoke(app, ["deploy", "proxy", "--listen", "0.0.0.0:8443", *files, "--key", "lost.key"])
    assert "lost.key does not exist" in str(lost.exception)
    open_door = CliRunner().invoke(
        app, ["deploy", "proxy", "--listen", "0.0.0.0:8443", "--superlink", "0.0.0.0:8000", *files]
    )
    assert "must listen on loopback" in str(open_door.exception)
