"""Where documents come from: files, their split into training and validation, and reading a part of a file."""

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
from typing import Any

from foldray.errors import UserError
from foldray.recipe import DataSpec

# Tests are left out because distributions package them apart, so that the text differs little between machines; pydoc_data is
# one file of generated prose, and most of the validation set if the split picks it.
_NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "pydoc_data"}
_PART_BYTES = 8 << 20
_HEAD_BYTES = 8 << 10  # in which a file shows whether it is text


@dataclass(frozen=True)
class SourceFile:
    """One file of documents.

    Args:
        kind: stdlib, text, jsonl or parquet.
        name: its name below the glob's fixed folder (or the library's root), which decides the split and the order.
        path: absolute path; empty for stdlib, which every node finds for itself.
        size: bytes.
        mtime_ns: time of the last change.
    """

    kind: str
    name: str
    path: str
    size: int
    mtime_ns: int

    def locate(self) -> str:
        """Its path on this machine."""
        return self.path or str(_library() / self.name)


@dataclass(frozen=True)
class Part:
    """What is read at once: a whole text file, the lines that begin in bytes [start, stop), or the row group `start`."""

    file: SourceFile
    start: int
    stop: int
    size: int
    """Bytes of text, for dealing out work."""
    last: bool
    """No part of this file comes after it."""


def split_files(data: DataSpec) -> tuple[list[SourceFile], list[SourceFile]]:
    """Files to train on and files to validate on, each in order of name; none is in both.

    A file belongs to one side whole. Without `validation.path` the files whose names hash lowest are held back: `fraction` of
    them, and at least one for each side. With it, the files that it names are held back, wherever else they appear.

    Raises:
        UserError: a pattern matches no file, or one side would be empty.
    """
    files = _list_library() if data.source == "stdlib" else _list_files(data.source, str(data.path), "data.path")
    if data.validation.path is not None:
        kind = "text" if data.source == "stdlib" else data.source
        held = _list_files(kind, data.validation.path, "data.validation.path")
        held_paths = {os.path.realpath(file.locate()) for file in held}
        train = [file for file in files if os.path.realpath(file.locate()) not in held_paths]
        if not train:
            rule = "covers every file of data.path; nothing is left to train on"
            raise UserError("data.validation.path", data.validation.path, rule)
        return train, held
    if len(files) == 1:
        rule = f"must name a validation set: data.path is one file, {files[0].name}, and files are not split"
        raise UserError("data.validation.path", "null", rule)
    count = min(max(round(data.validation.fraction * len(files)), 1), len(files) - 1)
    chosen = {file.name for file in sorted(files, key=lambda file: hashlib.sha256(os.fsencode(file.name)).digest())[:count]}
    return [file for file in files if file.name not in chosen], [file for file in files if file.name in chosen]


def python_version() -> str:
    """The version that the standard library's text belongs to."""
    return platform.python_version()


def check_field(file: SourceFile, text_field: str) -> None:
    """Look for the text field where that is cheap: in a file's schema or first line; of a text file, whether its head is text.

    Raises:
        UserError: it is missing (with the fields there are), or the file is not of its kind.
    """
    with _reading(file):
        if file.kind == "parquet":
            _check_schema(file, _open_parquet(file).schema_arrow, text_field)
        elif file.kind == "jsonl":
            next(_jsonl_documents(Part(file, 0, file.size, file.size, last=True), text_field), None)
        else:
            with open(file.locate(), "rb") as content:
                _text(content.read(_HEAD_BYTES), file)


def cut(files: Iterable[SourceFile]) -> Iterator[Part]:
    """The parts of files, in order; the same whatever reads them."""
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
        # A file without rows has one part all the same, so that it is counted as done.
        spans = spans or [(0, 0, 0)]
        for index, (start, stop, size) in enumerate(spans):
            yield Part(file, start, stop, size, last=index == len(spans) - 1)


def read_documents(part: Part, text_field: str) -> Iterator[str]:
    """The documents of a part, in order. Bytes that are not UTF-8 become U+FFFD.

    Raises:
        UserError: the file cannot be read on this machine, differs from the one that was listed, or lacks the text field.
    """
    file = part.file
    with _reading(file):
        if os.stat(file.locate()).st_size != file.size:
            rule = f"has another size on node {platform.node()} than where it was listed, or is being written"
            raise UserError("data.path", file.locate(), rule)
        if file.kind == "parquet":
            yield from _parquet_documents(part, text_field)
        elif file.kind == "jsonl":
            yield from _jsonl_documents(part, text_field)
        else:
            yield _text(Path(file.locate()).read_bytes(), file)


@contextmanager
def _reading(file: SourceFile) -> Iterator[None]:
    try:
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
            if os.path.isfile(path):  # a distribution may ship links to nowhere
                files.append(_source_file("stdlib", os.path.relpath(path, root), path))
    if len(files) < 2:
        rule = f"finds no Python sources in {root}; train on files of your own"
        raise UserError("data.source", "stdlib", rule, ["text", "jsonl", "parquet"])
    return sorted(files, key=lambda file: file.name)


def _list_files(kind: str, pattern: str, field: str) -> list[SourceFile]:
    expanded = os.path.abspath(os.path.expanduser(pattern))
    if os.path.isdir(expanded):
        raise UserError(field, pattern, "is a folder; name a file or a glob, such as " + os.path.join(pattern, "*"))
    # A name that exists is meant, even if it has brackets in it.
    exists = os.path.isfile(expanded)
    paths = [expanded] if exists else sorted(filter(os.path.isfile, glob.glob(expanded, recursive=True)))
    if not paths:
        raise UserError(field, pattern, f"matches no file (looked for {expanded})")
    root = os.path.dirname(expanded if exists else re.split(r"[*?\[]", expanded, maxsplit=1)[0])
    return [_source_file(kind, os.path.relpath(path, root), path) for path in paths]


def _source_file(kind: str, name: str, path: str) -> SourceFile:
    stat = os.stat(path)
    return SourceFile(kind, name, "" if kind == "stdlib" else path, stat.st_size, stat.st_mtime_ns)


def _text(content: bytes, file: SourceFile) -> str:
    if b"\0" in content[:_HEAD_BYTES]:
        raise UserError("data.path", file.locate(), "is no UTF-8 text but binary, or in another encoding: it has zero bytes")
    return content.decode("utf-8", "replace")


def _jsonl_documents(part: Part, text_field: str) -> Iterator[str]:
    with open(part.file.locate(), "rb") as lines:
        if part.start:
            # The line that holds the byte before this part belongs to the part before it.
            lines.seek(part.start - 1)
            lines.readline()
        while (offset := lines.tell()) < part.stop:
            line = lines.readline()
            if line.strip():
                yield _field_of(line, part.file, text_field, offset)


def _field_of(line: bytes, file: SourceFile, text_field: str, offset: int) -> str:
    try:
        document = json.loads(line.decode("utf-8-sig", "replace"))
    except ValueError as error:
        raise UserError("data.path", file.locate(), f"line {_line_number(file, offset)} is not JSON ({error})") from None
    if not isinstance(document, dict):
        raise UserError("data.path", file.locate(), f"line {_line_number(file, offset)} is no JSON object")
    if text_field not in document:
        rule = f"is no field of line {_line_number(file, offset)} of {file.locate()}"
        raise UserError("data.text_field", text_field, rule, document)
    if not isinstance(document[text_field], str):
        kind = type(document[text_field]).__name__
        rule = f"holds no text but {kind} at line {_line_number(file, offset)} of {file.locate()}"
        raise UserError("data.text_field", text_field, rule)
    # JSON can spell half a surrogate pair, which UTF-8 cannot.
    return document[text_field].encode("utf-8", "replace").decode()


def _line_number(file: SourceFile, offset: int) -> int:
    with open(file.locate(), "rb") as lines:
        return lines.read(offset).count(b"\n") + 1


def _parquet_documents(part: Part, text_field: str) -> Iterator[str]:
    table = _open_parquet(part.file)
    _check_schema(part.file, table.schema_arrow, text_field)
    groups = list(range(part.start, part.stop))
    for batch in table.iter_batches(batch_size=1024, row_groups=groups, columns=[text_field]) if groups else ():
        for document in batch.column(0).to_pylist():
            if not isinstance(document, str):
                rule = f"holds no text but {type(document).__name__} in row group {part.start} of {part.file.locate()}"
                raise UserError("data.text_field", text_field, rule)
            yield document


def _open_parquet(file: SourceFile) -> Any:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(file.locate())
    except pyarrow.ArrowInvalid as error:
        raise UserError("data.path", file.locate(), f"is not Parquet ({error})") from None


def _check_schema(file: SourceFile, schema: Any, text_field: str) -> None:
    if text_field not in schema.names:
        raise UserError("data.text_field", text_field, f"is no column of {file.locate()}", schema.names)
