"""What a deployment shows to the outside: which ports answer, what passes, certificates, who may read the keys.

Nothing is changed by asking: Flower's interfaces are asked with GET, which it answers with 405 where POST would act,
and with POST only for lists.
"""

from __future__ import annotations

import datetime
import http.client
import os
import socket
import ssl
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dqnfed.flower.proxy import FLEET, Address, is_loopback

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

PATIENCE = 5.0  # seconds for a connection and for an answer
USUAL_PORTS = (8000, 9091, 9092, 9093, 9094, 39091)  # SuperLink, older Flower, a node's own, simulation
CONTROL_CALLS = ("start-run", "stop-run", "list-runs", "stream-logs", "pull-artifacts", "register-node", "list-nodes")
CLOSED = (403, 404)  # what a proxy answers; Flower itself has an answer for every path below
LIST_RUNS = "/v1/control/list-runs"
WHY_CLOSED = (
    "who reaches the SuperLink itself can run code on every node. Start it with --host 127.0.0.1 behind the proxy of "
    "`dqnfed deploy proxy`."
)
PULL_MESSAGES = f"{FLEET}pull-messages"
REGISTER_NODE = f"{FLEET}register-node"


class Verdict(Enum):
    FINE = "ok"
    NOTE = "note"
    WRONG = "wrong"


class Finding(NamedTuple):
    verdict: Verdict
    text: str


class Probe(NamedTuple):
    method: str
    path: str
    what: str  # that a stranger could do where this is answered


PROBES = (
    *(Probe("GET", f"/v1/control/{call}", "the Control API") for call in CONTROL_CALLS),
    Probe("POST", LIST_RUNS, "the Control API"),
    Probe("POST", "/v1/control/list-nodes", "the Control API"),
    Probe("GET", "/v1/runtime/acquire-task", "the Runtime API"),
    Probe("GET", "/v1/runtime/pull-task-input", "the Runtime API"),
    Probe("GET", "/health", "the SuperLink's health page"),
    Probe("GET", "/openapi.json", "the SuperLink's description of itself"),
)


def fine(text: str) -> Finding:
    return Finding(Verdict.FINE, text)


def note(text: str) -> Finding:
    return Finding(Verdict.NOTE, text)


def wrong(text: str) -> Finding:
    return Finding(Verdict.WRONG, text)


def check_running(address: Address, authority: Path, *, days: int, ports: Sequence[int]) -> Iterator[Finding]:
    """Yield what somebody finds who reaches this address and has the certificate of the authority."""
    try:
        context = ssl.create_default_context(cafile=str(authority))
    except (OSError, ssl.SSLError) as error:
        yield wrong(f"{authority} cannot be read as a certificate ({error}); give that of the authority: --ca ca.crt")
        return
    if not answers(address):
        yield wrong(f"{address} does not answer; is the proxy running, and its port open in the firewall?")
    else:
        handshake = list(_check_handshake(address, context, days))
        yield from handshake
        if not any(finding.verdict is Verdict.WRONG for finding in handshake):
            yield from _check_calls(address, context)
    yield from _check_other_ports(address, [port for port in ports if port != address.port])


def check_files(
    address: Address, authority: Path, certificate: Path | None, keys: Sequence[Path], *, days: int
) -> Iterator[Finding]:
    """Yield what the files say: dates and names of certificates, and who may read the private keys."""
    root = _certificate(authority)
    if isinstance(root, Finding):
        yield root
    else:
        yield _dates(str(authority), root, days)
    if certificate is not None:
        leaf = _certificate(certificate)
        if isinstance(leaf, Finding):
            yield leaf
        else:
            yield _dates(str(certificate), leaf, days)
            yield _names(str(certificate), leaf, [address.host, "localhost"])
            if not isinstance(root, Finding):
                yield _signature(str(certificate), leaf, str(authority), root)
    yield from (finding for key in keys for finding in check_key(key))


def check_key(path: Path) -> Iterator[Finding]:
    """Yield whether the file is a private key that only its owner may read."""
    try:
        text, mode = path.read_bytes(), path.stat()
    except OSError as error:
        yield wrong(f"{path} cannot be read: {error.strerror or error}")
        return
    if b"PRIVATE KEY-----" not in text:
        yield wrong(f"{path} is not a private key; give the file without .pub")
        return
    if mode.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        yield wrong(f"{path} may be read or changed by others ({stat.filemode(mode.st_mode)}): chmod 600 {path}")
    elif mode.st_uid not in (os.getuid(), 0):
        yield wrong(f"{path} belongs to another user ({mode.st_uid}), who may read it")
    else:
        yield fine(f"{path} is readable by its owner only")


def check_ports_free(addresses: Iterable[Address]) -> Iterator[Finding]:
    """Yield whether the ports of a planned deployment are still free on this machine."""
    for address in addresses:
        taken = answers(address)
        yield (
            note(f"{address} is in use already; for a deployment that runs, leave out --planned")
            if taken
            else fine(f"{address} is free")
        )


def answers(address: Address) -> bool:
    with suppress(OSError), socket.create_connection(address, PATIENCE):
        return True
    return False


def _check_handshake(address: Address, context: ssl.SSLContext, days: int) -> Iterator[Finding]:
    try:
        with (
            socket.create_connection(address, PATIENCE) as plain,
            context.wrap_socket(plain, server_hostname=address.host) as secure,
        ):
            shown = secure.getpeercert() or {}
            version = secure.version()
    except ssl.SSLCertVerificationError as error:
        yield wrong(
            f"{address} shows a certificate that nodes refuse: {error.verify_message}. Make one that the authority has "
            "signed and that names this address under subjectAltName."
        )
        return
    except (ssl.SSLError, OSError) as error:
        yield wrong(f"{address} does not speak TLS ({error}); messages would travel in the open")
        return
    ends = datetime.datetime.fromtimestamp(ssl.cert_time_to_seconds(str(shown["notAfter"])), datetime.UTC)
    yield fine(f"{address} shows a certificate that nodes accept ({version})")
    yield _days_left(f"the certificate that {address} shows", ends, days)


def _check_calls(address: Address, context: ssl.SSLContext) -> Iterator[Finding]:
    reached: dict[str, list[str]] = {}
    statuses = {probe: _status(address, context, probe.method, probe.path) for probe in PROBES}
    for probe, status in statuses.items():
        if status not in CLOSED:
            reached.setdefault(probe.what, []).append(f"{probe.method} {probe.path}: {status or 'no answer'}")
    for what in dict.fromkeys(probe.what for probe in PROBES):
        if what not in reached:
            yield fine(f"{what} is refused at {address}")
        elif what == "the Control API" and statuses[Probe("POST", LIST_RUNS, what)] == 401:
            yield note(f"{what} answers at {address}, and asks for an account")
        else:
            others = f" and {len(reached[what]) - 1} more" if len(reached[what]) > 1 else ""
            yield wrong(f"{what} is reachable at {address} ({reached[what][-1]}{others}): {WHY_CLOSED}")
    yield _check_fleet(address, _status(address, context, "POST", PULL_MESSAGES))
    if _status(address, context, "POST", REGISTER_NODE) == 401:
        yield note(
            f"{address} passes {REGISTER_NODE}: nodes without a registered key are refused only if the SuperLink runs "
            "with --enable-supernode-auth"
        )
    else:
        yield fine(f"nodes cannot register themselves at {address}")


def _check_fleet(address: Address, status: int | None) -> Finding:
    if status == 401:
        return fine(f"the Fleet API answers at {address}, and asks for a node's key")
    if status in (502, 503, 504):
        return wrong(f"the proxy at {address} answers, but the SuperLink behind it does not ({status}): start it")
    return wrong(f"nodes do not reach the Fleet API at {address} (POST {PULL_MESSAGES}: {status or 'no answer'})")


def _check_other_ports(address: Address, ports: Sequence[int]) -> Iterator[Finding]:
    silent = []
    for port in ports:
        other = Address(address.host, port)
        if not answers(other):
            silent.append(str(port))
        elif not _is_flower(other):
            yield note(f"something that is not Flower answers at {other}")
        elif is_loopback(address.host):
            yield note(f"Flower answers at {other}, on loopback; ask from another machine what that one reaches")
        else:
            yield wrong(f"Flower itself answers at {other}, past the proxy: {WHY_CLOSED}")
    if silent:
        yield fine(f"no other usual port answers at {address.host}: {', '.join(silent)}")


def _is_flower(address: Address) -> bool:
    """Return whether the health page or an interface of Flower answers, with TLS or without."""
    anybody = ssl.create_default_context()
    anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE  # whoever it is: nothing secret is sent
    for context in (anybody, None):
        found = [_status(address, context, "GET", path) for path in (LIST_RUNS, "/v1/runtime/acquire-task")]
        if 405 in found or 401 in found:
            return True
    return False


def _status(address: Address, context: ssl.SSLContext | None, method: str, path: str) -> int | None:
    """Return the status of the answer to an empty request; None where there is none."""
    connection = (
        http.client.HTTPSConnection(*address, timeout=PATIENCE, context=context)
        if context is not None
        else http.client.HTTPConnection(*address, timeout=PATIENCE)
    )
    try:
        body = b"" if method == "POST" else None
        connection.request(method, path, body, {"Content-Type": "application/protobuf", "Accept": "*/*"})
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def _certificate(path: Path) -> Certificate | Finding:
    try:
        from cryptography import x509
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "reading certificates needs Flower's libraries: pip install 'dqnfed[flower]'.", name=error.name
        ) from error
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except OSError as error:
        return wrong(f"{path} cannot be read: {error.strerror or error}")
    except ValueError:
        return wrong(f"{path} is not a certificate in PEM format")


def _dates(name: str, certificate: Certificate, days: int) -> Finding:
    if certificate.not_valid_before_utc > datetime.datetime.now(datetime.UTC):
        return wrong(f"{name} is valid only from {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC on")
    return _days_left(name, certificate.not_valid_after_utc, days)


def _days_left(name: str, ends: datetime.datetime, days: int) -> Finding:
    left = (ends - datetime.datetime.now(datetime.UTC)).total_seconds() / 86400
    if left <= 0:
        return wrong(f"{name} expired on {ends:%Y-%m-%d}; make a new one and restart SuperLink and proxy")
    if left < days:
        return wrong(f"{name} expires on {ends:%Y-%m-%d}, in {int(left)} days; make a new one (--days {days})")
    return fine(f"{name} is valid until {ends:%Y-%m-%d}")


def _names(name: str, certificate: Certificate, hosts: Sequence[str]) -> Finding:
    from cryptography import x509

    try:
        listed = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return wrong(f"{name} names no host under subjectAltName, so every node refuses it")
    named = {*listed.get_values_for_type(x509.DNSName), *map(str, listed.get_values_for_type(x509.IPAddress))}
    missing = [host for host in dict.fromkeys(hosts) if host not in named]
    if missing:
        return wrong(f"{name} names {', '.join(sorted(named))} under subjectAltName, but not {' and '.join(missing)}")
    return fine(f"{name} names {', '.join(dict.fromkeys(hosts))}")


def _signature(name: str, certificate: Certificate, authority: str, root: Certificate) -> Finding:
    try:
        certificate.verify_directly_issued_by(root)
    except Exception:  # cryptography raises several kinds, all of which mean no
        return wrong(f"{name} was not signed by {authority}: nodes refuse it")
    return fine(f"{name} was signed by {authority}")
