"""Adapters of PEFT: trainings give the same, adapters go there and come back, and merged models are the same models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from foldray import Recipe, UserError
from foldray.cli import main
from foldray.comm import Groups
from foldray.runtime import Engine
from tests.foldray.parity import batches, engine_of, engine_on, go_on, sample
from tests.trainers.hugging_face.oracle import FAMILIES, loaded, saved, widened
from tests.trainers.hugging_face.test_families import imported
from trainers.checkpoints import tensors
from trainers.checkpoints.tensors import Staged
from trainers.hugging_face.adapters import CONFIG, TENSORS, Adapter
from trainers.inference.model import Model
from trainers.worker.engines import read_adapter, read_weights

peft = pytest.importorskip("peft", reason="needs PEFT")
_ADAM = {"kind": "adamw", "lr": 1e-2, "weight_decay": 0.1, "decay": "constant", "clip": 1.0}
_MODULES, _STACKS = ["q_proj", "k_proj", "v_proj", "o_proj"], ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
_SIZES = {family: {**sizes, "num_hidden_layers": 2} for family, sizes in FAMILIES if family in ("Mixtral", "Qwen3Moe", "GptOss")}


def adapted(folder: Path, family: str, rank: int = 4, spread: float = 0.0, **given: Any) -> Any:
    """Write a model of transformers and an adapter of PEFT, and return the model with it.

    Args:
        spread: standard deviation of what is added to the adapter, whose second matrices are zeros.
    """
    theirs = saved(folder / "hub", family, _SIZES[family])
    torch.manual_seed(3)
    config = {"target_modules": _MODULES, "target_parameters": _STACKS, "lora_alpha": 2 * rank, **given}
    made = peft.get_peft_model(theirs, peft.LoraConfig(r=rank, **config)).double().eval()
    for parameter in filter(lambda parameter: parameter.requires_grad, made.parameters()):
        parameter.data += spread * torch.randn_like(parameter)
    made.save_pretrained(folder / "adapter")
    return made


def recipe_for(folder: Path, rank: int = 4, targets: list[str] | None = None, **sections: Any) -> Recipe:
    given = imported(folder / "hub", folder / "recipe.yaml").model_dump(mode="json")
    adapter = {"rank": rank, "alpha": 2.0 * rank, **({} if targets is None else {"targets": targets})}
    changes = {"model": {"adapter": adapter}, "training": {"adapter": str(folder / "adapter")}, **sections}
    return Recipe.parse(given | {key: {**given[key], **value} for key, value in changes.items()})


def filled(recipe: Recipe, groups: Groups) -> Engine:
    engine = engine_of(recipe, groups)
    read_weights(engine, recipe)
    if recipe.training.adapter is not None:
        read_adapter(engine, recipe)
    engine.load_shards()
    return engine


def trained(rank: int, recipe: Recipe, steps: int, folder: Path | None = None) -> list[float]:
    """Train, write a run with a checkpoint, and return the losses."""
    with engine_on(recipe, rank, filled) as (engine, groups):
        losses = [loss for loss, *_ in go_on(engine, groups, recipe, range(steps))["losses"]]
        if folder is not None:
            write_run(folder, recipe, engine, groups)
        return losses


def write_run(folder: Path, recipe: Recipe, engine: Engine, groups: Groups) -> None:
    at = folder / "step_00000003"
    if groups.rank == 0:
        at.mkdir(parents=True)
        (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    groups.control.all_reduce(torch.zeros(()))
    progress = {"step": 3, "data": "d", "fold": {}, "validation": {"loss": 1.0}, "seed": 0, "global_batch": 8}
    tensors.write(at, Staged(engine.shards()), progress, groups.control.group)


@pytest.mark.gate(1 / 2)
@pytest.mark.parametrize("rank", [4, 16])
@pytest.mark.parametrize("family", _SIZES)
def test_a_training_is_that_of_peft(tmp_path: Path, ranks: Any, family: str, rank: int) -> None:
    """AdamW from PEFT's initial values, alone and on two ranks that share the experts; then each reads the other's adapter."""
    theirs, steps = adapted(tmp_path, family, rank), 20
    recipe = recipe_for(tmp_path, rank, optimizer=_ADAM)
    adam = torch.optim.AdamW(
        [parameter for parameter in theirs.parameters() if parameter.requires_grad],
        lr=1e-2, weight_decay=0.1, betas=recipe.optimizer.betas, eps=recipe.optimizer.eps,
    )  # fmt: skip
    expected = []
    for step in range(steps):
        parts = batches(recipe, 0, step)
        tokens, targets = (torch.cat([part[i] for part in parts]) for i in range(2))
        with widened():
            logits_BLV = theirs(tokens).logits
        loss = torch.nn.functional.cross_entropy(logits_BLV.flatten(0, 1), targets.flatten())
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for p in theirs.parameters() if p.requires_grad], 1.0)
        adam.step()
        expected.append(loss.item())
    with widened(), torch.no_grad():
        after_BLV = theirs(tokens).logits
        with theirs.disable_adapter():
            assert (theirs(tokens).logits - after_BLV).abs().max() > 0.1
    assert trained(0, recipe, steps, tmp_path / "run") == pytest.approx(expected, abs=1e-9)
    two = recipe_for_two(recipe)
    for losses in ranks(2).run(trained, two, steps):
        assert losses == pytest.approx(expected, abs=1e-9)
    # What foldray has trained, in PEFT's format and by PEFT's names, is what PEFT has trained.
    assert main(["export-hf", str(tmp_path / "run"), str(tmp_path / "ours"), "--adapter"]) == 0
    theirs.save_pretrained(tmp_path / "theirs")
    ours, known = (loaded_tensors(tmp_path / name) for name in ("ours", "theirs"))
    assert ours.keys() == known.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, known[name], atol=1e-9, rtol=1e-9, msg=name)


def recipe_for_two(recipe: Recipe) -> Recipe:
    given = recipe.model_dump(mode="json")
    return Recipe.parse(given | {"fold": {**given["fold"], "ep": 2}, "cluster": {**given["cluster"], "workers": 2}})


def loaded_tensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / TENSORS)


@pytest.mark.gate(1)
@pytest.mark.parametrize("targets", [None, ["q_proj", "v_proj"], ["gate_up_proj"], ["down_proj", "o_proj"]], ids=str)
@pytest.mark.parametrize("family", _SIZES)
def test_adapters_come_from_peft_and_go_there(tmp_path: Path, family: str, targets: list[str] | None) -> None:
    """The logits of foldray's engine, of a model from its checkpoint, of its merged export, and of PEFT with its adapter."""
    wanted = targets or [*_MODULES, "gate_up_proj", "down_proj"]
    named = {
        "target_modules": [name for name in wanted if name in _MODULES],
        "target_parameters": [name for name in _STACKS if name.rsplit(".", 1)[1] in wanted],
    }
    theirs, text_BL = adapted(tmp_path, family, spread=0.1, **named), sample(3, 3, 14, 320)
    recipe = recipe_for(tmp_path, targets=targets)
    Adapter.of(recipe).check(recipe)
    with widened(), torch.no_grad():
        expected = theirs(text_BL).logits
        with theirs.disable_adapter():
            assert (theirs(text_BL).logits - expected).abs().max() > 1e-3
    groups = Groups.create(recipe.placed_fold)
    engine = filled(recipe, groups)
    with torch.no_grad():
        torch.testing.assert_close(engine.model.logits(text_BL), expected, atol=1e-9, rtol=1e-9)
    write_run(tmp_path / "run", recipe, engine, groups)
    groups.close()
    torch.testing.assert_close(Model.load(tmp_path / "run").logits(text_BL), expected, atol=1e-9, rtol=1e-9)
    for name, flags in (("merged", []), ("again", ["--adapter"])):
        assert main(["export-hf", str(tmp_path / "run"), str(tmp_path / name), *flags]) == 0
    again = peft.PeftModel.from_pretrained(loaded(tmp_path / "hub"), tmp_path / "again").double().eval()
    with widened(), torch.no_grad():
        torch.testing.assert_close(loaded(tmp_path / "merged")(text_BL).logits, expected, atol=1e-9, rtol=1e-9)
        torch.testing.assert_close(again(text_BL).logits, expected, atol=1e-9, rtol=1e-9)
    known = loaded_tensors(tmp_path / "adapter")
    assert all(torch.equal(tensor, known.pop(name)) for name, tensor in loaded_tensors(tmp_path / "again").items())
    assert not known


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("given")
    adapted(folder, "Mixtral")
    return folder


@pytest.mark.parametrize(("change", "rule"), [
    ({"r": 8}, "has r=8, and model.adapter.rank is 4"),
    ({"lora_alpha": 3}, r"weighs its adapters by 0\.75, and the recipe by 2"),
    ({"use_rslora": True}, r"weighs its adapters by 4, and the recipe by 2"),
    ({"use_dora": True}, "says use_dora=True, which foldray does not train"),
    ({"peft_type": "IA3"}, "foldray trains LORA"),
    ({}, "has the tensor base_model"),
])  # fmt: skip
def test_other_adapters_are_refused(given: Path, tmp_path: Path, change: dict[str, Any], rule: str) -> None:
    (tmp_path / "hub").symlink_to(given / "hub")
    shutil.copytree(given / "adapter", tmp_path / "adapter")
    recipe = recipe_for(tmp_path, targets=None if change else ["q_proj"])
    config = tmp_path / "adapter" / CONFIG
    config.write_text(json.dumps({**json.loads(config.read_text()), **change}))
    with pytest.raises(UserError, match=rule):
        Adapter.of(recipe).check(recipe)
