"""Adapters on Ray: from a folder of transformers to trained adapters, which resume, write text and leave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from foldray.cli import main
from foldray.recipe import Recipe
from tests.trainers.driver.runs import fit, losses, weights, write_texts
from tests.trainers.hugging_face.test_export import make_run
from trainers import Model
from trainers.hugging_face.adapters import CONFIG, TENSORS

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("ray_session")
_STEPS = 6


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("storage")
    write_texts(folder / "texts", 200)
    make_run(folder / "base", precision="float32")
    assert main(["export-hf", str(folder / "base"), str(folder / "hub")]) == 0
    assert main(["import-hf", str(folder / "hub"), str(folder / "recipe.yaml"), "--tokenizer", "byte"]) == 0
    return folder


def recipe_of(storage: Path, fold: dict[str, int], **training: Any) -> Recipe:
    given = yaml.safe_load((storage / "recipe.yaml").read_text())
    sizes = {"steps": _STEPS, "global_batch": 4, "micro_batch": 1, "eval_sequences": 8}
    return Recipe.parse({
        **given, "model": {**given["model"], "adapter": {"rank": 4, "alpha": 8}}, "fold": fold, "precision": "float64",
        "data": {**given["data"], "source": "text", "path": str(storage / "texts" / "*.txt"), "seq_len": 32},
        "training": {**given["training"], **sizes, **training}, "cluster": {"workers": 2, "storage": str(storage / "runs")},
        "optimizer": {"lr": 1e-2}, "engine": {"kind": "torch"},
    })  # fmt: skip


@pytest.mark.nightly("three trainings")
def test_a_training_of_adapters(
    storage: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    whole = fit(recipe_of(storage, {"ep": 2}))
    begun = fit(recipe_of(storage, {"ep": 2}, stop_after=3))
    resumed = fit(recipe_of(storage, {"etp": 2}), resume=begun.run.folder.path.name)  # under another fold
    assert losses(resumed) == pytest.approx(losses(whole), abs=1e-10)
    assert losses(whole)[-1] < losses(whole)[0]
    # A checkpoint has the adapters, their moments, and nothing else.
    names = {name.split("/", 1)[1] for name in weights(whole, _STEPS)}
    assert names
    assert all("_lora." in name or name.endswith("router.bias") for name in names)
    run = str(whole.run.folder.path)
    # The model in one process, the merged model, and the adapter alone are the model that was trained.
    model = Model.load(run, device="cpu")
    text = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(0))
    assert main(["export-hf", run, str(tmp_path / "merged")]) == 0
    assert main(["import-hf", str(tmp_path / "merged"), str(tmp_path / "merged.yaml"), "--tokenizer", "byte"]) == 0
    import transformers

    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(merged(text).logits.double(), model.logits(text), atol=1e-4, rtol=1e-4)
    assert main(["export-hf", run, str(tmp_path / "adapter"), "--adapter"]) == 0
    assert json.loads((tmp_path / "adapter" / CONFIG).read_text())["r"] == 4
    assert (tmp_path / "adapter" / TENSORS).exists()
    capsys.readouterr()
    assert main(["generate", run, "--prompt", "3 times", "--temperature", "0", "--tokens", "8"]) == 0
    assert capsys.readouterr().out.strip()
    # Another training begins with the adapter.
    further = fit(recipe_of(storage, {"ep": 2}, adapter=str(tmp_path / "adapter"), steps=1))
    assert losses(further)[0] < losses(whole)[0] - 0.05


@pytest.mark.gate(2)
@pytest.mark.parametrize(
    ("change", "line"),
    [
        (["training.weights=null"], "training.weights=null: must be given with adapters (model.adapter)"),
        (["training.adapter=nowhere"], "training.adapter=nowhere: must be a folder with an adapter of PEFT"),
        (["model.adapter=null", "training.adapter=a"], "training.adapter=a: needs model.adapter"),
        (["model.adapter.targets=[gate]"], "model.adapter.targets.0=gate: "),
        (["model.adapter.rank=0"], "model.adapter.rank=0: "),
        (["optimizer.kind=muon", "engine.kind=torch"], "optimizer.kind=muon: is for whole matrices of hidden layers"),
    ],
    ids=str,
)
def test_mistakes_are_one_line(
    storage: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: list[str], line: str
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe_of(storage, {"ep": 2}).model_dump(mode="json")))
    assert main(["train", str(path), f"cluster.storage={tmp_path / 'runs'}", *change]) == 2
    (told,) = capsys.readouterr().err.strip().splitlines()
    assert told.startswith(f"foldray: {line}")
