"""Proxies in front of a server, started from the file that `dqnfed deploy proxy` wrote: nginx, or the tests' own."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.helpers.repository import ROOT
from tests.helpers.superlink import PATIENCE, is_listening, nginx_command

KINDS = ("pass-through", "nginx")


@contextmanager
def running(kind: str, folder: Path, host: str, port: int) -> Iterator[None]:
    """Run the proxy of this folder's nginx.conf."""
    words = nginx_command(kind)
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
            assert process.poll() is None, (
                f"the proxy ended: {process.stdout.read().decode() if process.stdout else ''}"
            )
            assert time.monotonic() < end, "the proxy does not listen"
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        process.communicate()
