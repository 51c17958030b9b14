"""A folder on a disk or in a cloud's storage, whose files are looked at without trust in them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from typing import Annotated, TypeVar
from urllib.parse import urlsplit

from pyarrow import NativeFile
from pyarrow.fs import FileSelector, FileSystem, FileType, LocalFileSystem
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from ray.train import Checkpoint

_CHUNK, _MOST_JSON = 4 << 20, 16 << 20
Count = Annotated[int, Field(ge=0, lt=2**63)]
Model = TypeVar("Model")


class Checked(BaseModel):
    """What is read from a file that others may have written, with `read_json`."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class DamagedFile(Exception):
    """A file that is not what it should be.

    Args:
        name: of the file, in its folder.
        what: is wrong with it, as the rest of a sentence.
    """

    def __init__(self, name: str, what: str):
        super().__init__(name, what)
        self.name, self.what = _printable(name), _printable(what)

    def __str__(self) -> str:
        return f"{self.name} {self.what}"


class Folder:
    """A folder by the name that its user knows it by.

    Args:
        name: a path, or a URI that pyarrow understands.
        filesystem: where the name is a path on; found out if not given.

    Raises:
        OSError, ValueError: the URI names no storage that can be reached (so pyarrow's exceptions are).
    """

    def __init__(self, name: str, filesystem: FileSystem | None = None):
        self.name = name
        if filesystem is None and "://" not in name:
            self.filesystem, self.path = LocalFileSystem(), os.path.abspath(name)
        else:
            self.filesystem, self.path = (filesystem, name) if filesystem else FileSystem.from_uri(name)
        self._given = filesystem

    def __truediv__(self, part: str) -> Folder:
        return Folder(_with_path(self.name, lambda path: f"{path.rstrip('/')}/{part}"), self._given)

    @property
    def parent(self) -> Folder:
        return Folder(_with_path(self.name, os.path.dirname), self._given)

    @property
    def last(self) -> str:
        """The last part of its name."""
        return os.path.basename(self.path)

    @property
    def checkpoint(self) -> Checkpoint:
        """Ray's handle of it."""
        return Checkpoint(self.path, self.filesystem)

    def names(self) -> list[str] | None:
        """What lies in it, sorted; None if it is not there."""
        if self.filesystem.get_file_info(self.path).type != FileType.Directory:
            return None
        return sorted(info.base_name for info in self.filesystem.get_file_info(FileSelector(self.path)))

    def size(self, name: str) -> int:
        """Bytes of a file.

        Raises:
            DamagedFile: there is none, or it is a folder, a device or a pipe, which could be read for ever.
        """
        info = self.filesystem.get_file_info(self._at(name))
        if info.type == FileType.NotFound:
            raise DamagedFile(name, "is missing")
        if info.type != FileType.File:
            raise DamagedFile(name, "is no regular file")
        return info.size

    def read(self, name: str, limit: int) -> bytes:
        """A file's content.

        Raises:
            DamagedFile: as `size`, or it has more than `limit` bytes.
        """
        size = self.size(name)
        if size > limit:
            raise DamagedFile(name, f"has {size} bytes, and such a file at most {limit}")
        with self._stream(name) as stream:
            return stream.read(size)

    def sha256(self, name: str) -> str:
        """Hash of a file's content."""
        left, digest = self.size(name), hashlib.sha256()
        with self._stream(name) as stream:
            while left and (chunk := stream.read(min(left, _CHUNK))):
                digest.update(chunk)
                left -= len(chunk)
        return digest.hexdigest()

    def _stream(self, name: str) -> NativeFile:
        return self.filesystem.open_input_stream(self._at(name), compression=None)  # else guessed from the name

    def _at(self, name: str) -> str:
        return f"{self.path}/{name}"


def read_json(folder: Folder, name: str, kind: TypeAdapter[Model]) -> Model:
    """A file's JSON as what it should be; values of other types are refused, and not converted.

    Raises:
        DamagedFile: it is something else.
    """
    try:
        return kind.validate_json(folder.read(name, _MOST_JSON), strict=True)
    except ValidationError as error:
        raise DamagedFile(name, f"cannot be read ({_first_fault(error)})") from None


def _first_fault(error: ValidationError) -> str:
    """The first of pydantic's findings: where, and what."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where[:80]}: {first['msg']}" if where else first["msg"]


def _printable(text: str, limit: int = 200) -> str:
    """What a forged file says must not steer the terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:limit])


def _with_path(name: str, change: Callable[[str], str]) -> str:
    """A path changed, or a URI's path: what follows it there, such as `?region=…`, stays."""
    if "://" not in name:
        return change(name)
    parts = urlsplit(name)
    return parts._replace(path=change(parts.path.rstrip("/"))).geturl()
