"""Downloads against a local server: progress, resume after a cut, wrong checksums, a full disk, hostile archives."""

from __future__ import annotations

import errno
import gzip
import hashlib
import io
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO, Any

import pytest

from dqnfed.data import DataError
from dqnfed.data.catalogue import DATASETS, Download
from dqnfed.data.fetch import download, fetch, problem_with, unpack, verify
from tests.helpers import official


@dataclass
class Served:
    """Files by path, how many bytes to send before hanging up (once each), and the ranges that were asked for."""

    files: dict[str, bytes] = field(default_factory=dict)
    cuts: list[int] = field(default_factory=list)
    failures: list[int] = field(default_factory=list)
    ranges: list[str | None] = field(default_factory=list)
    knows_ranges: bool = True
    url: str = ""


@pytest.fixture
def served() -> Iterator[Served]:
    state = Served()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked = self.headers.get("Range")
            state.ranges.append(asked)
            if state.failures:
                self.send_error(state.failures.pop(0))
                return
            if self.path not in state.files:
                self.send_error(404)
                return
            body = state.files[self.path]
            start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and state.knows_ranges else 0
            if start >= len(body) > 0:
                self.send_error(416)
                return
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(len(body) - start))
            self.end_headers()
            end = start + state.cuts.pop(0) if state.cuts else len(body)
            self.wfile.write(body[start:end])

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_port}"
    yield state
    server.shutdown()
    server.server_close()
    thread.join()


def md5(raw: bytes) -> str:
    return hashlib.md5(raw).hexdigest()


BODY = bytes(range(256)) * 4000  # a megabyte: several blocks


def test_a_download_reports_progress_and_arrives_whole(served: Served, tmp_path: Path) -> None:
    served.files["/a.bin"] = BODY
    seen: list[tuple[str, int, int | None]] = []
    download(
        Download(f"{served.url}/a.bin", md5(BODY)), tmp_path / "a.bin", progress=lambda *told: seen.append(told), wait=0
    )
    assert (tmp_path / "a.bin").read_bytes() == BODY
    assert [done for _, done, _ in seen] == sorted({done for _, done, _ in seen})
    assert seen[-1] == ("a.bin", len(BODY), len(BODY))
    assert list(tmp_path.iterdir()) == [tmp_path / "a.bin"]


def test_a_cut_connection_is_resumed_where_it_broke(served: Served, tmp_path: Path) -> None:
    served.files["/a.bin"], served.cuts = BODY, [300_000, 300_000]
    download(Download(f"{served.url}/a.bin", md5(BODY)), tmp_path / "a.bin", wait=0)
    assert (tmp_path / "a.bin").read_bytes() == BODY
    assert served.ranges == [None, "bytes=300000-", "bytes=600000-"]


def test_a_later_command_goes_on_from_a_cut(served: Served, tmp_path: Path) -> None:
    served.files["/a.bin"], served.cuts = BODY, [300_000, 100_000]
    source = Download(f"{served.url}/a.bin", md5(BODY))
    with pytest.raises(DataError, match="400000 bytes are kept, and the same command goes on"):
        download(source, tmp_path / "a.bin", wait=0, retries=1)
    assert not (tmp_path / "a.bin").exists()
    download(source, tmp_path / "a.bin", wait=0)
    assert (tmp_path / "a.bin").read_bytes() == BODY
    assert served.ranges[-1] == "bytes=400000-"


def test_a_server_without_ranges_starts_again(served: Served, tmp_path: Path) -> None:
    served.files["/a.bin"], served.cuts, served.knows_ranges = BODY, [300_000], False
    download(Download(f"{served.url}/a.bin", md5(BODY)), tmp_path / "a.bin", wait=0)
    assert (tmp_path / "a.bin").read_bytes() == BODY


def test_busy_servers_are_asked_again_and_absent_files_are_not(served: Served, tmp_path: Path) -> None:
    served.files["/a.bin"], served.failures = BODY, [503, 500]
    download(Download(f"{served.url}/a.bin", md5(BODY)), tmp_path / "a.bin", wait=0)
    assert (tmp_path / "a.bin").read_bytes() == BODY
    asked = len(served.ranges)
    with pytest.raises(DataError, match="answered 404"):
        download(Download(f"{served.url}/none"), tmp_path / "none", wait=0)
    assert len(served.ranges) == asked + 1


def test_a_wrong_checksum_throws_the_file_away(served: Served, tmp_path: Path) -> None:
    served.files["/a.bin"] = BODY
    with pytest.raises(DataError, match=f"its MD5 is {md5(BODY)}, not the published {md5(b'other')}"):
        download(Download(f"{served.url}/a.bin", md5(b"other")), tmp_path / "a.bin", wait=0)
    assert list(tmp_path.iterdir()) == []


def test_the_same_contents_packed_otherwise_are_right(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(BODY, 1))
    assert problem_with(path, Download("http://x/a.gz", md5(gzip.compress(BODY, 9)), md5(BODY))) is None
    assert problem_with(path, Download("http://x/a.gz", md5(b"other"), md5(b"other"))) is not None
    assert problem_with(path, Download("http://x/a.gz")) is None  # no checksum published


def test_a_full_disk_keeps_what_came_and_says_so(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.files["/a.bin"] = BODY
    true_open = Path.open

    class FullAfter:
        """A file on a disk with room for one block more."""

        def __init__(self, file: IO[bytes]) -> None:
            self.file, self.blocks = file, 0

        def write(self, block: bytes) -> int:
            self.blocks += 1
            if self.blocks > 1:
                raise OSError(errno.ENOSPC, "No space left on device")
            return self.file.write(block)

        def __enter__(self) -> FullAfter:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

    def open_on_full_disk(self: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        opened = true_open(self, mode, *args, **kwargs)
        return FullAfter(opened) if self.suffix == ".part" and mode != "rb" else opened

    source = Download(f"{served.url}/a.bin", md5(BODY))
    with monkeypatch.context() as full:
        full.setattr(Path, "open", open_on_full_disk)
        with pytest.raises(DataError, match=r"the disk is full.*make room"):
            download(source, tmp_path / "a.bin", wait=0)
    kept = (tmp_path / "a.bin.part").stat().st_size
    assert 0 < kept < len(BODY)
    download(source, tmp_path / "a.bin", wait=0)  # room was made
    assert (tmp_path / "a.bin").read_bytes() == BODY
    assert served.ranges[-1] == f"bytes={kept}-"


def tar_of(folder: Path) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        archive.add(folder, arcname=".")
    return buffer.getvalue()


def test_a_dataset_is_fetched_unpacked_and_verified(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    official.cifar10(tmp_path / "made")
    archive = tar_of(tmp_path / "made")
    served.files["/cifar-10-binary.tar.gz"] = archive
    source = Download(f"{served.url}/cifar-10-binary.tar.gz", md5(archive))
    monkeypatch.setitem(DATASETS, "cifar10", replace(DATASETS["cifar10"], downloads=(source,), n_examples=120))
    data = tmp_path / "data"
    folder = fetch("cifar10", data, wait=0)
    assert (folder / "cifar-10-batches-bin" / "test_batch.bin").is_file()
    assert all(verdict.is_right for verdict in verify("cifar10", data))
    asked = len(served.ranges)
    fetch("cifar10", data, wait=0)
    assert len(served.ranges) == asked  # nothing is downloaded twice

    (folder / "cifar-10-binary.tar.gz").write_bytes(archive[:-1])
    damaged = verify("cifar10", data)
    assert [verdict.is_right for verdict in damaged] == [False, True]
    fetch("cifar10", data, wait=0)
    assert all(verdict.is_right for verdict in verify("cifar10", data))

    (folder / "cifar-10-batches-bin" / "data_batch_1.bin").write_bytes(b"x")
    assert "not a multiple of 3073" in verify("cifar10", data)[-1].detail
    monkeypatch.setitem(DATASETS, "cifar10", replace(DATASETS["cifar10"], n_examples=60_000))
    official.cifar10(tmp_path / "other" / "cifar10")
    assert "120 examples, but 60000 are published" in verify("cifar10", tmp_path / "other")[-1].detail


def test_what_cannot_be_downloaded_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="on request"):
        fetch("clothing1m", tmp_path)
    assert fetch("digits", tmp_path) == tmp_path  # comes with a package
    assert verify("digits", tmp_path)[-1].is_right
    assert "dqnfed data fetch mnist" in verify("mnist", tmp_path)[-1].detail


def test_archives_stay_in_their_folder(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    with zipfile.ZipFile(inside / "bad.zip", "w") as archive:
        archive.writestr("../escaped.txt", "x")
    with pytest.raises(DataError, match="outside its folder"):
        unpack(inside / "bad.zip")
    with tarfile.open(inside / "bad.tar.gz", "w:gz") as tar:
        info = tarfile.TarInfo("../escaped.txt")
        info.size = 1
        tar.addfile(info, io.BytesIO(b"x"))
    with pytest.raises(DataError, match="cannot be unpacked"):
        unpack(inside / "bad.tar.gz")
    assert not (tmp_path / "escaped.txt").exists()
    (inside / "cut.zip").write_bytes((inside / "bad.zip").read_bytes()[:30])
    with pytest.raises(DataError, match="delete it and fetch it again"):
        unpack(inside / "cut.zip")


def test_every_download_is_https_and_has_a_checksum_or_records_one(
    served: Served, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of two files no checksum is published: the first fetch records it, and other bytes are refused from then on."""
    downloads = [source for dataset in DATASETS.values() for source in dataset.downloads]
    assert all(source.url.startswith("https://") for source in downloads)
    assert {source.filename for source in downloads if not source.md5} == {"1994-01-100.zip", "phishing"}
    served.files["/file"] = BODY
    source, target = Download(f"{served.url}/file"), tmp_path / "file"
    download(source, target)
    assert "no checksum of this file is published. Its SHA-256 is recorded" in caplog.text
    assert problem_with(target, source) is None
    target.unlink()
    served.files["/file"] = BODY[::-1]
    with pytest.raises(DataError, match=r"as recorded when it was first fetched\. The file was thrown away"):
        download(source, target)
    assert not target.exists()
