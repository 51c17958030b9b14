"""The cases of `foldray verify --all`: where parallel training of MoE models goes wrong without a word.

Each case makes one class of fault visible in a small recipe with the user's fold, schedule, engine and backend. The classes are
those that users of several frameworks report, such as the list of silent errors in Megatron-LM's issue 7452. Tests plant a
fault for each case, and show that the case finds it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from foldray.errors import UserError
from foldray.kinds import RECOMPUTABLE
from foldray.recipe import Recipe

Values = dict[str, Any]


Change = Callable[[Values, Recipe], None]
"""Changes the values of a small recipe in place."""


class Case(NamedTuple):
    """A case finds faults of one class. With `masked`, some targets do not count, differently many on every worker."""

    name: str
    fault: str
    change: Change
    masked: bool = False


def _set(section: str, **settings: Any) -> Change:
    return lambda values, recipe: values[section].update(settings)


def _route(**settings: Any) -> Change:
    return lambda values, recipe: values["model"]["router"].update(settings)


def _balance(weight: float, scope: str = "sequence", z_loss: float = 0.0) -> Change:
    return _route(balance_loss=weight, balance_scope=scope, z_loss=z_loss)


_nothing = _set("model")


def _idle(values: Values, recipe: Recipe) -> None:
    values["model"].update(topk=1, experts=32 * recipe.placed_fold.ep)


def _shared(values: Values, recipe: Recipe) -> None:
    values["model"]["shared_hidden"] = 16 * recipe.placed_fold.tp


def _accumulated(values: Values, recipe: Recipe) -> None:
    values["training"]["global_batch"] *= 2


def _on_the_host(values: dict[str, Any], recipe: Recipe) -> None:
    """Twice as many blocks, because the last one keeps its own on the device."""
    sizes = values["schedule"]["stage_layers"]
    values["schedule"].update(offload=list(RECOMPUTABLE), recompute=[], stage_layers=sizes and [2 * size for size in sizes])
    values["model"]["layers"] *= 2


CASES: Mapping[str, Case] = {
    case.name: case
    for case in (
        Case("as it is", "gradients whose scale depends on the parallel sizes", _nothing),
        Case("masked tokens", "means over ranks instead of tokens; masks that are cut by the wrong group", _nothing, masked=True),
        Case("documents", "attention across documents where sequences are cut", _set("data", mask_documents=True)),
        Case("window", "windows that end where a slice or a rank ends", _set("model", windows=["sliding:8"])),
        Case("router", "router gradients that are detached, or scaled by EP", _balance(0.0)),
        Case("balance loss", "a balance loss that counts once per TP, CP or pipeline rank", _balance(1.0)),
        Case("batch balance", "frequencies of the tokens of one worker alone, or of its TP group", _balance(1.0, "batch")),
        Case("global balance", "frequencies that workers do not share, or not from step to step", _balance(1.0, "global_batch")),
        Case("z-loss", "a z-loss that counts once per TP, CP or pipeline rank", _balance(0.0, z_loss=0.1)),
        Case("sigmoid scores", "scores that are normalised over the wrong experts",
             _route(score="sigmoid", softmax="after_topk", normalize=True)),
        Case("idle experts", "experts without tokens: gradients that are missing, or left from before", _idle),
        Case("shared expert", "a shared expert that counts once per TP rank", _shared),
        Case("tied embedding", "an embedding whose two gradients do not meet", _set("model", tied_embeddings=True)),
        Case("further tokens", "later tokens that are those of a rank's own piece", _set("model", mtp_depth=2)),
        Case("dropped tokens", "tokens that are dropped by the order of ranks",
             _route(capacity_factor=0.5, drop="position", drop_scope="sequence")),
        Case("recomputation", "state that counts twice if a forward runs twice",
             _set("schedule", recompute=list(RECOMPUTABLE))),
        Case("activations on the host", "what an op keeps that comes back too late, or to another op", _on_the_host),
        Case("copied experts", "gradients that stay with copies of experts, or are added twice", _set("moe", copies=1)),
        Case("accumulation", "gradients scaled by the number of micro-batches", _accumulated),
    )
}  # fmt: skip
"""Cases by name, in the order of the table."""


@dataclass(frozen=True)
class Refused:
    """The reason why a case cannot be made of a recipe."""

    reason: str


def case_recipe(case: Case, recipe: Recipe) -> Recipe | Refused:
    """Return the recipe of a case. `recipe` is a small one (`verify.small`)."""
    values = recipe.model_dump()
    values["model"]["preset"] = None
    case.change(values, recipe)
    try:
        return Recipe.parse(values)
    except UserError as error:
        return Refused(str(error).splitlines()[0])
