"""Where files of text are: on a disk, or in a store that a URI names; as they are, or compressed.

pyarrow knows the stores `s3://`, `gs://`, `abfss://` and `hdfs://`; fsspec knows the others, such as `https://`. Clients of a
store may wait for minutes, so a store is listed in another process, which can be stopped.
"""

from __future__ import annotations

import bz2
import glob
import gzip
import io
import json
import lzma
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple, cast
from urllib.parse import unquote, urlsplit

import pyarrow
import pyarrow.fs

from foldray.errors import UserError
from foldray.urls import holds_secret
from trainers.data import store_listing

COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_REACHED_S, _LISTED_S = 20.0, 600.0  # seconds for a store to answer at all, and to list its files
_BUFFER, _CHUNK = 1 << 20, 1 << 16
_SECRET = (
    "holds a password, a key or a token, which the run's files would keep; put the secret into the environment, such as "
    "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or into the configuration of the store's client"
)


class Place(NamedTuple):
    """A file that a pattern matches.

    Args:
        path: absolute path, or URI.
        name: name below the fixed folder of the pattern.
        mtime_ns: time of the last change; 0 if the store does not tell it.
    """

    path: str
    name: str
    size: int
    mtime_ns: int


def is_uri(path: str) -> bool:
    """Whether a path names a store. `file:` names the disk."""
    return "://" in path and not path.startswith("file:")


def find(field: str, pattern: str) -> list[Place]:
    """Return the files that a path, a URI or a glob of either matches, in the order of their names."""
    return _in_store(field, pattern) if is_uri(pattern) else _on_disk(field, pattern)


def _on_disk(field: str, pattern: str) -> list[Place]:
    plain = unquote(re.sub("^file:(//[^/]*)?", "", pattern)) if pattern.startswith("file:") else pattern
    expanded = os.path.abspath(os.path.expanduser(plain))
    if os.path.isdir(expanded):
        raise UserError(field, pattern, "is a folder; name a file or a glob, such as " + os.path.join(pattern, "*"))
    # The name of an existing file is not a glob, even if it has brackets in it.
    exists = os.path.isfile(expanded)
    paths = [expanded] if exists else sorted(filter(os.path.isfile, glob.glob(expanded, recursive=True)))
    if not paths:
        raise UserError(field, pattern, f"matches no file (looked for {expanded})")
    root = os.path.dirname(expanded if exists else re.split(r"[*?\[]", expanded, maxsplit=1)[0])
    stats = ((path, os.stat(path)) for path in paths)
    return [Place(path, os.path.relpath(path, root), stat.st_size, stat.st_mtime_ns) for path, stat in stats]


def _in_store(field: str, pattern: str) -> list[Place]:
    if holds_secret(pattern):
        raise UserError(field, pattern, _SECRET)
    command = [sys.executable, "-P", store_listing.__file__, pattern]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            output, _ = process.communicate(timeout=_REACHED_S)
        except subprocess.TimeoutExpired as error:
            if not (error.stdout or b"").startswith(store_listing.REACHED.encode()):
                process.kill()
                raise UserError(field, pattern, f"is in a store that gives no answer in {_REACHED_S:.0f} s") from None
            output = _rest(field, pattern, process)
    last = output.strip().splitlines()[-1] if output.strip() else ""
    if process.returncode != 0:
        reason = last[:300] or f"its client ended with {process.returncode}"
        raise UserError(field, pattern, f"cannot be listed ({reason})")
    places = [Place(*row) for row in json.loads(last)]
    if not places:
        raise UserError(field, pattern, "matches no file that the store shows")
    return sorted(places)


def _rest(field: str, pattern: str, process: subprocess.Popen[str]) -> str:
    try:
        return process.communicate(timeout=_LISTED_S)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        raise UserError(field, pattern, f"is in a store that does not list its files in {_LISTED_S:.0f} s") from None


def size_of(path: str) -> int:
    """Return the size of a file in bytes, or raise an OSError."""
    if not is_uri(path):
        return os.stat(path).st_size
    files, inside = store_listing.store(path)
    info = files.get_file_info(inside)
    if info.type != pyarrow.fs.FileType.File:
        raise FileNotFoundError(2, "No such file", path)
    return info.size


def open_plain(path: str) -> IO[bytes]:
    """Open a file as it is. It can seek."""
    if not is_uri(path):
        return open(path, "rb")
    files, inside = store_listing.store(path)
    return _buffered(files.open_input_file(inside))


def open_text(path: str) -> IO[bytes]:
    """Open a file, and decompress it by the ending of its name. Only a file that is not compressed can seek."""
    file, packed = open_plain(path), suffix(path)
    if packed == ".gz":
        return cast(IO[bytes], gzip.GzipFile(fileobj=file))
    if packed == ".bz2":
        return _buffered(_Streams(file, bz2.BZ2Decompressor))
    if packed == ".xz":
        return _buffered(_Streams(file, partial(lzma.LZMADecompressor, lzma.FORMAT_XZ), pads=True))
    if packed == ".zst":
        return _buffered(pyarrow.CompressedInputStream(pyarrow.PythonFile(file, "r"), "zstd"))
    return file


def suffix(path: str) -> str:
    """Return the ending of a compressed file's name, or an empty text."""
    last = ending(path)
    return last if last in COMPRESSED else ""


def ending(path: str) -> str:
    """Return the ending of a file's name, in small letters. The options of a URI are no part of the name."""
    return Path(urlsplit(path).path if is_uri(path) else path).suffix.lower()


def _buffered(stream: Any) -> IO[bytes]:
    return io.BufferedReader(stream, _BUFFER)


class _Streams(io.RawIOBase):
    """The content of a file of compressed streams, one after another. Everything behind a stream is another one, or an error.

    Python's own readers take damage at the beginning of a later stream for the end of the file.

    Args:
        begin: makes the decompressor of a stream.
        pads: whether zero bytes, a multiple of four, may follow a stream, as in the format xz.
    """

    def __init__(self, file: IO[bytes], begin: Callable[[], Any], pads: bool = False):
        self._file, self._begin, self._pads, self._stream = file, begin, pads, begin()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        content = b""
        while not content:
            packed = b""
            if self._stream.eof:
                if not (packed := self._behind()):
                    return 0
                self._stream = self._begin()
            elif self._stream.needs_input and not (packed := self._file.read(_CHUNK)):
                raise EOFError("it ends within a stream")
            content = self._stream.decompress(packed, len(buffer))
        buffer[: len(content)] = content
        return len(content)

    def _behind(self) -> bytes:
        """Return what follows a stream and its padding; nothing at the end of the file."""
        packed, zeros = self._stream.unused_data, 0
        while packed or (packed := self._file.read(_CHUNK)):
            rest = packed.lstrip(b"\0") if self._pads else packed
            zeros, packed = zeros + len(packed) - len(rest), rest
            if packed:
                break
        if zeros % 4:
            raise OSError(f"{zeros} zero bytes are behind a stream, which is no multiple of four")
        return packed
