"""The configuration of nginx in front of a SuperLink: nodes' calls pass, everything else is refused and logged.

Flower 1.41 and 1.42 serve three interfaces on one port: Fleet (what nodes call; signed with their keys), Control
(`flwr run`, `flwr supernode register`; open to everybody who reaches the port) and Runtime (the server app's). There is
no option that gives them addresses of their own, so the SuperLink stays on loopback behind this proxy.
"""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import NamedTuple

# What a SuperNode with a key calls. `register-node` and `unregister-node` are not among them: keys are registered by
# whoever runs the server, through the Control API on loopback.
NODE_CALLS = (
    "activate-node",
    "confirm-message-received",
    "deactivate-node",
    "get-fab",
    "get-run",
    "pull-messages",
    "pull-object",
    "push-messages",
    "push-object",
    "send-node-heartbeat",
)
FLEET = "/v1/fleet/"
LARGEST_BODY = 64  # megabytes; Flower sends arrays in pieces of 20
NO_KEY = "This node has no key: start it with --auth-supernode-private-key, and have its public key registered."
UNSAFE_IN_NGINX = re.compile(r"[\"'\\$;{}\x00-\x1f]")


class Address(NamedTuple):
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """Return host and port of `host:port`; an IPv6 address stands in brackets."""
    match = re.fullmatch(r"(?:\[(?P<six>[0-9A-Fa-f:.%]+)\]|(?P<host>[A-Za-z0-9._-]+)):(?P<port>[0-9]{1,5})", text)
    if match is None or not 1 <= int(match["port"]) <= 65535:
        raise ValueError(
            f"'{text}' is not an address; write host:port, as in fed.example.org:8443, 0.0.0.0:8443 or [::]:8443."
        )
    return Address(match["six"] or match["host"], int(match["port"]))


def is_loopback(host: str) -> bool:
    """Return whether only processes of the same machine reach this host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def proxy_config(listen: Address, superlink: Address, *, certificate: Path, key: Path, authority: Path) -> str:
    """Return a complete nginx.conf, whose own files (logs, pid) lie in the folder that nginx is started in (`-p`).

    Every call that passes has a location of its own with a fixed target: what the SuperLink is asked is never taken
    from the path that a stranger sent.
    """
    if not is_loopback(superlink.host):
        raise ValueError(
            f"the SuperLink must listen on loopback, but {superlink} is not: whoever reaches it may run code on every "
            f"node. Start it with --host 127.0.0.1 and say --superlink 127.0.0.1:{superlink.port}."
        )
    if _is_on(listen.host, superlink.host) and listen.port == superlink.port:
        raise ValueError(f"proxy and SuperLink cannot share port {listen.port}; choose another for one of them.")
    calls = "\n".join(_location(call, superlink) for call in NODE_CALLS)
    return TEMPLATE.format(
        listen=listen,
        certificate=_quoted(certificate),
        key=_quoted(key),
        authority=_quoted(authority),
        largest=LARGEST_BODY,
        no_key=NO_KEY,
        calls=calls,
    )


def write_proxy(folder: Path, config: str) -> Path:
    """Return the path of nginx.conf, written to the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "nginx.conf"
    path.write_text(config, encoding="utf-8")
    return path


def _location(call: str, superlink: Address) -> str:
    path = f"{FLEET}{call}"
    return f"        location = {path} {{ limit_except POST {{ deny all; }} proxy_pass https://{superlink}{path}; }}"


def _is_on(host: str, other: str) -> bool:
    """Return whether listening on `host` takes the ports of `other`, too."""
    return host in {"0.0.0.0", "::"} or host == other or {host, other} <= {"localhost", "127.0.0.1", "::1"}


def _quoted(path: Path) -> str:
    text = path.resolve().as_posix()
    if UNSAFE_IN_NGINX.search(text):
        raise ValueError(f"nginx cannot read {text}: quotes, $, ;, braces and backslashes are not allowed in its path.")
    return f'"{text}"'


TEMPLATE = """\
# Written by `dqnfed deploy proxy`. Nodes reach the calls below, which Flower checks against their keys. Everything
# else, Flower's Control API above all, is answered with 403. refused.log has every refusal, Flower's too.
daemon off;
worker_processes 1;
pid nginx.pid;
error_log error.log;
events {{ worker_connections 1024; }}
http {{
    map $status $is_refused {{ default 0; ~^4 1; }}
    log_format refusal '$time_iso8601 $remote_addr "$request" $status';
    access_log refused.log refusal if=$is_refused;
    client_body_temp_path body;
    proxy_temp_path answers;
    fastcgi_temp_path unused-fastcgi;
    uwsgi_temp_path unused-uwsgi;
    scgi_temp_path unused-scgi;
    server_tokens off;
    default_type text/plain;
    server {{
        listen {listen} ssl;
        ssl_certificate {certificate};
        ssl_certificate_key {key};
        ssl_protocols TLSv1.2 TLSv1.3;
        client_max_body_size {largest}m;

        # Nothing is kept on disk on its way.
        proxy_request_buffering off;
        proxy_max_temp_file_size 0;
        proxy_http_version 1.1;
        proxy_read_timeout 300s;
        proxy_set_header Host localhost;
        proxy_set_header Connection "";
        proxy_set_header X-Forwarded-For $remote_addr;
        proxy_set_header X-Forwarded-Proto https;

        # The SuperLink shows the same certificate, which therefore names localhost, too.
        proxy_ssl_verify on;
        proxy_ssl_trusted_certificate {authority};
        proxy_ssl_name localhost;

{calls}

        # Flower's own words for a node without a key, which ends then; it does not after a 403.
        location = /v1/fleet/register-node {{
            default_type application/json;
            return 412 '{{"code": 2001, "detail": "{no_key}"}}';
        }}
        location / {{ return 403 "refused: only the calls of nodes pass here\\n"; }}
    }}
}}
"""
