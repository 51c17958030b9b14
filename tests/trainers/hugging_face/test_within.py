"""Models for several media, of which foldray trains the text model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from foldray import Recipe
from foldray.cli import main
from foldray.comm import Groups
from tests.foldray.parity import sample
from tests.trainers.checkpoints.damage import shards_of
from tests.trainers.hugging_face.oracle import ARIA, GLM, QWEN, QWEN35, filled, loaded, widened
from trainers.checkpoints import tensors
from trainers.checkpoints.tensors import Staged

transformers = pytest.importorskip("transformers")
ROPE = {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [2, 2, 2], "mrope_interleaved": True}
TEXT = {key: value for key, value in QWEN.items() if key != "norm_topk_prob"} | {
    "head_dim": 12, "rope_parameters": ROPE, "tie_word_embeddings": False,
}  # fmt: skip
EYES = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 48, "patch_size": 4,
    "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
}  # fmt: skip
TEXT35 = {key: value for key, value in QWEN35.items() if key != "rope_parameters"} | {
    "rope_parameters": ROPE | {"partial_rotary_factor": 0.5, "mrope_section": [1, 1, 1]},
}  # fmt: skip
EYES35 = {key: value for key, value in EYES.items() if key != "deepstack_visual_indexes"}
TEXT_GLM = {key: value for key, value in GLM.items() if key != "num_nextn_predict_layers"} | {
    "attention_bias": True, "rope_parameters": ROPE | {"partial_rotary_factor": 0.5, "mrope_section": [1, 1, 1]},
    "tie_word_embeddings": False,
}  # fmt: skip
EYES_GLM = {key: value for key, value in EYES35.items() if key != "num_position_embeddings"} | {"image_size": 16}
EARS = {"num_mel_bins": 8, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 8, "d_model": 8,
        "output_dim": 48, "downsample_hidden_size": 4}  # fmt: skip


def as_released(path: Path, family: str) -> None:
    """Give experts the tensors that a family was released with; transformers reads both.

    Those of Qwen3-VL are one tensor in another shape. Those of Qwen3.5 are one tensor, with the rows of gate before those of up.
    Its folders also have a block for further tokens, which transformers does not load.
    """
    from safetensors.torch import load_file, save_file

    found = load_file(path)
    if family == "Qwen3_5Moe":
        found["mtp.fc.weight"] = torch.zeros(48, 96)
        for layer in range(TEXT35["num_hidden_layers"]):
            name, experts = f"model.language_model.layers.{layer}.mlp.experts", range(TEXT35["num_experts"])
            gates, ups, downs = (
                torch.stack([found.pop(f"{name}.{expert}.{part}_proj.weight") for expert in experts])
                for part in ("gate", "up", "down")
            )
            found[f"{name}.gate_up_proj"], found[f"{name}.down_proj"] = torch.cat([gates, ups], dim=1), downs
        save_file(found, path, {"format": "pt"})
        return
    for name, tensor in found.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            found[name] = tensor.transpose(1, 2).contiguous()
    save_file(found, path, {"format": "pt"})


def whole(family: str) -> Any:
    """Return an untrained model for several media."""
    if family == "Qwen3_5Moe":
        config = transformers.Qwen3_5MoeConfig(text_config=TEXT35, vision_config=EYES35, tie_word_embeddings=False)
        return transformers.Qwen3_5MoeForConditionalGeneration(config)
    if family == "Qwen3VLMoe":
        config = transformers.Qwen3VLMoeConfig(text_config=TEXT, vision_config=EYES, tie_word_embeddings=False)
        return transformers.Qwen3VLMoeForConditionalGeneration(config)
    if family == "Glm4vMoe":
        config = transformers.Glm4vMoeConfig(text_config=TEXT_GLM, vision_config=EYES_GLM, tie_word_embeddings=False)
        return transformers.Glm4vMoeForConditionalGeneration(config)
    if family == "Aria":
        eyes = {"model_type": "idefics3_vision", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
                "num_attention_heads": 2, "image_size": 16, "patch_size": 4}  # fmt: skip
        return transformers.AriaForConditionalGeneration(transformers.AriaConfig(vision_config=eyes, text_config=ARIA))
    text = TEXT | {"norm_topk_prob": True}
    thinker = {"text_config": text, "vision_config": EYES, "audio_config": EARS}
    config = transformers.Qwen3OmniMoeConfig(thinker_config=thinker, enable_audio_output=False)
    return transformers.Qwen3OmniMoeForConditionalGeneration(config)


@pytest.mark.parametrize(
    ("family", "released", "leaves"),
    [
        ("Qwen3VLMoe", True, "Qwen3MoeForCausalLM"), ("Qwen3OmniMoe", True, "Qwen3MoeForCausalLM"),
        ("Glm4vMoe", False, "Glm4MoeForCausalLM"), ("Aria", False, "AriaTextForCausalLM"),
        ("Qwen3_5Moe", True, "Qwen3_5MoeForCausalLM"), ("Qwen3_5Moe", False, "Qwen3_5MoeForCausalLM"),
    ],
)  # fmt: skip
def test_the_text_model_comes_and_leaves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], family: str, released: bool, leaves: str
) -> None:
    torch.manual_seed(1)
    made = whole(family).double().eval()
    made.save_pretrained(tmp_path / "hub")
    if released:
        as_released(tmp_path / "hub" / "model.safetensors", family)
    made = type(made).from_pretrained(tmp_path / "hub", experts_implementation="eager", dtype=torch.float64).eval()
    thinker = getattr(made, "thinker", made)
    assert main(["import-hf", str(tmp_path / "hub"), str(tmp_path / "recipe.yaml"), "--tokenizer", "byte"]) == 0
    assert "tensors of parts that take other media than text" in capsys.readouterr().out
    given = yaml.safe_load((tmp_path / "recipe.yaml").read_text())
    assert given["export"].get("family") == ("qwen3_5_moe_text" if family == "Qwen3_5Moe" else None)
    given |= {"precision": "float64", "engine": {"kind": "torch"}, "moe": {"experts": "loop"}}
    engine = filled(recipe := Recipe.parse(given), groups := Groups.create(recipe.placed_fold))
    text_BL = sample(3, 3, 14, 320)
    with torch.no_grad():
        expected_BLV, found_BLV = thinker(text_BL).logits, engine.model.logits(text_BL)
    # transformers has rotary tables and norms in float32 here, and linear attention, which rounds more.
    close = 5e-5 if recipe.model.linear else 1e-5
    torch.testing.assert_close(found_BLV, expected_BLV, atol=close * float(expected_BLV.abs().max()), rtol=0.0)

    run = tmp_path / "run"
    (at := run / "step_00000001").mkdir(parents=True)
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    state = {shard.key: shard.tensor for shard in engine.shards() if shard.key.startswith("model/")}
    progress = {"step": 1, "data": "d", "fold": {}, "validation": {"loss": 1.0}, "seed": 0, "global_batch": 8}
    tensors.write(at, Staged(shards_of(state)), progress, None)
    assert main(["export-hf", str(at), str(tmp_path / "out")]) == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == [leaves]
    with widened(), torch.no_grad():
        again_BLV = loaded(tmp_path / "out")(text_BL).logits
    torch.testing.assert_close(again_BLV, found_BLV, atol=1e-9, rtol=1e-9)
    engine.close()
    groups.close()
