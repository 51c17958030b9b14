"""What other libraries tell their makers about their users: foldray turns this off.

The libraries read these variables of the environment when they are imported, or when Ray starts. So `trainers` sets them when it
is imported, which every driver, worker and job does first. A variable that is set already keeps its value.
"""

from __future__ import annotations

import os

VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",  # ray/_common/usage/usage_lib.py: the head of a cluster reports to usage-stats.ray.io
    "MLFLOW_DISABLE_TELEMETRY": "true",  # mlflow/telemetry/utils.py
    "HF_HUB_DISABLE_TELEMETRY": "1",  # huggingface_hub/constants.py, for transformers, too
}


def turn_off() -> None:
    """Set the variables that are not set."""
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
