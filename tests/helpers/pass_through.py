"""A small proxy that obeys the nginx.conf of `dqnfed deploy proxy`, for machines without nginx.

It reads the directives that the generated file uses and no others, with a reader of its own: `python -m
tests.helpers.pass_through -p FOLDER -c nginx.conf` is what `nginx -p FOLDER -c nginx.conf` is. One request a
connection, no buffering limits: for tests only.
"""

from __future__ import annotations

import argparse
import datetime
import http.client
import posixpath
import re
import ssl
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

TOKEN = re.compile(
    r"""\s*(?:\#[^\n]*|(?P<quoted>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|(?P<mark>[{};])|(?P<word>[^\s{};]+))"""
)


class Directive(NamedTuple):
    words: tuple[str, ...]
    block: tuple[Directive, ...]

    def find(self, name: str) -> list[Directive]:
        return [inner for inner in self.block if inner.words[0] == name]

    def value(self, name: str) -> str:
        (found,) = self.find(name)
        return found.words[1]


def parse(text: str) -> Directive:
    """Return the directives of an nginx configuration as a tree."""
    tokens = []
    for match in TOKEN.finditer(text):
        if match["quoted"]:
            tokens.append(match["quoted"][1:-1].replace("\\n", "\n"))
        elif match["mark"] or match["word"]:
            tokens.append(match["mark"] or match["word"])
    block, rest = _block(tokens)
    assert not rest, rest
    return Directive(("main",), block)


def _block(tokens: list[str]) -> tuple[tuple[Directive, ...], list[str]]:
    found: list[Directive] = []
    words: list[str] = []
    while tokens:
        token, tokens = tokens[0], tokens[1:]
        if token == "}":
            break
        if token == "{":
            inner, tokens = _block(tokens)
            found.append(Directive(tuple(words), inner))
            words = []
        elif token == ";":
            found.append(Directive(tuple(words), ()))
            words = []
        else:
            words.append(token)
    return tuple(found), tokens


class Rule(NamedTuple):
    """What happens to a request: it is passed to a fixed URL, or answered at once."""

    method: str | None  # the only one allowed; None: any
    target: str | None
    status: int
    body: str


class Rules:
    """The locations of the generated server block."""

    def __init__(self, config: str) -> None:
        (http_block,) = parse(config).find("http")
        (self.server,) = http_block.find("server")
        self._exact = {x.words[2]: _rule(x) for x in self.server.find("location") if x.words[1] == "="}
        (self._other,) = [_rule(x) for x in self.server.find("location") if x.words[1:] == ("/",)]
        host, _, port = self.server.value("listen").rpartition(":")
        self.listen = (host.strip("[]"), int(port))
        self.largest = int(self.server.value("client_max_body_size").removesuffix("m")) * 2**20

    def rule_for(self, method: str, target: str) -> Rule:
        """Return the rule of nginx: the path is decoded and its dots are resolved before it is looked up."""
        path = urllib.parse.unquote(urllib.parse.urlsplit(target).path)
        rule = self._exact.get(re.sub("/+", "/", posixpath.normpath(path)), self._other)
        if rule.method is not None and method != rule.method:
            return Rule(None, None, 403, "")
        return rule


def _rule(location: Directive) -> Rule:
    methods = [inner.words[1] for inner in location.find("limit_except")]
    answers = [inner.words[1:] for inner in location.find("return")]
    if answers:
        return Rule(None, None, int(answers[0][0]), answers[0][1])
    return Rule(methods[0] if methods else None, location.value("proxy_pass"), 0, "")


class PassThrough(ThreadingHTTPServer):
    """The proxy itself."""

    daemon_threads = True

    def __init__(self, folder: Path, config: str) -> None:
        self.rules = Rules((folder / config).read_text())
        self.log_file = folder / "refused.log"
        self.log_file.touch()
        super().__init__(self.rules.listen, _Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(
            self.rules.server.value("ssl_certificate"), self.rules.server.value("ssl_certificate_key")
        )
        self.socket = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
        self.upstream = ssl.create_default_context(cafile=self.rules.server.value("proxy_ssl_trusted_certificate"))

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: strangers end connections as they like."""


class _Handler(BaseHTTPRequestHandler):
    server: PassThrough
    timeout = 60

    def handle_request(self) -> None:
        rule = self.server.rules.rule_for(self.command, self.path)
        if "Transfer-Encoding" in self.headers:  # two ways to say where a request ends
            rule = Rule(None, None, 400, "")
        elif int(self.headers.get("Content-Length", 0)) > self.server.rules.largest:
            rule = Rule(None, None, 413, "")
        status, headers, body = (
            self._passed(rule.target)
            if rule.target
            else (rule.status, {"Content-Type": "text/plain"}, rule.body.encode())
        )
        if 400 <= status < 500:
            now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            with self.server.log_file.open("a") as log:
                log.write(f'{now} {self.client_address[0]} "{self.requestline}" {status}\n')
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = do_OPTIONS = do_PATCH = handle_request

    def _passed(self, target: str) -> tuple[int, dict[str, str], bytes]:
        goal = urllib.parse.urlsplit(target)
        length = int(self.headers.get("Content-Length", 0))
        kept = {k: v for k, v in self.headers.items() if k.lower() not in {"host", "connection", "content-length"}}
        assert goal.hostname is not None
        connection = http.client.HTTPSConnection("localhost", goal.port, timeout=300, context=self.server.upstream)
        try:
            connection.request(self.command, goal.path, self.rfile.read(length), kept)
            answer = connection.getresponse()
            return answer.status, {"Content-Type": answer.headers.get("Content-Type", "")}, answer.read()
        except OSError:
            return 502, {}, b""
        finally:
            connection.close()

    def log_message(self, *arguments: Any) -> None:
        """Refusals are logged above; nothing else is."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("-p", dest="folder", type=Path, required=True)
    parser.add_argument("-c", dest="config", required=True)
    given = parser.parse_args()
    with PassThrough(given.folder, given.config) as proxy:
        proxy.serve_forever()


if __name__ == "__main__":
    main()
