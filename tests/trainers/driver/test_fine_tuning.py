"""Fine-tuning on conversations on Ray: what the run reports, resuming, and the way from a folder of transformers and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.nn import functional

from foldray.cli import main
from foldray.recipe import Recipe
from tests.trainers.data.chats import CHATML, CHATS, chat, make_tokenizer
from tests.trainers.driver.runs import fit
from tests.trainers.hugging_face.test_export import SIZES, make_run
from trainers import Model
from trainers.data.packed import Batches, PackedData

pytestmark = pytest.mark.usefixtures("ray_session")
STEPS, BATCH = 8, 8


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("storage")
    make_tokenizer(folder / "tokenizer")
    for name, many in (("train", 60), ("held", 9)):
        turns = [chat(f"{a} plus {len(name)}?", f"{a + len(name)}!" * (1 + a % 4)) for a in range(many)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"turns": each}) + "\n" for each in [*turns, *CHATS.values()]))
    return folder


def data_of(storage: Path) -> dict[str, Any]:
    return {
        "source": "conversations", "path": str(storage / "train.jsonl"), "validation": {"path": str(storage / "held.jsonl")},
        "messages_field": "turns", "tokenizer": str(storage / "tokenizer"), "seq_len": 64,
    }  # fmt: skip


def recipe_of(storage: Path, **training: Any) -> Recipe:
    return Recipe.parse({
        "model": {**SIZES, "init_std": 0.02, "router": {"balance_loss": 0.0}}, "data": data_of(storage), "fold": {"ep": 2},
        "optimizer": {"lr": 3e-3}, "engine": {"kind": "torch"}, "precision": "float64",
        "training": {"steps": STEPS, "global_batch": BATCH, "micro_batch": 2, "eval_every": 4, **training},
        "cluster": {"workers": 2, "storage": str(storage / "runs")},
    })  # fmt: skip


def mean_loss(model: Model, tokens: torch.Tensor, trained: torch.Tensor, segments: torch.Tensor) -> float:
    logits = model.transformer.logits(tokens[:, :-1], segments)
    return float(functional.cross_entropy(logits[trained], tokens[:, 1:][trained]))


@pytest.fixture(scope="module")
def whole(storage: Path, ray_session: None) -> Any:
    """An uninterrupted run."""
    return fit(recipe_of(storage)).run


@pytest.mark.nightly("another training")
def test_a_run_reports_the_tokens_that_count(storage: Path, whole: Any) -> None:
    run, history = whole, whole.folder.history
    (cache,) = (storage / "runs" / "data").iterdir()
    data = PackedData.open(cache)
    order = Batches(data.train, 0)
    for step, record in history.steps.items():
        indices = order.indices(step - 1, 0, 0, 1, BATCH, BATCH)
        assert record["trained_tokens"] == int(data.train.trained(indices).sum())
    assert len({record["trained_tokens"] for record in history.steps.values()}) > 1
    rows = range(len(data.validation))
    given = data.validation.tokens(rows), data.validation.trained(rows), data.validation.segments(rows)
    validation, model = history.validations[STEPS], Model.load(run.folder.path, device="cpu")
    assert validation["loss"] == pytest.approx(mean_loss(model, *given), abs=1e-10)
    assert (validation["bits_per_byte"], run.summary.val_loss, run.summary.val_bpb) == (None, validation["loss"], None)
    assert history.validations[STEPS]["loss"] < history.validations[4]["loss"]
    assert {Path(picture).name for picture in run.summary.pictures} >= {"loss.png", "expert_load.png"}


@pytest.mark.nightly("two trainings more")
def test_a_run_goes_on_at_the_same_conversation(storage: Path, whole: Any) -> None:
    first = fit(recipe_of(storage, stop_after=3)).run
    second = fit(recipe_of(storage), resume=first.folder.path.name).run
    ours, theirs = (
        [(each["loss"], each["trained_tokens"]) for _, each in sorted(run.folder.history.steps.items())]
        for run in (second, whole)
    )
    assert ours == theirs
    assert second.summary.val_loss == whole.summary.val_loss


@pytest.mark.gate(1 / 4)
def test_from_a_folder_of_transformers_and_back(
    storage: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """import-hf, train, export-hf, generate."""
    pytest.importorskip("transformers")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    make_run(tmp_path / "base", precision="float32", init_std=0.02)
    run = tmp_path / "base" / "recipe.yaml"
    run.write_text(run.read_text().replace("tokenizer: byte", f"tokenizer: {storage / 'tokenizer'}"))
    assert main(["export-hf", str(tmp_path / "base" / "step_00000003"), str(tmp_path / "hf")]) == 0
    assert (tmp_path / "hf" / "chat_template.jinja").read_text() == CHATML
    assert main(["import-hf", str(tmp_path / "hf"), str(tmp_path / "tune.yaml")]) == 0
    given = yaml.safe_load((tmp_path / "tune.yaml").read_text())
    assert (given["data"]["tokenizer"], given["training"]["weights"]) == (str(tmp_path / "hf"), str(tmp_path / "hf"))
    capsys.readouterr()
    data = [f"data.{key}={value}" for key, value in data_of(storage).items() if key not in ("tokenizer", "validation")]
    changes = [
        *data, f"data.validation.path={storage / 'held.jsonl'}", "training.steps=20", "training.global_batch=8",
        "engine.kind=torch", "training.micro_batch=4", "optimizer.lr=1e-2", "fold.ep=2", "cluster.workers=2",
        f"cluster.storage={tmp_path / 'runs'}",
    ]  # fmt: skip
    assert main(["train", str(tmp_path / "tune.yaml"), *changes, "--json"]) == 0
    out, err = capsys.readouterr()
    summary = json.loads(out)
    kept = len(CHATS) - 1  # one has its answer behind the end of a sequence
    assert f"conversations: {60 + kept} for training, {9 + kept} for validation" in err
    losses = [json.loads(line)["loss"] for line in (Path(summary["run_dir"]) / "metrics.jsonl").open() if '"step_time_s"' in line]
    base = Model.load(tmp_path / "base" / "step_00000003", device="cpu")
    (cache,) = (tmp_path / "runs" / "data").iterdir()
    split = PackedData.open(cache).train
    indices = Batches(split, 0).indices(0, 0, 0, 1, 8, 8)
    expected = mean_loss(base, split.tokens(indices), split.trained(indices), split.segments(indices))
    assert losses[0] == pytest.approx(expected, abs=1e-4)
    assert losses[-1] < losses[0] - 0.5
    assert main(["export-hf", summary["run_dir"], str(tmp_path / "tuned")]) == 0
    assert (tmp_path / "tuned" / "chat_template.jinja").read_text() == CHATML
    assert main(["generate", summary["run_dir"], "--chat", "--prompt", "3 plus 5?", "--temperature", "0", "--tokens", "8"]) == 0
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"tokenizer": "byte"}, "data.tokenizer=byte: has no chat template"),
        ({"messages_field": "messages"}, "data.messages_field=messages: is not a field of line 1"),
        ({"seq_len": 2}, "data.seq_len=2: no conversation for training has a token to train on among its first 2"),
    ],
    ids=str,
)
def test_mistakes_are_one_line(
    storage: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], line: str
) -> None:
    given = {"model": SIZES, "data": {**data_of(storage), **change}, "training": {"steps": 2}, "cluster": {"workers": 1}}
    (tmp_path / "bad.yaml").write_text(yaml.safe_dump(given))
    assert main(["train", str(tmp_path / "bad.yaml"), f"cluster.storage={tmp_path / 'runs'}"]) == 2
    (told,) = capsys.readouterr().err.strip().splitlines()
    assert told.startswith(f"foldray: {line}")
    assert not [path for path in (tmp_path / "runs").rglob("*") if path.is_file() and path.name != "mlflow.db"]
