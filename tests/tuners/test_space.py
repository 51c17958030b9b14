"""The table of legal settings: it has every legal setting once, and converts rows to parameters of trials and back."""

from __future__ import annotations

import time
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from foldray.costs.hardware import load_hardware
from foldray.errors import UserError
from foldray.plan.placing import roofline
from foldray.plan.space import Space
from foldray.recipe import Recipe
from foldray.refold import as_candidate
from tests.foldray.test_recipe import SHIPPED
from tuners import predictions
from tuners.predictions import predict_rows
from tuners.space import Setting, Settings, apply_setting


def recipe(workers: int = 4, **space: Any) -> Recipe:
    return Recipe.parse(
        {
            "model": {"preset": "tiny", "layers": 2},
            "engine": {"kind": "torch"},
            "cluster": {"workers": workers},
            "tune": {"space": space},
        }
    )


@pytest.mark.gate(1 / 2)
def test_every_row_is_a_legal_recipe_and_each_means_something_else() -> None:
    table = Settings(recipe(sp_bytes=[None, 65536]))
    told = [apply_setting(table.recipe, row) for row in table.rows]
    assert len(table.rows) > 100
    assert len({each.model_dump_json() for each in told}) == len(table.rows)
    assert {each.fold.ep for each in told} == {1, 2, 4}
    assert all(Setting.of(each) == row for each, row in zip(told, table.rows, strict=True))


def test_rows_are_all_that_is_legal() -> None:
    """Compare the table with all combinations, each tried separately."""
    space = {"cp": [1], "pp": [1], "kind": ["sequential", "moe_only", "stream"], "degree": [1, 2], "sp_bytes": [None, 1 << 20]}
    table = Settings(recipe(2, **space))
    found = set()
    for tp in (1, 2):
        for ep in (1, 2):
            for etp in (1, 2):
                for kind, degree in (("sequential", 1), ("moe_only", 2), ("stream", 2)):
                    for how, size in (("end", 0), ("chunks", 1 << 20)):
                        row = Setting(tp, 1, 1, ep, etp, 1, 1, kind, degree, "time_uniform", 1, "none", how, size)
                        try:
                            apply_setting(table.recipe, row)
                        except UserError:
                            continue
                        if ep > 1 or degree == 1:
                            found.add(row)
    assert set(table.rows) == found


OWN = (
    {}, {"kind": "flow", "sp_bytes": "auto"}, {"kind": "stream", "degree": 3, "reduction": "buckets", "slicing": "token_uniform"},
    {"kind": "aaam", "degree": 2, "backward": "stream", "recompute": ["expert"], "slices": [128, 128]},
    {"kind": "weave", "degrees": [1, 2], "reduction": "chunks", "sp_bytes": 100_000},
    {"kind": "stream", "degree": 4, "attention_degree": 2, "slices": [160, 96]},
)  # fmt: skip


@pytest.mark.parametrize("ep", [1, 2])
@pytest.mark.parametrize("schedule", OWN, ids=str)
def test_a_space_without_lists_has_the_unchanged_recipe(schedule: dict[str, Any], ep: int) -> None:
    base = recipe(2, tp=[1], cp=[1], pp=[1], etp=[1]).model_dump(exclude={"schedule"})
    given = Recipe.parse(base | {"fold": {"ep": ep}, "training": {"micro_batch": 2}, "schedule": schedule})
    table = Settings(given)
    assert table.default in table.number
    assert {(row.reduction, row.sp_bytes, row.recompute) for row in table.rows} == {
        (table.default.reduction, table.default.sp_bytes, table.default.recompute)
    }
    own = apply_setting(given, table.default)
    assert own.ordering == given.ordering._replace(reduction=own.ordering.reduction)
    assert (own.ordering.reduction.kind, own.ordering.reduction.most) == (
        given.ordering.reduction.kind, given.ordering.reduction.most,
    )  # fmt: skip


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_recipe_may_win_its_own_study(path: Path) -> None:
    shipped = Recipe.load(path)
    sizes = Setting.of(shipped)
    fold = {axis: (getattr(sizes, axis),) for axis in ("tp", "cp", "pp", "ep", "etp")}
    space = shipped.tune.space.model_copy(update=fold)
    table = Settings(shipped.model_copy(update={"tune": shipped.tune.model_copy(update={"space": space})}))
    assert table.default in table.number


def test_a_list_settles_or_widens() -> None:
    first, *rows = Settings(recipe(ep=[2])).rows
    assert (first, {row.ep for row in rows}) == (Setting.of(recipe()), {2})
    rows = Settings(recipe(tp=[1], cp=[1], pp=[1], micro_batch=[1, 2], recompute=[[], ["expert"]])).rows
    assert {row.micro_batch for row in rows} == {1, 2}
    assert {row.recompute for row in rows} == {"none", "expert"}


def test_what_has_no_choice_is_no_parameter() -> None:
    table = Settings(recipe(tp=[1], cp=[1], pp=[1], etp=[1]))
    assert set(table.distributions) == {"ep", "kind", "degree"}


def test_params_are_rows_and_back() -> None:
    table = Settings(recipe(sp_bytes=[None, 65536, 1 << 20]))
    for row in table.rows:
        params = table.params(row)
        assert table.row(params) == row
        for name, value in params.items():
            distribution = table.distributions[name]
            assert distribution._contains(distribution.to_internal_repr(value))
    assert table.features.shape[0] == len(table.rows)
    assert len({tuple(each) for each in table.features.tolist()}) == len(table.rows)


def test_a_space_without_a_legal_row_is_refused() -> None:
    with pytest.raises(UserError, match="has no legal setting for 4 workers"):
        Settings(recipe(tp=[3]))


def placed(**space: Any) -> Recipe:
    return Recipe.parse(
        {
            "model": {"preset": "tiny", "layers": 4, "moe_every": 1},
            "placement": {"attention": 2, "experts": 2},
            "training": {"global_batch": 12},
            "engine": {"kind": "torch"},
            "cluster": {"workers": 4},
            "tune": {"space": space},
        }
    )


def test_workers_of_their_own_keep_the_nodes_of_their_experts() -> None:
    given = Recipe.parse({**placed().model_dump(), "fold": {"ep": 2, "ep_inside": 2}})
    assert apply_setting(given, Setting.of(given)).fold == given.fold
    assert "2 of a group on a node" in str(Setting.of(given))


def test_workers_of_their_own_are_split_in_every_way_that_is_asked_for() -> None:
    table = Settings(placed(attention=[1, 2, 3], degree=[1, 2]))
    told = [apply_setting(table.recipe, row) for row in table.rows]
    assert all(Setting.of(each) == row for each, row in zip(told, table.rows, strict=True))
    assert {each.placed_fold.attention_ranks for each in told} == {1, 2, 3}
    assert {each.schedule.kind for each in told} == {"af_pipe"}
    assert {each.placed_fold.moe_pp for each in told if each.placed_fold.moe_ranks == 2} == {1, 2}
    assert len({each.model_dump_json() for each in told}) == len(table.rows)
    assert {row.attention for row in Settings(placed()).rows} == {2}
    predicted = predict_rows(Settings(placed(attention=[0, 1, 2, 3], degree=[1])), load_hardware("h800"))
    assert min(predicted.seconds) > 0
    assert min(predicted.peak_bytes) > 0


def test_a_found_list_needs_no_bound_of_micro_batches() -> None:
    bounded = placed(attention=[2]).model_dump()
    bounded["schedule"]["alive"] = 2
    given = Recipe.parse(bounded)
    told = {kind: apply_setting(given, Setting.of(given)._replace(kind=kind)) for kind in ("af_pipe", "list")}
    assert told["af_pipe"].schedule.alive == 2
    assert told["list"].schedule.alive is None


def test_splits_need_a_worker_for_each_half_and_a_walk_needs_hardware() -> None:
    with pytest.raises(UserError, match=r"tune\.space\.attention=4: must leave a worker to each half; .*; legal: 0…3"):
        Settings(placed(attention=[4]))
    with pytest.raises(UserError, match=r"tune\.space\.attention=auto: needs tune\.hardware"):
        placed(attention="auto")


@pytest.mark.parametrize("own", [True, False])
def test_shared_workers_stand_beside_workers_of_their_own(own: bool) -> None:
    """Whichever of both the recipe has, one table has both, and every row is the recipe that it says."""
    lists: dict[str, Any] = {"attention": [0, 1, 2], "degree": [1, 2], "sp_bytes": [None, 1 << 20]}
    given = placed(**lists)
    if not own:
        given = Recipe.parse({**given.model_dump(exclude={"placement", "schedule"}), "schedule": {"kind": "stream", "degree": 2}})
    table = Settings(given)
    told = [apply_setting(given, row) for row in table.rows]
    assert all(Setting.of(each) == row for each, row in zip(told, table.rows, strict=True))
    assert {each.placement.attention if each.placement else 0 for each in told} == {0, 1, 2}
    assert {each.schedule.kind for each in told if each.placement} == {"af_pipe"}
    assert {"sequential", "stream", "list"} < {each.schedule.kind for each in told if not each.placement}
    assert [table.row(table.params(row)) for row in table.rows] == table.rows
    assert len({each.model_dump_json() for each in told}) == len(table.rows)


def test_zeros_beside_sizes_are_told_apart() -> None:
    """A list may order shared workers and own ones. In a trial's parameters, no workers of their own look like the most."""
    table = Settings(placed(attention=[0, 2], kind=["list"], degree=[1], tp=[1], cp=[1], pp=[1], ep=[1, 2], etp=[1]))
    assert {(row.attention, row.workers) for row in table.rows if row.kind == "list"} == {(0, "shared"), (2, "own")}
    assert [table.row(table.params(row)) for row in table.rows] == table.rows


def test_a_walk_begins_at_the_allocated_split_and_goes_to_where_steps_are_shorter() -> None:
    base = placed().model_dump()
    base["tune"] = {"hardware": "h800", "space": {"attention": "auto", "kind": ["af_pipe"], "degree": [1]}}
    base["cluster"]["workers"], base["placement"]["attention"] = 8, 6
    base["training"]["global_batch"] = 840
    table = Settings(Recipe.parse(base))
    _, allocation = roofline(Space(as_candidate(table.recipe).job, load_hardware("h800"), 8))
    assert {row.attention for row in table.rows} == set(range(1, 8))
    tried: dict[int, float | None] = {}
    walked: list[int] = []
    while reach := [row for row in table.within_reach(range(len(table.rows)), tried) if row not in tried]:
        split = min(reach, key=lambda row: (abs(table.rows[row].attention - 6), row))
        walked.append(table.rows[split].attention)
        tried[split] = 1.0 + abs(walked[-1] - 6)  # the fastest split is 6
    steps = list(dict.fromkeys(walked))
    assert steps[0] == allocation.attention != 6
    assert all(abs(later - earlier) == 1 for earlier, later in pairwise(steps))
    assert 6 in steps
    failed = dict.fromkeys((row for row in range(len(table.rows)) if table.rows[row].attention == allocation.attention), None)
    beyond = {table.rows[row].attention for row in table.within_reach(range(len(table.rows)), failed)}
    assert beyond >= {allocation.attention - 1, allocation.attention + 1} & set(range(1, 8)), "a split that fails does not end it"


NEAR = (
    ("micro_batch", 4, {2, 4, 8}), ("batch_degree", 2, {1, 2, 4}),
    ("degree", 3, {1, 2, 3, 4, 6, 8}), ("zero", "1", {"0", "1", "2"}),
    ("dispatch", "assignment", {"assignment", "rank"}), ("sp_bytes", 1 << 20, {0, 1 << 19, 1 << 20, 1 << 21, 5 << 19, 25 << 20}),
    ("slicing", "time_uniform", {"time_uniform", "token_uniform"}), ("ep", 2, {1, 2}), ("etp", 1, {1, 2}),
    ("kind", "flow", {"sequential", "moe_only", "one_a_one_m", "stream", "list", "flow"}),
)  # fmt: skip


@pytest.mark.parametrize(("field", "own", "values"), NEAR, ids=[field for field, *_ in NEAR])
def test_a_recipe_without_a_space_is_tried_with_neighbouring_values(field: str, own: Any, values: set[Any]) -> None:
    table = _table_of_neighbours()
    assert getattr(table.default, field) == own
    assert {getattr(row, field) for row in table.rows} == values


def test_every_neighbour_is_a_recipe_of_its_own() -> None:
    table = _table_of_neighbours()
    told = [apply_setting(table.recipe, row) for row in table.rows]
    assert [Setting.of(each) for each in told] == table.rows
    assert len({each.model_dump_json() for each in told}) == len(table.rows)
    assert [table.row(table.params(row)) for row in table.rows] == table.rows
    assert {row.backend for row in table.rows} >= {"torch", "deepspeed"}
    fewer = {len(each.slicing.attention) for each in told if each.slicing and each.schedule.degree == 4}
    assert fewer >= {2, 4}, "attention in fewer slices than pieces"


@lru_cache
def _table_of_neighbours() -> Settings:
    schedule = {"kind": "flow", "degree": 3, "batch_degree": 2, "reduction": "chunks", "sp_bytes": 1 << 20}
    sizes = {"fold": {"ep": 2}, "training": {"micro_batch": 4, "global_batch": 16}, "engine": {"kind": "torch", "zero": 1}}
    base = recipe(2).model_dump(exclude={"tune", "schedule", "fold", "training", "engine"})
    return Settings(Recipe.parse({**base, "schedule": schedule, **sizes}))


def test_tutel_is_tried_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for installed in (True, False):
        found = {"tutel": installed, "deepspeed": False}
        monkeypatch.setattr("tuners.space.importlib.util.find_spec", lambda name, found=found: found[name] or None)
        rows = Settings(Recipe.parse(recipe(2).model_dump(exclude={"tune"}))).rows
        assert {row.backend for row in rows} == {"torch", *(["tutel"] if installed else [])}


def test_axis_orders_and_nodes_are_searched_where_they_are_listed() -> None:
    orders = ["tp-cp-dp-pp", "dp-tp-cp-pp"]
    table = Settings(recipe(order=orders, moe_order=["ep-etp-edp-pp"], dispatch=["rank"], ep_inside=[1, 2], ep=[4], degree=[1]))
    rows = table.rows[1:]
    assert {row.order for row in rows} == set(orders)
    assert {row.moe_order for row in rows} == {"ep-etp-edp-pp"}
    assert {apply_setting(table.recipe, row).fold.ep_inside for row in rows} == {1, 2}
    assert any("2 of a group on a node" in str(row) for row in rows)
    with pytest.raises(UserError, match=r"tune\.space\.order\.0=tp-dp-pp"):
        recipe(order=["tp-dp-pp"])


def test_a_recipe_that_leaves_its_order_open_is_a_row_that_does() -> None:
    """Where rows travel, the recipe's own row is `auto`, with the least prediction of all orders; elsewhere it cuts nothing."""
    open_order = Recipe.parse({**recipe(2, tp=[1], cp=[1], pp=[1], etp=[1]).model_dump(), "fold": {"ep": 2}})
    table = Settings(open_order)
    assert (table.default.kind, Setting.of(recipe(2)).kind) == ("auto", "sequential")
    assert {row.kind for row in table.rows if row.ep == 1} == {"sequential", "list"}
    assert apply_setting(open_order, table.default).schedule.kind == "auto"
    fast = table.default._replace(kind="stream", degree=2)
    made_up = [0.5 if row == fast else 0.1 if row.ep == 1 else 1.0 for row in table.rows]
    assert predictions._with_choice(table, made_up) == [0.5, *made_up[1:]], "of its own fold alone"


def test_tokens_may_travel_once_to_each_rank() -> None:
    kinds: dict[str, Any] = {"kind": ["sequential", "stream"]}
    table = Settings(recipe(tp=[1], cp=[1], pp=[1], etp=[1], degree=[1, 2], dispatch=["assignment", "rank"], **kinds))
    assert {(row.ep, row.dispatch) for row in table.rows} == {
        (1, "assignment"), *((ep, way) for ep in (2, 4) for way in ("assignment", "rank"))
    }  # fmt: skip
    for row in table.rows:
        made = apply_setting(table.recipe, row)
        assert (made.moe.dispatch, Setting.of(made)) == (row.dispatch, row)
        assert ("once to each rank" in str(row)) == (row.dispatch == "rank")
    hardware = load_hardware("h200").model_copy(update={"peak_tflops": {"fp32": 60.0}})
    together = predict_rows(table, hardware)
    for number, row in enumerate(table.rows):
        alone = Settings(apply_setting(table.recipe, row).model_copy(update={"tune": recipe(**_only(row)).tune}))
        assert alone.rows == [row]
        assert predict_rows(alone, hardware).seconds == [together.seconds[number]]


def test_attention_may_have_fewer_slices_than_pieces() -> None:
    kinds: dict[str, Any] = {"kind": ["moe_only", "stream"], "degree": [1, 2, 4], "tp": [1], "cp": [1], "pp": [1], "ep": [4]}
    table = Settings(recipe(etp=[1], attention_degree=[2, 4], **kinds))
    found = {(row.kind, row.degree, len(made.slicing.attention) if made.slicing else 1) for row in table.rows
             for made in [apply_setting(table.recipe, row)]}  # fmt: skip
    cut = {("moe_only", 2, 1), ("moe_only", 4, 1), ("stream", 2, 2), ("stream", 4, 4), ("stream", 4, 2)}
    assert found == {("sequential", 1, 1)} | cut, "the recipe's own setting, and the lists'"
    assert len(table.rows) == len(found)
    for row in table.rows:
        assert table.row(table.params(row)) == row
        assert Setting.of(apply_setting(table.recipe, row)) == row
        assert (" d=4/2" in str(row)) == (row.attention_degree == 2)


def test_rows_of_a_large_table_have_one_price(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one worker nothing travels, so a found list takes as long as passes of stages, nearly: hosts get ahead differently."""
    monkeypatch.setattr("tuners.predictions._MOST_SIMULATED", 1)
    sizes = {"layers": 2, "hidden": 1024, "heads": 8, "kv_heads": 2, "head_dim": 128, "expert_hidden": 4096}
    given = {
        "model": {"preset": "tiny", **sizes},
        "engine": {"kind": "torch"},
        "precision": "bfloat16",
        "data": {"seq_len": 16384},
    }
    space = {"kind": ["sequential", "list"], "degree": [1], "recompute": [[]], "sp_bytes": [None], "micro_batch": [1]}
    table = Settings(Recipe.parse({**given, "training": {"global_batch": 2}, "tune": {"space": space}}))
    assert [row.kind for row in table.rows] == ["sequential", "list"]
    passes, listed = predict_rows(table, load_hardware("h200")).seconds
    assert listed == pytest.approx(passes, rel=0.02)


def _only(row: Setting) -> dict[str, Any]:
    """Return the space of one row."""
    sizes = {axis: [getattr(row, axis)] for axis in ("tp", "cp", "pp", "ep", "etp")}
    return {**sizes, "degree": [row.degree], "kind": ["stream" if row.degree > 1 else "sequential"], "dispatch": [row.dispatch]}


def test_a_setting_is_told_in_a_line() -> None:
    row = Setting(2, 1, 1, 4, 1, 1, 2, "stream", 4, "time_uniform", 1, "expert", "chunks", 1 << 20)
    assert str(row) == "TP2 EP4 stream d=4, micro-batch 2, recomputes expert, chunks of 1 MiB"
    assert str(Setting.of(placed())) == "attention on 2 af_pipe"


@pytest.mark.parametrize(
    ("workers", "space", "what"),
    [
        (55440, {}, "folds"),
        (64, {"ep": [64], "micro_batch": list(range(1, 17)), "degree": list(range(1, 17)), "sp_bytes": [1, 2, 3]}, "settings"),
    ],
    ids=["folds", "settings"],
)
def test_a_space_that_would_take_hours_is_refused_in_seconds(workers: int, space: dict[str, Any], what: str) -> None:
    big = Recipe.parse(
        {
            "model": {"preset": "tiny", "layers": 2, "experts": 64},
            "engine": {"kind": "torch"},
            "training": {"global_batch": 16 * workers},
            "cluster": {"workers": workers},
            "tune": {"space": space},
        }
    )
    begin = time.process_time()
    rule = f"is too many to check, for {workers} workers; list fewer values"
    with pytest.raises(UserError, match=rf"^tune\.space=more than 16384 {what}: {rule}$"):
        Settings(big)
    assert time.process_time() - begin < 60
