"""Writes a small file to a storage and deletes it: `storage_probe.py URI`. It prints an error on standard output."""

from __future__ import annotations

import secrets
import sys

from pyarrow.fs import FileSystem


def probe(uri: str) -> None:
    """Write and delete a file at a URI. Errors of the storage's client are not caught."""
    write(*FileSystem.from_uri(uri))


def write(files: FileSystem, folder: str) -> None:
    """Write and delete a file in a folder of a filesystem."""
    path = f"{folder.rstrip('/')}/.foldray-{secrets.token_hex(4)}"
    with files.open_output_stream(path) as stream:
        stream.write(b"foldray was here")
    files.delete_file(path)


if __name__ == "__main__":
    try:
        probe(sys.argv[1])
    except Exception as error:
        print(" ".join(str(error).split()))
        raise SystemExit(1) from None
