"""Models of transformers, as foldray trains them further."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from foldray import Recipe, UserError
from foldray.blueprint import PRESETS, ModelSpec
from foldray.cli import main
from foldray.comm import Groups
from foldray.model import Transformer
from foldray.runtime import Shard
from tests.foldray.parity import engine_on, sample, weights
from tests.trainers.hugging_face import hub
from tests.trainers.hugging_face.oracle import GLM, MIXTRAL, filled, loaded, saved, widened
from trainers.hugging_face.quantized import Plain
from trainers.hugging_face.rows import computed
from trainers.hugging_face.tokens import write_tokenizer
from trainers.hugging_face.weights import Weights
from trainers.worker.engines import read_weights

transformers = pytest.importorskip("transformers")


def imported(tmp_path: Path, **sections: Any) -> Recipe:
    """Import the folder `hub`, and return the recipe, with further sections."""
    assert main(["import-hf", str(tmp_path / "hub"), str(tmp_path / "recipe.yaml"), "--tokenizer", "byte"]) == 0
    given = yaml.safe_load((tmp_path / "recipe.yaml").read_text())
    base = {"engine": {"kind": "torch"}, "precision": "float64", "moe": {"experts": "loop"}}
    return Recipe.parse({**given, **base, **sections})


def held(rank: int, recipe: Recipe) -> dict[str, torch.Tensor]:
    """Fill the engine of a rank from the recipe's folder, and return its weights with their boxes."""
    with engine_on(recipe, rank, filled) as (engine, _):
        return weights(engine)


@pytest.mark.gate(1 / 2)
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


class Made(TorchDispatchMode):
    """Counts the elements of new tensors in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        given, made = ([x for x in tree_leaves(each) if isinstance(x, torch.Tensor)] for each in ((args, kwargs), found))
        known = {tensor.untyped_storage().data_ptr() for tensor in given}
        new = [tensor for tensor in made if tensor.untyped_storage().data_ptr() not in known]
        self.elements += sum(tensor.numel() for tensor in new if tensor.dtype == torch.float32)
        return found


def uncounted(values: Plain, index: Any) -> torch.Tensor:
    """Read a part of a tensor. The package safetensors cannot do it while operations are counted."""
    with _disable_current_modes():
        return values.values[index]


def made_in_float32(rank: int, recipe: Recipe) -> tuple[int, int]:
    """Return how many elements of float32 a rank makes to start from weights, and how many weights its model has."""
    with engine_on(recipe, rank) as (engine, _):
        with mock.patch.object(Plain, "__getitem__", uncounted), Made() as made:
            read_weights(engine, recipe)
            engine.load_shards()
        held = sum(parameter.numel() for parameter in engine.model.parameters())
    return made.elements, held


@pytest.mark.gate(1)
@pytest.mark.parametrize("engine", [{"kind": "torch", "zero": 1}, {"kind": "deepspeed", "zero": 1}], ids=str)
def test_a_rank_makes_its_share_of_the_optimizers_state(tmp_path: Path, ranks: Any, engine: dict[str, Any]) -> None:
    """Weights in bfloat16, whose optimizer is shared out: each rank needs two numbers for a quarter of the weights. Looking for
    numbers that are not finite makes one more for a moment."""
    saved(tmp_path / "hub", "Mixtral", MIXTRAL)
    cluster, training = {"workers": 4}, {"weights": str(tmp_path / "hub"), "global_batch": 4}
    given = {"engine": engine, "precision": "bfloat16", "moe": {"experts": "grouped"}, "optimizer": {"kind": "adamw"}}
    recipe = imported(tmp_path, cluster=cluster, training=training, **given)
    for elements, count in ranks(4).run(made_in_float32, recipe):
        assert elements < 3.2 * count / 4


def test_what_import_says(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    saved(tmp_path / "hub", "Mixtral", MIXTRAL)
    assert main(["import-hf", str(tmp_path / "hub"), str(tmp_path / "recipe.yaml"), "--tokenizer", "byte", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"] == sum(parameter.numel() for parameter in transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**MIXTRAL)
    ).parameters())  # fmt: skip
    assert found["dropout"] == {}
    changed(tmp_path / "hub", attention_dropout=0.1)
    assert main(["import-hf", str(tmp_path / "hub"), str(tmp_path / "again.yaml"), "--tokenizer", "byte"]) == 0
    line = "  dropout     none: config.json asks for attention_dropout=0.1, and foldray trains without it"
    assert line in capsys.readouterr().out.splitlines()


@pytest.mark.gate(4)
@pytest.mark.parametrize("name", [name for name in hub.CONFIGS if name not in hub.LARGER])
def test_a_model_as_hubs_have_it(tmp_path: Path, capsys: pytest.CaptureFixture, name: str) -> None:
    """Its logits are those of transformers, and so is the weight of its balance loss."""
    config, path = hub.written(tmp_path / "hub", name), tmp_path / "recipe.yaml"
    dense = hub.CONFIGS[name].keys().isdisjoint(hub.TOPK)
    more = ["--upcycle", "4"] if dense else []
    assert main(["import-hf", str(tmp_path / "hub"), str(path), "--tokenizer", "byte", "--json", *more]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    given = yaml.safe_load(path.read_text())
    assert told["balance_loss"] == (0.01 if dense else 0.001 if name == "deepseek-v2-lite" else 0.0)
    assert given["model"]["router"]["balance_loss"] == told["balance_loss"]
    assert told["left_out"] == {"ernie-4.5-21b-a3b": 12, "hy3": 8 + 1 + 1 + 3 + 3 * 8 + 4}.get(name, 0)
    assert told["mtp_depth"] == (name in ("glm-4.5-air", "deepseek-v3", "glm-4.7-flash"))
    recipe = Recipe.parse({**given, "engine": {"kind": "torch"}, "precision": "float64", "moe": {"experts": "loop"}})
    engine, text_BL = filled(recipe, groups := Groups.create(recipe.placed_fold)), sample(3, 3, 14, 320)
    if name == "kimi-k2":  # DeepSeek's class, under a name that transformers does not know
        changed(tmp_path / "hub", model_type="deepseek_v3")
    theirs = loaded(tmp_path / "hub")
    with widened():
        expected = theirs(text_BL).logits
    torch.testing.assert_close(engine.model.logits(text_BL), expected, atol=1e-9, rtol=1e-9)
    assert recipe.model.layers == config["num_hidden_layers"]
    groups.close()


@pytest.mark.parametrize("name", [name for name in hub.CONFIGS if name in PRESETS])
def test_a_preset_computes_what_the_released_model_does(tmp_path: Path, name: str) -> None:
    """By its published `config.json`."""
    (tmp_path / "config.json").write_text(json.dumps(hub.CONFIGS[name]))
    read = Weights(tmp_path, "DIR", {}).model()
    assert computed(ModelSpec(preset=name)) == computed(ModelSpec.model_validate(read))


@pytest.mark.parametrize(("name", "keys", "weight", "said"), [
    ("gpt-oss-20b", {}, 0.0, "output_router_logits is off in config.json, and with it router_aux_loss_coef=0.9"),
    ("mixtral-8x7b", {"output_router_logits": True}, 0.02 * 2 / 32, "2 experts of a token / 32 blocks, as transformers sums"),
    ("glm-4.5-air", {"output_router_logits": True}, 0.0, "transformers trains a Glm4MoeForCausalLM without one"),
    ("deepseek-v2-lite", {}, 0.001, "aux_loss_alpha in config.json"),
    ("deepseek-v2-lite", {"aux_loss_alpha": None}, 0.0, "config.json has no aux_loss_alpha"),
    ("kimi-k2", {}, 0.0, "transformers trains a DeepseekV3ForCausalLM without one"),
    ("qwen3-0.6b", {}, 0.01, "foldray's own: a dense model has none"),
])  # fmt: skip
def test_the_balance_loss_is_what_the_folder_says(
    tmp_path: Path, name: str, keys: dict[str, Any], weight: float, said: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(hub.CONFIGS[name] | keys))
    model = ModelSpec(preset="tiny" if name not in PRESETS else name)
    found, origin, scope = Weights(tmp_path, "DIR", {}).balance(model)
    assert found == pytest.approx(weight, rel=1e-12)
    assert scope == ("batch" if "as transformers sums" in said else "sequence")
    assert said in origin


def test_a_head_beside_a_tied_embedding(tmp_path: Path) -> None:
    """Some trainers save both. If they differ, it is not known which one the model has."""
    saved(tmp_path / "hub", "Mixtral", MIXTRAL | {"tie_word_embeddings": True})
    rewritten(tmp_path / "hub", lambda found: found.update({"lm_head.weight": found["model.embed_tokens.weight"].clone()}))
    recipe = imported(tmp_path)
    held(0, recipe)
    rewritten(tmp_path / "hub", lambda found: found["lm_head.weight"][3].add_(1e-9))
    with pytest.raises(UserError, match=r"lm_head\.weight differs from embedding\.weight"):
        held(0, recipe)


@pytest.mark.parametrize(("content", "said"), [
    (None, "it lacks tokenizer.json or a similar file"),
    ("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "holds no Hugging Face tokenizer that can be loaded"),
    ('{"version": "1.0", "model": {', "holds no Hugging Face tokenizer that can be loaded"),
])  # fmt: skip
def test_a_tokenizer_that_cannot_be_loaded_has_no_substitute(
    tmp_path: Path, capsys: pytest.CaptureFixture, content: str | None, said: str
) -> None:
    folder, path = tmp_path / "hub", tmp_path / "recipe.yaml"
    saved(folder, "Mixtral", MIXTRAL)
    write_tokenizer("byte", tmp_path)
    if content is not None:
        write_tokenizer("byte", folder)
        (folder / "tokenizer.json").write_text(content)
    capsys.readouterr()
    assert main(["import-hf", str(folder), str(path)]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert said in line
    assert "--tokenizer" in line
    assert not path.exists()
    assert main(["import-hf", str(folder), str(path), "--tokenizer", str(folder)]) == 2
    assert capsys.readouterr().err.startswith(f"foldray: tokenizer={folder}")
    assert main(["import-hf", str(folder), str(path), "--tokenizer", str(tmp_path)]) == 0
    assert yaml.safe_load(path.read_text())["data"]["tokenizer"] == str(tmp_path)


def changed(folder: Path, **keys: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | keys))


def rewritten(hub: Path, change: Any) -> None:
    """Change the tensors in the folder's only file."""
    from safetensors.torch import load_file, save_file

    found = load_file(hub / "model.safetensors")
    change(found)
    save_file(found, hub / "model.safetensors", {"format": "pt"})


def renamed(hub: Path) -> None:
    rewritten(hub, lambda found: found.update({"model.layers.0.self_attn.query.weight": found.pop(QUERY)}))


def indexed(hub: Path, **changes: str) -> None:
    """Write an index, in which some tensors lie in other files."""
    from safetensors.torch import load_file

    placed = dict.fromkeys(load_file(hub / "model.safetensors"), "all.safetensors") | changes
    (hub / "model.safetensors").rename(hub / "all.safetensors")
    (hub / INDEX).write_text(json.dumps({"weight_map": placed}))


def only_an_index(hub: Path, text: str) -> None:
    indexed(hub)
    (hub / INDEX).write_text(text)


INDEX = "model.safetensors.index.json"
QUERY, KEY = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"
BAD = {
    "another type": (lambda hub: changed(hub, model_type="bert"), "has a model of type 'bert'"),
    "no config": (lambda hub: (hub / "config.json").unlink(), "has no config.json"),
    "half a config": (lambda hub: (hub / "config.json").write_text("{"), "its config.json cannot be read"),
    "another width": (lambda hub: changed(hub, hidden_size=64), "has shape [320, 48]"),
    "more layers": (lambda hub: changed(hub, num_hidden_layers=3), "has no tensor model.layers.2."),
    "fewer layers": (lambda hub: changed(hub, num_hidden_layers=1), "has the tensor model.layers.1."),
    "scaled positions": (
        lambda hub: changed(hub, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e6}),
        "its config.json says rope_parameters={'rope_type': 'dynamic'",
    ),
    "another activation": (lambda hub: changed(hub, hidden_act="gelu"), "its config.json says hidden_act=gelu, and foldray"),
    "more experts": (lambda hub: changed(hub, num_local_experts=8), "has no tensor model.layers.0.block_sparse_moe.experts.4."),
    "another family": (lambda hub: changed(hub, model_type="olmoe", num_experts=4), "experts.0.w1.weight, which the recipe's"),
    "a list as config": (lambda hub: (hub / "config.json").write_text("[]"), "config.json cannot be read (Input should be an"),
    "no type": (lambda hub: changed(hub, model_type=None), "has a model of type None"),
    "another name": (renamed, "has the tensor model.layers.0.self_attn.query.weight, which the recipe's model has not"),
    "a lost tensor": (lambda hub: rewritten(hub, lambda found: found.pop(QUERY)), f"has no tensor {QUERY}"),
    "a tensor too many": (
        lambda hub: rewritten(hub, lambda found: found.update({"extra": found[KEY].clone()})), "has the tensor extra, which",
    ),
    "another shape": (
        lambda hub: rewritten(hub, lambda found: found.update({KEY: found[KEY].T.contiguous()})), "has shape [48, 24]",
    ),
    "weights elsewhere": (lambda hub: changed(hub, transformers_weights="../a.safetensors"), "which is no name of a file"),
    "lost weights": (lambda hub: changed(hub, transformers_weights="a.safetensors"), "weights in a.safetensors, and has none"),
    "half of how it generates": (
        lambda hub: (hub / "generation_config.json").write_text("{"), "its generation_config.json cannot be read",
    ),
    "ends that are text": (
        lambda hub: (hub / "generation_config.json").write_text('{"eos_token_id": "</s>"}'), "export.generation.eos_token_id=",
    ),
    "a lost file": (lambda hub: indexed(hub, **{QUERY: "lost.safetensors"}), "its lost.safetensors cannot be read"),
    "an index without places": (lambda hub: only_an_index(hub, "{}"), "has no weight_map"),
    "half an index": (lambda hub: only_an_index(hub, "{"), "cannot be read"),
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


def test_an_index_that_is_wrong_is_told(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    saved(tmp_path / "hub", "Mixtral", MIXTRAL, max_shard_size="20KB")
    path = tmp_path / "hub" / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"][QUERY] = next(file for file in index["weight_map"].values() if file != index["weight_map"][QUERY])
    path.write_text(json.dumps(index))
    assert main(["import-hf", str(tmp_path / "hub"), str(tmp_path / "recipe.yaml")]) == 2
    assert f"lacks the tensor {QUERY}" in capsys.readouterr().err.splitlines()[-1]


def shards(hub: Path, made: Any) -> None:
    made.save_pretrained(hub, max_shard_size="20KB")


SAVES = {
    "one file over many": (lambda hub, old, new: (shards(hub, old), new.save_pretrained(hub)), True),
    "one file beside many": (
        lambda hub, old, new: (
            new.save_pretrained(hub), (hub / "model.safetensors").rename(hub / "new"), shards(hub, old),
            (hub / "new").rename(hub / "model.safetensors"),
        ),
        True,
    ),
    "many files over one": (lambda hub, old, new: (old.save_pretrained(hub), shards(hub, new)), False),
    "many files over more": (lambda hub, old, new: (old.save_pretrained(hub, max_shard_size="10KB"), shards(hub, new)), True),
    "a file with a name": (
        lambda hub, old, new: (
            new.save_pretrained(hub), (hub / "model.safetensors").rename(hub / "own.safetensors"), old.save_pretrained(hub),
            changed(hub, transformers_weights="own.safetensors"),
        ),
        True,
    ),
    "other files beside it": (
        lambda hub, old, new: (
            old.save_pretrained(hub), (hub / "model.safetensors").rename(hub / "consolidated.safetensors"),
            new.save_pretrained(hub),
        ),
        True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SAVES)
def test_the_weights_are_those_that_transformers_loads(tmp_path: Path, case: str) -> None:
    """A folder may hold files of two saves."""
    old, new = (transformers.MixtralForCausalLM(transformers.MixtralConfig(**MIXTRAL)) for _ in range(2))
    save, is_new = SAVES[case]
    save(tmp_path / "hub", old, new)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hub").model.embed_tokens.weight
    assert torch.equal(theirs, (new if is_new else old).model.embed_tokens.weight)
    ours, _ = held(0, imported(tmp_path, precision="float32"))["model/embedding.weight"]
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_is_told(tmp_path: Path, value: float) -> None:
    saved(tmp_path / "hub", "Mixtral", MIXTRAL)
    rewritten(tmp_path / "hub", lambda found: found[KEY][3, 3].fill_(value))
    with pytest.raises(UserError, match=f"has a number in {KEY} that is not finite"):
        held(0, imported(tmp_path))


def test_a_recipe_with_another_model_is_refused(tmp_path: Path) -> None:
    saved(tmp_path / "hub", "Mixtral", MIXTRAL)
    recipe = imported(tmp_path)
    weights = Weights.at(str(tmp_path / "hub"), "training.weights")
    weights.check(recipe.model)
    with pytest.raises(UserError, match=r"means model\.topk=2, and the recipe's model has 3"):
        weights.check(recipe.model.model_copy(update={"topk": 3}))
    with pytest.raises(UserError, match="does not exist"):
        Weights.at(str(tmp_path / "nowhere"), "training.weights")


LARGE = MIXTRAL | {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_local_experts": 8,
    "num_hidden_layers": 5,
    "vocab_size": 32000,
}


def held_memory() -> int:
    """Return the bytes that this process holds, without pages of files."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def growth(rank: int, recipe: Recipe) -> tuple[int, int]:
    """Fill a rank's weights. Return how much memory this took at most beyond the weights, and the bytes of the largest tensor."""
    groups = Groups.create(recipe.placed_fold, rank)
    model = Transformer(recipe.ownership, groups, seed=None)
    parameters, shards = dict(model.named_parameters()), list[Shard]()
    for local, parts in model.global_parts.items():
        for name, index in parts:
            piece = model.pieces[name]
            shards.append(Shard(f"model/{name}", parameters[local].detach()[index], piece.spec.shape, piece.offset))
    for shard in shards:
        shard.tensor.zero_()  # now its pages are there
    before, most, over = held_memory(), [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.002):
            most[0] = max(most[0], held_memory())

    thread = threading.Thread(target=watch)
    thread.start()
    assert recipe.training.weights is not None
    Weights.at(recipe.training.weights, "training.weights").fill(recipe.model, shards, parameters)
    over.set()
    thread.join()
    groups.close()
    assert all(shard.tensor.any() for shard in shards if shard.key.endswith(("query", "down", "embedding.weight")))
    return most[0] - before, max(shard.tensor.numel() * 4 for shard in shards)


@pytest.mark.nightly("writes a model of 2 GiB")
@pytest.mark.parametrize("workers", [1, 2])
def test_reading_takes_no_memory_beyond_the_largest_tensor(tmp_path: Path, ranks: Any, workers: int) -> None:
    torch.manual_seed(1)
    made = transformers.MixtralForCausalLM(transformers.MixtralConfig(**LARGE)).float()
    made.save_pretrained(tmp_path / "hub")
    assert sum(path.stat().st_size for path in (tmp_path / "hub").glob("*.safetensors")) > 2 << 30
    del made
    recipe = imported(tmp_path, fold={"ep": workers}, cluster={"workers": workers}, training={
        "weights": str(tmp_path / "hub"), "global_batch": workers})  # fmt: skip
    for more, largest in ranks(workers).run(growth, recipe, timeout=300):
        assert more < 2 * largest + (64 << 20)
