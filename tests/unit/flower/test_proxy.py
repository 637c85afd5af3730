"""The proxy's rules: a server that answers everything stands behind it, and is asked the calls of nodes only."""

from __future__ import annotations

import http.client
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES
from flwr.supernode.fleet_http_client import FleetHttpClient

from dqnfed.flower.proxy import Address, parse_address, proxy_config, write_proxy
from tests.helpers import proxies
from tests.helpers.superlink import PATIENCE, PUBLIC, free_port, nginx_command, write_certificates

PASSES = {
    "/v1/fleet/activate-node",
    "/v1/fleet/confirm-message-received",
    "/v1/fleet/deactivate-node",
    "/v1/fleet/get-fab",
    "/v1/fleet/get-run",
    "/v1/fleet/pull-messages",
    "/v1/fleet/pull-object",
    "/v1/fleet/push-messages",
    "/v1/fleet/push-object",
    "/v1/fleet/send-node-heartbeat",
}
EVASIONS = [
    "/v1/fleet/../control/list-runs",
    "/v1/fleet/%2e%2e/control/list-runs",
    "/v1/fleet/pull-messages/../../control/list-runs",
    "/v1/fleet/..%2fcontrol/list-runs",
    "/v1/fleet/pull-messages%2f..%2f..%2fcontrol%2flist-runs",
    "/v1/fleet/pull-messages/..;/../control/list-runs",
    "/v1/fleet//../control/list-runs",
    "//v1/control/list-runs",
    "/V1/CONTROL/list-runs",
    "/v1/control/list-runs/",
    "/v1/control/list-runs?/v1/fleet/pull-messages",
    "/v1/control/list-runs#/v1/fleet/pull-messages",
    "/v1/control/list-runs%00/v1/fleet/pull-messages",
    "/v1/fleet/pull-messages\\..\\..\\control\\list-runs",
    "https://localhost/v1/control/list-runs",
    "/v1/runtime/acquire-task",
    "/v1/fleet/",
    "/v1/fleet",
    "/",
    "/docs",
    "/openapi.json",
    "/health",
    "*",
]


class Behind(ThreadingHTTPServer):
    """A server with TLS that answers every request and remembers what it was asked."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Everything)
        self.asked: list[tuple[str, str]] = []
        self.bodies: list[bytes] = []
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "server.pem", folder / "server.key")
        self.socket = context.wrap_socket(self.socket, server_side=True)


class _Everything(BaseHTTPRequestHandler):
    server: Behind
    protocol_version = "HTTP/1.1"

    def answer(self) -> None:
        self.server.asked.append((self.command, self.path))
        self.server.bodies.append(self._body())
        self.send_response(200)
        self.send_header("Content-Type", "application/protobuf")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = do_OPTIONS = do_PATCH = answer

    def log_message(self, *arguments: Any) -> None:
        """Say nothing."""


class Place(NamedTuple):
    behind: Behind
    port: int
    folder: Path
    authority: Path

    def status(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] = MappingProxyType({})
    ) -> int | None:
        """Return the status of an answer to exactly this path; None: the connection was ended."""
        context = ssl.create_default_context(cafile=str(self.authority))
        connection = http.client.HTTPSConnection(PUBLIC, self.port, context=context, timeout=60)
        try:
            connection.putrequest(method, path, skip_host="Host" in headers)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                connection.putheader(name, value)
            connection.endheaders(body)
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    def has_logged(self, refusal: str) -> bool:
        """Return whether the log has the line; nginx writes it after it has answered."""
        end = time.monotonic() + PATIENCE
        while refusal not in (self.folder / "refused.log").read_text():
            if time.monotonic() > end:
                return False
            time.sleep(0.05)
        return True


@pytest.fixture(scope="module", params=proxies.KINDS)
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    if nginx_command(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    folder = tmp_path_factory.mktemp("proxy")
    write_certificates(folder)
    behind = Behind(folder)
    thread = threading.Thread(target=behind.serve_forever, daemon=True)
    thread.start()
    listen = Address(PUBLIC, free_port(PUBLIC))
    config = proxy_config(
        listen,
        Address("127.0.0.1", behind.server_port),
        certificate=folder / "server.pem",
        key=folder / "server.key",
        authority=folder / "ca.crt",
    )
    write_proxy(folder / "proxy", config)
    try:
        with proxies.running(request.param, folder / "proxy", *listen):
            yield Place(behind, listen.port, folder / "proxy", folder / "ca.crt")
    finally:
        behind.shutdown()
        behind.server_close()


def test_of_all_calls_of_flower_only_those_of_nodes_pass(place: Place) -> None:
    paths = sorted(path for _, path in PROTOBUF_REQUEST_TYPES)
    assert len(paths) > 60  # Fleet, Control and Runtime API
    place.behind.asked.clear()
    statuses = {path: place.status("POST", path) for path in paths}
    assert {path for path, status in statuses.items() if status == 200} == PASSES
    assert set(place.behind.asked) == {("POST", path) for path in PASSES}
    for path in set(paths) - PASSES:
        assert statuses[path] == (412 if path == "/v1/fleet/register-node" else 403)
        assert place.has_logged(f'"POST {path} HTTP/1.1" {statuses[path]}')


def test_a_node_of_flower_calls_nothing_but_what_passes_and_its_registration() -> None:
    """The list is Flower's: a call that a later version adds, or renames, fails here."""
    called: set[str] = set()

    class Listening(FleetHttpClient):
        def _unary_unary(self, *, path: str, response_type: type, **others: Any) -> Any:
            called.add(path)
            return response_type()

    client = object.__new__(Listening)
    for name in vars(FleetHttpClient):
        if name[0].isupper():
            getattr(client, name)(None)
    assert called == PASSES | {"/v1/fleet/register-node", "/v1/fleet/unregister-node"}


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_no_spelling_of_another_path_passes(place: Place, method: str) -> None:
    place.behind.asked.clear()
    for path in EVASIONS:
        status = place.status(method, path)
        assert status is None or 400 <= status < 500, (path, status)
    assert place.behind.asked == []


def test_what_the_server_is_asked_is_never_what_a_stranger_wrote(place: Place) -> None:
    """Where a strange spelling is taken for a call that passes, the server is asked that call, in its own spelling."""
    place.behind.asked.clear()
    for path in ["/v1/control/../fleet/get-run", "/v1/fleet/./get-run", "//v1//fleet/get-run", "/v1/fleet/get%2drun"]:
        place.status("POST", path)
    assert set(place.behind.asked) <= {("POST", "/v1/fleet/get-run")}


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_nodes_calls_pass_with_post_only(place: Place, method: str) -> None:
    place.behind.asked.clear()
    assert {place.status(method, path) for path in PASSES} == {403}
    assert place.behind.asked == []


def test_headers_do_not_change_the_path(place: Place) -> None:
    place.behind.asked.clear()
    for name in ("X-Original-URL", "X-Rewrite-URL", "X-Forwarded-Prefix", "X-HTTP-Method-Override", "Upgrade"):
        place.status("POST", "/v1/fleet/get-run", headers={name: "/v1/control/list-runs"})
        assert place.status("POST", "/", headers={name: "/v1/fleet/get-run"}) == 403
    assert place.status("POST", "/v1/control/list-runs", headers={"Host": "127.0.0.1:8000"}) == 403
    assert set(place.behind.asked) == {("POST", "/v1/fleet/get-run")}


def test_a_second_request_hidden_in_a_body_is_a_body(place: Place) -> None:
    hidden = b"POST /v1/control/list-runs HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n"
    place.behind.asked.clear()
    place.behind.bodies.clear()
    assert place.status("POST", "/v1/fleet/push-object", hidden) == 200
    assert place.behind.bodies == [hidden]
    place.status("POST", "/v1/fleet/push-object", b"0\r\n\r\n" + hidden, headers={"Transfer-Encoding": "chunked"})
    assert set(place.behind.asked) == {("POST", "/v1/fleet/push-object")}


def test_large_messages_pass_unchanged(place: Place) -> None:
    body = bytes(range(256)) * (80 * 1024)  # Flower's pieces of arrays have 20 MiB
    place.behind.bodies.clear()
    assert place.status("POST", "/v1/fleet/push-object", body) == 200
    assert place.behind.bodies == [body]


def test_a_message_above_the_limit_is_refused(place: Place) -> None:
    place.behind.asked.clear()
    assert place.status("POST", "/v1/fleet/push-object", headers={"Content-Length": str(64 * 2**20 + 1)}) == 413
    assert place.behind.asked == []
    assert place.has_logged('"POST /v1/fleet/push-object HTTP/1.1" 413')


def test_a_stranger_without_the_authoritys_certificate_is_told_nothing_else(place: Place) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        http.client.HTTPSConnection(PUBLIC, place.port, context=ssl.create_default_context()).connect()


@pytest.mark.parametrize("superlink", ["0.0.0.0:8000", "192.0.2.7:8000", "fed.example.org:8000", "[::]:8000"])
def test_a_superlink_that_others_reach_is_refused(superlink: str) -> None:
    with pytest.raises(ValueError, match=r"must listen on loopback.*--host 127\.0\.0\.1"):
        config_of("0.0.0.0:8443", superlink)


@pytest.mark.parametrize("listen", ["0.0.0.0:8000", "[::]:8000", "127.0.0.1:8000", "localhost:8000"])
def test_two_servers_do_not_share_a_port(listen: str) -> None:
    with pytest.raises(ValueError, match="share port 8000; choose another"):
        config_of(listen, "127.0.0.1:8000")
    assert "listen 127.0.0.2:8000 ssl;" in config_of("127.0.0.2:8000", "127.0.0.1:8000")


@pytest.mark.parametrize("name", ['a"b', "a;b", "$a", "a{b", "a\nb", "a'b"])
def test_a_path_that_would_end_the_line_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="nginx cannot read"):
        config_of("0.0.0.0:8443", "127.0.0.1:8000", key=Path(name))


@pytest.mark.parametrize(
    "text", ["8443", "host", "host:", "host:0", "host:65536", "a b:1", "host:1;", "::1:80", "h:1\n"]
)
def test_an_address_is_host_and_port(text: str) -> None:
    with pytest.raises(ValueError, match="is not an address; write host:port"):
        parse_address(text)


def test_addresses_are_written_as_they_were_read() -> None:
    for text in ["fed.example.org:8443", "0.0.0.0:1", "[::1]:65535"]:
        assert str(parse_address(text)) == text


def config_of(listen: str, superlink: str, key: Path = Path("server.key")) -> str:
    return proxy_config(
        parse_address(listen),
        parse_address(superlink),
        certificate=Path("server.pem"),
        key=key,
        authority=Path("ca.crt"),
    )
