"""Exported models, as transformers loads them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from foldray import Recipe, UserError
from foldray.blueprint import ModelSpec, Ownership, parameter_table
from foldray.cli import main
from foldray.comm import Groups
from foldray.fold import Fold
from foldray.model import Transformer
from tests.foldray.model.test_transformer import by_name
from tests.trainers.checkpoints.damage import FILE, flipped, shards_of
from tests.trainers.data.chats import make_tokenizer
from tests.trainers.hugging_face.oracle import MIXTRAL, saved
from trainers.checkpoints import tensors
from trainers.checkpoints.tensors import Staged
from trainers.data.tokenizers import ByteTokenizer, load_tokenizer
from trainers.driver.resuming import Beginning
from trainers.hugging_face.families import family_of, tensors_of
from trainers.hugging_face.family import rope_config
from trainers.hugging_face.tokens import roles, write_tokenizer
from trainers.inference import export as module

transformers = pytest.importorskip("transformers")
SIZES: dict[str, Any] = {
    "layers": 2, "hidden": 48, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn_hidden": 40, "experts": 4, "topk": 2,
    "expert_hidden": 56, "vocab": 320, "init_std": 0.3,
}  # fmt: skip


def make_run(
    folder: Path, steps: tuple[int, ...] = (3,), precision: str = "float64", spread: float = 0.0, **model: Any
) -> Transformer:
    """Write the folder of a run with checkpoints of an untrained model, whose norms differ by `spread`. Return the model."""
    recipe = Recipe.parse({
        "model": {**SIZES, **model}, "data": {"seq_len": 32}, "precision": precision, "engine": {"kind": "torch"},
        "cluster": {"workers": 1},
    })  # fmt: skip
    folder.mkdir()
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    made = Transformer(Ownership(recipe.model, Fold(1)), Groups.create(Fold(1)), dtype=torch.float64)
    torch.manual_seed(1)
    for parameter in made.parameters() if spread else ():
        if parameter.dim() == 1:  # norms begin as ones
            parameter.data += spread * torch.randn_like(parameter)
    for bias in made.biases().values() if recipe.model.router.score == "sigmoid" else ():
        bias.copy_(torch.linspace(-1, 1, len(bias)))  # this changes which experts are chosen
    weights = {**by_name(made), **made.biases()}
    state = {f"model/{name}": tensor.detach().contiguous() for name, tensor in weights.items()}
    for step in steps:
        progress = {"step": step, "data": "d", "fold": {}, "validation": {"loss": 1.0}, "seed": 0, "global_batch": 8}
        at = folder / f"step_{step:08d}"
        at.mkdir()
        tensors.write(at, Staged(shards_of(state)), progress, None)
    return made


GLM: dict[str, Any] = {"router": {"score": "sigmoid", "bias_rate": 0.01}, "shared_hidden": 112, "dense_first": 1, "layers": 3}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("Mixtral", {}),
    ("Mixtral", {"tied_embeddings": True, "kv_heads": 4, "head_dim": 10}),
    ("Mixtral", {"windows": ["sliding:5"], "rope_theta": 500.0, "norm_eps": 1e-3}),
    ("Mixtral", {"router": {"softmax": "before_topk", "normalize": True}, "topk": 3}),
    ("Glm4Moe", GLM),
    ("Glm4Moe", GLM | {"dense_first": 0, "rope_theta": 500.0, "tied_embeddings": True, "shared_hidden": 56}),
    ("Glm4Moe", GLM | {"router": {"score": "sigmoid", "normalize": True, "scale": 2.5}, "topk": 3}),
]


@pytest.mark.parametrize(("family", "model"), VARIANTS, ids=lambda value: value if isinstance(value, str) else ", ".join(value))
def test_transformers_computes_the_same_logits_and_gradients(tmp_path: Path, family: str, model: dict[str, Any]) -> None:
    ours = make_run(tmp_path / "run", **model)
    assert main(["export-hf", str(tmp_path / "run" / "step_00000003"), str(tmp_path / "out")]) == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", attn_implementation="eager", experts_implementation="eager"
    )
    assert type(theirs).__name__ == f"{family}ForCausalLM"
    assert theirs.dtype == torch.float64
    text = torch.randint(0, 257, (2, 13), generator=torch.Generator().manual_seed(1))
    logits, expected = ours.logits(text), theirs(text).logits
    torch.testing.assert_close(expected, logits, atol=1e-5, rtol=1e-5)  # Mixtral's rotary table is float32
    for each in (logits, expected):
        torch.nn.functional.cross_entropy(each[:, :-1].flatten(0, 1), text[:, 1:].flatten()).backward()
    norms = [sum(float(each.grad.norm()) ** 2 for each in made.parameters() if each.grad is not None) for made in (ours, theirs)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)


def test_every_weight_is_there_once_and_in_the_type_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file

    ours = by_name(make_run(tmp_path / "run", steps=(1, 2)))
    monkeypatch.setattr(module, "_FILE", 40_000)
    place = tmp_path / "new" / "out"
    assert main(["export-hf", str(tmp_path / "run" / "step_00000002"), str(place), "--dtype", "bfloat16", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["step"] == 2
    assert told["parameters"] == sum(each.numel() for each in ours.values()) == told["bytes"] // 2
    written = json.loads((place / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(written.values())) == told["files"] > 2
    found: dict[str, torch.Tensor] = {}
    for name in sorted(set(written.values())):
        content = load_file(place / name)
        assert found.keys().isdisjoint(content)
        found |= content
    model = ModelSpec.model_validate(SIZES)
    for each in tensors_of(family_of(model), model):
        expected = ours[each.ours].T if each.turned else ours[each.ours]
        assert torch.equal(found.pop(each.name), expected.to(torch.bfloat16))
    assert not found
    assert not list(place.parent.glob(".*"))
    assert len({path.stat().st_mode for path in place.iterdir()}) == 1
    assert transformers.AutoModelForCausalLM.from_pretrained(place).dtype == torch.bfloat16


def test_what_a_folder_brought_leaves_with_it(tmp_path: Path) -> None:
    """The run's sequences have 32 tokens, and its separator is 256."""
    saved(tmp_path / "hub", "Mixtral", MIXTRAL | {"max_position_embeddings": 4096, "pad_token_id": 5})
    generation = {"do_sample": True, "temperature": 0.7, "eos_token_id": [7, 2], "pad_token_id": 5, "of its own": [1.5]}
    (tmp_path / "hub" / "generation_config.json").write_text(json.dumps(generation))
    assert main(["import-hf", str(tmp_path / "hub"), str(tmp_path / "recipe.yaml"), "--tokenizer", "byte"]) == 0
    make_run(tmp_path / "run")
    kept = yaml.safe_load((tmp_path / "recipe.yaml").read_text())["export"]
    written = tmp_path / "run" / "recipe.yaml"
    written.write_text(yaml.safe_dump(yaml.safe_load(written.read_text()) | {"export": kept}))
    assert main(["export-hf", str(tmp_path / "run" / "step_00000003"), str(tmp_path / "out")]) == 0
    before, after = (json.loads((tmp_path / place / "config.json").read_text()) for place in ("hub", "out"))
    for key in ("max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"):
        assert after[key] == before[key], key
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == generation | {"eos_token_id": [7, 2, 256]}
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").generation_config.temperature == 0.7


YARN = {"factor": 4.0, "original_positions": 1000}
POSITIONS: list[tuple[int | None, dict[str, Any], int, int]] = [
    (None, {}, 32, 32), (4096, {}, 32, 4096), (16, {}, 32, 32), (None, {"rope_scaling": YARN}, 32, 4000),
    (1000, {"rope_scaling": YARN}, 32, 4000), (1250, {"rope_scaling": YARN}, 32, 1250),
    (131, {"rope_scaling": YARN | {"kind": "llama3", "original_positions": 64, "beta_fast": 4.0}}, 32, 131),
    (64, {"rope_scaling": {"kind": "linear", "factor": 2.0}}, 32, 64),
]  # fmt: skip


@pytest.mark.parametrize(("told", "model", "seq_len", "expected"), POSITIONS)
def test_the_positions_of_a_model(told: int | None, model: dict[str, Any], seq_len: int, expected: int) -> None:
    given = {"model": {**SIZES, **model}, "data": {"seq_len": seq_len}, "export": {"max_positions": told}}
    assert module._positions(Recipe.parse(given)) == expected


def test_readers_of_older_configurations_find_rotary_positions() -> None:
    plain = {**SIZES, "rope_theta": 500.0}
    found = rope_config(ModelSpec.model_validate(plain))
    assert (found["rope_theta"], found["rope_scaling"]) == (500.0, None)
    found = rope_config(ModelSpec.model_validate({**plain, "rope_scaling": YARN, "rope_dim": 8}))
    assert {"rope_type", "factor", "original_max_position_embeddings"} < found["rope_scaling"].keys()
    assert found["rope_parameters"] == {**found["rope_scaling"], "rope_theta": 500.0, "partial_rotary_factor": 0.5}
    assert (found["rope_theta"], found["partial_rotary_factor"]) == (500.0, 0.5)


def test_the_tokens_of_a_model_from_scratch(tmp_path: Path) -> None:
    """A text ends with the separator, and an answer with what the template says."""
    folder = make_tokenizer(tmp_path / "tokenizer", pad_token="[INST]")
    tokenizer = load_tokenizer(str(folder))
    bos, eos, end, pad = tokenizer.inner.convert_tokens_to_ids(["<s>", "</s>", "<|im_end|>", "[INST]"])  # type: ignore[attr-defined]
    talks, reads = {"source": "conversations", "path": "a"}, {"source": "text", "path": "b"}
    for data, ends in ((reads, bos), (talks, [end, eos]), ({"sources": {"a": talks, "b": reads}}, [end, eos, bos])):
        tokens, generation = roles(Recipe.parse({"model": SIZES, "data": {**data, "tokenizer": str(folder)}}), tokenizer)
        assert tokens == generation == {"bos_token_id": bos, "eos_token_id": ends, "pad_token_id": pad}


def test_the_newest_checkpoint_of_a_run_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "run", steps=(1, 2))
    newest = Beginning.at(str(tmp_path / "run" / "step_00000001"))
    monkeypatch.setattr(Beginning, "newest", lambda folder: newest)  # Ray writes the list of a run's checkpoints
    assert module.export(str(tmp_path / "run"), tmp_path / "out", as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 1


def test_the_byte_tokenizer_makes_the_same_tokens(tmp_path: Path) -> None:
    assert write_tokenizer("byte", tmp_path).separator == 256
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mixtral"}))
    theirs, text = transformers.AutoTokenizer.from_pretrained(tmp_path), "def f(x):\n\treturn x  # größer ✓ \x00\x7f 日本"
    ids = theirs(text)["input_ids"]
    assert ids == [256, *text.encode()]
    assert theirs.decode(ids, skip_special_tokens=True) == text
    mine = load_tokenizer(str(tmp_path))
    assert (mine.separator, mine.vocab_size) == (256, 257)
    assert np.array_equal(mine.encode(text), ByteTokenizer().encode(text))
    again = tmp_path / "again"
    again.mkdir()
    assert write_tokenizer(str(tmp_path), again).separator == 256
    assert sorted(path.name for path in again.iterdir()) == ["tokenizer.json", "tokenizer_config.json"]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"norm": "layernorm"}, "model.norm=layernorm: is in no model that transformers knows"),
    ({"positions": "learned"}, "model.positions=learned"),
    ({"ffn": "gelu"}, "model.ffn=gelu"),
    ({"dense_first": 1}, "model.dense_first=1"),
    ({"moe_every": 2}, "model.moe_every=2"),
    ({"shared_hidden": 8}, "model.shared_hidden=8"),
    (GLM | {"shared_hidden": 50}, "model.shared_hidden=50"),
    (GLM | {"windows": ["sliding:4"]}, "model.windows="),
    ({"value_dim": 8}, "model.value_dim=8"),
    ({"windows": ["full", "sliding:4"]}, "model.windows="),
    ({"windows": ["chunked:4"]}, "model.windows="),
    ({"router": {"score": "sigmoid"}, "dense_first": 1}, "model.shared_hidden=0"),
    ({"router": {"softmax": "before_topk"}}, "model.router.normalize=False"),
    ({"router": {"scale": 2.0}}, "model.router.scale=2.0"),
]


@pytest.mark.parametrize(("model", "line"), REFUSED, ids=[line for _, line in REFUSED])
def test_other_models_are_refused(model: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError) as error:
        family_of(ModelSpec.model_validate({**SIZES, **model}))
    assert str(error.value).startswith(line)
    assert "MixtralForCausalLM" in str(error.value)


def test_mistakes_are_one_line_and_leave_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "run", steps=(1, 2))
    run, step = tmp_path / "run", tmp_path / "run" / "step_00000002"
    bare = tmp_path / "bare"
    make_run(bare)
    os.remove(bare / "recipe.yaml")
    damaged = tmp_path / "damaged"
    make_run(damaged)
    flipped(FILE)(damaged / "step_00000003")
    (tmp_path / "file").write_text("")
    wide = tmp_path / "wide"
    make_run(wide, init_std=1e6)
    for arguments, line in (
        ([tmp_path / "none", "out"], "does not exist"),
        ([tmp_path, "out"], "holds no checkpoint"),
        ([bare / "step_00000003", "out"], "its recipe.yaml is missing"),
        ([step, run], "exists already"),
        ([step, tmp_path / "file" / "out"], "cannot be written"),
        ([damaged / "step_00000003", "out"], "is damaged: __0_0.distcp"),
        ([step, "out", "--dtype", "int8"], "is not known"),
        ([wide / "step_00000003", "out", "--dtype", "float16"], "dtype=float16: embedding.weight has a number"),
    ):
        place = [tmp_path / "out" if each == "out" else each for each in arguments]
        assert main(["export-hf", *map(str, place)]) == 2
        told = capsys.readouterr().err
        assert line in told.splitlines()[-1], told
        assert "Traceback" not in told
        assert not (tmp_path / "out").exists()
        assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_every_parameter_has_a_tensor() -> None:
    model = ModelSpec.model_validate({**SIZES, "tied_embeddings": True})
    assert len(tensors_of(family_of(model), model)) == len(parameter_table(model))
