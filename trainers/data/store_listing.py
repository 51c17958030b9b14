"""Files in a store that a URI names: `store_listing.py PATTERN` lists those that match. It prints errors on standard output.

Globs in URIs have `*`, `**` and `[…]`. In URIs of pyarrow's stores, a question mark begins the options of the store, such as
`?region=eu-west-1`; elsewhere it is a part of the address.
"""

from __future__ import annotations

import json
import posixpath
import re
import sys
from collections.abc import Callable
from urllib.parse import quote, unquote

from pyarrow.fs import FileInfo, FileSystem, FileType, FSSpecHandler, PyFileSystem

REACHED = "reached"
_WITH_BUCKETS = ("s3://", "gs://", "gcs://", "abfs://", "abfss://")
_OF_ARROW = (*_WITH_BUCKETS, "hdfs://", "viewfs://")


def store(uri: str) -> tuple[FileSystem, str]:
    """Return the filesystem of a URI, and the path in it."""
    if uri.startswith(_OF_ARROW):
        return FileSystem.from_uri(uri)
    import fsspec

    try:
        files, path = fsspec.core.url_to_fs(uri)
    except ImportError as error:
        raise ValueError(f"its store needs a package that is not installed: {error}") from None
    return PyFileSystem(FSSpecHandler(files)), path


def listed(pattern: str) -> list[tuple[str, str, int, int]]:
    """Return URI, name, size and time of change of the files that a pattern matches.

    A key of one of pyarrow's stores is written as the store shows it. Only if there is no such key, its escapes are read (`%20`).
    """
    if not pattern.startswith(_OF_ARROW):
        return _matched(pattern, "", str)
    plain, question, options = pattern.partition("?")
    found = _matched(plain, question + options, _quoted)
    return found or ("%" in plain and _matched(_unescaped(plain), question + options, _quoted)) or []


def _matched(plain: str, options: str, quoted: Callable[[str], str]) -> list[tuple[str, str, int, int]]:
    """Return what `listed` returns.

    Args:
        plain: the pattern without options.
        options: what follows it in the URI of every file.
        quoted: makes a URI of a scheme and a key.
    """
    from fsspec.implementations.arrow import ArrowFSWrapper

    fixed = re.split(r"[*\[]", plain, maxsplit=1)[0]
    folder = posixpath.dirname(fixed)
    files, root = store(quoted(folder) + options)
    wanted = root + plain[len(folder) :]
    bucket = root.split("/")[0] or root
    exists = files.get_file_info(bucket).type != FileType.NotFound  # raises if the store does not answer
    print(REACHED, flush=True)
    if not exists and plain.startswith(_WITH_BUCKETS):
        raise FileNotFoundError(f"there is no bucket {bucket}, or it is not shown to you")

    def existing(paths: list[str]) -> list[FileInfo]:
        return [info for info in files.get_file_info(paths) if info.type == FileType.File]

    # The name of an existing file is not a glob, even if it has brackets in it.
    infos = [] if "*" in plain else existing([wanted])
    if fixed != plain and not infos:
        infos = existing(sorted(ArrowFSWrapper(files).glob(wanted)))
    for info in infos:
        if info.size is None:
            raise OSError(f"the store does not tell the size of {info.path}")
    return [
        (quoted(folder + info.path[len(root) :]) + options, posixpath.relpath(info.path, root), info.size, info.mtime_ns or 0)
        for info in infos
    ]


def _quoted(uri: str) -> str:
    scheme, between, key = uri.partition("://")
    return scheme + between + quote(key, safe="/!$&'()*+,;=:@")


def _unescaped(plain: str) -> str:
    """Return a pattern without escapes. An escaped `*`, `?` or bracket stays a plain character."""
    return unquote(re.sub("%(2A|3F|5B)", r"[\g<0>]", plain, flags=re.IGNORECASE))


if __name__ == "__main__":
    try:
        print(json.dumps(listed(sys.argv[1])))
    except Exception as error:  # clients of stores document no types
        print(" ".join(str(error).split()) or type(error).__name__)
        raise SystemExit(1) from None
