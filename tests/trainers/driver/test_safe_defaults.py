"""What a training leaves where, who can read it, and who can reach what it starts."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml

from foldray import Recipe, UserError
from foldray.recipe import describe
from trainers.cluster import jobs, joining

ROOT = Path(__file__).parents[3]
SECRET = "hush-5ecr3t"
RECIPE: dict[str, Any] = {
    "model": {"preset": "tiny", "layers": 2},
    "data": {"source": "text", "path": "texts/*", "seq_len": 32, "validation": {"fraction": 0.3}},
    "engine": {"kind": "torch"},
    "training": {"steps": 2, "global_batch": 4, "eval_sequences": 4},
    "cluster": {"workers": 1, "storage": "my-runs"},
}
URL = f"s3://me:{SECRET}@host/x"
SHOWN = ["tracking.uri", "cluster.address", "cluster.storage", "tune.storage"]
"""Keys whose secret foldray itself may need. Files show them without it."""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "home"


def start(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the options with which foldray would start Ray on this machine."""
    options: dict[str, Any] = {}
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **given: options.update(given))
    joining.connect(Recipe.parse(RECIPE))
    return options


def test_ray_starts_without_its_dashboard(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert start(monkeypatch)["include_dashboard"] is False


def test_only_its_user_may_read_the_token_of_a_cluster(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start(monkeypatch)
    (file,) = (home / ".ray").iterdir()
    assert file.name == "auth_token"
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700
    token = file.read_text()
    assert len(bytes.fromhex(token)) == 32
    start(monkeypatch)
    assert file.read_text() == token


@pytest.mark.parametrize("name", ["RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"])
def test_what_a_user_says_of_tokens_stays(home: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "disabled")
    start(monkeypatch)
    assert not (home / ".ray").exists()


def with_secret(key: str) -> list[str]:
    return [f"{key}={URL}"]


KEYS = [key for key, legal, *_ in describe(Recipe) if "str" in legal.split("|")]


def test_the_keys_that_may_hold_a_secret_are_known() -> None:
    assert set(SHOWN) < set(KEYS)
    assert len(KEYS) > 10


@pytest.mark.parametrize("key", KEYS)
def test_no_file_gets_the_secret_of_a_recipe(tmp_path: Path, key: str) -> None:
    """A value with a secret is refused, or shown without it in all that foldray writes or sends of a recipe."""
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({**RECIPE, "data": {**RECIPE["data"], "source": "text"}}))
    if key in SHOWN:
        shown = str(Recipe.load(path, with_secret(key)).model_dump(mode="json"))
        assert "***@host" in shown
        assert SECRET not in shown
    else:
        with pytest.raises(UserError) as caught:
            Recipe.load(path, with_secret(key))
        assert SECRET not in str(caught.value)


def test_a_job_gets_no_secret(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the environment of the user nor the recipe brings one to the cluster."""
    sent: dict[str, Any] = {}

    class Client:
        def __init__(self, address: str):
            pass

        def submit_job(self, **given: Any) -> str:
            sent.update(given)
            sent["files"] = b"".join(path.read_bytes() for path in Path(given["runtime_env"]["working_dir"]).glob("*.yaml"))
            return "job"

    monkeypatch.setattr("ray.job_submission.JobSubmissionClient", Client)
    for name in ("AWS_SECRET_ACCESS_KEY", "MLFLOW_TRACKING_PASSWORD", "HF_TOKEN"):
        monkeypatch.setenv(name, SECRET)
    recipe = Recipe.parse({**RECIPE, "tune": {"storage": URL}})
    assert jobs.submit(recipe, "http://127.0.0.1:9", wait=False) == 0
    assert b"***@host" in sent["files"]
    assert SECRET not in str(sent)


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder with a short path. Those of Ray's sockets may have 107 characters."""
    with tempfile.TemporaryDirectory(prefix="f-") as place:
        yield Path(place)


@pytest.mark.nightly("starts a Ray of its own")
def test_a_training_writes_only_where_the_user_says(short: Path) -> None:
    """The rest is Ray's session, its token, and a list of fonts; no file has a secret of the environment."""
    work, home, temporary = (short / name for name in ("work", "home", "tmp"))
    for folder in (work / "texts", home, temporary):
        folder.mkdir(parents=True)
    for name in "abcd":
        (work / "texts" / name).write_text("".join(f"{name} is not {i * i}. " for i in range(500)))
    (work / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    given = {path.relative_to(work) for path in work.rglob("*")}
    environment = {
        "PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "HOME": str(home), "TMPDIR": str(temporary),
        "MLFLOW_TRACKING_PASSWORD": SECRET, "AWS_SECRET_ACCESS_KEY": SECRET, "HF_TOKEN": SECRET,
    }  # fmt: skip
    command = [sys.executable, "-m", "foldray", "train", "recipe.yaml"]
    done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    new = {path.relative_to(work) for path in work.rglob("*")} - given
    assert {path.parts[0] for path in new} == {"my-runs"}
    files = {str(path.relative_to(home)) for path in home.rglob("*") if path.is_file()}
    assert {name.split("/")[1] if name.startswith(".cache") else name for name in files} <= {".ray/auth_token", "matplotlib"}
    assert (home / ".ray" / "auth_token").stat().st_mode & 0o077 == 0
    assert {path.name for path in temporary.iterdir()} <= {"ray", f"torchinductor_{os.environ.get('USER', 'root')}"}
    assert not [path for path in temporary.glob("torchinductor_*/**/*") if path.is_file()]
    holding = [path for path in short.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert not holding
    assert SECRET not in done.stdout + done.stderr
