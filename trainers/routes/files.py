"""The files of recorded routes, in the folder `routes` of a run.

Each rank that has tokens writes files of its own, without compression, so their bytes can be counted beforehand
(`bytes_of_counts`, `bytes_of_tokens`). A file has the steps since the one before it. Its name has the attempt, the last step
and the rank. An attempt that goes on from a checkpoint runs some steps again: the newest attempt counts.

Legend: S recorded steps, M MoE blocks of the rank, E experts, B sequences, s positions of the rank's piece, K experts per token.

| array | what |
|---|---|
| `layers` [M] | numbers of the rank's MoE blocks |
| `steps` [S], `counts` [S, M, E] | assignments of the rank's tokens to every expert, before dropping |
| `experts_N` [M, B, s, K] | the experts of the rank's tokens in step N |
| `sequences_N` [B], `positions` [s] | the places of their sequences in the step's batch; their positions in these sequences |
"""

from __future__ import annotations

import re
from typing import Annotated, NamedTuple

import numpy as np
from pydantic import Field

from foldray.amounts import in_bytes
from foldray.recipe import Recipe
from trainers.folders import Checked

FOLDER, ABOUT = "routes", "routes.json"
_NAME = re.compile(r"(\d{13})-(\d{8})-rank(\d{5})\.npz")
Whole = Annotated[int, Field(ge=0, lt=2**40)]


class About(Checked):
    """What recorded routes are of: the model, the data and the order in which sequences came."""

    layers: tuple[Whole, ...]
    """The numbers of the MoE blocks."""
    experts: Annotated[int, Field(ge=1, le=2**18)]
    topk: Annotated[int, Field(ge=1, le=2**18)]
    seq_len: Whole
    global_batch: Whole
    seed: Whole
    order: Whole
    content: str | None

    @classmethod
    def of(cls, recipe: Recipe, order: int, content: str | None) -> About:
        """Describe a training, whose data have this content and come in the order of this version."""
        model, training = recipe.model, recipe.training
        return cls(
            layers=model.moe_layers, experts=model.experts, topk=model.topk, seq_len=recipe.data.seq_len,
            global_batch=training.global_batch, seed=training.seed, order=order, content=content,
        )  # fmt: skip


class FileName(NamedTuple):
    """The name of a file: milliseconds since 1970 at which its attempt began, its last step, and its rank."""

    attempt: int
    last: int
    rank: int

    @classmethod
    def read(cls, name: str) -> FileName | None:
        found = _NAME.fullmatch(name)
        return None if found is None else cls(*map(int, found.groups()))

    def __str__(self) -> str:
        return f"{self.attempt:013d}-{self.last:08d}-rank{self.rank:05d}.npz"


def narrow(values: np.ndarray, most: int) -> np.ndarray:
    """Return whole numbers from 0 to `most` in the smallest type that holds them."""
    return values.astype(np.min_scalar_type(most))


def bytes_of_counts(recipe: Recipe) -> int:
    """Return the bytes of the counts of one step, in the files of all ranks."""
    model, fold = recipe.model, recipe.placed_fold
    ranks = fold.dp * fold.cp * fold.tp
    most = -(-recipe.training.global_batch // ranks) * recipe.data.seq_len * model.topk
    return ranks * len(model.moe_layers) * model.experts * np.min_scalar_type(most).itemsize


def bytes_of_tokens(recipe: Recipe) -> int:
    """Return the bytes of the experts of all tokens of one step, in the files of all ranks."""
    model, tokens = recipe.model, recipe.training.global_batch * recipe.data.seq_len
    return tokens * len(model.moe_layers) * model.topk * np.min_scalar_type(model.experts - 1).itemsize


def told_of_routes(recipe: Recipe) -> str | None:
    """Return in one line how much a training records; None if nothing."""
    routes, steps = recipe.routes, recipe.training.steps
    if routes.record is None and routes.record_tokens is None:
        return None
    tokens = steps // routes.record_tokens if routes.record_tokens else 0
    counted = {step for every in (routes.record, routes.record_tokens) if every for step in range(every, steps + 1, every)}
    size = len(counted) * bytes_of_counts(recipe) + tokens * bytes_of_tokens(recipe)
    return (
        f"routes: the counts of {len(counted)} steps and the tokens of {tokens} take up to {in_bytes(size)} in the run's folder"
    )
