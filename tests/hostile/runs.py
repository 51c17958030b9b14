"""Hostile folders of runs: checkpoints, pickles, Ray's list, records."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.hostile.row import CANARY, LARGE, STEP, TOUCH, Make, Row, both, cut, deep, fifo, folder, hole, linked, listening, text
from tests.trainers.checkpoints import damage
from trainers.sinks.run_folder import RANKS

LIST = "run/checkpoint_manager_snapshot.json"
OWN = f"open({CANARY!r}, 'w').close()\nROW = None\n"


class _Runs:
    """An object that runs a command when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (TOUCH,)


def checkpoint(harm: damage.Damage) -> Make:
    return lambda place: harm(place / STEP)


def names(change: Callable[[dict[str, Any]], Any]) -> Make:
    return checkpoint(damage.manifest(change))


def index(change: Callable[[Any, Path], Any]) -> Make:
    return checkpoint(damage.metadata(change))


def recipe(**values: Any) -> Make:
    """Change a section of the run's recipe."""

    def make(place: Path) -> None:
        import yaml

        path = place / "run/recipe.yaml"
        found = yaml.safe_load(path.read_text())
        for section, keys in values.items():
            found[section] = {**found[section], **keys} if isinstance(keys, dict) else keys
        path.write_text(yaml.safe_dump(found))

    return make


def _elsewhere(found: Any, _: Path) -> None:
    for place in found.storage_data.values():
        place.relative_path = "../../recipe.yaml"


def _negative(found: Any, _: Path) -> None:
    for place in found.storage_data.values():
        place.offset = -1


def _huge(found: Any, _: Path) -> None:
    import torch

    for tensor in found.state_dict_metadata.values():
        tensor.size = torch.Size([2**62, *tensor.size[1:]])


def _listed(*entries: str) -> Make:
    return text(LIST, json.dumps({"checkpoint_results": [{"checkpoint_dir_name": name, "metrics": {}} for name in entries]}))


def _large_index(place: Path) -> None:
    hole(f"{STEP}/.metadata")(place)
    damage.manifest(lambda found: found[".metadata"].update(size=LARGE))(place / STEP)


def _weights(place: Path) -> None:
    """Replace all tensors by a pickle that runs a command."""
    file = place / STEP / damage.FILE
    file.write_bytes(pickle.dumps(_Runs()).ljust(file.stat().st_size, b"\0"))
    damage.forged(place / STEP)


_STEP, _RUN = f"generate {STEP} --prompt x", "generate run --prompt x"
_CHECKPOINTS = [
    ("an index that calls", _STEP, ".metadata cannot be read", index(lambda found, folder: _Runs())),
    ("an index that calls, to train from", f"train recipe.yaml --from {STEP}", ".metadata cannot be read",
     index(lambda found, folder: _Runs())),
    ("tensors that call", f"export-hf {STEP} out", "__0_0.distcp", _weights),
    ("no pickle", f"eval {STEP} texts/a", ".metadata cannot be read",
     checkpoint(damage.replaced(".metadata", b"\x80\x04garbage"))),
    ("a deep pickle", _STEP, ".metadata cannot be read",
     checkpoint(damage.replaced(".metadata", b"\x80\x04})" + b"\x85" * 300_000 + b"K\x00s."))),
    ("half an index", _RUN, ".metadata", cut(f"{STEP}/.metadata", 100)),
    ("half the tensors", "export-hf run out", "__0_0.distcp", cut(f"{STEP}/{damage.FILE}", 1000)),
    ("one other bit", "eval run texts/a", "SHA-256 differs", checkpoint(damage.flipped(damage.FILE))),
    ("a file outside in the manifest", _STEP, "manifest.0.json cannot be read",
     names(lambda found: found.update({"../../recipe.yaml": {"size": 1}}))),
    ("an absolute file in the manifest", _STEP, "manifest.0.json cannot be read",
     names(lambda found: found.update({"/etc/passwd": {"size": 1}}))),
    ("a name for the terminal in the manifest", _STEP, "manifest.0.json cannot be read",
     names(lambda found: found.update({"\x1b[2J": {"size": 1}}))),
    ("a negative size in the manifest", _STEP, "manifest.0.json cannot be read",
     names(lambda found: found[".metadata"].update(size=-1))),
    ("a file outside in the index", _STEP, "names the file ../../recipe.yaml", index(_elsewhere)),
    ("a negative place in the index", _STEP, "where a whole number belongs", index(_negative)),
    ("a tensor of 2^62 rows", _STEP, "do not make up the tensor", index(_huge)),
    ("6 GiB of index", _STEP, ".metadata", _large_index),
    ("a deep manifest", _STEP, "manifest.0.json cannot be read", text(f"{STEP}/manifest.0.json", deep())),
    ("6 GiB of manifest", _STEP, "may have at most", hole(f"{STEP}/manifest.0.json")),
    ("a manifest that is a pipe", _STEP, "is not a regular file", fifo(f"{STEP}/manifest.0.json")),
    ("tensors that are a device", f"export-hf {STEP} out", "is not a regular file", linked(f"{STEP}/{damage.FILE}", "/dev/zero")),
    ("tensors that are a socket", _STEP, "is not a regular file", listening(f"{STEP}/{damage.FILE}")),
    ("tensors that are a folder", _STEP, "is not a regular file", folder(f"{STEP}/{damage.FILE}")),
    ("progress with a huge step", _STEP, "progress.json", checkpoint(damage.progress(step=10**30))),
    ("progress with a text as a step", _STEP, "progress.json", checkpoint(damage.progress(step="3"))),
    ("progress that is no number", _STEP, "progress.json", checkpoint(damage.progress(step=float("nan")))),
    ("a pickle alone", "generate model.pt --prompt x", "is not a checkpoint's folder", text("model.pt", pickle.dumps(_Runs()))),
    ("a folder of a pickle", "generate hack --prompt x", "holds no checkpoint",
     both(folder("hack"), text("hack/pytorch_model.bin", pickle.dumps(_Runs())))),
    ("a link to itself", "generate loop --prompt x", "loop", linked("loop", "loop")),
    ("a checkpoint elsewhere", "train recipe.yaml --from ../place/hub", "holds no checkpoint"),
    ("a checkpoint at an unknown storage", "train recipe.yaml --from evil://x/y", "is not a storage that can be reached"),
    ("an export into new folders of half a checkpoint", "export-hf run a/b/out", "__0_0.distcp",
     cut(f"{STEP}/{damage.FILE}", 1000)),
    ("an export over a link to nowhere", "export-hf run out", "out", linked("out", "nowhere")),
]  # fmt: skip
_RAYS_LIST = [
    ("a checkpoint outside", "train recipe.yaml cluster.storage=. --resume run",
     "checkpoint_manager_snapshot.json cannot be read",
     both(_listed("../../recipe.yaml"), lambda place: (place / STEP / "progress.json").unlink())),
    ("an absolute checkpoint", "train recipe.yaml cluster.storage=. --resume run", "checkpoint_manager_snapshot.json cannot",
     both(_listed("/etc"), lambda place: (place / STEP / "progress.json").unlink())),
    ("a checkpoint that is missing", "train recipe.yaml cluster.storage=. --resume run", "step_00000009",
     both(_listed("step_00000009"), lambda place: (place / STEP / "progress.json").unlink())),
    ("depth", "generate run --prompt x", "checkpoint_manager_snapshot.json",
     both(text(LIST, deep()), lambda place: (place / STEP / "progress.json").unlink())),
]  # fmt: skip
_RECORDS = [
    ("a recipe that laughs", "status run", "with all aliases followed", text("run/recipe.yaml", "a: &a [*a]\n")),
    ("a recipe with a tag that calls", _RUN, "is not YAML",
     text("run/recipe.yaml", f'!!python/object/apply:os.system ["{TOUCH}"]')),
    ("a recipe that is a pipe", _RUN, "recipe.yaml", fifo("run/recipe.yaml")),
    ("a recipe that is a device", "health run", "not a regular file", linked("run/recipe.yaml", "/dev/zero")),
    ("a recipe that names a module", _RUN, "own:ROW", both(text("own.py", OWN), recipe(model={"ffn": "own:ROW"}))),
    ("a recipe that names a module, to export", "export-hf run out", "own:ROW",
     both(text("own.py", OWN), recipe(model={"ffn": "own:ROW"}))),
    ("a recipe that names a module, to look at", "status run", "own:ROW",
     both(text("own.py", OWN), recipe(schedule={"kind": "own:ROW", "degree": 2}))),
    ("a recipe with a model of 10^14 parameters", _RUN, "run", recipe(model={"layers": 4000, "hidden": 2**17, "heads": 4})),
    ("depth in run.json", "status run", "its run.json cannot be read", text("run/run.json", deep())),
    ("run.json that is a pipe", "status run", "its run.json is not a regular file", fifo("run/run.json")),
    ("6 GiB of run.json", "status run", "its run.json has", hole("run/run.json")),
    ("a status for the terminal", "status run", "its run.json cannot be read",
     text("run/run.json", r'{"status": ["\u001b[2J"]}')),
    ("a list as run.json", "status run", "its run.json cannot be read", text("run/run.json", "[]")),
    ("depth in metrics.jsonl", "status run", "line 1 is not a record", text("run/metrics.jsonl", deep())),
    ("6 GiB of metrics.jsonl", "status run", "its metrics.jsonl cannot be read", hole("run/metrics.jsonl")),
    ("metrics.jsonl that is a device", "health run", "is not a regular file", linked("run/metrics.jsonl", "/dev/zero")),
    ("a record for the terminal", "status run", "line 1 is not a record of a run",
     text("run/metrics.jsonl", r'{"kind": "\u001b[2J", "step": 1}' + "\n")),
    ("records of other types", "health run", "line 2 is not a record of a run",
     text("run/metrics.jsonl", '\n{"kind": "resumed", "step": "9"}\n')),
    ("ranks of text", "status run", f"its {RANKS} cannot be read", text(f"run/{RANKS}", '{"time": "x", "ranks": [1]}')),
    ("a device as a run", "status /dev/zero", "has no run.json"),
    ("a text that is a device", "eval run /dev/zero", "not a regular file"),
    ("a text that is a pipe", "eval run pipe", "not a regular file", fifo("pipe")),
    ("a text of zero bytes", "eval run x", "is empty", text("x", "")),
    ("a text in no encoding", "eval run x", "is not UTF-8 text", text("x", b"\xff\xfe\xfd")),
]  # fmt: skip
ROWS = [
    *(Row("checkpoints and pickles", *row) for row in _CHECKPOINTS),
    *(Row("Ray's list of checkpoints", *row) for row in _RAYS_LIST),
    *(Row("recipes and records of runs", *row) for row in _RECORDS),
]
