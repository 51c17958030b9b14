"""Upcycling: a model with experts begins by computing what the dense model computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from foldray import UserError
from foldray.cli import main
from foldray.comm import Groups
from foldray.recipe import Recipe
from tests.foldray.parity import engine_on, go_on, sample
from tests.trainers.hugging_face.oracle import SIZES, YARN, filled, saved, widened
from trainers.hugging_face.weights import Weights

DENSE = {key: value for key, value in SIZES.items() if key != "num_experts_per_tok"} | {"intermediate_size": 48, "head_dim": 12}
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("Llama", DENSE | {"rope_parameters": YARN}),
    ("Mistral", DENSE | {"sliding_window": 5, "tie_word_embeddings": True}),
    ("Qwen2", DENSE),
    ("Qwen3", DENSE | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
]
WAYS = [(4, 1, 1), (4, 2, 1), (3, 1, 4), (4, 3, 2)]  # copies, copies per token, experts per copy


def imported(folder: Path, path: Path, copies: int, topk: int, parts: int, **sections: Any) -> Recipe:
    given = ["--upcycle", str(copies), "--topk", str(topk), "--granularity", str(parts), "--tokenizer", "byte"]
    assert main(["import-hf", str(folder), str(path), *given]) == 0
    base = {"engine": {"kind": "torch"}, "precision": "float64", "data": {"seq_len": 16, "tokenizer": "byte"}}
    recipe = yaml.safe_load(path.read_text())
    recipe["training"] = recipe["training"] | sections.pop("training", {})
    return Recipe.parse({**recipe, **base, **sections})


@pytest.mark.parametrize(("family", "sizes"), FAMILIES)
@pytest.mark.parametrize(("copies", "topk", "parts"), WAYS)
def test_the_function_is_preserved(
    tmp_path: Path, family: str, sizes: dict[str, Any], copies: int, topk: int, parts: int
) -> None:
    theirs = saved(tmp_path / "hub", family, sizes)
    recipe = imported(tmp_path / "hub", tmp_path / "recipe.yaml", copies, topk, parts)
    assert (recipe.model.experts, recipe.model.topk) == (copies * parts, topk * parts)
    engine, text_BL = filled(recipe, groups := Groups.create(recipe.placed_fold)), sample(3, 3, 14, 320)
    with widened():
        expected = theirs(text_BL).logits
    torch.testing.assert_close(engine.model.logits(text_BL), expected, atol=1e-9, rtol=1e-9)
    router = engine.model.block(0).moe.router.weight.view(48, copies, parts)
    assert torch.equal(router, router[..., :1].expand_as(router))
    assert len(router[..., 0].unique(dim=1)[0]) == copies
    groups.close()


def losses(rank: int, recipe: Recipe, steps: int) -> list[float]:
    with engine_on(recipe, rank, filled) as (engine, groups):
        return [loss for loss, *_ in go_on(engine, groups, recipe, range(steps))["losses"]]


@pytest.mark.nightly("many steps on four ranks")
@pytest.mark.parametrize("steps", [20, 200])
def test_training_goes_on_from_the_dense_loss(tmp_path: Path, ranks: Any, steps: int) -> None:
    """Under TP2, EP2 and ETP2. Random text has a loss of ln 320 at best, and an untrained model more."""
    theirs = saved(tmp_path / "hub", "Llama", DENSE)
    recipe = imported(
        tmp_path / "hub", tmp_path / "recipe.yaml", 4, 2, 2, fold={"tp": 2, "ep": 2, "etp": 2}, cluster={"workers": 4},
        training={"global_batch": 8, "micro_batch": 2}, optimizer={"lr": 5e-3, "warmup_steps": 0, "decay": "constant"},
    )  # fmt: skip
    text_BL = sample(0, 8, 17, 320)
    with widened():
        logits_BLV = theirs(text_BL[:, :-1]).logits
    dense = float(torch.nn.functional.cross_entropy(logits_BLV.flatten(0, 1), text_BL[:, 1:].flatten()))
    for found in ranks(4).run(losses, recipe, steps, timeout=600):
        assert found[0] == pytest.approx(dense, abs=1e-9)
        assert found[-1] < found[0]


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ([], "upcycle=not given: the folder has a dense model (llama); say how many experts"),
        (["--upcycle", "4", "--topk", "5"], "topk=5"),
        (["--upcycle", "4", "--granularity", "5"], "granularity=5: must divide the inner width 48"),
        (["--upcycle", "0"], "upcycle=0"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture, given: list[str], line: str) -> None:
    saved(tmp_path / "hub", "Llama", DENSE)
    capsys.readouterr()
    assert main(["import-hf", str(tmp_path / "hub"), str(tmp_path / "recipe.yaml"), *given]) == 2
    told = capsys.readouterr().err.strip().splitlines()
    assert len(told) == 1
    assert line in told[0]
    assert not (tmp_path / "recipe.yaml").exists()


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"expert_hidden": 20}, "must divide ffn_hidden=48"),
        ({"topk": 3}, "must be multiples of 2"),
        ({"router": {"scale": 1.0}}, "router.scale=1 must be 2"),
        ({"router": {"scale": 2.0, "softmax": "before_topk"}}, "must sum to 1"),
        ({"shared_hidden": 8}, "no shared expert"),
        ({"router": {"scale": 2.0, "capacity_factor": 1.0}}, "no expert may drop"),
        ({"heads": 8}, "means model.heads=4"),
    ],
)
def test_a_model_that_would_begin_differently_is_refused(tmp_path: Path, change: dict[str, Any], line: str) -> None:
    saved(tmp_path / "hub", "Llama", DENSE)
    recipe = imported(tmp_path / "hub", tmp_path / "recipe.yaml", 4, 2, 2)
    weights = Weights.at(str(tmp_path / "hub"), "training.weights")
    weights.check(recipe.model)
    with pytest.raises(UserError, match=line):
        weights.check(
            recipe.model.model_validate(recipe.model.model_dump(exclude={"router"}) | {"router": {"scale": 2.0}} | change)
        )


def test_a_model_with_experts_is_not_upcycled(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    saved(tmp_path / "hub", "Mixtral", SIZES | {"intermediate_size": 56, "num_local_experts": 4})
    assert main(["import-hf", str(tmp_path / "hub"), str(tmp_path / "recipe.yaml"), "--upcycle", "4"]) == 2
    assert "upcycle=4: the folder's model has experts already" in capsys.readouterr().err
