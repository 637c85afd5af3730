"""The live page's server: whom it answers, what it says, how soon it notices."""

import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dqnfed.report.page import read_content
from dqnfed.report.watch import LiveServer, progress_text, watch
from tests.helpers.runs import write_comparison, write_run

SECONDS = 20  # patience of every wait; nothing here takes that long


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", rounds=6, finished=False)


@pytest.fixture
def server(folder: Path) -> Iterator[LiveServer]:
    live = LiveServer([folder])
    yield live
    live.close()


def fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=SECONDS) as answer:
        return bytes(answer.read())


def data(server: LiveServer) -> Any:
    return json.loads(fetch(server.url.replace("/?", "/data?")))


def add_round(folder: Path) -> None:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    record = json.loads(lines[-1])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(record | {"round": record["round"] + 1}) + "\n")


@pytest.mark.parametrize("path", ["/", "/data", "/events", "/nothing"])
@pytest.mark.parametrize("token", ["", "?token=", "?token=wrong", "?token=%C3%A9"])
def test_a_wrong_token_gets_403_everywhere(server: LiveServer, path: str, token: str) -> None:
    host, port = server.address
    with pytest.raises(urllib.error.HTTPError) as caught:
        fetch(f"http://{host}:{port}{path}{token}")
    assert caught.value.code == 403
    caught.value.close()


def test_unknown_addresses_get_404(server: LiveServer) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        fetch(server.url.replace("/?", "/etc/passwd?"))
    assert caught.value.code == 404
    caught.value.close()


def test_it_listens_on_loopback_only_by_default(server: LiveServer) -> None:
    assert server.address[0] == "127.0.0.1"
    try:
        other = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
    except socket.gaierror:
        return  # this machine has no other address to try
    for address in other - {"127.0.0.1", "127.0.1.1"}:
        with pytest.raises(OSError), socket.create_connection((str(address), server.address[1]), timeout=2):
            pass


def test_tokens_differ_and_are_long(folder: Path) -> None:
    first, second = LiveServer([folder]), LiveServer([folder])
    first.close()
    second.close()
    assert first.token != second.token
    assert len(first.token) >= 20


def test_the_page_may_talk_to_its_server_only(server: LiveServer) -> None:
    text = fetch(server.url).decode()
    assert "connect-src &#x27;self&#x27;" in text
    assert "startLive" in text


def test_data_follows_the_run(server: LiveServer, folder: Path) -> None:
    before = data(server)
    assert before["charts"][0]["curves"]["mean"][0]["x"][-1] == 6
    add_round(folder)
    after = data(server)
    assert after["charts"][0]["curves"]["mean"][0]["x"][-1] == 7
    assert after["stamp"] != before["stamp"]
    assert after["status"].startswith("Live: round 7 of 6")


def test_an_event_follows_every_round(server: LiveServer, folder: Path) -> None:
    with urllib.request.urlopen(server.url.replace("/?", "/events?"), timeout=SECONDS) as stream:
        assert stream.headers["Content-Type"].startswith("text/event-stream")
        assert stream.readline() == b"data: changed\n"
        assert stream.readline() == b"\n"
        add_round(folder)
        assert stream.readline() == b"data: changed\n"


def test_closing_ends_open_streams(folder: Path) -> None:
    live = LiveServer([folder])
    with urllib.request.urlopen(live.url.replace("/?", "/events?"), timeout=SECONDS) as stream:
        stream.readline()
        live.close()
        assert stream.read() in (b"\n", b"")


def test_an_empty_folder_waits_for_the_first_round(tmp_path: Path) -> None:
    live = LiveServer([tmp_path])
    try:
        assert data(live)["status"] == "Waiting for the first round"
        write_run(tmp_path / "run", rounds=2, finished=False)
        assert len(data(live)["charts"]) == 1
    finally:
        live.close()


def test_progress_is_told_in_words(tmp_path: Path, folder: Path) -> None:
    text = (folder / "config.toml").read_text().replace("rounds = 6", "rounds = 206")
    (folder / "config.toml").write_text(text)
    # 200 rounds at 0.05 to 0.06 s
    assert progress_text(read_content([folder])) in {f"Live: round 6 of 206, about {n} s left" for n in (10, 11, 12)}
    (done,) = write_comparison(tmp_path / "done", algorithms=("fedavg",), seeds=(0,), rounds=1)
    assert progress_text(read_content([done])) == "The run has finished"
    assert "1 of 2 runs have ended" in progress_text(read_content([done, folder]))


def test_watch_announces_the_address_and_warns_beyond_loopback(folder: Path) -> None:
    said: list[str] = []
    stop = threading.Event()
    stop.set()
    watch([folder], announce=said.append, until=stop)
    assert len(said) == 1
    assert "http://127.0.0.1:" in said[0]
    watch([folder], host="0.0.0.0", announce=said.append, until=stop)
    assert "anyone who can reach this machine" in said[1]
    with pytest.raises(ValueError, match="there is no folder"):
        watch([folder / "nowhere"], announce=said.append, until=stop)
