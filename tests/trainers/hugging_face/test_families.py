"""Every family of models: logits, gradients and training steps are those of transformers, in float64, under every fold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from foldray import Recipe
from foldray.blueprint import ModelSpec
from foldray.cli import main
from foldray.comm import Groups
from foldray.model import Cache
from foldray.model.rotary import rotation
from foldray.moe import TokenPiece
from tests.foldray.parity import IGNORED, batches, engine_on, go_on, sample, weights
from tests.trainers.checkpoints.damage import shards_of
from tests.trainers.hugging_face import oracle
from tests.trainers.hugging_face.oracle import (
    ALL,
    FAMILIES,
    MIXTRAL,
    QWEN,
    by_our_names,
    filled,
    loaded,
    mean_loss,
    saved,
    widened,
)
from trainers.checkpoints import tensors
from trainers.checkpoints.tensors import Staged
from trainers.hugging_face.family import rope_config

BATCH, LENGTH = 8, 16
FOLDS: list[tuple[str, int, dict[str, Any]]] = [
    ("EP2", 2, {"fold": {"ep": 2}}),
    ("TP2, EP4", 4, {"fold": {"tp": 2, "ep": 4}}),
    ("PP2", 2, {"fold": {"pp": 2}}),
    ("CP2", 2, {"fold": {"cp": 2}}),
    ("stream", 2, {"fold": {"ep": 2}, "schedule": {"kind": "stream", "degree": 2}}),
    ("TP2, CP2 in slices", 4, {"fold": {"tp": 2, "cp": 2, "ep": 2}, "schedule": {"kind": "moe_only", "degree": 2}}),
]


def imported(folder: Path, path: Path, balanced: bool = False, **sections: Any) -> Recipe:
    """Import a folder, and return the recipe with further sections, and without a balance loss unless it is `balanced`."""
    assert main(["import-hf", str(folder), str(path), "--tokenizer", "byte"]) == 0
    given = yaml.safe_load(path.read_text())
    given["model"]["router"] |= {} if balanced else {"balance_loss": 0.0}
    base = {
        "engine": {"kind": "torch"}, "precision": "float64", "moe": {"experts": "loop"},
        "optimizer": {"kind": "sgd", "lr": 1.0, "decay": "constant", "weight_decay": 0.0, "clip": None},
    }  # fmt: skip
    given["data"]["seq_len"], given["training"] = LENGTH, given["training"] | {"global_batch": BATCH, "micro_batch": 2}
    return Recipe.parse({**given, **base, **sections})


@pytest.mark.parametrize(("family", "sizes"), ALL)
def test_logits_and_gradients(tmp_path: Path, family: str, sizes: dict[str, Any]) -> None:
    theirs = saved(tmp_path / "hub", family, sizes)
    recipe = imported(tmp_path / "hub", tmp_path / "recipe.yaml")
    engine, text_BL = filled(recipe, groups := Groups.create(recipe.placed_fold)), sample(3, 3, 14, 320)
    with widened():
        expected = theirs(text_BL[:, :-1]).logits
    torch.testing.assert_close(engine.model.logits(text_BL[:, :-1]), expected, atol=1e-9, rtol=1e-9)
    mean_loss(theirs, text_BL).backward()
    logits_BLV = engine.model.logits(text_BL[:, :-1])
    torch.nn.functional.cross_entropy(logits_BLV.flatten(0, 1), text_BL[:, 1:].flatten()).backward()
    slopes = by_our_names(theirs, recipe, tmp_path / "slopes", gradients=True)
    for local, parameter in engine.model.named_parameters():
        assert parameter.grad is not None
        for name, index in engine.model.global_parts[local]:
            torch.testing.assert_close(parameter.grad[index], slopes.pop(name), atol=1e-9, rtol=1e-9, msg=name)
    assert not slopes
    groups.close()


@pytest.mark.gate(9)
@pytest.mark.parametrize(("family", "sizes"), ALL)
def test_logits_in_single_precision(tmp_path: Path, family: str, sizes: dict[str, Any]) -> None:
    """As a user has them: transformers' own code in float32, rotary tables and norms included.

    Linear attention rounds more, on both sides: here, transformers and foldray in float32 are 2e-5 from float64.
    """
    saved(tmp_path / "hub", family, sizes).float().save_pretrained(tmp_path / "hub32")
    recipe = imported(tmp_path / "hub32", tmp_path / "recipe.yaml", precision="float32")
    engine, text_BL = filled(recipe, groups := Groups.create(recipe.placed_fold)), sample(3, 3, 14, 320)
    theirs = getattr(oracle.transformers, f"{family}ForCausalLM").from_pretrained(tmp_path / "hub32", dtype=torch.float32).eval()
    logits_BLV = engine.model.logits(text_BL)
    assert logits_BLV.dtype == torch.float32
    expected, close = theirs(text_BL).logits, 5e-5 if recipe.model.linear else 1e-5
    torch.testing.assert_close(logits_BLV, expected, atol=close * float(expected.detach().abs().max()), rtol=0.0)
    groups.close()


@pytest.mark.gate(4)
@pytest.mark.parametrize(("family", "sizes"), ALL)
def test_greedy_generation(tmp_path: Path, family: str, sizes: dict[str, Any]) -> None:
    """Both have a cache of keys and values."""
    theirs = saved(tmp_path / "hub", family, sizes)
    recipe = imported(tmp_path / "hub", tmp_path / "recipe.yaml")
    engine = filled(recipe, groups := Groups.create(recipe.placed_fold))
    text_BL, cache, made = sample(7, 2, 9, 320), Cache(engine.model, 2), []
    with widened():
        expected = theirs.generate(text_BL, do_sample=False, max_new_tokens=20, eos_token_id=None, pad_token_id=0)
    x_BSH = cache.extend(text_BL)
    for _ in range(20):
        made.append(engine.model.head_logits(x_BSH[:, -1:]).argmax(-1))
        x_BSH = cache.extend(made[-1])
    assert torch.equal(torch.cat([text_BL, *made], dim=1), expected)
    groups.close()


def trained(rank: int, recipe: Recipe) -> dict[str, Any]:
    with engine_on(recipe, rank, filled) as (engine, groups):
        go_on(engine, groups, recipe, range(1))
        return weights(engine)


@pytest.mark.parametrize("scaling", [
    {"kind": "linear", "factor": 4.0},
    {"kind": "llama3", "factor": 8.0, "original_positions": 64, "beta_fast": 4.0},
    {"kind": "llama3", "factor": 32.0, "original_positions": 8192, "beta_fast": 4.0, "beta_slow": 0.5},
    {"kind": "yarn", "factor": 4.0, "original_positions": 64},
    {"kind": "yarn", "factor": 1.0, "original_positions": 64},
    {"kind": "yarn", "factor": 32.0, "original_positions": 4096, "beta_fast": 1.0, "beta_slow": 1.0},
    {"kind": "yarn", "factor": 32.0, "original_positions": 4096, "beta_fast": 1.0, "truncate": False},
], ids=lambda scaling: f"{scaling['kind']}-{scaling['factor']:g}")  # fmt: skip
def test_scaled_rotations_are_those_of_transformers(scaling: dict[str, Any]) -> None:
    """The rates of all pairs, from the key that an export writes, and the factor on cosines and sines."""
    model = ModelSpec(preset="tiny", head_dim=64, rope_theta=5e5, rope_scaling=scaling)
    rope = model.block(0).attention.rope
    assert rope
    config = oracle.transformers.LlamaConfig(head_dim=64, max_position_embeddings=1 << 17, **rope_config(model))
    with widened():
        rate_R, magnitude = oracle.ROPE_INIT_FUNCTIONS[scaling["kind"]](config)
    cos_R, sin_R = (each[0] for each in rotation(torch.ones(1), rope, torch.float64)[:2])
    torch.testing.assert_close(torch.atan2(sin_R, cos_R), rate_R, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(torch.hypot(sin_R, cos_R), torch.full_like(rate_R, magnitude), atol=1e-12, rtol=1e-12)


@pytest.mark.gate(1 / 2)
@pytest.mark.parametrize(("name", "workers", "sections"), FOLDS)
@pytest.mark.parametrize(("family", "sizes"), FAMILIES)
def test_a_step_under_every_fold(
    tmp_path: Path, ranks: Any, family: str, sizes: dict[str, Any], name: str, workers: int, sections: dict[str, Any]
) -> None:
    theirs = saved(tmp_path / "hub", family, sizes)
    recipe = imported(tmp_path / "hub", tmp_path / "recipe.yaml", cluster={"workers": workers}, **sections)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=1.0)
    mean_loss(theirs, sample(0, BATCH, LENGTH + 1, recipe.model.vocab)).backward()
    optimizer.step()
    expected = by_our_names(theirs, recipe, tmp_path / "after")
    held = ranks(workers).run(trained, recipe)
    assert {key.removeprefix("model/") for each in held for key in each} >= expected.keys()
    for each in held:
        for key, (tensor, box) in each.items():
            if (parameter := key.removeprefix("model/")) in expected:
                torch.testing.assert_close(tensor, expected[parameter][box], atol=1e-9, rtol=1e-9, msg=f"{parameter} on {name}")


def per_block(theirs: Any, text_BL: torch.Tensor) -> torch.Tensor:
    """Return the balance loss of transformers for each block by itself, mean over blocks."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    logits, topk = theirs(text_BL, output_router_logits=True).router_logits, theirs.config.num_experts_per_tok
    return sum(load_balancing_loss_func((each,), each.shape[1], topk) for each in logits) / len(logits)


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize(("family", "sizes"), [("Mixtral", MIXTRAL), ("Qwen3Moe", QWEN | {"mlp_only_layers": []})])
def test_a_step_with_a_balance_loss(tmp_path: Path, family: str, sizes: dict[str, Any], blocks: int) -> None:
    """In a step of one micro-batch. transformers takes several blocks together, so here its function gets each by itself."""
    more = {"num_hidden_layers": blocks, "output_router_logits": True, "router_aux_loss_coef": 0.5}
    theirs = saved(tmp_path / "hub", family, sizes | more)
    training = {"weights": str(tmp_path / "hub"), "global_batch": BATCH, "micro_batch": BATCH}
    recipe = imported(tmp_path / "hub", tmp_path / "recipe.yaml", balanced=True, training=training)
    assert recipe.model.router.balance_scope == "batch"
    text_BL, optimizer = sample(0, BATCH, LENGTH + 1, recipe.model.vocab), torch.optim.SGD(theirs.parameters(), lr=1.0)
    with widened():
        balance = per_block(theirs, text_BL[:, :-1])
        theirs_own = theirs(text_BL[:, :-1], output_router_logits=True).aux_loss
    assert (abs((balance - theirs_own).item()) < 1e-9) is (blocks == 1)
    (mean_loss(theirs, text_BL) + 0.5 * balance).backward()
    optimizer.step()
    expected = by_our_names(theirs, recipe, tmp_path / "after")
    found = trained(0, recipe)
    for key, tensor in expected.items():
        torch.testing.assert_close(found[f"model/{key}"][0], tensor, atol=1e-9, rtol=1e-9, msg=key)


@pytest.mark.gate(3)
@pytest.mark.parametrize(("family", "sizes"), ALL)
def test_import_and_export_change_no_bit(tmp_path: Path, family: str, sizes: dict[str, Any]) -> None:
    from safetensors.torch import load_file

    theirs = saved(tmp_path / "hub", family, sizes)
    recipe = imported(tmp_path / "hub", tmp_path / "recipe.yaml")
    engine = filled(recipe, groups := Groups.create(recipe.placed_fold))
    state = {key: tensor.detach().contiguous() for key, tensor in engine.state().items() if key.startswith("model/")}
    run, step = tmp_path / "run", tmp_path / "run" / "step_00000001"
    step.mkdir(parents=True)
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    progress = {"step": 1, "data": "d", "fold": {}, "validation": {"loss": 1.0}, "seed": 0, "global_batch": 8}
    tensors.write(step, Staged(shards_of(state)), progress, None)
    assert main(["export-hf", str(step), str(tmp_path / "again")]) == 0
    first, second = ({name: tensor for path in sorted((tmp_path / place).glob("*.safetensors"))
                      for name, tensor in load_file(path).items()} for place in ("hub", "again"))  # fmt: skip
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) and first[name].dtype == second[name].dtype for name in first)
    text = sample(3, 2, 13, 320)
    with widened():
        assert torch.equal(loaded(tmp_path / "again")(text).logits, theirs(text).logits)
    once_more = imported(tmp_path / "again", tmp_path / "again.yaml")
    assert once_more.model == recipe.model
    again = filled(once_more, groups)
    assert again.model.pieces == engine.model.pieces
    assert all(torch.equal(tensor, again.state()[key]) for key, tensor in state.items())
    assert json.loads((tmp_path / "again" / "config.json").read_text())["architectures"] == [f"{family}ForCausalLM"]
    groups.close()


@pytest.mark.parametrize(("family", "sizes"), FAMILIES)
def test_routers_choose_the_same_experts(tmp_path: Path, family: str, sizes: dict[str, Any]) -> None:
    """10,000 random tokens, and two experts that always have equal scores."""
    theirs = saved(tmp_path / "hub", family, sizes)
    recipe = imported(tmp_path / "hub", tmp_path / "recipe.yaml")
    engine, layer = filled(recipe, groups := Groups.create(recipe.placed_fold)), recipe.model.layers - 1
    block, router = theirs.model.layers[layer], engine.model.block(layer).moe.router
    network = getattr(block, "mlp", None) or block.block_sparse_moe
    gate = getattr(network, "gate", None) or network.router
    with torch.no_grad():
        matrix = getattr(gate, {"Afmoe": "gate", "HunYuanMoEV1": "wg"}.get(family, ""), gate).weight
        matrix[-1] = matrix[-2]
        router.weight[:, -1] = router.weight[:, -2]
        bias = getattr(network, "e_score_correction_bias", getattr(gate, "e_score_correction_bias", getattr(gate, "bias", None)))
        if family == "Ernie4_5_Moe":
            bias = gate.moe_statics.e_score_correction_bias[0]
        if family == "Afmoe":
            bias = network.expert_bias
        for each in (bias, router.bias, router.logit_bias):
            if each is not None:
                each[-1] = each[-2]
    x_TH = torch.randn(10_000, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    with widened(), torch.no_grad():
        _, weight_TK, expert_TK = gate(x_TH[None], bias) if family in ("MiniMaxM2", "HYV3", "Afmoe") else gate(x_TH)
    ours = router(x_TH, TokenPiece(1))
    expected_TK = weight_TK * recipe.model.residual_scale  # which transformers multiplies later
    order, own = expert_TK.argsort(-1), ours.expert_TK.argsort(-1)
    assert torch.equal(ours.expert_TK.gather(-1, own), expert_TK.gather(-1, order))
    torch.testing.assert_close(ours.weight_TK.gather(-1, own), expected_TK.gather(-1, order), atol=1e-12, rtol=1e-12)
    assert (ours.expert_TK >= recipe.model.experts - 2).any()
    groups.close()


def curve(rank: int, recipe: Recipe, steps: int, masked: bool) -> list[float]:
    with engine_on(recipe, rank, filled) as (engine, groups):
        return [loss for loss, *_ in go_on(engine, groups, recipe, range(steps), masked=masked)["losses"]]


_LONG = pytest.mark.nightly("100 steps of two models")


@pytest.mark.gate(1 / 2)
@pytest.mark.parametrize(("family", "masked", "steps"), [
    ("Qwen3Moe", False, 20), ("Mixtral", True, 20),
    pytest.param("Mixtral", False, 100, marks=_LONG), pytest.param("Qwen3Moe", False, 100, marks=_LONG),
    pytest.param("Qwen3Moe", True, 100, marks=_LONG),
])  # fmt: skip
def test_a_training_is_that_of_plain_pytorch(tmp_path: Path, ranks: Any, family: str, masked: bool, steps: int) -> None:
    """AdamW on two ranks with EP. If targets are masked, the ranks have different numbers of them."""
    theirs = saved(tmp_path / "hub", family, dict(FAMILIES)[family])
    optimizer = {"kind": "adamw", "lr": 1e-3, "weight_decay": 0.1, "decay": "constant", "clip": 1.0}
    fold = {"fold": {"ep": 2}, "cluster": {"workers": 2}}
    recipe = imported(tmp_path / "hub", tmp_path / "recipe.yaml", optimizer=optimizer, **fold)
    matrices, vectors = ([each for each in theirs.parameters() if (each.dim() > 1) is several] for several in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=1e-3, betas=recipe.optimizer.betas, eps=recipe.optimizer.eps)
    expected = []
    for step in range(steps):
        parts = [batch for place in range(2) for batch in batches(recipe, place, step, masked=masked)]
        assert not masked or len({int((part.target_BL >= 0).sum()) for part in parts}) > 1
        tokens, targets = (torch.cat([part[i] for part in parts]) for i in range(2))
        with widened():
            logits_BLV = theirs(tokens).logits
        loss = torch.nn.functional.cross_entropy(logits_BLV.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        adam.step()
        expected.append(float(loss))
    assert expected[-1] < expected[0]
    for losses in ranks(2).run(curve, recipe, steps, masked, timeout=600):
        assert losses == pytest.approx(expected, abs=1e-5)
