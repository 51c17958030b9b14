"""Files in a store that a URI names: `store_listing.py PATTERN` lists those that match. It prints errors on standard output.

Globs in URIs have `*`, `**` and `[…]`. A question mark begins the options of the store, such as `?region=eu-west-1`.
"""

from __future__ import annotations

import json
import posixpath
import re
import sys
from typing import Any

from pyarrow import ArrowInvalid
from pyarrow.fs import FileSystem, FileType, FSSpecHandler, PyFileSystem

REACHED = "reached"
_WITH_BUCKETS = ("s3://", "gs://", "gcs://", "abfs://", "abfss://")


def store(uri: str) -> tuple[FileSystem, str]:
    """Return the filesystem of a URI, and the path in it.

    Raises:
        OSError: the store cannot be reached.
        ValueError: nobody knows such a store, or a package for it is missing.
    """
    try:
        return FileSystem.from_uri(uri)
    except ArrowInvalid as error:
        if "Unrecognized filesystem type" not in str(error):
            raise
    import fsspec

    try:
        files, path = fsspec.core.url_to_fs(uri)
    except ImportError as error:
        raise ValueError(f"its store needs a package that is not installed: {error}") from None
    return PyFileSystem(FSSpecHandler(files)), path


def listed(pattern: str) -> list[tuple[str, str, int, int]]:
    """Return path, name, size and time of change of the files that a pattern matches."""
    from fsspec.implementations.arrow import ArrowFSWrapper

    plain, question, options = pattern.partition("?")
    fixed = re.split(r"[*\[]", plain, maxsplit=1)[0]
    folder = posixpath.dirname(fixed)
    files, root = store(folder + question + options)
    wanted = root + plain[len(folder) :]
    bucket = root.split("/")[0] or root
    there = files.get_file_info(bucket).type != FileType.NotFound  # raises if the store does not answer
    print(REACHED, flush=True)
    if not there and plain.startswith(_WITH_BUCKETS):
        raise FileNotFoundError(f"there is no bucket {bucket}, or it is not shown to you")
    matched = [wanted] if fixed == plain else sorted(ArrowFSWrapper(files).glob(wanted))
    found = [info for info in files.get_file_info(matched) if info.type == FileType.File]
    for info in found:
        if info.size is None:
            raise OSError(f"the store does not tell the size of {info.path}")
    return [
        (folder + info.path[len(root) :] + question + options, posixpath.relpath(info.path, root), info.size, info.mtime_ns or 0)
        for info in found
    ]


def _reason(error: Any) -> str:
    return " ".join(str(error).split()) or type(error).__name__


if __name__ == "__main__":
    try:
        print(json.dumps(listed(sys.argv[1])))
    except Exception as error:  # clients of stores document no types
        print(_reason(error))
        raise SystemExit(1) from None
