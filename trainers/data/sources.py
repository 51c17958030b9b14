"""Sources of documents: lists files, and splits them into training and validation."""

from __future__ import annotations

import hashlib
import os
import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from foldray.errors import UserError
from foldray.recipe import DataSpec
from trainers.data.places import ending, find, is_uri

# Tests are left out because some distributions package them separately. So the text is nearly the same on all machines.
# pydoc_data is one file of generated prose, which would be most of the validation set if the split picked it.
_NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "pydoc_data"}
STORED = re.compile(r"/documents/(sha256-[0-9a-f]{64}\.parquet$|hash-[0-9a-f]{64}(?=/[^/]*\.parquet$))")
"""Paths of files that `datasets.py` wrote. The group names the documents by their hash. Earlier versions wrote a single file."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of documents.

    Args:
        kind: stdlib, text, jsonl or parquet.
        name: name below the glob's fixed folder (or the library's root). It decides the split and the order.
        path: absolute path, or URI; empty for stdlib, because every node finds its own library.
        size: in bytes, as the file is stored.
        mtime_ns: time of the last change; 0 if nobody knows it.
    """

    kind: str
    name: str
    path: str
    size: int
    mtime_ns: int

    def locate(self) -> str:
        """Return the path of the file on this machine."""
        return self.path or str(_library() / self.name)


def split_files(data: DataSpec) -> tuple[list[SourceFile], list[SourceFile]]:
    """Split files into training files and validation files, each in the order of names.

    A file belongs to one side only. If `validation.path` is set, its files are held back, even if `path` matches them, too.
    Otherwise the files whose names have the lowest hashes are held back: the share `fraction` of all files, with at least
    one file on each side.
    """
    files = _list_library() if data.source == "stdlib" else _list_files(data.source, str(data.path), "data.path")
    if data.validation.path is not None:
        kind = "text" if data.source == "stdlib" else data.source
        validation = _list_files(kind, data.validation.path, "data.validation.path")
        validation_paths = {_real(file) for file in validation}
        train = [file for file in files if _real(file) not in validation_paths]
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


def _real(file: SourceFile) -> str:
    path = file.locate()
    return path if is_uri(path) else os.path.realpath(path)


def _library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def _list_library() -> list[SourceFile]:
    root, files = _library(), []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _NOT_LIBRARY]
        for path in (os.path.join(folder, name) for name in names if name.endswith(".py")):
            if os.path.isfile(path):  # some distributions have broken links
                stat = os.stat(path)
                files.append(SourceFile("stdlib", os.path.relpath(path, root), "", stat.st_size, stat.st_mtime_ns))
    if len(files) < 2:
        rule = f"finds no Python sources in {root}; train on files of your own"
        raise UserError("data.source", "stdlib", rule, ["text", "jsonl", "parquet", "conversations"])
    return sorted(files, key=lambda file: file.name)


def _list_files(kind: str, pattern: str, field: str) -> list[SourceFile]:
    return [
        SourceFile(_kind(kind, place.path), place.name, place.path, place.size, place.mtime_ns) for place in find(field, pattern)
    ]


def _kind(source: str, path: str) -> str:
    """Return how a file is read."""
    if source != "conversations":
        return source
    return "parquet" if ending(path) == ".parquet" else "jsonl"
