"""Models of transformers, as foldray trains them further."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from foldray import Recipe, UserError
from foldray.cli import main
from foldray.comm import Groups
from foldray.runtime import state_pieces
from tests.trainers.hugging_face.oracle import GLM, MIXTRAL, filled, saved
from trainers.hugging_face.weights import Weights

transformers = pytest.importorskip("transformers")


def imported(tmp_path: Path, **sections: Any) -> Recipe:
    """Import the folder `hub`, and return the recipe, with further sections."""
    assert main(["import-hf", str(tmp_path / "hub"), str(tmp_path / "recipe.yaml")]) == 0
    given = yaml.safe_load((tmp_path / "recipe.yaml").read_text())
    base = {"engine": {"kind": "torch"}, "precision": "float64", "moe": {"experts": "loop"}}
    return Recipe.parse({**given, **base, **sections})


def held(rank: int, recipe: Recipe) -> dict[str, torch.Tensor]:
    """Fill the engine of a rank from the recipe's folder, and return its weights with their boxes."""
    groups = Groups.create(recipe.placed_fold, rank)
    engine = filled(recipe, groups)
    pieces = state_pieces(engine.model, engine.state())
    found = {key: (tensor.clone(), pieces[key].box if key in pieces else ()) for key, tensor in engine.state().items()}
    engine.close()
    groups.close()
    return {key: each for key, each in found.items() if key.startswith("model/")}


@pytest.mark.parametrize("zero", [0, 1])
def test_every_rank_of_a_fold_reads_its_boxes(tmp_path: Path, ranks: Any, zero: int) -> None:
    saved(tmp_path / "hub", "Glm4Moe", GLM, max_shard_size="20KB")
    assert len(list((tmp_path / "hub").glob("*.safetensors"))) > 2
    whole = held(0, imported(tmp_path))
    (tmp_path / "recipe.yaml").unlink()
    fold = {"tp": 2, "ep": 2, "etp": 1, "pp": 1}
    cluster, training = {"workers": 4}, {"weights": str(tmp_path / "hub"), "global_batch": 4}
    recipe = imported(tmp_path, fold=fold, cluster=cluster, training=training, engine={"kind": "torch", "zero": zero})
    for each in ranks(4).run(held, recipe):
        for key, (tensor, box) in each.items():
            assert torch.equal(tensor, whole[key][0][box]), key


def test_what_import_says(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    saved(tmp_path / "hub", "Mixtral", MIXTRAL)
    assert main(["import-hf", str(tmp_path / "hub"), str(tmp_path / "recipe.yaml"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"] == sum(parameter.numel() for parameter in transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**MIXTRAL)
    ).parameters())  # fmt: skip


def changed(folder: Path, **keys: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | keys))


BAD = {
    "another type": (lambda hub: changed(hub, model_type="llama"), "has a model of type 'llama'"),
    "no config": (lambda hub: (hub / "config.json").unlink(), "has no config.json"),
    "half a config": (lambda hub: (hub / "config.json").write_text("{"), "its config.json cannot be read"),
    "another width": (lambda hub: changed(hub, hidden_size=64), "has shape [320, 48]"),
    "more layers": (lambda hub: changed(hub, num_hidden_layers=3), "has no tensor model.layers.2."),
    "fewer layers": (lambda hub: changed(hub, num_hidden_layers=1), "has the tensor model.layers.1."),
    "scaled positions": (
        lambda hub: changed(hub, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}),
        "its config.json says rope_parameters={'rope_type': 'linear'",
    ),
    "no weights": (lambda hub: (hub / "model.safetensors").unlink(), "has none"),
    "cut weights": (
        lambda hub: (hub / "model.safetensors").write_bytes((hub / "model.safetensors").read_bytes()[:5000]),
        "its model.safetensors cannot be read",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_folder_that_cannot_be_imported(tmp_path: Path, capsys: pytest.CaptureFixture, case: str) -> None:
    """One line says why, and nothing is written."""
    saved(tmp_path / "hub", "Mixtral", MIXTRAL)
    damage, said = BAD[case]
    damage(tmp_path / "hub")
    capsys.readouterr()
    assert main(["import-hf", str(tmp_path / "hub"), str(tmp_path / "recipe.yaml")]) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert len(printed.err.strip().splitlines()) == 1
    assert not (tmp_path / "recipe.yaml").exists()


def test_a_recipe_with_another_model_is_refused(tmp_path: Path) -> None:
    saved(tmp_path / "hub", "Mixtral", MIXTRAL)
    recipe = imported(tmp_path)
    weights = Weights.at(str(tmp_path / "hub"), "training.weights")
    weights.check(recipe.model)
    with pytest.raises(UserError, match=r"means model\.topk=2, and the recipe's model has 3"):
        weights.check(recipe.model.model_copy(update={"topk": 3}))
    with pytest.raises(UserError, match="does not exist"):
        Weights.at(str(tmp_path / "nowhere"), "training.weights")
