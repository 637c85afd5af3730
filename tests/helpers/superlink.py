"""A real Flower deployment on the loopback interface: SuperLink with TLS and node keys, SuperNodes, an app to run."""

from __future__ import annotations

import datetime
import ipaddress
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

BIN = Path(sys.executable).parent
PATIENCE = 180.0  # seconds for anything to come up on a busy machine


class Deployment:
    """A SuperLink in a folder, and whatever is started against it; `close` ends every process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.environment = {
            **os.environ,
            "FLWR_HOME": str(folder / "flwr"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "OMP_NUM_THREADS": "1",
            "PATH": os.pathsep.join([str(BIN), os.environ.get("PATH", "")]),
        }
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        write_certificates(folder)
        home = folder / "flwr"
        home.mkdir()
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "tls"\n[superlink.tls]\naddress = "127.0.0.1:{self.port}"\n'
            f'root-certificates = "{folder / "ca.crt"}"\n'
        )

    def start_superlink(self) -> None:
        """Start the SuperLink: TLS, node authentication, its state on disk."""
        arguments = ["--ssl-ca-certfile", "ca.crt", "--ssl-certfile", "server.pem", "--ssl-keyfile", "server.key"]
        arguments += ["--host", "127.0.0.1", "--port", str(self.port), "--enable-supernode-auth"]
        self.start("superlink", ["flower-superlink", *arguments, "--database", "state.db"])
        self.wait_until(lambda: is_listening(self.port), "the SuperLink listens")

    def register(self, keys: Sequence[str]) -> None:
        """Make node keys and register their public halves, all at once: most of it is the command's start."""
        for key in keys:
            write_node_key(self.folder / key)

        def registered(key: str) -> subprocess.CompletedProcess[str]:
            return self.flwr("supernode", "register", str(self.folder / f"{key}.pub"), "tls")

        with ThreadPoolExecutor(len(keys)) as pool:
            for done in pool.map(registered, keys):
                assert done.returncode == 0, done.stdout + done.stderr

    def start_node(self, name: str, key: str | None, node_config: str, *, is_plaintext: bool = False) -> None:
        """Start a SuperNode with the given key."""
        security = ["--insecure"] if is_plaintext else ["--root-certificates", "ca.crt"]
        identity = [] if key is None else ["--auth-supernode-private-key", key]
        address = ["--superlink", f"127.0.0.1:{self.port}", "--host", "127.0.0.1", "--port", str(free_port())]
        limits = ["--max-retries", "3"] if is_plaintext else []
        self.start(name, ["flower-supernode", *security, *address, *identity, *limits, "--node-config", node_config])

    def wait_for_nodes(self, n_online: int) -> None:
        self.wait_until(lambda: self.n_online() == n_online, f"{n_online} nodes are online")

    def n_online(self) -> int:
        done = self.flwr("supernode", "list", "tls", "--format", "json")
        nodes = json.loads(done.stdout)["nodes"] if done.returncode == 0 else []
        return sum(node["status"] == "online" for node in nodes)

    def run(self, app: Path, run_config: str) -> subprocess.CompletedProcess[str]:
        """Run the app to its end; the log is in the result."""
        return self.flwr("run", str(app), "tls", "--stream", "--run-config", run_config)

    def flwr(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(BIN / "flwr"), *arguments],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=900,
        )

    def start(self, name: str, command: Sequence[str]) -> None:
        log = (self.folder / f"{name}.log").open("ab")
        self._running[name] = subprocess.Popen(
            [str(BIN / command[0]), *command[1:]],
            cwd=self.folder,
            env=self.environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that its children can be ended with it
        )
        log.close()

    def stop(self, name: str, *, kill: bool = False) -> None:
        """End a process and its children."""
        process = self._running.pop(name)
        send_to_group(process, signal.SIGKILL if kill else signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            send_to_group(process, signal.SIGKILL)
            process.wait()

    def is_running(self, name: str) -> bool:
        return self._running[name].poll() is None

    def ended(self, name: str) -> int | None:
        """Return the exit status of a process that should not last; None: it is still there."""
        end = time.monotonic() + PATIENCE
        while self._running[name].poll() is None and time.monotonic() < end:
            time.sleep(0.2)
        return self._running[name].poll()

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def wait_until(self, is_so: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + PATIENCE
        while not is_so():
            dead = [name for name, process in self._running.items() if process.poll() is not None]
            assert not dead, f"{dead[0]} ended while waiting until {what}:\n{self.log(dead[0])[-3000:]}"
            assert time.monotonic() < end, f"waited {PATIENCE:g} s in vain until {what}"
            time.sleep(0.2)

    def kill_server_apps(self) -> None:
        """End server apps: they have sessions of their own, and outlive their SuperLink."""
        kill_processes_at_home(self.folder / "flwr", "flwr-serverapp")

    def close(self) -> None:
        for name in list(self._running):
            self.stop(name, kill=True)
        kill_processes_at_home(self.folder / "flwr")


def send_to_group(process: subprocess.Popen[bytes], number: int) -> None:
    """Send the signal to a process and its children, which may outlive it."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def kill_processes_at_home(home: Path, name: str = "") -> None:
    """End the processes that have this FLWR_HOME, so only those of one test, and this name in their command."""
    mark = f"FLWR_HOME={home}\0".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark in (process / "environ").read_bytes() and name.encode() in (process / "cmdline").read_bytes():
                os.kill(int(process.name), signal.SIGKILL)


def free_port(host: str = "127.0.0.1") -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
    return port


def is_listening(port: int, host: str = "127.0.0.1") -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((host, port)) == 0


def write_node_key(path: Path) -> None:
    """Write a node's key pair in OpenSSH's format, as `ssh-keygen -t ecdsa -b 384` does."""
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    path.write_bytes(private)
    path.with_name(f"{path.name}.pub").write_bytes(public + b"\n")


def write_certificates(folder: Path) -> None:
    """Write a certificate authority, and a server certificate for the loopback interface signed by it."""
    authority, server = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    issuer = _name("test authority")
    root = _builder(issuer, issuer, authority).add_extension(x509.BasicConstraints(True, None), critical=True)
    signs: dict[str, Any] = dict.fromkeys(
        ["digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"], False
    )
    usage = x509.KeyUsage(**signs, key_cert_sign=True, crl_sign=True, encipher_only=False, decipher_only=False)
    identifier = x509.SubjectKeyIdentifier.from_public_key(authority.public_key())
    certificate = (
        root.add_extension(usage, critical=True)
        .add_extension(identifier, critical=False)
        .sign(authority, hashes.SHA256())
    )
    addresses = [x509.IPAddress(ipaddress.ip_address(f"127.0.0.{last}")) for last in (1, 2)]
    names = x509.SubjectAlternativeName([x509.DNSName("localhost"), *addresses])
    signed_by = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier)
    leaf = _builder(_name("localhost"), issuer, server).add_extension(names, critical=False)
    leaf = leaf.add_extension(signed_by, critical=False).add_extension(
        x509.BasicConstraints(False, None), critical=True
    )
    pem = serialization.Encoding.PEM
    (folder / "ca.crt").write_bytes(certificate.public_bytes(pem))
    (folder / "server.pem").write_bytes(leaf.sign(authority, hashes.SHA256()).public_bytes(pem))
    (folder / "server.key").write_bytes(
        server.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=2))
    )


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])
