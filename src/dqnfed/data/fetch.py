"""Downloads from the official sources: resumed after a cut, checked, unpacked, never half there."""

from __future__ import annotations

import errno
import gzip
import hashlib
import logging
import lzma
import struct
import tarfile
import time
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple

from dqnfed.core.checksums import sha256_of
from dqnfed.data.catalogue import Download, dataset_called
from dqnfed.data.load import folder_of, load, missing
from dqnfed.data.raw import DataError

logger = logging.getLogger("dqnfed")
BLOCK = 1 << 18
MAX_UNPACKED = 1 << 38  # bytes of an archive's members; the largest dataset here has 150 GB
ODD_ARCHIVES = (
    NotImplementedError,
    RuntimeError,
    OverflowError,
    ValueError,
    LookupError,
    struct.error,
)
PATIENCE_SECONDS = 30.0  # without a byte before a connection counts as cut

Progress = Callable[[str, int, int | None], None]  # file name, bytes so far, bytes in all where known


def silent(name: str, done: int, total: int | None) -> None:
    """Report nothing."""


def fetch(
    name: str,
    data_dir: Path | None = None,
    *,
    progress: Progress = silent,
    retries: int = 5,
    wait: float = 2.0,  # seconds before the first retry, doubled each time
) -> Path:
    """Return the folder of the dataset after downloading what is not there yet, checking and unpacking it."""
    dataset = dataset_called(name)
    folder = folder_of(dataset, data_dir)
    if not dataset.folder:
        return folder
    if not dataset.downloads:
        raise DataError(missing(dataset, folder))
    for source in dataset.downloads:
        target = folder / source.filename
        if not target.is_file() or problem_with(target, source) is not None:
            download(source, target, progress=progress, retries=retries, wait=wait)
        unpack(target)
    return folder


def download(
    source: Download, target: Path, *, progress: Progress = silent, retries: int = 5, wait: float = 2.0
) -> None:
    """Download to `target`, going on where an earlier attempt was cut, and keep the file only if its checksum is
    right.
    """
    partial = target.with_name(f"{target.name}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        for attempt in range(retries + 1):
            try:
                receive(source.url, partial, progress)
                break
            except urllib.error.HTTPError as error:
                if error.code < 500 or attempt == retries:
                    raise DataError(
                        f"{source.url} answered {error.code} {error.reason}; try later, or get it by hand."
                    ) from error
            except (urllib.error.URLError, HTTPException, TimeoutError, ConnectionError) as error:
                if attempt == retries:
                    kept = partial.stat().st_size if partial.exists() else 0
                    raise DataError(
                        f"{source.url} could not be read ({error}) in {retries + 1} attempts; {kept} bytes are kept, "
                        "and the same command goes on from there."
                    ) from error
            time.sleep(wait * 2**attempt)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DataError(
                f"the disk is full: {target.name} stopped in {target.parent}. What was received is kept; make room, "
                "or choose "
                "another folder with --data-dir, and run the same command again."
            ) from error
        raise
    trouble = problem_with(partial, source)
    if trouble is not None:
        partial.unlink()
        raise DataError(
            f"{source.url}: {trouble}. The file was thrown away; the source has changed or was tampered with."
        )
    partial.replace(target)
    record_first_use(target, source)


def receive(url: str, partial: Path, progress: Progress) -> None:
    """Append what is missing of `url` to `partial`; raises when the connection ends before the promised length."""
    have = partial.stat().st_size if partial.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        answer = urllib.request.urlopen(request, timeout=PATIENCE_SECONDS)
    except urllib.error.HTTPError as error:
        if error.code == 416 and have:  # nothing after what we have: the file is whole, the checksum decides
            return
        raise
    with answer:
        if url.startswith("https:") and not answer.geturl().startswith("https:"):
            raise DataError(f"{url} leads to {answer.geturl()}, which is not https; it is not trusted.")
        resumed = answer.status == 206
        have = have if resumed else 0
        length = answer.headers.get("Content-Length")
        total = have + int(length) if length is not None else None
        with partial.open("ab" if resumed else "wb") as file:
            while block := answer.read(BLOCK):
                file.write(block)
                have += len(block)
                progress(partial.stem, have, total)
    if total is not None and have < total:
        raise ConnectionError(f"cut after {have} of {total} bytes")


def problem_with(path: Path, source: Download) -> str | None:
    """Return what is wrong with a downloaded file, or None when its checksum, packed or unpacked, is the published
    one.
    """
    if source.md5 is None and source.content_md5 is None:
        recorded = recorded_sha256(path)
        if recorded is None or sha256_of(path) == recorded:
            return None
        return f"its SHA-256 is not {recorded}, as recorded when it was first fetched"
    found = md5_of(path)
    if found == source.md5:
        return None
    if source.content_md5 is not None and content_md5_of(path) == source.content_md5:
        return None
    return f"its MD5 is {found}, not the published {source.md5 or source.content_md5}"


def confirmed(path: Path, source: Download) -> str:
    """Return which published checksum a right file has."""
    if source.md5 is None and source.content_md5 is None:
        recorded = recorded_sha256(path)
        return "no checksum is published" + (f"; as first fetched, SHA-256 {recorded}" if recorded else "")
    if md5_of(path) == source.md5:
        return f"MD5 {source.md5}"
    return f"packed anew, but the contents have the published MD5 {source.content_md5}"


def record_of(path: Path) -> Path:
    """Return where the checksum of a file without a published one is kept."""
    return path.with_name(f"{path.name.removesuffix('.part')}.sha256")


def recorded_sha256(path: Path) -> str | None:
    """Return the checksum that was recorded when the file was first fetched; None where there is no record."""
    record = record_of(path)
    return record.read_text(encoding="ascii", errors="replace").split()[0] if record.is_file() else None


def record_first_use(path: Path, source: Download) -> None:
    """Record the checksum of a file whose source publishes none, and say that nobody could confirm it."""
    if source.md5 is not None or source.content_md5 is not None or recorded_sha256(path) is not None:
        return
    found = sha256_of(path)
    record_of(path).write_text(f"{found}  {path.name}\n", encoding="ascii")
    logger.warning(
        "%s: no checksum of this file is published. Its SHA-256 is recorded now in %s, and a later fetch of other "
        "bytes is refused: %s",
        source.url,
        record_of(path).name,
        found,
    )


def md5_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def content_md5_of(path: Path) -> str | None:
    digest = hashlib.md5(usedforsecurity=False)
    try:
        with gzip.open(path) as file:
            while block := file.read(BLOCK):
                digest.update(block)
    except (OSError, EOFError):
        return None
    return digest.hexdigest()


def unpack(path: Path) -> None:
    """Unpack an archive beside itself; members that would land elsewhere are refused. Single packed files stay as
    they are.
    """
    marker = path.with_name(f".{path.name}.unpacked")
    stamped = f"{path.stat().st_size} {path.stat().st_mtime_ns}"
    if marker.is_file() and marker.read_text() == stamped:
        return
    try:
        if path.name.endswith((".tar.gz", ".tgz", ".tar")):
            with tarfile.open(path) as archive:
                archive.extractall(path.parent, filter="data")
        elif path.suffix == ".zip":
            with zipfile.ZipFile(path) as archive:
                if (packed := sum(entry.file_size for entry in archive.infolist())) > MAX_UNPACKED:
                    raise DataError(f"{path} would unpack to {packed / 2**30:.0f} GiB; it is not trusted.")
                for member in archive.namelist():
                    if not (path.parent / member).resolve().is_relative_to(path.parent.resolve()):
                        raise DataError(f"{path} holds a member {member!r} outside its folder; it is not trusted.")
                archive.extractall(path.parent)
        else:
            return
    except DataError:
        raise
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, zlib.error, lzma.LZMAError, *ODD_ARCHIVES) as error:
        raise DataError(f"{path} cannot be unpacked ({error}); delete it and fetch it again.") from error
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DataError(
            f"the disk is full while unpacking {path}; make room and run the same command again."
        ) from error
    marker.write_text(stamped)


class Verdict(NamedTuple):
    """One checked fact about a dataset on disk."""

    what: str
    is_right: bool
    detail: str


def verify(name: str, data_dir: Path | None = None) -> list[Verdict]:
    """Return what was checked: checksums of the downloaded files still there, then that the reader accepts all, and
    the count.
    """
    dataset = dataset_called(name)
    folder = folder_of(dataset, data_dir)
    verdicts = []
    for source in dataset.downloads:
        path = folder / source.filename
        if path.is_file():
            trouble = problem_with(path, source)
            verdicts.append(Verdict(source.filename, trouble is None, trouble or confirmed(path, source)))
    try:
        raw = dataset.read(folder) if folder.is_dir() or not dataset.folder else load(name, data_dir)
    except DataError as error:
        return [*verdicts, Verdict("contents", False, str(error))]
    expected = dataset.n_examples
    detail = f"{len(raw)} examples" + ("" if expected in (None, len(raw)) else f", but {expected} are published")
    return [*verdicts, Verdict("contents", expected in (None, len(raw)), detail)]
