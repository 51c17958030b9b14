"""Opens the storage of a study by its URL, and locks it for one tuner at a time.

Tuners can make single calls of an Optuna storage at the same time. But choosing a row takes several calls (read all trials,
choose, write), so a tuner holds `storage_lock` meanwhile.
"""

from __future__ import annotations

import fcntl
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend

from foldray.errors import MissingPackage, UserError, refuse_hidden
from foldray.recipe import Recipe
from foldray.urls import sqlite_parts, sqlite_url, told_without
from trainers.cluster.run_storage import storage_folder

_CONNECT_S = 10  # seconds; without a limit, connecting to a server that does not answer takes minutes
_JOURNAL = "journal://"
_EXAMPLES = ("sqlite:///PATH/tune.db", "journal:///PATH/tune.log", "postgresql+psycopg2://USER@HOST/DATABASE")


def study_folder(recipe: Recipe) -> Path:
    """Return the folder of a study's report and pictures, and of its database unless the recipe names a storage."""
    storage = storage_folder(recipe)
    if "://" in storage:
        raise UserError("cluster.storage", storage, "must be a folder for tuning; a study's pictures are written there")
    return Path(storage) / "tune" / recipe.tune.study


def study_url(recipe: Recipe, folder: Path) -> str:
    """Return the URL of a study's storage. A file has its absolute path, also if the recipe's is relative or begins with `~`.

    The database is in `folder`, unless the recipe names a storage.
    """
    url = recipe.tune.storage or sqlite_url(folder.absolute() / "tune.db")
    if (path := _path(url)) is None or str(path) in (".", ":memory:"):
        return url
    try:
        full, parts = path.expanduser().absolute(), sqlite_parts(url)
        return f"{_JOURNAL}{full}" if parts is None else sqlite_url(full) + parts[1]
    except RuntimeError:
        raise UserError("tune.storage", url, "names the home of an unknown user") from None


def open_storage(url: str) -> BaseStorage:
    """Open a storage by its URL; create it if it does not exist."""
    refuse_hidden("tune.storage", url)
    try:
        if (path := _path(url)) is not None:
            _check_file(path, b"{" if url.startswith("journal:") else b"SQLite format 3\0")
            path.parent.mkdir(parents=True, exist_ok=True)
            if url.startswith("journal:"):
                return JournalStorage(JournalFileBackend(str(path)))
        with storage_lock(url, "tables"):  # two tuners that create the tables of a new database at once both fail
            return RDBStorage(url, engine_kwargs={"pool_pre_ping": True, **_connect_options(url)})
    except ModuleNotFoundError as error:
        name = error.name or "its driver"
        raise MissingPackage(
            "tune.storage", url, name, f"pip install {name}-binary" if name == "psycopg2" else f"pip install {name}"
        ) from None
    except ImportError:
        raise MissingPackage("tune.storage", url, "psycopg2", "pip install psycopg2-binary") from None
    except Exception as error:
        reason = told_without(" ".join(str(error.__cause__ or error).split()), url)[:160]
        raise UserError("tune.storage", url, f"cannot be opened ({reason})", _EXAMPLES) from None


def storage_lock(url: str, name: str) -> AbstractContextManager[None]:
    """Return a lock of this storage. Other databases than SQLite, PostgreSQL and MySQL have none.

    The name is, for example, that of a study. A storage in a file has one lock for all names.
    """
    if _is_server(url):
        return _server_lock(url, name)
    path = _path(url)
    return nullcontext() if path is None else _file_lock(Path(f"{path}.turn"))  # Optuna's journal uses the ending .lock


@contextmanager
def _server_lock(url: str, name: str) -> Iterator[None]:
    """Hold a lock of the database server. The server releases it when the connection ends, even if the process is killed."""
    from sqlalchemy import NullPool, create_engine, text

    number = zlib.crc32(name.encode())
    postgres = url.startswith("postgresql")
    acquire, release = (
        ("SELECT pg_advisory_lock(:key)", "SELECT pg_advisory_unlock(:key)")
        if postgres
        else ("SELECT GET_LOCK(:key, 60)", "SELECT RELEASE_LOCK(:key)")
    )
    key = {"key": number if postgres else f"foldray-{number}"}
    # Autocommit leaves no transaction open; without a pool, no connection stays open after the lock. A server has few.
    engine = create_engine(url, isolation_level="AUTOCOMMIT", poolclass=NullPool, **_connect_options(url))
    with engine.connect() as connection:
        while not connection.execute(text(acquire), key).scalar() and not postgres:
            pass  # MySQL gives up after the time that the call names; another tuner may measure for longer than that
        try:
            yield
        finally:
            connection.execute(text(release), key)


@contextmanager
def _file_lock(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _is_server(url: str) -> bool:
    return url.startswith(("postgresql", "mysql"))


def _connect_options(url: str) -> dict[str, Any]:
    return {"connect_args": {"connect_timeout": _CONNECT_S}} if _is_server(url) else {}


def _path(url: str) -> Path | None:
    """Return the file of a storage; None for a storage on a server."""
    if parts := sqlite_parts(url):
        return parts[0]
    return Path(url.removeprefix(_JOURNAL)) if url.startswith(_JOURNAL) else None


def _check_file(path: Path, head: bytes) -> None:
    """Refuse an existing file that is no storage, before a lock is written beside it. Reading a device might never end."""
    if not path.exists():
        return
    if not path.is_file():
        raise ValueError("it is not a regular file")
    with path.open("rb") as file:
        if (begin := file.read(len(head))) and begin != head:
            raise ValueError("the file there is something else")
