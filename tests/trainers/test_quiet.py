"""Other libraries tell nobody about their users, unless a user wants it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainers.quiet import VARIABLES

# What the libraries themselves make of the environment, after what is imported first.
ASKED = """
import json, {first}
from ray._common.usage.usage_lib import usage_stats_enabled
found = {{"RAY_USAGE_STATS_ENABLED": usage_stats_enabled()}}
from mlflow.telemetry.utils import is_telemetry_disabled
found["MLFLOW_DISABLE_TELEMETRY"] = not is_telemetry_disabled()
from huggingface_hub.constants import HF_HUB_DISABLE_TELEMETRY
found["HF_HUB_DISABLE_TELEMETRY"] = not HF_HUB_DISABLE_TELEMETRY
print(json.dumps(found))
"""


def tells(first: str, tmp_path: Path, **variables: str) -> dict[str, bool]:
    """Return by variable whether its library would tell, in a process that first imports a module."""
    root = Path(__file__).parents[2]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(root), "HOME": str(tmp_path), **variables}
    done = subprocess.run([sys.executable, "-c", ASKED.format(first=first)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module", autouse=True)
def _with_hugging_face() -> None:
    pytest.importorskip("huggingface_hub")


@pytest.mark.gate(1 / 5)
@pytest.mark.parametrize("first", ["trainers.worker.loop", "tuners"])
def test_nobody_is_told(tmp_path: Path, first: str) -> None:
    assert tells(first, tmp_path) == dict.fromkeys(VARIABLES, False)


@pytest.mark.gate(1 / 2)
def test_the_libraries_would_tell_by_themselves(tmp_path: Path) -> None:
    assert tells("sys", tmp_path) == dict.fromkeys(VARIABLES, True)


@pytest.mark.gate(1 / 5)
def test_what_a_user_sets_stays(tmp_path: Path) -> None:
    wanted = {"RAY_USAGE_STATS_ENABLED": "1", "MLFLOW_DISABLE_TELEMETRY": "false", "HF_HUB_DISABLE_TELEMETRY": "0"}
    assert wanted.keys() == VARIABLES.keys()
    assert tells("trainers.worker.loop", tmp_path, **wanted) == dict.fromkeys(VARIABLES, True)
