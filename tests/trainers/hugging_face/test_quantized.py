"""Folders with quantized tensors: every rank starts from the values that they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from foldray.cli import main
from foldray.recipe import Recipe
from tests.trainers.hugging_face.oracle import DEEPSEEK3, GPT_OSS, MINIMAX, saved
from tests.trainers.hugging_face.test_import import changed, held, imported
from trainers.hugging_face.families import family_of, tensors_of
from trainers.hugging_face.quantized import Fp8, Mxfp4, Packed, Scaled

Tensors = dict[str, torch.Tensor]
HEIGHT, WIDTH = 16, 8
FP8 = {"quant_method": "fp8", "weight_block_size": [HEIGHT, WIDTH], "fmt": "e4m3", "activation_scheme": "dynamic"}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens", "lm_head"]}
WIDE = GPT_OSS | {"hidden_size": 64, "intermediate_size": 96}  # widths of whole blocks of 32


def times_scales(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the values of FP8, [..., rows, columns], in float32: each times the scale of the block that it lies in."""
    row, column = torch.arange(values.shape[-2]) // HEIGHT, torch.arange(values.shape[-1]) // WIDTH
    return values.float() * scales.float()[..., row[:, None], column]


def as_fp8(tensors: Tensors, of_scales: torch.dtype = torch.float32) -> tuple[Tensors, Tensors]:
    """Return the tensors with most matrices in FP8, and what all of them stand for."""
    stored, stands = {}, dict(tensors)
    for name, tensor in tensors.items():
        if tensor.dim() != 2 or name.startswith(("model.embed", "lm_head")) or ".gate." in name:
            stored[name] = tensor
            continue
        rows, columns = -(-tensor.shape[0] // HEIGHT), -(-tensor.shape[1] // WIDTH)
        scales = torch.rand(rows, columns).add(0.1).to(of_scales)
        values = (tensor.float() * 10).to(torch.float8_e4m3fn)
        stored |= {name: values, f"{name}_scale_inv": scales}
        stands[name] = times_scales(values, scales)
    return stored, stands


def as_mxfp4(tensors: Tensors) -> tuple[Tensors, Tensors]:
    """Return the tensors with random experts in MXFP4, and what all of them stand for, as transformers reads it."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    stored, stands = {}, dict(tensors)
    for name, tensor in tensors.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(110, 130, blocks.shape[:-1], dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        stands[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    return stored, stands


def quantized(hub: Path, family: str, sizes: dict[str, Any], config: dict[str, Any], **options: Any) -> Tensors:
    """Write a quantized model, and return what its tensors stand for."""
    saved(hub, family, sizes)
    tensors = load_file(hub / "model.safetensors")
    stored, stands = (as_fp8 if config["quant_method"] == "fp8" else as_mxfp4)(tensors, **options)
    save_file(stored, hub / "model.safetensors")
    changed(hub, quantization_config=config)
    return stands


def compare(found: dict[str, Any], stands: Tensors, recipe: Recipe) -> None:
    """Compare a rank's weights with what the tensors of a folder stand for."""
    for each in tensors_of(family_of(recipe.model), recipe.model):
        if f"model/{each.ours}" in found:
            tensor, box = found[f"model/{each.ours}"]
            assert torch.equal(tensor, each.taken(stands[each.name]).double()[box]), each.name


MODELS = [
    pytest.param("DeepseekV3", DEEPSEEK3, FP8, {}, id="DeepSeek-V3"),
    pytest.param("DeepseekV3", DEEPSEEK3, FP8, {"of_scales": torch.float8_e8m0fnu}, id="scales of 8 bits"),
    pytest.param("MiniMaxM2", MINIMAX, FP8, {"of_scales": torch.bfloat16}, id="MiniMax-M2"),
    pytest.param("GptOss", WIDE, MXFP4, {}, id="GPT-OSS"),
]


@pytest.mark.parametrize(("family", "sizes", "config", "options"), MODELS)
def test_one_rank(tmp_path: Path, capsys: Any, family: str, sizes: dict[str, Any], config: Any, options: Any) -> None:
    stands = quantized(tmp_path / "hub", family, sizes, config, **options)
    recipe = imported(tmp_path)
    found = held(0, recipe)
    assert found.keys() >= {f"model/{each.ours}" for each in tensors_of(family_of(recipe.model), recipe.model)}
    compare(found, stands, recipe)
    stored = load_file(tmp_path / "hub" / "model.safetensors")
    count = sum(name.endswith(("_scale_inv", "_scales")) for name in stored)
    blocks = "fp8 in blocks of 16 × 8" if config is FP8 else "mxfp4 in blocks of 32"
    printed = capsys.readouterr().out
    assert f"  quantized   {count} tensors, {blocks}; training starts from the values that they stand for\n" in printed
    assert "quant" not in (tmp_path / "recipe.yaml").read_text()


@pytest.mark.parametrize(
    ("family", "sizes", "config", "etp"),
    [("DeepseekV3", DEEPSEEK3, FP8, 1), ("DeepseekV3", DEEPSEEK3, FP8, 2), ("GptOss", WIDE, MXFP4, 1)],
)
def test_every_rank_of_a_fold(tmp_path: Path, ranks: Any, family: str, sizes: Any, config: Any, etp: int) -> None:
    stands = quantized(tmp_path / "hub", family, sizes, config)
    training = {"weights": str(tmp_path / "hub"), "global_batch": 4}
    recipe = imported(tmp_path, fold={"tp": 2, "ep": 2, "etp": etp}, cluster={"workers": 4}, training=training)
    all_held = ranks(4).run(held, recipe)
    assert any(box not in ((), (slice(None),) * len(box)) for found in all_held for _, box in found.values())
    for found in all_held:
        compare(found, stands, recipe)


def test_a_tensor_and_its_scales_in_two_files(tmp_path: Path) -> None:
    stands = quantized(hub := tmp_path / "hub", "MiniMaxM2", MINIMAX, FP8)
    stored = load_file(hub / "model.safetensors")
    (hub / "model.safetensors").unlink()
    names = {name: f"{'scales' if name.endswith('_scale_inv') else 'values'}.safetensors" for name in stored}
    for file in set(names.values()):
        save_file({name: tensor for name, tensor in stored.items() if names[name] == file}, hub / file)
    (hub / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    recipe = imported(tmp_path)
    compare(held(0, recipe), stands, recipe)


@pytest.mark.parametrize("config", [FP8, MXFP4])
def test_a_folder_in_which_nothing_is_quantized(tmp_path: Path, capsys: Any, config: Any) -> None:
    saved(tmp_path / "hub", "MiniMaxM2", MINIMAX)
    changed(tmp_path / "hub", quantization_config=config)
    recipe = imported(tmp_path)
    compare(held(0, recipe), load_file(tmp_path / "hub" / "model.safetensors"), recipe)
    assert "quantized" not in capsys.readouterr().out


class Counted:
    """A tensor in a file, which counts the numbers that are read."""

    def __init__(self, part: Any):
        self.part, self.count = part, 0
        self.get_shape, self.get_dtype = part.get_shape, part.get_dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        found = self.part[index]
        self.count += found.numel()
        return found


INDEXES: list[tuple[Any, int]] = [
    (..., 2), ((...,), 2), ((2,), 2), ((1, ...), 2), ((0, slice(3, 4)), 1), ((slice(1, 3), slice(17, 40), slice(5, 23)), 2),
    ((1, slice(None), slice(1, None, 2)), 2), ((2, slice(32, 37), slice(7, 9)), 1),
    ((0, slice(2, None, 19), slice(0, None, 9)), 2),
]  # fmt: skip


@pytest.mark.parametrize(("index", "blocks"), INDEXES)
def test_three_axes(tmp_path: Path, index: Any, blocks: int) -> None:
    """Experts in one tensor, in both formats. Every part is that of the whole, and no more is read than it needs.

    Args:
        blocks: how many blocks of 32 the index touches on the second axis.
    """
    torch.manual_seed(2)
    tensors = {
        "a": torch.randn(3, 43, 29).to(torch.float8_e4m3fn), "a_scale_inv": torch.rand(3, 3, 4),
        "b_blocks": torch.randint(0, 256, (3, 29, 2, 16), dtype=torch.uint8),
        "b_scales": torch.randint(1, 250, (3, 29, 2), dtype=torch.uint8),
    }  # fmt: skip
    save_file(tensors, tmp_path / "model.safetensors")
    stands = {"a": times_scales(tensors["a"], tensors["a_scale_inv"]), "b": unpacked(tensors["b_blocks"], tensors["b_scales"])}
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        for name, form in (("a", Fp8((HEIGHT, WIDTH))), ("b", Mxfp4())):
            parts = [Counted(file.get_slice(part)) for part in form.parts(name, tensors)]
            tensor = form.tensor(name, parts)
            assert isinstance(tensor, Scaled | Packed)
            assert tensor.shape == stands[name].shape
            wanted = stands[name][index]
            assert torch.equal(tensor[index], wanted)
            if name == "a":
                assert parts[0].count == wanted.numel()
                assert parts[1].count <= 3 * 4 * (wanted.shape[0] if wanted.dim() == 3 else 1)  # those of the experts
            else:
                rows = wanted.numel() // wanted.shape[-2]
                assert [part.count for part in parts] == [rows * blocks * 16, rows * blocks]


def unpacked(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the values of MXFP4 by the definition of E2M1: a sign, two bits of exponent with bias 1, and one of fraction."""
    found = torch.empty(*blocks.shape[:-1], 32, dtype=torch.float64)
    for place in range(32):
        bits = (blocks[..., place // 2].int() >> 4 * (place % 2)) & 15
        exponent, fraction = bits >> 1 & 3, (bits & 1) / 2
        size = torch.where(exponent > 0, (1 + fraction) * 2.0 ** (exponent - 1), fraction)
        found[..., place] = torch.where(bits >= 8, -size, size) * 2.0 ** (scales.double() - 127)
    return found.float().flatten(-2).transpose(-1, -2)


def damaged(change: Callable[[Tensors], Any]) -> Callable[[Path], None]:
    """Return what changes the tensors of a folder."""

    def damage(hub: Path) -> None:
        tensors = load_file(hub / "model.safetensors")
        change(tensors)
        save_file(tensors, hub / "model.safetensors")

    return damage


def asks(**keys: Any) -> Callable[[Path], None]:
    return lambda hub: changed(hub, quantization_config=FP8 | keys)


MATRIX = "model.layers.0.self_attn.o_proj.weight"
SCALES, NORM = f"{MATRIX}_scale_inv", "model.norm.weight"
BAD_FP8: dict[str, tuple[Callable[[Path], None], str]] = {
    "no scales": (
        damaged(lambda held: held.pop(SCALES)), f"has the tensor {MATRIX} of type F8_E4M3 without its scales, {SCALES}",
    ),
    "scales alone": (damaged(lambda held: held.pop(MATRIX)), f"has no tensor {MATRIX}, which the recipe's model needs"),
    "scales of nothing": (
        damaged(lambda held: held.update({"model.x_scale_inv": torch.ones(1)})), "has the tensor model.x_scale_inv, which",
    ),
    "more scales": (
        damaged(lambda held: held.update({SCALES: torch.ones(4, 8)})),
        f"has {SCALES} in shape [4, 8]; the tensor that it scales needs [3, 8]",
    ),
    "other blocks": (asks(weight_block_size=[8, 8]), "the tensor that it scales needs ["),
    "scales of whole numbers": (
        damaged(lambda held: held.update({SCALES: held[SCALES].int()})), f"has the tensor {SCALES} of type I32, and foldray",
    ),
    "values of 5 bits of exponent": (
        damaged(lambda held: held.update({MATRIX: held[MATRIX].float().to(torch.float8_e5m2)})),
        f"has the tensor {MATRIX} of type F8_E5M2, and foldray reads it as F8_E4M3 only",
    ),
    "plain values with scales": (
        damaged(lambda held: held.update({MATRIX: held[MATRIX].float()})),
        f"has the tensor {MATRIX} of type F32, and foldray reads it as F8_E4M3 only",
    ),
    "a vector": (
        damaged(lambda held: held.update({NORM: held[NORM].to(torch.float8_e4m3fn), f"{NORM}_scale_inv": torch.ones(6)})),
        f"has the tensor {NORM} of type F8_E4M3 in shape [48], which has no blocks",
    ),
    "whole numbers": (damaged(lambda held: held.update({NORM: held[NORM].int()})), f"has the tensor {NORM} of type I32"),
    "another width": (
        damaged(lambda held: held.update({MATRIX: held[MATRIX][:40].contiguous(), SCALES: held[SCALES]})),
        f"{MATRIX} has shape [40, 64]; the recipe's model needs [48, 64]",
    ),
    "no blocks": (asks(weight_block_size=None), "its config.json says weight_block_size=None, and foldray reads fp8 in blocks"),
    "blocks of nothing": (asks(weight_block_size=[0, 8]), "its config.json says weight_block_size=[0, 8]"),
    "blocks of one size": (asks(weight_block_size=[8]), "its config.json says weight_block_size=[8]"),
    "another method": (
        asks(quant_method="awq"),
        "its config.json says quant_method=awq, which foldray does not read, only fp8 and mxfp4; save it with plain weights",
    ),
    "no method": (asks(quant_method=None), "its config.json says quant_method=None"),
    "a method of several": (asks(quant_method=["fp8"]), "its config.json says quant_method=['fp8']"),
    "no object": (lambda hub: changed(hub, quantization_config="fp8"), "a quantization_config that is no JSON object"),
    "not said": (lambda hub: changed(hub, quantization_config=None), "_scale_inv, which the recipe's model has not"),
}  # fmt: skip
STACK = "model.layers.1.mlp.experts.down_proj"
BAD_MXFP4: dict[str, tuple[Callable[[Path], None], str]] = {
    "no scales": (damaged(lambda held: held.pop(f"{STACK}_scales")), f"has no tensor {STACK}_scales, which the recipe's"),
    "no values": (damaged(lambda held: held.pop(f"{STACK}_blocks")), f"has no tensor {STACK}_blocks, which the recipe's"),
    "twice": (
        damaged(lambda held: held.update({STACK: torch.ones(4, 96, 64)})), f"has the tensor {STACK}_blocks, which the recipe's",
    ),
    "values of 16 bits": (
        damaged(lambda held: held.update({f"{STACK}_blocks": held[f"{STACK}_blocks"].short()})),
        f"has the tensor {STACK}_blocks of type I16, and foldray reads it as U8 only",
    ),
    "scales of 32 bits": (
        damaged(lambda held: held.update({f"{STACK}_scales": held[f"{STACK}_scales"].float()})),
        f"has the tensor {STACK}_scales of type F32, and foldray reads it as U8 only",
    ),
    "fewer scales": (
        damaged(lambda held: held.update({f"{STACK}_scales": held[f"{STACK}_scales"][:, :, :2].contiguous()})),
        f"has {STACK}_scales in shape [4, 64, 2]; the tensor that it scales needs [4, 64, 3]",
    ),
    "smaller blocks": (
        damaged(lambda held: held.update({f"{STACK}_blocks": held[f"{STACK}_blocks"].view(4, 64, 6, 8)})),
        f"has {STACK}_blocks in shape [4, 64, 6, 8], and mxfp4 needs [experts, outputs, inputs / 32, 16]",
    ),
    "fewer inputs": (
        damaged(lambda held: held.update({f"{STACK}_{part}": held[f"{STACK}_{part}"][:, :, :2].contiguous()
                                          for part in ("blocks", "scales")})),
        f"{STACK} has shape [4, 64, 64]; the recipe's model needs [4, 96, 64]",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def hubs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("hubs")
    quantized(folder / "fp8", "MiniMaxM2", MINIMAX, FP8)
    quantized(folder / "mxfp4", "GptOss", WIDE, MXFP4)
    return {name: folder / name for name in ("fp8", "mxfp4")}


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [pytest.param(name, *case, id=f"{name}, {what}") for name, table in (("fp8", BAD_FP8), ("mxfp4", BAD_MXFP4))
     for what, case in table.items()],
)  # fmt: skip
def test_a_folder_that_cannot_be_imported(
    tmp_path: Path, capsys: Any, hubs: dict[str, Path], name: str, damage: Callable[[Path], None], said: str
) -> None:
    """One line says why, and nothing is written."""
    hub = tmp_path / "hub"
    hub.mkdir()
    for file in hubs[name].iterdir():
        (hub / file.name).write_bytes(file.read_bytes())
    damage(hub)
    capsys.readouterr()
    assert main(["import-hf", str(hub), str(tmp_path / "recipe.yaml")]) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert "DIR=" in printed.err
    assert len(printed.err.strip().splitlines()) == 1
    assert not (tmp_path / "recipe.yaml").exists()


def test_what_import_says_to_programs(tmp_path: Path, hubs: dict[str, Path], capsys: Any) -> None:
    for name, folder in hubs.items():
        capsys.readouterr()
        assert main(["import-hf", str(folder), str(tmp_path / f"{name}.yaml"), "--tokenizer", "byte", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["quantized"] == name
        assert yaml.safe_load((tmp_path / f"{name}.yaml").read_text())["training"]["weights"] == str(folder)
