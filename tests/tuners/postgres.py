"""Starts a PostgreSQL server for the tests, if the machine has its programs."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def programs() -> Path | None:
    """Return the folder of `initdb` and `postgres`, which Debian does not put on PATH; None if there is none."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    on_path = shutil.which("initdb")
    return found[-1].parent if found else Path(on_path).parent if on_path else None


@contextmanager
def server(folders: pytest.TempPathFactory) -> Iterator[str]:
    """Run a server until the end of the context, and yield its URL without a database."""
    folder = programs()
    if folder is None:
        pytest.skip("needs PostgreSQL's server (Debian: apt install postgresql)")
    pytest.importorskip("psycopg2", reason="pip install psycopg2-binary")
    user = "postgres" if os.geteuid() == 0 else None  # the server refuses to run as root
    data = folders.mktemp("postgres")
    if user:
        for above in (data, *data.parents[:3]):  # other users cannot enter pytest's folders
            above.chmod(above.stat().st_mode | 0o011)
        shutil.chown(data, user)
    given = {"user": user, "cwd": data, "check": True, "stdout": subprocess.DEVNULL}
    subprocess.run([folder / "initdb", "-D", data / "db", "-U", "tuner", "-A", "trust", "--no-sync"], **given)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = f"-p {port} -k {data} -c listen_addresses=127.0.0.1 -F"
    subprocess.run([folder / "pg_ctl", "-D", data / "db", "-l", data / "log", "-o", options, "-w", "start"], **given)
    try:
        yield f"postgresql+psycopg2://tuner@127.0.0.1:{port}"
    finally:
        subprocess.run([folder / "pg_ctl", "-D", data / "db", "-m", "immediate", "stop"], **given)


def new_database(url: str) -> str:
    """Create an empty database on a server, and return its URL."""
    from sqlalchemy import create_engine, text

    name = f"study_{uuid.uuid4().hex[:8]}"
    with create_engine(f"{url}/postgres", isolation_level="AUTOCOMMIT").connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    return f"{url}/{name}"
