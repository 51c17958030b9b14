"""`foldray verify`: it passes correct gradients, names the parameter of a wrong one, and shrinks any recipe to its fold."""

from __future__ import annotations

import json

import pytest
import torch

from foldray.blueprint import PRESETS
from foldray.cli import main
from foldray.comm import Groups
from foldray.errors import UserError
from foldray.recipe import Recipe
from foldray.runtime import Gradients
from tests.foldray.folds import legal_folds, name
from tests.foldray.parity import make_recipe
from trainers.measure.verify import TOLERANCE, UPDATE_TOLERANCE, Verification, _report, as_checked, compared, on_rank, small

_QUIET = {"optimizer": {"kind": "adamw", "lr": 1e-3}, "precision": "float32"}


def run_comparison(rank: int, recipe: Recipe, wrong: str = "") -> dict | None:
    groups = Groups.create(recipe.placed_fold, rank)
    finish = Gradients.finish

    def doubled(self: Gradients) -> None:
        finish(self)
        for buffer in self.buffers:
            if buffer.name == wrong and self.groups.fold.world_size > 1:  # the single process stays correct
                buffer.sums.mul_(2.0)

    Gradients.finish = doubled  # type: ignore[method-assign]
    try:
        return on_rank(recipe, groups, torch.device("cpu"))
    finally:
        Gradients.finish = finish  # type: ignore[method-assign]
        groups.close()


@pytest.mark.gate(1 / 3)
@pytest.mark.parametrize(
    ("workers", "fold", "engine", "backend"),
    [
        (4, {"tp": 2, "cp": 2, "ep": 4}, {"kind": "torch"}, "torch"),
        (4, {"pp": 2, "etp": 2}, {"kind": "torch"}, "torch"),
        (4, {"tp": 2, "pp": 2, "ep": 2}, {"kind": "deepspeed", "zero": 1}, "torch"),
        (2, {"cp": 2, "ep": 2}, {"kind": "deepspeed", "zero": 2}, "deepspeed"),
    ],
)
def test_what_is_right_passes(ranks, workers: int, fold: dict, engine: dict, backend: str) -> None:
    router = {"softmax": "before_topk", "normalize": True} if backend == "deepspeed" else {}
    recipe = make_recipe(
        workers, fold, engine=engine, moe={"backend": backend, "experts": "grouped"}, model={"router": router}, **_QUIET
    )
    found = compared(recipe, ranks(workers).run(run_comparison, recipe)[0])
    assert (found.engine, found.backend) == (engine["kind"], backend)
    assert found.dtype == ("float64" if engine["kind"] == "torch" else "float32")
    assert found.passed, found
    assert 0 < found.grad_rel_distance <= TOLERANCE[found.dtype]
    assert 0 < found.grad_max_rel_diff <= TOLERANCE[found.dtype]
    assert 0 < found.update_rel_diff <= UPDATE_TOLERANCE[found.precision]
    assert found.changed == ({} if found.dtype == found.precision else {"precision": found.dtype})


@pytest.mark.nightly("a fault that other tests find, too")
def test_adapters_are_compared_alone(ranks) -> None:
    """No gradient is zero, although the second matrices of adapters begin with zeros."""
    recipe = make_recipe(4, {"tp": 2, "etp": 2}, model={"adapter": {"rank": 4}}, **_QUIET)
    found = compared(recipe, ranks(4).run(run_comparison, recipe)[0])
    assert found.passed, found
    assert "_lora." in found.worst_parameter
    assert not compared(recipe, ranks(4).run(run_comparison, recipe, "replicated")[0]).passed


@pytest.mark.gate(1 / 4)
@pytest.mark.parametrize(("wire", "least", "most"), [("bfloat16", 1e-4, 0.02), ("float8", 5e-3, 0.3)])
def test_rows_that_are_rounded_are_told_and_no_mistake(ranks, wire: str, least: float, most: float) -> None:
    recipe = make_recipe(2, 2, moe={"wire": wire, "experts": "grouped"}, **_QUIET)
    found = compared(recipe, ranks(2).run(run_comparison, recipe)[0])
    assert found.passed, found
    assert found.dtype == "float64"
    assert found.grad_max_rel_diff <= TOLERANCE["float64"], "without rounding, all is exact"
    assert found.rounded is not None
    assert least < found.rounded["grad_rel_distance"] < most
    told = _report(found)
    out = {"bfloat16": "3.9e-03;", "float8": "6.2e-02, or 2.2e-06 of the largest of 128;"}[wire]
    assert f"rows on the wire: numbers to experts are off by up to {out} back, by up to 3.9e-03" in told
    assert "dropped tokens depend" not in told
    doubled = compared(recipe, ranks(2).run(run_comparison, recipe, "expert")[0])
    assert not doubled.passed, "rounding hides no mistake"


@pytest.mark.gate(1 / 3)
@pytest.mark.parametrize("wrong", ["dense", "replicated", "expert"])
def test_a_doubled_gradient_class_is_found_and_named(ranks, wrong: str) -> None:
    recipe = make_recipe(4, {"tp": 2, "ep": 2}, **_QUIET)
    found = compared(recipe, ranks(4).run(run_comparison, recipe, wrong)[0])
    assert not found.passed
    assert (found.grad_max_rel_diff, found.update_rel_diff) == pytest.approx((1.0, 1.0), rel=1e-4)
    named = {"dense": "attention|embedding|head|shared", "replicated": "norm|router", "expert": ".experts."}[wrong]
    assert any(part in found.worst_parameter for part in named.split("|"))
    assert any(part in found.update_worst_parameter for part in named.split("|"))


def _lost(rank: int, recipe: Recipe) -> dict | None:
    """Compare with an engine in which no sum in bfloat16 reaches DeepSpeed."""
    from trainers.worker.deepspeed_engine import DeepSpeedEngine

    make = DeepSpeedEngine.__init__

    def without(self: DeepSpeedEngine, *given: object) -> None:
        make(self, *given)  # type: ignore[arg-type]
        give = self._give_sums

        def nothing() -> None:
            give()
            for (sums,) in self.optimizer.averaged_gradients.values() if self.engine.bfloat16_enabled() else ():
                sums.zero_()

        self._give_sums = nothing  # type: ignore[method-assign]

    DeepSpeedEngine.__init__ = without  # type: ignore[method-assign]
    try:
        return run_comparison(rank, recipe)
    finally:
        DeepSpeedEngine.__init__ = make  # type: ignore[method-assign]


def test_a_gradient_that_is_lost_in_one_precision_alone_is_found(ranks) -> None:
    recipe = make_recipe(
        2, 2, engine={"kind": "deepspeed", "zero": 2}, precision="bfloat16", schedule={"reduction": "buckets"},
        optimizer={"kind": "adamw", "lr": 1e-3},
    )  # fmt: skip
    found = compared(recipe, ranks(2).run(_lost, recipe)[0])
    assert found.grad_max_rel_diff <= TOLERANCE["float32"]
    assert (found.update_rel_diff, found.passed) == (1.0, False)


def test_drops_follow_whole_sequences_while_verifying() -> None:
    recipe = make_recipe(4, {"tp": 2, "cp": 2}, model={"router": {"capacity_factor": 1.0}}, **_QUIET)
    assert as_checked(recipe).model.router.drop_scope == "sequence"


@pytest.mark.gate(2)
@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_every_fold_of_every_named_model_can_be_shrunk(world: int) -> None:
    for preset in PRESETS:
        for fold in legal_folds(world):
            try:
                model = {"preset": preset, **_padded(preset)}
                recipe = Recipe.parse({"model": model, "fold": fold, "cluster": {"workers": world}})
            except UserError:
                continue  # the fold does not divide this model
            shrunk = small(recipe)
            assert shrunk.placed_fold == recipe.placed_fold, f"{preset} {name(fold)}"
            assert shrunk.model.hidden <= 64
            assert bool(shrunk.model.moe_layers) == bool(recipe.model.moe_layers)


def _padded(preset: str) -> dict[str, int]:
    return {"vocab": PRESETS[preset]["vocab"] + -PRESETS[preset]["vocab"] % 8}


def test_uneven_stages_stay_uneven() -> None:
    recipe = make_recipe(2, {"pp": 2}, model={"layers": 7}, schedule={"stage_layers": [4, 3]}, **_QUIET)
    assert small(recipe).schedule.stage_layers == (2, 1)
    assert small(recipe).model.layers == 3


def test_not_a_number_fails() -> None:
    nan, inf = float("nan"), float("inf")
    cases = [[nan, 0.0, 0.0, 0.0, 0.0], [0.0, inf, 0.0, 0.0, 0.0], *([0.0] * i + [nan] + [0.0] * (4 - i) for i in (2, 3, 4))]
    for loss, gradient, update, norm, evaluation in [*cases, [0.0] * 5]:
        found = Verification(
            "float32", "torch", "torch", loss, gradient, 0.0, "x", {}, "bfloat16", update, "y", norm, evaluation, {}
        )
        assert found.passed == (loss == gradient == update == norm == evaluation == 0.0)


@pytest.mark.gate(1 / 4)
@pytest.mark.gate(1 / 4)
@pytest.mark.parametrize("zero", [1, 2])
def test_gradients_that_are_rounded_are_no_mistake(ranks, zero: int) -> None:
    """Gradients are compared without rounding, and updates with it."""
    recipe = make_recipe(2, 2, **{**_QUIET, "engine": {"kind": "torch", "zero": zero, "wire": "bfloat16"}})
    found = compared(recipe, ranks(2).run(run_comparison, recipe)[0])
    assert found.passed, found
    assert found.grad_max_rel_diff <= TOLERANCE["float64"]
    assert 1e-5 < found.update_rel_diff <= UPDATE_TOLERANCE["bfloat16"]
    assert "engine.wire" not in _report(found)
    assert not compared(recipe, ranks(2).run(run_comparison, recipe, "expert")[0]).passed, "rounding hides no mistake"


def test_the_command_on_ray(ray_session, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(
        "model: {preset: tiny}\nfold: {tp: 2, ep: 2}\ncluster: {workers: 2}\nengine: {kind: torch}\ntraining: {global_batch: 8}\n"
    )
    assert main(["verify", "recipe.yaml", "--shrink", "--json"]) == 0
    out, _ = capsys.readouterr()
    found = json.loads(out)
    assert set(found) == {
        "dtype", "engine", "backend", "loss_abs_diff", "grad_max_rel_diff", "worst_parameter", "passed",
        "precision", "update_rel_diff", "update_worst_parameter", "norm_rel_diff", "evaluation_abs_diff", "changed",
        "grad_rel_distance", "rounded", "wire", "gradient_wire",
    }  # fmt: skip
    assert (found["dtype"], found["engine"], found["passed"]) == ("float64", "torch", True)
    assert sorted(path.name for path in tmp_path.rglob("*") if "verify" in path.name) == []
