"""A live page for runs in progress: a small local server that says when a round has ended."""

from __future__ import annotations

import ipaddress
import json
import math
import secrets
import threading
import webbrowser
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import numpy as np

from dqnfed.report.page import OFFLINE_POLICY, SCRIPTS, Content, live_parts, page, read_content
from dqnfed.report.payload import payload
from dqnfed.report.reader import Run

POLL_SECONDS = 0.3
HEARTBEAT_SECONDS = 15.0  # a comment on an idle stream tells a dead connection from a quiet one
WATCHED = ("metrics.jsonl", "clients.csv", "summary.json")
LIVE_POLICY = OFFLINE_POLICY + "; connect-src 'self'"
N_RECENT = 20  # rounds that the remaining time is estimated from

Stamp = tuple[tuple[str, int, int], ...]


class LiveServer:
    """Serves the live page of the runs at or below some folders until closed; every address needs the token."""

    def __init__(
        self, runs: Sequence[Path], *, host: str = "127.0.0.1", port: int = 0, token: str | None = None
    ) -> None:
        self.runs = [Path(run) for run in runs]
        self.token = token or secrets.token_urlsafe(16)
        self.closing = threading.Event()
        self._lock = threading.Lock()
        self._built: tuple[Stamp, bytes] | None = None
        self._server = ThreadingHTTPServer((host, port), _handler_for(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
        self._thread.start()

    @property
    def address(self) -> tuple[str, int]:
        """Host and port it listens on."""
        host, port = self._server.server_address[:2]
        return str(host), int(port)

    @property
    def url(self) -> str:
        """Address to open, with the token."""
        host, port = self.address
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/?token={self.token}"

    def stamp(self) -> Stamp:
        """Return what changes whenever a run file does."""
        found = []
        for root in self.runs:
            for name in WATCHED:
                for path in root.rglob(name):
                    try:
                        state = path.stat()
                    except OSError:
                        continue  # replaced in this moment; the next look sees the new file
                    found.append((str(path), state.st_mtime_ns, state.st_size))
        return tuple(sorted(found))

    def page(self) -> bytes:
        """Return the whole page as it stands now."""
        return page(self._content(), policy=LIVE_POLICY, scripts=(*SCRIPTS[:-1], "live.js", SCRIPTS[-1])).encode()

    def data(self) -> bytes:
        """Return what changed on the page as JSON; built once for all who ask."""
        with self._lock:
            stamp = self.stamp()
            if self._built is None or self._built[0] != stamp:
                content = self._content()
                news = {
                    "stamp": f"{hash(stamp):x}",
                    "status": progress_text(content),
                    "parts": live_parts(content),
                    "charts": payload(content.experiments),
                }
                self._built = stamp, json.dumps(news, allow_nan=False).encode()
            return self._built[1]

    def close(self) -> None:
        """Stop serving."""
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _content(self) -> Content:
        return read_content(self.runs, expect_running=True)


def watch(
    runs: Sequence[Path],
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    open_browser: bool = False,
    announce: Callable[[str], None],
    until: threading.Event | None = None,
) -> None:
    """Serve the live page until interrupted (or until the event); `announce` is given what the user should read."""
    missing = [str(run) for run in runs if not Path(run).exists()]
    if missing:
        raise ValueError(f"there is no folder {missing[0]} to watch; give the folder that `dqnfed run` writes to.")
    server = LiveServer(runs, host=host, port=port)
    try:
        if not _is_loopback(host):
            announce(f"Listening on {host}: anyone who can reach this machine and knows the address below can watch.")
        announce(f"Watching {', '.join(map(str, runs))} at {server.url}")
        if open_browser:
            webbrowser.open(server.url)
        (until or threading.Event()).wait()
    except KeyboardInterrupt:
        announce("Stopped watching; the run goes on.")
    finally:
        server.close()


def progress_text(content: Content) -> str:
    """Return how far the runs are and about how long they will take."""
    runs = [run for experiment in content.experiments for run in experiment.runs if not run.model]
    going = [run for run in runs if run.status == "running"]
    if not runs:
        return "Waiting for the first round"
    if not going:
        return "All runs have ended" if len(runs) > 1 else f"The run has {_ended(runs[0])}"
    latest = going[-1]
    text = f"Live: round {latest.n_rounds:,} of {latest.planned_rounds:,}"
    if len(runs) > 1:
        text += f", {len(runs) - len(going)} of {len(runs)} runs have ended"
    left = seconds_left(latest)
    return text if math.isnan(left) else f"{text}, about {_duration(left)} left"


def seconds_left(run: Run) -> float:
    """Return the time the rest of a run takes at the pace of its last rounds; NaN before the second round."""
    spent = run.history.get("seconds", np.empty(0))[-N_RECENT - 1 :]
    if len(spent) < 3:
        return math.nan
    return float(spent[-1] - spent[0]) / (len(spent) - 1) * max(0, run.planned_rounds - run.n_rounds)


def _ended(run: Run) -> str:
    known = {"finished": "finished", "interrupted": "been interrupted", "stopped": "stopped", "diverged": "diverged"}
    return known.get(run.status, "ended")


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _handler_for(live: LiveServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.0"  # one request a connection: an event stream ends when its connection does

        def do_GET(self) -> None:
            address = urlsplit(self.path)
            given = parse_qs(address.query).get("token", [""])[0]
            if not secrets.compare_digest(given.encode(), live.token.encode()):
                self._answer(HTTPStatus.FORBIDDEN, "text/plain", b"The token in the address is missing or wrong.\n")
            elif address.path == "/":
                self._answer(HTTPStatus.OK, "text/html", live.page())
            elif address.path == "/data":
                self._answer(HTTPStatus.OK, "application/json", live.data())
            elif address.path == "/events":
                self._stream()
            else:
                self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"There is nothing at this address.\n")

        def _answer(self, status: HTTPStatus, kind: str, body: bytes) -> None:
            self.send_response(status)
            self._headers(kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _stream(self) -> None:
            """Send one event now and one after every change, until the reader or the server goes away."""
            self.send_response(HTTPStatus.OK)
            self._headers("text/event-stream")
            self.end_headers()
            seen: Stamp | None = None
            quiet = 0.0
            try:
                while not live.closing.is_set():
                    stamp = live.stamp()
                    if stamp != seen:
                        seen, quiet = stamp, 0.0
                        self.wfile.write(b"data: changed\n\n")
                    elif quiet >= HEARTBEAT_SECONDS:
                        quiet = 0.0
                        self.wfile.write(b": still here\n\n")
                    self.wfile.flush()
                    quiet += POLL_SECONDS
                    live.closing.wait(POLL_SECONDS)
            except OSError:
                return  # the page was closed

        def _headers(self, kind: str) -> None:
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Cache-Control", "no-store")
            self.send_header("Referrer-Policy", "no-referrer")  # the address holds the token
            self.send_header("X-Content-Type-Options", "nosniff")

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """Say nothing: the terminal belongs to the user, and the address holds the token."""

    return Handler
