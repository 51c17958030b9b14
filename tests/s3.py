"""A server of S3 on this machine, for tests: moto's."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pyarrow.fs import S3FileSystem

NO_MOTO = "moto is not installed; pip install 'moto[s3]', or name its moto_server in MOTO_SERVER"
ENVIRONMENT = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_EC2_METADATA_DISABLED": "true"}


@dataclass(frozen=True)
class S3:
    """A server that runs.

    Args:
        process: its process.
        port: its port on this machine.
    """

    process: subprocess.Popen
    port: int

    @property
    def options(self) -> str:
        """The options of a URI."""
        return f"?endpoint_override=127.0.0.1:{self.port}&scheme=http&region=us-east-1"

    def files(self) -> S3FileSystem:
        """Return its files. The environment must have the keys (`ENVIRONMENT`)."""
        address = f"127.0.0.1:{self.port}"
        return S3FileSystem(endpoint_override=address, scheme="http", region="us-east-1", allow_bucket_creation=True)


def moto_server() -> str | None:
    """Return the command that starts a server; None if there is none."""
    beside = Path(sys.executable).with_name("moto_server")
    return os.environ.get("MOTO_SERVER") or (str(beside) if beside.exists() else None)


@contextmanager
def s3_server() -> Iterator[S3]:
    """Start a server. `moto_server` must have found one."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen([str(moto_server()), "-p", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(200):
            with socket.socket() as knock:
                if knock.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield S3(process, port)
    finally:
        process.kill()
        process.wait()
