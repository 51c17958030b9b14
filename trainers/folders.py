"""Folders on a disk or in a cloud storage. Files in them are read without trust."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Callable
from typing import Annotated, TypeVar
from urllib.parse import urlsplit

from pyarrow import ArrowException, NativeFile
from pyarrow.fs import FileSelector, FileSystem, FileType, LocalFileSystem
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from ray.train import Checkpoint

_CHUNK, _MOST_JSON = 4 << 20, 16 << 20
Count = Annotated[int, Field(ge=0, lt=2**63)]
Model = TypeVar("Model")
UNREACHED = (OSError, ValueError, ArrowException)
"""What a filesystem raises if it cannot be reached, or refuses."""


class Checked(BaseModel):
    """Base class of documents that `read_json` reads from files that others may have written."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class DamagedFile(Exception):
    """A file is missing or damaged. `what` is the damage, as the rest of a sentence that begins with the file's name."""

    def __init__(self, name: str, what: str):
        super().__init__(name, what)
        self.name, self.what = printable(name), printable(what)

    def __str__(self) -> str:
        return f"{self.name} {self.what}"


class Folder:
    """A folder on any filesystem, with the name that the user gave it: a path, or a URI that pyarrow understands.

    Without a filesystem, it is that of the URI, or the local one. If pyarrow cannot reach it, this raises OSError or ValueError.
    """

    def __init__(self, name: str, filesystem: FileSystem | None = None):
        self.name = name
        if filesystem is None and "://" not in name:
            self.filesystem, self.path = LocalFileSystem(), os.path.abspath(name)
        else:
            self.filesystem, self.path = (filesystem, name) if filesystem else FileSystem.from_uri(name)
        self._filesystem_argument = filesystem

    def __truediv__(self, part: str) -> Folder:
        return Folder(with_path(self.name, lambda path: f"{path.rstrip('/')}/{part}"), self._filesystem_argument)

    @property
    def parent(self) -> Folder:
        return Folder(with_path(self.name, os.path.dirname), self._filesystem_argument)

    @property
    def last(self) -> str:
        return os.path.basename(self.path)

    @property
    def checkpoint(self) -> Checkpoint:
        """Ray's handle for the folder."""
        return Checkpoint(self.path, self.filesystem)

    def names(self) -> list[str] | None:
        """Return the sorted names in the folder; None if the folder does not exist."""
        if self.filesystem.get_file_info(self.path).type != FileType.Directory:
            return None
        return sorted(info.base_name for info in self.filesystem.get_file_info(FileSelector(self.path)))

    def size(self, name: str) -> int:
        """Return the size of a file in bytes, or raise DamagedFile if it is missing, or is no regular file.

        Reading a device or a pipe might never end.
        """
        info = self.filesystem.get_file_info(self._at(name))
        if info.type == FileType.NotFound:
            raise DamagedFile(name, "is missing")
        if info.type != FileType.File:
            raise DamagedFile(name, "is not a regular file")
        return info.size

    def read(self, name: str, limit: int) -> bytes:
        """Return the content of a file, or raise DamagedFile if `size` refuses it, or if it has more than `limit` bytes."""
        size = self.size(name)
        if size > limit:
            raise DamagedFile(name, f"has {size} bytes, but may have at most {limit}")
        with self._stream(name) as stream:
            return stream.read(size)

    def open(self, name: str) -> NativeFile:
        """Open a file that `size` has not refused, to read any part of it."""
        return self.filesystem.open_input_file(self._at(name))

    def sha256(self, name: str) -> str:
        left, digest = self.size(name), hashlib.sha256()
        with self._stream(name) as stream:
            while left and (chunk := stream.read(min(left, _CHUNK))):
                digest.update(chunk)
                left -= len(chunk)
        return digest.hexdigest()

    def write(self, name: str, content: bytes) -> None:
        """Write a file, and create the folder if needed. A reader finds the old content or the new one, never a part."""
        self.filesystem.create_dir(self.path, recursive=True)
        draft = self._at(f".{name}.{secrets.token_hex(4)}.new")  # two writers must not share one
        with self.filesystem.open_output_stream(draft, compression=None) as stream:
            stream.write(content)
        self.filesystem.move(draft, self._at(name))

    def remove(self, name: str) -> None:
        self.filesystem.delete_file(self._at(name))

    def delete(self) -> None:
        """Delete the folder with its files, if it exists."""
        if self.names() is not None:
            self.filesystem.delete_dir(self.path)

    def flush(self, *names: str) -> None:
        """Wait until a disk holds these files of the folder. Storages other than disks do so when a file is written."""
        if not isinstance(self.filesystem, LocalFileSystem):
            return
        for path in (*map(self._at, names), self.path):
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)

    def _stream(self, name: str) -> NativeFile:
        # By default pyarrow guesses the compression from the name.
        return self.filesystem.open_input_stream(self._at(name), compression=None)

    def _at(self, name: str) -> str:
        return f"{self.path}/{name}"


def read_json(folder: Folder, name: str, kind: TypeAdapter[Model], limit: int = _MOST_JSON) -> Model:
    """Read a JSON file as a document of a type, or raise DamagedFile. Values of other types are refused, not converted."""
    try:
        return kind.validate_json(folder.read(name, limit), strict=True)
    except ValidationError as error:
        raise DamagedFile(name, f"cannot be read ({first_fault(error)})") from None


def first_fault(error: ValidationError) -> str:
    """Return the place and the message of the first error that pydantic reports."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where[:80]}: {first['msg']}" if where else first["msg"]


def printable(text: str, limit: int = 200) -> str:
    """Replace unprintable characters and cut the text, because a forged file must not control the terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:limit])


def with_path(name: str, change: Callable[[str], str]) -> str:
    """Change a path, or the path of a URI. Parts of a URI after the path, such as `?region=…`, stay."""
    if "://" not in name:
        return change(name)
    parts = urlsplit(name)
    return parts._replace(path=change(parts.path.rstrip("/"))).geturl()
