"""Recipes whose experts have workers of their own: what the section `placement` means, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from foldray import Recipe, UserError
from foldray.blueprint import ModelSpec, Ownership
from foldray.costs.apart import most_kept
from foldray.fold import Fold
from foldray.graph import Place, Slicing, StepGraph
from foldray.orders import position_list


def placed(placement: dict[str, Any] | None, **sections: Any) -> Recipe:
    base: dict[str, Any] = {"model": {"preset": "tiny"}, "fold": {"ep": 2}, "cluster": {"workers": 4}}
    return Recipe.parse({**base, **({} if placement is None else {"placement": placement}), **sections})


BOTH = {"attention": 2, "experts": 2}


def test_a_placement_is_a_fold_over_disjoint_workers() -> None:
    recipe = placed({**BOTH, "expert_pp": 1}, fold={"pp": 2, "ep": 2}, training={"global_batch": 8})
    assert recipe.placed_fold == Fold(4, pp=2, ep=2, expert_ranks=2, expert_pp=1)
    assert recipe.schedule.kind == "af_pipe"
    assert recipe.accumulation == 8
    assert Recipe.parse(recipe.model_dump()) == recipe
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe


def test_a_recipe_says_how_many_micro_batches_are_alive() -> None:
    kept = []
    for alive in (1, 2, None):
        recipe = placed(BOTH, schedule={"alive": alive}, training={"global_batch": 16})
        assert recipe.ordering.alive == recipe.named_ordering("af_pipe").alive == alive
        blocks = tuple(map(recipe.model.block, range(2)))
        graph = StepGraph((blocks,), Slicing((16,), (16,)), micro_batches=4, places=(Place(0, 1), Place(0, 1)))
        kept.append(most_kept(position_list(graph, 1, recipe.ordering), "expert").total())
    assert kept == [2, 4, 7]


def test_adapters_go_by_half() -> None:
    given = {**BOTH, "attention_adapters": ["mlx5_0"], "expert_adapters": ["mlx5_1", "mlx5_2:1"]}
    recipe = placed(given, cluster={"workers": 4, "gpu": True})
    assert recipe.adapters == (("mlx5_0",),) * 2 + (("mlx5_1", "mlx5_2:1"),) * 2
    assert placed(BOTH).adapters == placed(None).adapters == (None,) * 4


def test_tokens_go_once_to_each_node_with_any_dispatch() -> None:
    recipe = placed({"attention": 2, "experts": 4}, fold={"ep": 4, "ep_inside": 2}, cluster={"workers": 6})
    assert recipe.placed_fold == Fold(6, ep=4, ep_inside=2, expert_ranks=4)


def test_labels_go_by_half() -> None:
    labelled = {**BOTH, "attention_nodes": "gpu=h100", "expert_nodes": "gpu=a100"}
    assert placed(labelled).labels == ("gpu=h100", "gpu=h100", "gpu=a100", "gpu=a100")
    assert placed(BOTH).labels == placed(None).labels == (None,) * 4


BAD: list[tuple[dict[str, Any] | None, dict[str, Any], str]] = [
    ({"attention": 2}, {}, "placement.experts=nothing: is required"),
    ({"attention": 2, "experts": 1}, {}, "placement=2 + 1: attention + experts must be cluster.workers=4"),
    ({"attention": 0, "experts": 4}, {}, "placement.attention=0: must be greater than or equal to 1"),
    ({**BOTH, "expert": 1}, {}, "placement.expert=1: is not a known key"),
    ({"attention": 1, "experts": 3}, {}, "fold=1·2·1: etp·ep·expert_pp must divide the experts' 3 ranks"),
    (BOTH, {"fold": {"tp": 4}}, "fold=4·1·1: tp·cp·pp must divide attention's 2 ranks"),
    (BOTH, {"schedule": {"kind": "stream", "degree": 2}}, "schedule.kind=stream: orders workers that have both"),
    (BOTH, {"schedule": {"backward": "aaam", "degree": 2}}, "schedule.backward=aaam: orders workers that have both"),
    (None, {"schedule": {"kind": "af_pipe"}}, "schedule.kind=af_pipe: is for experts with workers of their own"),
    (BOTH, {"schedule": {"kind": "list", "alive": 2}}, "schedule.alive=2: has no meaning with kind=list, only with af_pipe"),
    (None, {"schedule": {"alive": 2}}, "schedule.alive=2: has no meaning with kind=auto, only with af_pipe"),
    (BOTH, {"schedule": {"alive": 0}}, "schedule.alive=0: must be greater than or equal to 1"),
    (BOTH, {"moe": {"backend": "tutel"}}, "moe.backend=tutel: Tutel's kernels"),
    (BOTH, {"model": {"preset": "tiny", "router": {"capacity_factor": 1.0, "pad": True}}}, "model.router.pad=true"),
    (BOTH, {"model": {"preset": "tiny", "norms": "both"}}, "model.norms=both: must be before if the experts have workers"),
    ({**BOTH, "expert_pp": 2}, {"fold": {"ep": 1}, "model": {"preset": "tiny", "layers": 1}}, "placement.expert_pp=2: makes 2"),
    ({**BOTH, "expert_adapters": ["mlx5_0"]}, {}, "placement.expert_adapters=['mlx5_0']: are for NCCL; workers without GPUs"),
    ({**BOTH, "attention_adapters": ["mlx5_0,mlx5_1"]}, {}, "placement.attention_adapters"),
    (
        {**BOTH, "attention_adapters": ["mlx5_0"]},
        {"tune": {"space": {"attention": [1, 2]}}, "cluster": {"workers": 4, "gpu": True}},
        "tune.space.attention=[1, 2]: cannot be combined with adapters by half",
    ),
    ({**BOTH, "expert_nodes": "gpu"}, {}, "placement.expert_nodes=gpu: must be a node's label"),
    ({**BOTH, "expert_nodes": "a=b=c"}, {}, "placement.expert_nodes=a=b=c: must be a node's label"),
    ("both", {}, "placement=both"),  # type: ignore[list-item]
]


@pytest.mark.parametrize(("placement", "sections", "line"), BAD, ids=[line.split(":")[0] for _, _, line in BAD])
def test_mistakes_are_one_line(placement: dict[str, Any] | None, sections: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError) as error:
        placed(placement, **sections)
    assert str(error.value).startswith(line)
    assert "\n" not in str(error.value)


def test_the_nearest_placements_are_legal() -> None:
    with pytest.raises(UserError) as error:
        placed({"attention": 1, "experts": 3}, training={"global_batch": 12})
    options = error.value.rule.split("nearest legal folds: ")[1].split("; ")
    assert options
    for option in options:
        sizes = {axis: int(size) for axis, size in (part.split("=") for part in option.split())}
        placement = {"attention": 1, "experts": 3, "expert_pp": sizes.pop("expert_pp")}
        model = {"preset": "tiny", "experts": 6, "layers": 6, "moe_every": 1}
        assert placed(placement, fold=sizes, model=model).placement


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("dense", [0, 1, 3])
@pytest.mark.parametrize("virtual", [1, 2])
@pytest.mark.parametrize("further", [0, 2])
def test_stages_of_experts_share_the_moe_blocks_out(every: int, dense: int, virtual: int, further: int) -> None:
    """Blocks of further tokens are like the last one, which has experts here."""
    model = ModelSpec(preset="tiny", layers=dense + 5 * every, moe_every=every, dense_first=dense, mtp_depth=further)
    ownership = Ownership(model, Fold(6, pp=2, expert_ranks=4, expert_pp=2), virtual)
    counts = [sum(model.is_moe(layer) for layer in stage.layers) for stage in ownership.expert_stages]
    assert len(counts) == 2 * virtual
    assert sum(counts) == 5 + further
    assert max(counts) - min(counts) <= 1
    assert [stage.position for stage in ownership.expert_stages] == [0, 1] * virtual
    assert [layer for stage in ownership.expert_stages for layer in stage.layers] == list(model.all_layers)
    assert {place[0] for place in ownership.places[model.layers - 1 :]} == {1}, (
        "attention of further tokens is behind the last block"
    )
