"""Sending a recipe to a Ray cluster as a job."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from foldray.errors import UserError
from foldray.recipe import Recipe

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

_PACKAGES = ("foldray", "trainers", "tuners")


def submit(recipe: Recipe, address: str, as_json: bool = False, wait: bool = True) -> int:
    """Submit `foldray train` as a Ray job and follow its log; 0 if the job succeeded (or was accepted), else 1.

    The packages and the resolved recipe travel: the cluster needs foldray's dependencies, not foldray, and the recipe may lie
    anywhere.

    Raises:
        UserError: nothing answers at the address, or it refuses the token.
    """
    # Ray's job client leaves the token out unless it is asked for, and clusters ask for it by default.
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    from ray.job_submission import JobStatus, JobSubmissionClient

    with tempfile.TemporaryDirectory(prefix="foldray-job-") as folder:
        _pack(Path(folder), recipe)
        entrypoint = shlex.join(["python", "-m", "foldray", "train", "recipe.yaml", *(["--json"] if as_json else [])])
        try:
            client = JobSubmissionClient(address)
            environment = {"working_dir": folder, "env_vars": {"PYTHONUNBUFFERED": "1"}}
            job = client.submit_job(entrypoint=entrypoint, runtime_env=environment, metadata={"recipe": recipe.name})
        except (ConnectionError, RuntimeError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError("address", address, f"the cluster does not take the job ({reason})") from None
    print(f"job {job} at {address}", file=sys.stderr)
    if not wait:
        if as_json:
            print(json.dumps({"job_id": job, "address": address}))
        return 0
    asyncio.run(_follow(client, job))
    status = client.get_job_status(job)
    print(f"job {job}: {status.value.lower()}", file=sys.stderr)
    return 0 if status == JobStatus.SUCCEEDED else 1


def _pack(folder: Path, recipe: Recipe) -> None:
    root = Path(__file__).parent.parent
    for package in _PACKAGES:
        shutil.copytree(root / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    plain = recipe.model_dump(mode="json")
    plain["cluster"]["address"] = None  # the job runs on the cluster that it is sent to
    (folder / "recipe.yaml").write_text(yaml.safe_dump(plain, sort_keys=False))


async def _follow(client: JobSubmissionClient, job: str) -> None:
    async for text in client.tail_job_logs(job):
        print(text, end="", flush=True)
