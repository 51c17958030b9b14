"""Random recipes on real ranks, against a reference in plain torch that shares no code with foldray's model.

`FOLDRAY_SEED=N` and `FOLDRAY_CASES=M` choose the seeds N … N + M − 1.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from foldray.blueprint import parameter_table
from foldray.model.initial import initial_values
from foldray.recipe import Recipe
from tests.foldray.parity import IGNORED, batches, engine_on, go_by_times, go_on
from tests.foldray.plain import Plain
from tests.foldray.random_recipes import Case, draw, shrink
from tests.foldray.runtime.test_copies import tables_of

FIRST, CASES = int(os.environ.get("FOLDRAY_SEED", "0")), int(os.environ.get("FOLDRAY_CASES", "200"))
TOLERANCE = {"float64": 1e-9, "float32": 1e-4}
_SECONDS = 240
_SMALL = 1e-3  # biases of keys that do not turn have a gradient of zero, and so a weight that is rounding alone


def train(rank: int, recipe: Recipe, steps: int, *properties: bool) -> dict[str, Any]:
    """Train as `parity.train`. After the first step, random experts have copies, if there is room for some (`moe.copies`)."""
    options = dict(zip(Case._fields[1:], properties, strict=True))
    with engine_on(recipe, rank) as (engine, groups):
        first = go_by_times(engine, groups, recipe, 1, **options)
        if recipe.moe.copies:
            engine.execution.copy_experts(tables_of(recipe, 1, recipe.moe.copies))
        then = go_on(engine, groups, recipe, range(1, steps), **options)
        return {**then, **{key: first[key] + then[key] for key in ("losses", "norms")}}


def reference(case: Case, steps: int, change: float = 0.0) -> dict[str, Any]:
    """Return what plain torch makes of the case, from initial weights changed at random by that share."""
    recipe, seed = case.recipe, case.recipe.training.seed
    rows = parameter_table(recipe.model)
    drawn = {row.name: initial_values(row.shape, row.init, seed, row.name).double() for row in rows}
    random = torch.Generator().manual_seed(seed)
    for weight in drawn.values():
        weight *= 1 + change * torch.randn(weight.shape, generator=random, dtype=weight.dtype)
    plain, losses, norms = Plain(recipe, drawn), [], []
    dp = recipe.placed_fold.dp
    for step in range(steps):
        by_place = [batches(recipe, place, step, **case.options) for place in range(dp)]
        parts = [batch for same_number in zip(*by_place, strict=True) for batch in same_number]
        columns = [
            None if column[0] is None else torch.cat(column, dim=1 if column[0].dim() == 4 else 0)
            for column in zip(*parts, strict=True)
        ]
        assert case.masked == bool((columns[1] == IGNORED).any())
        found = plain.step(*columns)
        losses.append(found["losses"])
        norms.append(found["norm"])
    return {"weights": plain.weights, "losses": losses, "norms": norms}


def difference(found: list[dict[str, Any]], expected: dict[str, Any]) -> tuple[float, str]:
    """Return the largest difference of a weight (relative to its tensor's largest value), a loss or a norm, and its name."""
    apart = []
    for part in found:
        for key, (tensor, box) in part["weights"].items():
            if (name := key.removeprefix("model/")) in expected["weights"]:
                whole = expected["weights"][name].detach()
                apart.append((float((tensor.double() - whole[box]).abs().max() / whole.abs().max().clamp_min(_SMALL)), name))
        for step, (ours, theirs) in enumerate(zip(part["losses"], expected["losses"], strict=True)):
            names = ("loss", "balance", "z", "further tokens")[: len(theirs)]
            pairs = zip(names, ours, theirs, strict=True)
            apart += [(abs(a - b) / max(1.0, abs(b)), f"{name} of step {step}") for name, a, b in pairs]
        for step, (a, b) in enumerate(zip(part["norms"], expected["norms"], strict=True)):
            apart.append((abs(a - b) / max(1.0, b), f"norm of step {step}"))
    return max(apart)


@pytest.mark.gate(2)
@pytest.mark.parametrize("seed", range(FIRST, FIRST + CASES))
def test_a_random_recipe_equals_plain_torch(ranks, seed: int) -> None:
    def apart(case: Case) -> tuple[float, str]:
        recipe = case.recipe
        found = ranks(recipe.cluster.workers).run(train, recipe, 2, *case[1:], timeout=_SECONDS)
        return difference(found, reference(case, 2))

    def fails(case: Case) -> bool:
        try:
            found, precision = apart(case)[0], case.recipe.precision
            return not (found <= TOLERANCE[precision] or (precision == "float32" and rounded(case, found)))
        except Exception:
            return True

    def rounded(case: Case, found: float) -> bool:
        """Return whether rounding explains the difference: float64 has none, and plain torch makes as much of an epsilon.

        A learning rate of 1 makes rounding errors of a small weight hundreds of times as large within two steps.
        """
        given = case.recipe.model_dump(exclude_unset=True) | {"precision": "float64", "engine": {"kind": "torch"}}
        given["moe"] = given["moe"] | {"backend": "torch"}
        changed = reference(case, 2, change=torch.finfo(torch.float32).eps)
        alone = changed | {"weights": {name: (weight.detach(), ...) for name, weight in changed["weights"].items()}}
        explained = 10 * difference([alone], reference(case, 2))[0]
        return found <= explained and apart(case._replace(recipe=Recipe.parse(given)))[0] <= TOLERANCE["float64"]

    case = draw(seed)
    if not fails(case):
        return
    smallest = shrink(case, fails)
    told = smallest.recipe.model_dump(exclude_unset=True), smallest.options
    worst, where = apart(smallest)  # raises if the recipe raises an error
    pytest.fail(f"seed {seed}: {where} is {worst:.3g} from plain torch, with {told}")
