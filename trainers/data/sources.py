"""Sources of documents: lists files, splits them into training and validation, and reads parts of files."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import platform
import re
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from foldray.errors import UserError
from foldray.recipe import DataSpec

# Tests are left out because some distributions package them separately. So the text is nearly the same on all machines.
# pydoc_data is one file of generated prose, which would be most of the validation set if the split picked it.
_NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "pydoc_data"}
STORED = re.compile(r"/documents/sha256-[0-9a-f]{64}\.parquet$")
"""Paths of files that `datasets.py` wrote, which are named by the hash of their documents."""
_PART_BYTES = 8 << 20
_LONGEST_LINE = 1 << 28  # bytes of a document in a jsonl file
_HEAD_BYTES = 8 << 10  # the beginning of a file that is checked for zero bytes


@dataclass(frozen=True)
class SourceFile:
    """One file of documents.

    Args:
        kind: stdlib, text, jsonl or parquet.
        name: name below the glob's fixed folder (or the library's root). It decides the split and the order.
        path: absolute path; empty for stdlib, because every node finds its own library.
        size: in bytes.
        mtime_ns: time of the last change.
    """

    kind: str
    name: str
    path: str
    size: int
    mtime_ns: int

    def locate(self) -> str:
        """Return the path of the file on this machine."""
        return self.path or str(_library() / self.name)


@dataclass(frozen=True)
class Part:
    """A part of a file that is read at once.

    A part is a whole text file, the lines that begin in bytes [start, stop) of a jsonl file, or the row group `start` of a
    parquet file.
    """

    file: SourceFile
    start: int
    stop: int
    size: int
    """Bytes of text, used to group parts into works."""
    last: bool
    """Whether this is the last part of its file."""


def split_files(data: DataSpec) -> tuple[list[SourceFile], list[SourceFile]]:
    """Split files into training files and validation files, each in the order of names.

    A file belongs to one side only. If `validation.path` is set, its files are held back, even if `path` matches them, too.
    Otherwise the files whose names have the lowest hashes are held back: the share `fraction` of all files, with at least
    one file on each side.

    Raises:
        UserError: a pattern matches no file, or one side would be empty.
    """
    files = _list_library() if data.source == "stdlib" else _list_files(data.source, str(data.path), "data.path")
    if data.validation.path is not None:
        kind = "text" if data.source == "stdlib" else data.source
        validation = _list_files(kind, data.validation.path, "data.validation.path")
        validation_paths = {os.path.realpath(file.locate()) for file in validation}
        train = [file for file in files if os.path.realpath(file.locate()) not in validation_paths]
        if not train:
            rule = "covers every file of data.path; nothing is left to train on"
            raise UserError("data.validation.path", data.validation.path, rule)
        return train, validation
    if len(files) == 1:
        rule = f"must name a validation set: data.path is one file, {files[0].name}, and files are not split"
        raise UserError("data.validation.path", "null", rule)
    count = min(max(round(data.validation.fraction * len(files)), 1), len(files) - 1)
    chosen = {file.name for file in sorted(files, key=lambda file: hashlib.sha256(os.fsencode(file.name)).digest())[:count]}
    return [file for file in files if file.name not in chosen], [file for file in files if file.name in chosen]


def python_version() -> str:
    """Return the version of Python whose library is read."""
    return platform.python_version()


def check_field(file: SourceFile, text_field: str) -> None:
    """Check the beginning of a file: the text field in the schema or the first line, or zero bytes in a text file.

    Raises:
        UserError: the text field is missing (the error lists the fields), or the file is not of its kind.
    """
    with _reading(file):
        if file.kind == "parquet":
            _check_schema(file, _open_parquet(file).schema_arrow, "data.text_field", text_field)
        elif file.kind == "jsonl":
            next(read_documents(Part(file, 0, file.size, file.size, last=True), text_field), None)
        else:
            with open(file.locate(), "rb") as content:
                _text(content.read(_HEAD_BYTES), file)


def cut(files: Iterable[SourceFile]) -> Iterator[Part]:
    """Yield the parts of files, in order. The parts do not depend on the number of workers."""
    for file in files:
        if file.kind == "parquet":
            with _reading(file):
                metadata = _open_parquet(file).metadata
            sizes = [metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups)]
            spans = [(group, group + 1, size) for group, size in enumerate(sizes)]
        elif file.kind == "jsonl":
            starts = range(0, file.size, _PART_BYTES)
            spans = [(start, min(start + _PART_BYTES, file.size), _PART_BYTES) for start in starts]
        else:
            spans = [(0, file.size, file.size)]
        # A file without rows gets one empty part, so the file is counted as done.
        spans = spans or [(0, 0, 0)]
        for index, (start, stop, size) in enumerate(spans):
            yield Part(file, start, stop, size, last=index == len(spans) - 1)


def read_documents(part: Part, text_field: str) -> Iterator[str]:
    """Yield the documents of a part, in order. Bytes that are not UTF-8 become U+FFFD.

    Raises:
        UserError: as `read_rows`; or a document is not text.
    """
    if part.file.kind in ("jsonl", "parquet"):
        for row in read_rows(part, "data.text_field", text_field):
            if not isinstance(row.value, str):
                kind = type(row.value).__name__
                raise UserError("data.text_field", text_field, f"is not text but {kind} in {row}")
            yield as_utf8(row.value)
    else:
        with _reading(part.file):
            yield _text(Path(part.file.locate()).read_bytes(), part.file)


class Row(NamedTuple):
    """One row of a jsonl or parquet file.

    Args:
        value: the value of the field that is read.
        file: the file.
        at: for jsonl the offset of its line in bytes, for parquet its row group.
    """

    value: Any
    file: SourceFile
    at: int

    def __str__(self) -> str:
        """Return where the row is, for messages. This counts the lines before it."""
        where = f"row group {self.at}" if self.file.kind == "parquet" else f"line {_line_number(self.file, self.at)}"
        return f"{where} of {self.file.locate()}"


def read_rows(part: Part, field: str, key: str) -> Iterator[Row]:
    """Yield the rows of a part of a jsonl or parquet file, in order.

    Args:
        part: the part.
        field: name of the recipe key that says which field to read, for messages.
        key: its value: the field of every row that is read.

    Raises:
        UserError: the file cannot be read on this machine, has another size than when it was listed, or lacks the field.
    """
    with _reading(part.file):
        yield from (_parquet_rows if part.file.kind == "parquet" else _jsonl_rows)(part, field, key)


def as_utf8(text: str) -> str:
    """Return a text that UTF-8 can encode. JSON may hold half a surrogate pair, which becomes a question mark."""
    return text.encode("utf-8", "replace").decode()


@contextmanager
def _reading(file: SourceFile) -> Iterator[None]:
    try:
        if os.stat(file.locate()).st_size != file.size:
            rule = f"has another size on node {platform.node()} than on the driver, or it is being written"
            raise UserError("data.path", file.locate(), rule)
        yield
    except OSError as error:
        rule = f"cannot be read on node {platform.node()} ({error.strerror or error}); every node must see the files"
        raise UserError("data.path", file.locate(), rule) from None


def _library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def _list_library() -> list[SourceFile]:
    root, files = _library(), []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _NOT_LIBRARY]
        for path in (os.path.join(folder, name) for name in names if name.endswith(".py")):
            if os.path.isfile(path):  # some distributions have broken links
                files.append(_source_file("stdlib", os.path.relpath(path, root), path))
    if len(files) < 2:
        rule = f"finds no Python sources in {root}; train on files of your own"
        raise UserError("data.source", "stdlib", rule, ["text", "jsonl", "parquet", "conversations"])
    return sorted(files, key=lambda file: file.name)


def _list_files(kind: str, pattern: str, field: str) -> list[SourceFile]:
    expanded = os.path.abspath(os.path.expanduser(pattern))
    if os.path.isdir(expanded):
        raise UserError(field, pattern, "is a folder; name a file or a glob, such as " + os.path.join(pattern, "*"))
    # The name of an existing file is not a glob, even if it has brackets in it.
    exists = os.path.isfile(expanded)
    paths = [expanded] if exists else sorted(filter(os.path.isfile, glob.glob(expanded, recursive=True)))
    if not paths:
        raise UserError(field, pattern, f"matches no file (looked for {expanded})")
    root = os.path.dirname(expanded if exists else re.split(r"[*?\[]", expanded, maxsplit=1)[0])
    return [_source_file(_kind(kind, path), os.path.relpath(path, root), path) for path in paths]


def _kind(source: str, path: str) -> str:
    """Return how a file is read."""
    if source != "conversations":
        return source
    return "parquet" if path.endswith(".parquet") else "jsonl"


def _source_file(kind: str, name: str, path: str) -> SourceFile:
    stat = os.stat(path)
    return SourceFile(kind, name, "" if kind == "stdlib" else path, stat.st_size, stat.st_mtime_ns)


def _text(content: bytes, file: SourceFile) -> str:
    if b"\0" in content[:_HEAD_BYTES]:
        rule = "is not UTF-8 text but binary, or in another encoding: it has zero bytes"
        raise UserError("data.path", file.locate(), rule)
    return content.decode("utf-8", "replace")


def _jsonl_rows(part: Part, field: str, key: str) -> Iterator[Row]:
    with open(part.file.locate(), "rb") as lines:
        if part.start:
            # The line that holds the byte before this part belongs to the previous part.
            lines.seek(part.start - 1)
            while (skipped := lines.readline(_LONGEST_LINE)) and not skipped.endswith(b"\n"):
                pass
        while (offset := lines.tell()) < part.stop:
            line = lines.readline(_LONGEST_LINE)
            if len(line) == _LONGEST_LINE:
                rule = f"line {_line_number(part.file, offset)} has more than {_LONGEST_LINE >> 20} MiB"
                raise UserError("data.path", part.file.locate(), rule)
            if line.strip():
                yield Row(_value_of(line, part.file, offset, field, key), part.file, offset)


def _value_of(line: bytes, file: SourceFile, offset: int, field: str, key: str) -> Any:
    try:
        found = json.loads(line.decode("utf-8-sig", "replace"))
    except (ValueError, RecursionError) as error:
        raise UserError("data.path", file.locate(), f"line {_line_number(file, offset)} is not JSON ({error})") from None
    if not isinstance(found, dict):
        raise UserError("data.path", file.locate(), f"line {_line_number(file, offset)} is not a JSON object")
    if key not in found:
        raise UserError(field, key, f"is not a field of line {_line_number(file, offset)} of {file.locate()}", found)
    return found[key]


def _line_number(file: SourceFile, offset: int) -> int:
    with open(file.locate(), "rb") as lines:
        pieces = (lines.read(min(_PART_BYTES, offset - start)) for start in range(0, offset, _PART_BYTES))
        return sum(piece.count(b"\n") for piece in pieces) + 1


def _parquet_rows(part: Part, field: str, key: str) -> Iterator[Row]:
    table = _open_parquet(part.file)
    _check_schema(part.file, table.schema_arrow, field, key)
    groups = list(range(part.start, part.stop))
    for batch in table.iter_batches(batch_size=1024, row_groups=groups, columns=[key]) if groups else ():
        yield from (Row(value, part.file, part.start) for value in batch.column(0).to_pylist())


def _open_parquet(file: SourceFile) -> Any:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(file.locate())
    except pyarrow.ArrowInvalid as error:
        raise UserError("data.path", file.locate(), f"is not Parquet ({error})") from None


def _check_schema(file: SourceFile, schema: Any, field: str, key: str) -> None:
    if key not in schema.names:
        raise UserError(field, key, f"is not a column of {file.locate()}", schema.names)
