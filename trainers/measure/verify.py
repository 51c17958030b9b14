"""The command `foldray verify`. It compares a recipe's fold, engine and backend with one process, on the same data.

A common fault of parallel training is a gradient whose scale changes with the parallel sizes. This command checks that the
scale does not change. It runs one optimizer step on the workers and one in a single process, and does so twice. In the
widest precision of the engine, losses, every gradient, their norm and an evaluation must agree up to rounding. In the
recipe's own precision, the change of every weight must agree. With `--all`, the first comparison is made for every case of
`cases.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from foldray.blueprint import smallest_slice
from foldray.comm import Groups
from foldray.moe.exchange import GROUP, WIRES
from foldray.recipe import Recipe
from trainers.cluster.actors import on_workers
from trainers.measure.cases import CASES, Refused, case_recipe
from trainers.measure.comparison import compare_gradients, compare_updates
from trainers.telemetry.records import as_json as to_json

TOLERANCE = {"float64": 1e-10, "float32": 1e-5}
"""Largest difference that counts as rounding, relative to a gradient's largest value. For the loss it is absolute."""
_FIGURES = ("loss_abs_diff", "grad_max_rel_diff", "norm_rel_diff", "evaluation_abs_diff")
UPDATE_TOLERANCE = {"float64": 1e-8, "float32": 1e-3, "bfloat16": 0.2}
"""Largest `Verification.update_rel_diff` that counts as rounding, by the recipe's precision."""


@dataclass(frozen=True)
class Verification:
    """The result of a comparison.

    Args:
        dtype: the widest precision of the engine. Gradients are compared in it.
        loss_abs_diff: largest absolute difference of the mean cross-entropy, the balance loss and the z-loss.
        grad_max_rel_diff: largest max|Δ| / max|reference| of all parameters.
        grad_rel_distance: length of the difference of all gradients together, over the length of the reference.
        worst_parameter: global name of the parameter with the largest difference.
        worst: the parameters with the largest differences, and these differences.
        precision: the recipe's own precision. Updates are compared in it.
        update_rel_diff: largest difference of all parameters' updates (`compare_updates`).
        norm_rel_diff: difference of the gradient norm, relative to the norm.
        evaluation_abs_diff: absolute difference of the mean cross-entropy of an evaluation.
        update_worst_parameter: global name of the parameter with this difference, or of a block's experts together.
        changed: keys of the recipe that the comparison of gradients has to change, and their new values.
        rounded: the same differences in float32 of the loss, gradients, their norm and the evaluation if rows are written as
            `moe.wire` says; None without it.
    """

    dtype: str
    engine: str
    backend: str
    loss_abs_diff: float
    grad_max_rel_diff: float
    grad_rel_distance: float
    worst_parameter: str
    worst: dict[str, float]
    precision: str
    update_rel_diff: float
    update_worst_parameter: str
    norm_rel_diff: float
    evaluation_abs_diff: float
    changed: dict[str, Any]
    rounded: dict[str, Any] | None = None
    wire: str | None = None
    gradient_wire: str | None = None

    @property
    def passed(self) -> bool:
        """Whether all differences count as rounding. NaN does not. Those of rows that are rounded on the wire do not count."""
        return _is_rounding(vars(self), self.dtype) and self.update_rel_diff <= self.update_tolerance

    @property
    def update_tolerance(self) -> float:
        """The largest `update_rel_diff` that counts as rounding. Rows and gradients that are rounded on the wire allow as much as
        bfloat16."""
        return UPDATE_TOLERANCE["bfloat16" if self.wire or self.gradient_wire else self.precision]

    def as_dict(self) -> dict[str, Any]:
        """Return the document of `foldray verify --json`."""
        return {**_without_worst(asdict(self)), "passed": self.passed}


def _is_rounding(differences: Mapping[str, Any], dtype: str) -> bool:
    """Whether the differences of gradients count as rounding in this precision. NaN does not."""
    return all(differences[key] <= TOLERANCE[dtype] for key in _FIGURES)


def _without_worst(differences: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in differences.items() if key != "worst"}


def verify(recipe: Recipe, shrink: bool = False, as_json: bool = False) -> int:
    """Compare and print a report. Return 0 if all differences count as rounding, otherwise 1.

    With `shrink`, the model is as small as the fold allows.
    """
    recipe = small(recipe) if shrink else recipe
    message = f"{recipe.placed_fold} on {recipe.cluster.workers} workers against one process …"
    result = compared(recipe, on_workers(recipe, on_rank, message))
    print(to_json(result.as_dict()) if as_json else _report(result))
    return 0 if result.passed else 1


def verify_all(recipe: Recipe, as_json: bool = False) -> int:
    """Compare every case (`cases.CASES`) of a small recipe with the same fold, and print a table. Return 0 if all agree."""
    recipe = small(recipe)
    message = f"{recipe.placed_fold} on {recipe.cluster.workers} workers: {len(CASES)} cases …"
    checked = judged(recipe, on_workers(recipe, on_rank_all, message))
    print(to_json({"cases": checked}) if as_json else _case_table(checked))
    return 0 if all(case["passed"] for case in checked if "refused" not in case) else 1


def judged(recipe: Recipe, differences: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the compared cases with their differences and verdicts, and the others that this recipe cannot have, with the
    reason."""
    checked: list[dict[str, Any]] = []
    for case in CASES.values():
        about, made = {"case": case.name, "finds": case.fault}, case_recipe(case, recipe)
        if isinstance(made, Refused):
            checked.append({**about, "refused": made.reason})
        elif case.name in differences:
            figures = _without_worst(differences[case.name])
            checked.append({**about, **figures, "passed": _is_rounding(figures, as_checked(made).precision)})
    return checked


def on_rank_all(recipe: Recipe, groups: Groups, device: torch.device, names: Iterable[str] = CASES) -> dict[str, Any]:
    """Compare the cases with these names. Return the differences by case on the fold's first rank, and nothing on others."""
    compared_cases = {}
    for case in (CASES[name] for name in names):
        made = case_recipe(case, recipe)
        if not isinstance(made, Refused):
            compared_cases[case.name] = compare_gradients(as_checked(made), groups, device, case.masked)
    return {name: differences for name, differences in compared_cases.items() if differences is not None}


def _case_table(checked: Sequence[Mapping[str, Any]]) -> str:
    lines = [f"{'case':<16}{'loss':>9}{'gradient':>10}{'norm':>9}{'evaluation':>12}     finds"]
    for case in checked:
        if "refused" in case:
            lines.append(f"{case['case']:<16}{'not of this recipe: ' + case['refused']}")
            continue
        figures = [f"{case[key]:.0e}" for key in _FIGURES]
        verdict = "    " if case["passed"] else "FAIL"
        lines.append(f"{case['case']:<16}{figures[0]:>9}{figures[1]:>10}{figures[2]:>9}{figures[3]:>12} {verdict}{case['finds']}")
    failed = [case["case"] for case in checked if not case.get("passed", True)]
    return "\n".join([*lines, f"FAILED: {', '.join(failed)}" if failed else "passed"])


def compared(recipe: Recipe, differences: Mapping[str, Any]) -> Verification:
    wide = as_checked(recipe)
    return Verification(
        dtype=wide.precision, precision=recipe.precision, changed=_changed(recipe, wide), engine=recipe.engine.kind,
        backend=recipe.moe.backend, wire=recipe.moe.wire, gradient_wire=recipe.engine.wire, **differences,
    )  # fmt: skip


def as_checked(recipe: Recipe, wire: str | None = None) -> Recipe:
    """Return the recipe for `compare_gradients`.

    It has the widest precision of the engine, an optimizer that keeps the gradient, and drops that do not depend on the
    fold. Rows are written as `wire` says, in float32; None leaves them exact.
    """
    wide = recipe.engine.kind == "torch" and recipe.moe.backend != "tutel" and wire is None
    optimizer = {"kind": "sgd", "momentum": 0.9, "lr": 1e-3, "weight_decay": 0.0, "clip": None}
    return _with(recipe, "float64" if wide else "float32", optimizer, wire, None)


def as_updated(recipe: Recipe) -> Recipe:
    """Return the recipe for `compare_updates`. Its update is the gradient, and its drops do not depend on the fold."""
    optimizer = {"kind": "sgd", "lr": 1.0, "weight_decay": 0.0, "clip": recipe.optimizer.clip}
    return _with(recipe, recipe.precision, optimizer, recipe.moe.wire, recipe.engine.wire)


def _with(recipe: Recipe, precision: str, optimizer: dict[str, Any], wire: str | None, gradients: str | None) -> Recipe:
    values = recipe.model_dump() | {"precision": precision, "optimizer": optimizer}
    values["moe"]["wire"], values["engine"]["wire"] = wire, gradients
    values["cluster"]["max_failures"] = 0
    if recipe.model.router.capacity_factor is not None:
        values["model"]["router"]["drop_scope"] = "sequence"
        if recipe.slicing is not None:  # with drop=probability, every piece would have a capacity of its own
            values["model"]["router"]["drop"] = "position"
            values["schedule"].update(slicing="token_uniform", slices=None)
    return Recipe.parse(values)


def _changed(recipe: Recipe, checked: Recipe) -> dict[str, Any]:
    """Return the changed keys by their dotted names, with their new values."""

    def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
        for key, value in values.items():
            yield from flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [(prefix + key, value)]

    before = dict(flat(recipe.model_dump(exclude={"optimizer", "cluster"})))
    return {key: value for key, value in flat(checked.model_dump(exclude={"optimizer", "cluster"})) if before.get(key) != value}


def small(recipe: Recipe) -> Recipe:
    """Return a recipe with the same fold, schedule and kinds of layers, but so small that a comparison takes seconds."""
    fold, schedule, model, training = recipe.placed_fold, recipe.schedule, recipe.model, recipe.training
    stages = fold.pp * schedule.virtual_stages
    dense, every = min(model.dense_first, 1), min(model.moe_every, 2)
    moe = fold.moe_pp * schedule.virtual_stages if fold.disjoint else 1  # MoE blocks that the stages need
    layers = max(stages, dense + every * moe)
    sizes = schedule.stage_layers and [1 if size == min(schedule.stage_layers) else 2 for size in schedule.stage_layers]
    topk = min(model.topk, 4)
    unit = smallest_slice(fold.cp, fold.tp)
    length, micro_batch = unit * max(math.ceil(32 / unit), schedule.degree), schedule.batch_degree
    micro_batch *= min(training.micro_batch // micro_batch, 2)
    values = recipe.model_dump()
    values["schedule"].update(stage_layers=sizes, slices=None)
    values["data"]["seq_len"] = length
    values["training"].update(micro_batch=micro_batch, global_batch=fold.dp * micro_batch * 2 * fold.pp)
    values["model"].update(
        preset=None, layers=sum(sizes) if sizes else layers, dense_first=dense, moe_every=every, hidden=64,
        heads=fold.tp * min(model.heads // model.kv_heads, 2), kv_heads=min(fold.tp, model.kv_heads), head_dim=8, topk=topk,
        experts=fold.ep * max(math.ceil(topk / fold.ep), min(model.experts // fold.ep, 4)),
        expert_hidden=fold.etp * 16, ffn_hidden=fold.tp * 32, shared_hidden=fold.tp * 16 if model.shared_hidden else 0,
        vocab=fold.tp * 64, max_positions=length, init_std=0.1, rope_dim=model.rope_dim and 4,
    )  # fmt: skip
    if model.latent_rank:
        narrow = {"latent_rank": 16, "latent_query_rank": 12 if model.latent_query_rank else 0}
        values["model"].update(kv_heads=values["model"]["heads"], **narrow)
    groups = model.router.groups if values["model"]["experts"] % model.router.groups == 0 else 1
    fewest = math.ceil(topk * groups / values["model"]["experts"])  # groups that have enough experts
    values["model"]["router"].update(groups=groups, topk_groups=max(fewest, min(model.router.topk_groups, groups)))
    return Recipe.parse(values)


def _figure_lines(differences: Mapping[str, Any]) -> list[str]:
    return [
        f"  loss            {differences['loss_abs_diff']:.1e} (absolute)",
        f"  evaluation      {differences['evaluation_abs_diff']:.1e} (absolute)",
        f"  gradient norm   {differences['norm_rel_diff']:.1e}",
    ]


def on_rank(recipe: Recipe, groups: Groups, device: torch.device) -> dict[str, Any] | None:
    """Make both comparisons. Return the differences on the fold's first rank, and None on other ranks."""
    wire = recipe.moe.wire
    gradients = compare_gradients(as_checked(recipe), groups, device)
    updates = compare_updates(as_updated(recipe), groups, device)
    rounded = None if wire is None else compare_gradients(as_checked(recipe, wire), groups, device)
    return None if gradients is None or updates is None else {**gradients, **updates, "rounded": rounded}


def _report(result: Verification) -> str:
    lines = [
        f"{result.engine} engine, {result.backend} backend",
        f"in {result.dtype} (differences up to {TOLERANCE[result.dtype]:.0e} are rounding):",
        *_figure_lines(vars(result)),
        f"  worst gradient  {result.grad_max_rel_diff:.1e} (of the tensor's largest value)  {result.worst_parameter}",
        f"in {result.precision}, the recipe's own precision (up to {result.update_tolerance:.0e}):",
        f"  worst update    {result.update_rel_diff:.1e} (of the change of the tensor)  {result.update_worst_parameter}",
    ]
    if result.wire and result.rounded:
        out, back = WIRES[result.wire].out, WIRES[result.wire].back
        near_zero = f", or {out.floor:.1e} of the largest of {GROUP}" if out.floor else ""
        lines += [
            f"rows on the wire: numbers to experts are off by up to {out.error:.1e}{near_zero}; back, by up to {back.error:.1e}",
            "with them, in float32, this is no mistake:",
            *_figure_lines(result.rounded),
            f"  all gradients   {result.rounded['grad_rel_distance']:.1e} (of their length)",
        ]
    if changes := {key: value for key, value in result.changed.items() if key not in ("precision", "moe.wire", "engine.wire")}:
        values = ", ".join(f"{key}={value}" for key, value in changes.items())
        lines.append(f"compared with {values}, because otherwise the dropped tokens depend on how sequences are cut")
    if not result.passed:
        lines += ["gradients that differ most:"] + [f"  {value:.1e}  {name}" for name, value in result.worst.items()]
    return "\n".join([*lines, "passed" if result.passed else "FAILED: the results of this fold differ from one process"])
