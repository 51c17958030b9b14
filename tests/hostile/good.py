"""The good files of a working folder, which rows then damage: a recipe, texts, a run, a model of transformers, tokenizers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from tests.trainers.data.chats import chat, make_tokenizer
from tests.trainers.hugging_face.oracle import MIXTRAL, saved
from tests.trainers.hugging_face.test_export import make_run
from tests.trainers.telemetry import records
from trainers.checkpoints.reported import write_list
from trainers.folders import Folder
from trainers.sinks.run_folder import RANKS
from trainers.telemetry.records import as_json

RECIPE: dict[str, Any] = {
    "model": {"preset": "tiny", "layers": 2},
    "data": {"source": "text", "path": "texts/*", "seq_len": 32, "validation": {"fraction": 0.3}},
    "engine": {"kind": "torch"},
    "training": {"steps": 2, "global_batch": 4},
    "cluster": {"workers": 2, "storage": "runs"},
}
CHAT = RECIPE | {
    "data": {"source": "conversations", "path": "chats/*.jsonl", "seq_len": 32, "tokenizer": "tokenizer"},
    "model": {**RECIPE["model"], "vocab": 320},
}


def make_good(place: Path) -> None:
    """Write the files into a new folder."""
    place.mkdir()
    for folder in ("texts", "chats", "runs"):
        (place / folder).mkdir()
    for name in "abcd":
        (place / "texts" / name).write_text("".join(f"{name} is not {i * i}. " for i in range(500)))
        (place / "chats" / f"{name}.jsonl").write_text(json.dumps({"messages": chat("3 plus 4?", f"{name}.")}) + "\n")
    (place / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    (place / "chat.yaml").write_text(yaml.safe_dump(CHAT))
    make_tokenizer(place / "tokenizer")
    make_run(place / "run")
    write_list(Folder(str(place / "run")), ["step_00000003"])
    (place / "run" / "run.json").write_text(json.dumps({"status": "running", "mlflow_run_id": None}))
    with (place / "run" / "metrics.jsonl").open("w") as lines:
        lines.writelines(as_json(record) + "\n" for record in records.run(3, layers=2, experts=4))
    (place / "run" / RANKS).write_text(json.dumps({"time": 0.0, "ranks": []}))
    saved(place / "hub", "Mixtral", MIXTRAL)
