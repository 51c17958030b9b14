"""A family of the user's own: `import-hf --family`, the weights under a fold, and the export."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml

from foldray import Recipe
from foldray.cli import main
from foldray.comm import Groups
from tests.foldray.parity import sample
from tests.trainers.checkpoints.damage import shards_of
from tests.trainers.hugging_face.oracle import GLM, filled, loaded, saved, widened
from trainers.checkpoints import tensors
from trainers.checkpoints.tensors import Staged

OWN = "tests.trainers.hugging_face.dots:DOTS"
SIZES = {key: value for key, value in GLM.items() if key not in ("num_nextn_predict_layers", "rope_parameters")} | {
    "norm_topk_prob": True, "sliding_window": 5, "max_window_layers": 1, "num_hidden_layers": 3,
}  # fmt: skip


def test_a_family_from_outside_comes_and_leaves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = saved(tmp_path / "hub", "Dots1", SIZES)
    arguments = ["import-hf", str(tmp_path / "hub"), str(tmp_path / "recipe.yaml"), "--tokenizer", "byte", "--family", OWN]
    assert main(arguments) == 0
    given = yaml.safe_load((tmp_path / "recipe.yaml").read_text())
    assert given["export"]["family"] == OWN
    given |= {"precision": "float64", "engine": {"kind": "torch"}, "moe": {"experts": "loop"}}
    engine = filled(recipe := Recipe.parse(given), groups := Groups.create(recipe.placed_fold))
    text_BL = sample(3, 3, 14, 320)
    with widened():
        expected_BLV = theirs(text_BL).logits
    torch.testing.assert_close(engine.model.logits(text_BL), expected_BLV, atol=1e-9, rtol=1e-9)

    run = tmp_path / "run"
    (at := run / "step_00000001").mkdir(parents=True)
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    state = {shard.key: shard.tensor for shard in engine.shards() if shard.key.startswith("model/")}
    progress = {"step": 1, "data": "d", "fold": {}, "validation": {"loss": 1.0}, "seed": 0, "global_batch": 8}
    tensors.write(at, Staged(shards_of(state)), progress, None)
    assert main(["export-hf", str(at), str(tmp_path / "out")]) == 2, "a stored recipe runs no code of others"
    assert "--trust" in capsys.readouterr().err
    assert main(["export-hf", str(at), str(tmp_path / "out"), "--trust"]) == 0
    back = loaded(tmp_path / "out")
    assert type(back).__name__ == "Dots1ForCausalLM"
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor), name
    engine.close()
    groups.close()


@pytest.mark.parametrize(
    ("family", "line"),
    [
        ([], "type 'of_mine', which foldray does not read"),
        (["--family", "dots"], "export.family=dots: is not a legal value; legal: mixtral, "),
        (["--family", f"{OWN}S"], "cannot be imported"),
        (["--family", "tests.trainers.hugging_face.dots:mlp"], "is a function, not a trainers.hugging_face.Family"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], family: list[str], line: str) -> None:
    saved(tmp_path / "hub", "Dots1", SIZES)
    config = json.loads((tmp_path / "hub" / "config.json").read_text())
    (tmp_path / "hub" / "config.json").write_text(json.dumps(config | {"model_type": "of_mine"}))
    assert main(["import-hf", str(tmp_path / "hub"), str(tmp_path / "recipe.yaml"), *family]) == 2
    assert line in capsys.readouterr().err
    assert not (tmp_path / "recipe.yaml").exists()
