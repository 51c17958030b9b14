"""Sends a recipe to a Ray cluster as a job."""

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
from urllib.parse import urlsplit

import yaml

from foldray.errors import UserError
from foldray.recipe import Recipe, check_trains
from foldray.urls import holds_secret

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

WANTS_TOKEN = "the cluster requires its token; put it into ~/.ray/auth_token, or set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"
_STORED = (
    "holds a secret, and a job's recipe is stored on its cluster; put the secret into the cluster's environment, such as "
    "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, PGPASSWORD, or AWS_SECRET_ACCESS_KEY"
)
_PACKAGES = ("foldray", "trainers", "tuners")
_ROOT = Path(__file__).parents[2]
_TAKEN = (".py", ".yaml")  # all files that the packages have
_NEVER = ("__pycache__", "runs", "mlruns", "mlartifacts")  # folders
_STOP_S = 600  # seconds that `ray job stop` waits for a step and its checkpoint; Ray's default is 3
_MOST = 16 * 2**20  # bytes that a job carries; the packages have a few MiB, and Ray's dashboard refuses 100


def in_job() -> bool:
    """Whether this process was started as a Ray job."""
    return "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ


def submit(recipe: Recipe, address: str, as_json: bool = False, wait: bool = True, stops: bool = False) -> int:
    """Submit `foldray train` as a Ray job and follow its log.

    The job carries foldray's packages and the complete recipe. So the cluster needs foldray's dependencies, but not foldray
    or the recipe's file. `address` is that of the cluster's dashboard.

    Args:
        as_json: print the job's JSON document on standard output, and its log on standard error.
        wait: follow the log until the job ends; otherwise return once the cluster has accepted the job.
        stops: Ctrl-C stops the job. Otherwise the job goes on, and only its log is no longer followed.

    Returns:
        The exit code of the training; 0 if the job was accepted and nobody waits for it, 1 for a job without an exit code, and
        130 after Ctrl-C.
    """
    check_trains(recipe)
    _check_address(address)
    for key, url in (("tracking.uri", recipe.tracking.uri), ("cluster.storage", recipe.cluster.storage)):
        if url is not None and holds_secret(url):
            raise UserError(key, url, _STORED)
    if has_token():  # Ray's client sends it in this mode alone, and requires it then
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobStatus, JobSubmissionClient

    with tempfile.TemporaryDirectory(prefix="foldray-job-") as folder:
        _pack(Path(folder), recipe)
        entrypoint = shlex.join(["python", "-m", "foldray", "train", "recipe.yaml", *(["--json"] if as_json else [])])
        try:
            client = JobSubmissionClient(address)
            variables = {"PYTHONUNBUFFERED": "1", "RAY_JOB_STOP_WAIT_TIME_S": str(_STOP_S)}
            environment = {"working_dir": folder, "env_vars": variables}
            job = client.submit_job(entrypoint=entrypoint, runtime_env=environment, metadata={"recipe": recipe.name})
        except AuthenticationError as error:
            reason = error.message.split("\n")[0].split(". ")[0]
            raise UserError("address", address, f"{WANTS_TOKEN} ({reason})") from None
        except (ConnectionError, RuntimeError, ValueError) as error:
            # Ray's dashboard always answers in JSON.
            is_other = isinstance(error, json.JSONDecodeError)
            reason = "the server there is not a Ray dashboard" if is_other else " ".join(str(error).split())[:200]
            raise UserError("address", address, f"the cluster does not take the job ({reason})") from None
    print(f"job {job} at {address}", file=sys.stderr)
    if not wait:
        if as_json:
            print(json.dumps({"job_id": job, "address": address}))
        return 0
    try:
        asyncio.run(_follow(client, job, as_json))
    except KeyboardInterrupt:
        if stops:
            client.stop_job(job)
        rest = "stops" if stops else f"goes on; to stop it: ray job stop {job} --address {address}"
        print(f"job {job} {rest}", file=sys.stderr)
        return 130
    details = client.get_job_info(job)
    print(f"job {job}: {details.status.value.lower()}", file=sys.stderr)
    if details.status == JobStatus.SUCCEEDED:
        return 0
    return details.driver_exit_code or 1


def _check_address(address: str) -> None:
    """Refuse an address that is not a dashboard's. Ray's client would try some of these addresses for minutes."""
    try:
        parts = urlsplit(address)
        is_url = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url:
        raise UserError("address", address, "must be the address of the cluster's dashboard, such as http://HOST:8265")


def has_token() -> bool:
    named = os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")
    return bool(named) or token_file().exists()


def token_file() -> Path:
    return Path.home() / ".ray" / "auth_token"


def _pack(folder: Path, recipe: Recipe, root: Path = _ROOT) -> None:
    """Put what a job carries into a folder: foldray's packages, without what else lies beside their files, and the recipe."""
    for package in _PACKAGES:
        shutil.copytree(root / package, folder / package, ignore=_left_out)
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    if (total := sum(sizes.values())) > _MOST:
        largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
        names = ", ".join(f"{name} ({sizes[name] / 2**20:.1f} MiB)" for name in largest)
        rule = f"a job carries at most {_MOST / 2**20:.0f} MiB of the packages in {root}; move away what is not theirs: {names}"
        raise UserError("packages", f"{total / 2**20:.1f} MiB", rule)
    plain = recipe.model_dump(mode="json")
    plain["cluster"]["address"] = None  # the job runs on the cluster that it is sent to
    (folder / "recipe.yaml").write_text(yaml.safe_dump(plain, sort_keys=False))


def _left_out(folder: str, names: list[str]) -> list[str]:
    """Return the entries of a folder that do not belong to the packages: caches, runs, environments, links, other files."""

    def is_theirs(path: Path) -> bool:
        if path.is_symlink() or path.name.startswith("."):
            return False
        if path.is_dir():
            return path.name not in _NEVER and not (path / "pyvenv.cfg").exists()
        return path.suffix in _TAKEN and path.is_file()

    return [name for name in names if not is_theirs(Path(folder, name))]


async def _follow(client: JobSubmissionClient, job: str, as_json: bool) -> None:
    """Print the job's log as it grows.

    The log mixes standard output and standard error of the job. With `as_json`, only the document at the end of the log goes
    to this process's standard output.
    """
    end = ""  # the last two lines, the newest of which may be incomplete
    async for text in client.tail_job_logs(job):
        print(text, end="", flush=True, file=sys.stderr if as_json else sys.stdout)
        end = "\n".join((end + text).split("\n")[-2:])
    document = end.strip().rpartition("\n")[2]
    if as_json and document.startswith("{"):
        print(document)
