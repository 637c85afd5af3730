"""Proxies in front of a server, started from the file that `dqnfed deploy proxy` wrote: nginx, or the tests' own."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.helpers.repository import ROOT
from tests.helpers.superlink import PATIENCE, is_listening

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
KINDS = ("pass-through", "nginx")


def command(kind: str) -> list[str] | None:
    """Return the command that stands for `nginx`; None: it is not installed."""
    if kind == "pass-through":
        return [sys.executable, "-m", "tests.helpers.pass_through"]
    return None if NGINX is None else [NGINX]


def put_on_path(folder: Path) -> None:
    """Write a command `nginx` to the folder: the real one, or the tests' own where it is not installed."""
    folder.mkdir(parents=True, exist_ok=True)
    words = " ".join(f"'{word}'" for word in command("nginx") or command("pass-through") or [])
    script = folder / "nginx"
    script.write_text(f"#!/bin/sh\nPYTHONPATH='{ROOT}' exec {words} \"$@\"\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)


@contextmanager
def running(kind: str, folder: Path, host: str, port: int) -> Iterator[None]:
    """Run the proxy of this folder's nginx.conf."""
    words = command(kind)
    assert words is not None
    process = subprocess.Popen(
        [*words, "-p", str(folder), "-c", "nginx.conf"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        end = time.monotonic() + PATIENCE
        while not is_listening(port, host):
            assert process.poll() is None, f"the proxy ended: {process.stdout.read().decode() if process.stdout else ''}"
            assert time.monotonic() < end, "the proxy does not listen"
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        process.communicate()
