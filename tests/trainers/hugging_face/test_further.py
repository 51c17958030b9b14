"""Blocks of multi-token prediction in folders of transformers, as DeepSeek-V3 and GLM-4.5 have them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from foldray import Recipe, UserError
from foldray.cli import main
from foldray.comm import Groups
from foldray.model import Batch, Transformer
from foldray.runtime import Engine
from tests.foldray.parity import sample
from tests.trainers.checkpoints.damage import shards_of
from tests.trainers.hugging_face.oracle import filled, loaded, widened
from tests.trainers.hugging_face.test_export import GLM, make_run
from trainers.checkpoints import tensors
from trainers.checkpoints.tensors import Staged
from trainers.hugging_face.weights import Weights
from trainers.inference.model import Model

transformers = pytest.importorskip("transformers")
_LATENT = {
    "latent_rank": 20,
    "latent_query_rank": 12,
    "kv_heads": 4,
    "head_dim": 14,
    "rope_dim": 4,
    "value_dim": 6,
    "norm_eps": 1e-6,
}
MODELS: dict[str, dict[str, Any]] = {
    "Glm4Moe": GLM | {"mtp_depth": 1},
    "DeepseekV3": GLM | _LATENT | {"rope_pairs": "interleaved", "mtp_depth": 2, "tied_embeddings": False},
    "Glm4Moe, tied": GLM | {"mtp_depth": 2, "tied_embeddings": True},
}


def exported(folder: Path, **model: Any) -> Transformer:
    """Make a run and export it to `out`. Return its model."""
    made = make_run(folder / "run", spread=0.25, **model)
    assert main(["export-hf", str(folder / "run" / "step_00000003"), str(folder / "out")]) == 0
    return made


def imported(folder: Path, name: str = "recipe.yaml", **model: Any) -> Recipe:
    """Import `out`, and return the recipe with other keys of the model."""
    assert main(["import-hf", str(folder / "out"), str(folder / name)]) == 0
    given = yaml.safe_load((folder / name).read_text())
    given["model"] |= model
    return Recipe.parse({**given, "engine": {"kind": "torch"}, "precision": "float64", "moe": {"experts": "loop"}})


def state_of(engine: Engine) -> dict[str, torch.Tensor]:
    return {key: tensor.detach() for key, tensor in engine.state().items() if key.startswith("model/")}


def rewritten(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    from safetensors.torch import load_file, save_file

    found = load_file(folder / "out" / "model.safetensors")
    change(found)
    save_file(found, folder / "out" / "model.safetensors", {"format": "pt"})


@pytest.mark.gate(1)
@pytest.mark.parametrize("name", MODELS)
def test_import_and_export_keep_every_bit(tmp_path: Path, name: str) -> None:
    model = MODELS[name]
    exported(tmp_path, **model)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == model["mtp_depth"]
    recipe = imported(tmp_path)
    assert recipe.model.mtp_depth == model["mtp_depth"]
    engine = filled(recipe, groups := Groups.create(recipe.placed_fold))
    state = state_of(engine)
    groups.close()
    again = tmp_path / "again" / "step_00000003"
    again.mkdir(parents=True)
    (again.parent / "recipe.yaml").write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    progress = {"step": 3, "data": "d", "fold": {}, "validation": {"loss": 1.0}, "seed": 0, "global_batch": 8}
    tensors.write(again, Staged(shards_of(state)), progress, None)
    assert main(["export-hf", str(again), str(tmp_path / "second")]) == 0
    first, second = ((tmp_path / each / "model.safetensors").read_bytes() for each in ("out", "second"))
    assert first == second


@pytest.mark.parametrize("name", MODELS)
def test_further_tokens_are_those_of_blocks_of_transformers(tmp_path: Path, name: str) -> None:
    """Their blocks compute the states with the weights under DeepSeek-V3's names, and the loss from them."""
    from safetensors.torch import load_file

    ours = exported(tmp_path, **MODELS[name])
    held, theirs = load_file(tmp_path / "out" / "model.safetensors"), loaded(tmp_path / "out")
    config, text_BL = theirs.config, sample(3, 3, 15, 257)
    token_BL, target_BL, eps = text_BL[:, :-1], text_BL[:, 1:], theirs.config.rms_norm_eps
    length = token_BL.shape[1]

    def norm(x: torch.Tensor, weight: str) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * held[weight]

    mask = torch.full((length, length), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    with widened():
        out = theirs.model(token_BL)
        state, losses = out.last_hidden_state, []
        place = torch.arange(length)[None]
        rotation = theirs.model.rotary_emb(state, place)
        for depth in range(1, ours.spec.mtp_depth + 1):
            prefix = f"model.layers.{config.num_hidden_layers + depth - 1}."
            later_BL = torch.cat([token_BL[:, depth:], token_BL[:, -1:].expand(-1, depth)], dim=1)
            embedding = held[f"{prefix}embed_tokens.weight"][later_BL]
            both = torch.cat([norm(embedding, f"{prefix}enorm.weight"), norm(state, f"{prefix}hnorm.weight")], dim=-1)
            last = type(theirs.model.layers[-1])(config, config.num_hidden_layers - 1).double().eval()
            own = {key.removeprefix(prefix): tensor for key, tensor in held.items() if key.startswith(prefix)}
            last.load_state_dict(stacked(own, last.state_dict()), strict=True)
            hidden = last(both @ held[f"{prefix}eh_proj.weight"].T, attention_mask=mask, position_embeddings=rotation)
            hidden = hidden[0] if isinstance(hidden, tuple) else hidden
            state = norm(hidden, f"{prefix}shared_head.norm.weight")
            logits = state @ held[f"{prefix}shared_head.head.weight"].T
            losses.append(
                torch.nn.functional.cross_entropy(logits[:, : length - depth].flatten(0, 1), target_BL[:, depth:].flatten())
            )
    _, found = ours(Batch(token_BL, target_BL))
    assert float(found.further()) == pytest.approx(float(sum(losses)) / len(losses), abs=1e-6)  # tables of rotations are float32


def stacked(own: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of a block as its module has them. transformers keeps those of all experts in one."""
    found = {key: own[key] for key in wanted if key in own}
    for key in wanted.keys() - found.keys():
        kind = key.removeprefix("mlp.experts.")
        parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
        experts = range(wanted[key].shape[0])
        found[key] = torch.stack([torch.cat([own[f"mlp.experts.{e}.{part}.weight"] for part in parts]) for e in experts])
    return found


def test_transformers_and_generation_compute_the_next_token_alone(tmp_path: Path) -> None:
    ours = exported(tmp_path, **MODELS["Glm4Moe"])
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", **plain)
    text = torch.randint(0, 257, (2, 13), generator=torch.Generator().manual_seed(1))
    expected = ours.logits(text)
    torch.testing.assert_close(theirs(text).logits, expected, atol=1e-5, rtol=1e-5)
    model = Model.load(str(tmp_path / "run" / "step_00000003"), device="cpu")
    assert model.transformer.spec.mtp_depth == 0
    torch.testing.assert_close(model.logits(text), expected)
    assert len(model.generate("a", 3, temperature=0).tokens) <= 3


def test_a_recipe_may_leave_them_out(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    exported(tmp_path, **MODELS["DeepseekV3"])
    recipe = imported(tmp_path, mtp_depth=0)
    assert "mtp_depth   2" in capsys.readouterr().out
    weights = Weights.at(str(tmp_path / "out"), "training.weights")
    weights.check(recipe.model)
    assert all(name.startswith(("model.layers.3.", "model.layers.4.")) for name in weights.left_out(recipe.model))
    assert len(weights.left_out(recipe.model)) > len(weights.left_out(recipe.model.model_copy(update={"mtp_depth": 1}))) > 0
    engine = filled(recipe, groups := Groups.create(recipe.placed_fold))
    groups.close()
    assert not any("blocks.3." in key for key in engine.state())


def test_more_blocks_than_the_folder_has_are_refused(tmp_path: Path) -> None:
    exported(tmp_path, **MODELS["Glm4Moe"])
    recipe = imported(tmp_path, mtp_depth=2)
    weights = Weights.at(str(tmp_path / "out"), "training.weights")
    with pytest.raises(UserError, match="has a model of mtp_depth=1, and the recipe's model has 2"):
        weights.check(recipe.model)


def test_a_folder_that_says_more_than_it_has(tmp_path: Path) -> None:
    """transformers saves models without these blocks, and their number in `config.json`."""
    exported(tmp_path, **MODELS["Glm4Moe"])
    rewritten(tmp_path, lambda found: [found.pop(name) for name in [*found] if name.startswith("model.layers.3.")])
    assert imported(tmp_path).model.mtp_depth == 0


@pytest.mark.parametrize("copy", ["embed_tokens", "shared_head.head"])
def test_copies_of_embedding_and_head_must_be_equal(tmp_path: Path, copy: str) -> None:
    exported(tmp_path, **MODELS["Glm4Moe"])
    name = f"model.layers.3.{copy}.weight"
    rewritten(tmp_path, lambda found: found[name][3].add_(1e-9))
    recipe = imported(tmp_path)
    with pytest.raises(UserError, match=rf"{name} differs from \w+\.weight"):
        filled(recipe, Groups.create(recipe.placed_fold))
    rewritten(tmp_path, lambda found: found.pop(name))  # some folders have no copies
    filled(imported(tmp_path, "other.yaml"), Groups.create(recipe.placed_fold))


def test_other_families_have_none(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    make_run(tmp_path / "run", mtp_depth=1)
    assert main(["export-hf", str(tmp_path / "run" / "step_00000003"), str(tmp_path / "out")]) == 2
    assert "model.mtp_depth" in capsys.readouterr().err
