"""A real Flower deployment on the loopback interface, set up by the commands of the guide, and an app to run."""

from __future__ import annotations

import datetime
import ipaddress
import json
import os
import re
import shutil
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

from tests.helpers.pages import blocks_of
from tests.helpers.repository import ROOT

BIN = Path(sys.executable).parent
PUBLIC = "127.0.0.2"  # the proxy's: another loopback address than the server's, so that nothing else is open on it
PATIENCE = 180.0  # seconds for anything to come up on a busy machine


class Guide:
    """The shell blocks of docs/how-to/deploy.md by name: those below a comment `<!-- deploy: NAME -->`."""

    def __init__(self) -> None:
        blocks = blocks_of(ROOT / "docs" / "how-to" / "deploy.md")
        named = [(b.comment.removeprefix("deploy: "), b.code) for b in blocks if b.comment.startswith("deploy: ")]
        self.blocks = dict(named)
        assert len(self.blocks) == len(named), "two blocks of the guide have one name"

    def script(self, name: str, settings: dict[str, str], client: dict[str, str]) -> str:
        """Return a block as the guide has it, after its two blocks of settings with other values."""
        own = [self._exports("settings", settings), self.blocks["environment"], self._exports("client", client)]
        return "\n".join([*own, self.blocks[name]])

    def _exports(self, name: str, values: dict[str, str]) -> str:
        found = set(re.findall(r"(\w+)=", re.sub(r"#.*", "", self.blocks[name])))
        assert found == set(values), f"the guide sets {sorted(found)}, the test {sorted(values)}"
        return "\n".join(f"export {key}={value}" for key, value in values.items())


class Deployment:
    """The deployment of the guide in a folder, and whatever is started against it; `close` ends every process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port, self.superlink_port = free_port(PUBLIC), free_port()
        put_nginx_on_path(folder / "bin")
        self.environment = {
            **os.environ,
            "FLWR_HOME": str(folder / "flwr"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
            "OMP_NUM_THREADS": "1",
            "PATH": os.pathsep.join([str(folder / "bin"), str(BIN), os.environ.get("PATH", "")]),
        }
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._guide = Guide()
        self._node_ports: dict[int, int] = {}

    def open(self) -> None:
        """Do the guide's steps 1 to 3: certificates, SuperLink, proxy."""
        self.follow("certificates")
        self.start_superlink()
        self.follow("configuration")
        self.follow("proxy")
        self.start("nginx", self._bash("nginx"))
        self.wait_until(lambda: is_listening(self.port, PUBLIC), "the proxy listens")

    def start_superlink(self) -> None:
        self.start("superlink", self._bash("superlink"))
        self.wait_until(lambda: is_listening(self.superlink_port), "the SuperLink listens")

    def join(self, clients: Sequence[int]) -> None:
        """Do the guide's steps 4 to 6 for these clients at once: most of it is the commands' start."""

        def joined(client: int) -> None:
            self.follow("key", client)
            self.follow("register", client)
            self.start_client(client)

        with ThreadPoolExecutor(len(clients)) as pool:
            list(pool.map(joined, clients))

    def start_client(self, client: int) -> None:
        """Start a client's SuperNode as the guide does; its log is `node0.log`."""
        self.start(f"node{client}", self._bash("node", client))

    def follow(self, name: str, client: int = 0) -> str:
        """Run a block of the guide to its end and return what it printed."""
        done = subprocess.run(
            self._bash(name, client), cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=900
        )
        assert done.returncode == 0, f"{name}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def _bash(self, name: str, client: int = 0) -> list[str]:
        settings = {
            "SERVER": PUBLIC,
            "SAN": f"IP:{PUBLIC}",
            "LISTEN": PUBLIC,
            "PORT": str(self.port),
            "SUPERLINK": str(self.superlink_port),
        }
        node_port = self._node_ports.setdefault(client, free_port())
        about = {"CLIENT": str(client), "NODE_PORT": str(node_port)}
        return ["bash", "-euo", "pipefail", "-c", self._guide.script(name, settings, about)]

    def start_node(self, name: str, key: str | None, node_config: str, *, is_plaintext: bool = False) -> None:
        """Start a SuperNode that is not the guide's, against the open port."""
        security = ["--insecure"] if is_plaintext else ["--root-certificates", "ca.crt"]
        identity = [] if key is None else ["--auth-supernode-private-key", key]
        address = ["--superlink", f"{PUBLIC}:{self.port}", "--host", "127.0.0.1", "--port", str(free_port())]
        limits = ["--max-retries", "3"] if is_plaintext else []
        command = [*security, *address, *identity, *limits, "--node-config", node_config]
        self.start(name, [str(BIN / "flower-supernode"), *command])

    def wait_for_nodes(self, n_online: int) -> None:
        self.wait_until(lambda: self.n_online() == n_online, f"{n_online} nodes are online")

    def n_online(self) -> int:
        done = self.flwr("supernode", "list", "mine", "--format", "json")
        nodes = json.loads(done.stdout)["nodes"] if done.returncode == 0 else []
        return sum(node["status"] == "online" for node in nodes)

    def run(self, app: Path, run_config: str) -> subprocess.CompletedProcess[str]:
        """Run the app to its end; the log is in the result."""
        return self.flwr("run", str(app), "mine", "--stream", "--run-config", run_config)

    def flwr(self, *arguments: str, home: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run the command on the server, or with another FLWR_HOME: as somebody else."""
        return subprocess.run(
            [str(BIN / "flwr"), *arguments],
            cwd=self.folder,
            env=self.environment if home is None else {**self.environment, "FLWR_HOME": str(home)},
            capture_output=True,
            text=True,
            timeout=900,
        )

    def start(self, name: str, command: Sequence[str]) -> None:
        log = (self.folder / f"{name}.log").open("ab")
        self._running[name] = subprocess.Popen(
            list(command),
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

    def open_sockets(self) -> set[tuple[str, int]]:
        """Return the addresses on which the processes of this deployment listen."""
        found = {int(process.name) for process in processes_at_home(self.folder / "flwr")}
        groups = {process.pid for process in self._running.values()}  # nginx overwrites its environment
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if os.getpgid(int(process.name)) in groups:
                    found.add(int(process.name))
        return {address for process in found for address in listening_sockets(process)}

    def close(self) -> None:
        for name in list(self._running):
            self.stop(name, kill=True)
        kill_processes_at_home(self.folder / "flwr")


def nginx_command(kind: str = "nginx") -> list[str] | None:
    """Return the command `nginx`, or the tests' own proxy that obeys the same file; None: it is not installed."""
    if kind == "pass-through":
        return [sys.executable, "-m", "tests.helpers.pass_through"]
    found = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
    return None if found is None else [found]


def put_nginx_on_path(folder: Path) -> None:
    """Write a command `nginx` to the folder: the real one, or the tests' own where that is not installed."""
    folder.mkdir(parents=True, exist_ok=True)
    words = " ".join(f"'{word}'" for word in nginx_command() or nginx_command("pass-through") or [])
    script = folder / "nginx"
    script.write_text(f"#!/bin/sh\nPYTHONPATH='{ROOT}' exec {words} \"$@\"\n")
    script.chmod(0o755)


def send_to_group(process: subprocess.Popen[bytes], number: int) -> None:
    """Send the signal to a process and its children, which may outlive it."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def kill_processes_at_home(home: Path, name: str = "") -> None:
    """End the processes that have this FLWR_HOME, so only those of one test, and this name in their command."""
    for process in processes_at_home(home):
        with suppress(OSError):
            if name.encode() in (process / "cmdline").read_bytes():
                os.kill(int(process.name), signal.SIGKILL)


def processes_at_home(home: Path) -> list[Path]:
    """Return the folders in /proc of the processes that have this FLWR_HOME."""
    mark, found = f"FLWR_HOME={home}\0".encode(), []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark in (process / "environ").read_bytes():
                found.append(process)
    return found


def listening_sockets(process: int) -> set[tuple[str, int]]:
    """Return host and port of every TCP socket on which the process listens."""
    mine = set()
    with suppress(OSError):
        for link in Path(f"/proc/{process}/fd").iterdir():
            with suppress(OSError):
                mine.add(str(link.readlink()))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in mine:  # 0A: it listens
                host, port = fields[1].split(":")
                words = [bytes.fromhex(host[i : i + 8])[::-1] for i in range(0, len(host), 8)]
                found.add((str(ipaddress.ip_address(b"".join(words))), int(port, 16)))
    return found


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
    path.touch(mode=0o600)
    path.write_bytes(private)
    path.with_name(f"{path.name}.pub").write_bytes(public + b"\n")


def write_certificates(folder: Path, *, days: float = 90.0, host: str = "127.0.0.2") -> None:
    """Write a certificate authority, and a server certificate for the loopback interface signed by it."""
    authority, server = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    issuer = _name("test authority")
    root = _builder(issuer, issuer, authority, 90.0).add_extension(x509.BasicConstraints(True, None), critical=True)
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
    addresses = [x509.IPAddress(ipaddress.ip_address(address)) for address in ("127.0.0.1", host)]
    names = x509.SubjectAlternativeName([x509.DNSName("localhost"), *addresses])
    signed_by = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier)
    leaf = _builder(_name("localhost"), issuer, server, days).add_extension(names, critical=False)
    leaf = leaf.add_extension(signed_by, critical=False).add_extension(
        x509.BasicConstraints(False, None), critical=True
    )
    pem = serialization.Encoding.PEM
    (folder / "ca.crt").write_bytes(certificate.public_bytes(pem))
    (folder / "server.pem").write_bytes(leaf.sign(authority, hashes.SHA256()).public_bytes(pem))
    (folder / "server.key").touch(mode=0o600)
    (folder / "server.key").write_bytes(
        server.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: float
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=10))
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])
