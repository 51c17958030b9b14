"""The section `tune` of a recipe: its keys and defaults."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

from foldray.blueprint import Strict
from foldray.recipe.bounds import (
    MOST_S,
    MOST_TURNS,
    MOST_WORKERS,
    Few,
    Name,
    Operations,
    OverlapName,
    SamplerName,
    Size,
    Sizes,
    Url,
)
from foldray.schedule import SEARCHED

DEGREES = (1, 2, 4, 8)
"""The degrees that a tuner tries if the recipe lists none."""


class SpaceSpec(Strict):
    """The settings that `foldray tune` may try: all legal combinations of these values.

    A list of one value settles a key. More values may hold a faster setting, but more trials are needed to find it. Where a key
    is null, the recipe's own value is always among those that are tried.
    """

    tp: Sizes | None = Field(None, description="Tensor-parallel sizes. Null is every legal size.")
    cp: Sizes | None = Field(None, description="Context-parallel sizes. Null is every legal size.")
    pp: Sizes | None = Field(None, description="Pipeline-parallel sizes. Null is every legal size.")
    ep: Sizes | None = Field(None, description="Expert-parallel sizes. Null is every legal size.")
    etp: Sizes | None = Field(None, description="Expert-tensor-parallel sizes. Null is every legal size.")
    attention: Sizes | None = Field(
        None,
        description="Workers for attention, of a recipe with `placement`; the others are for the experts. Null is the recipe's "
        "number.",
    )
    virtual_stages: Sizes | None = Field(None, description="Stages per pipeline position. Null is the recipe's number.")
    micro_batch: Sizes | None = Field(None, description="Sequences per micro-batch. Null is the recipe's number.")
    kind: tuple[OverlapName, ...] | None = Field(
        None, min_length=1, max_length=16, description=f"Kinds of schedule. Null is {', '.join(SEARCHED)} and the recipe's."
    )
    degree: Sizes | None = Field(
        None,
        description=f"Pieces that a sequence is cut into. 1 does not cut. Null is {', '.join(map(str, DEGREES))} and the "
        "recipe's number.",
    )
    slicing: Annotated[tuple[Literal["token_uniform", "algorithm1", "time_uniform"], ...], Few] | None = Field(
        None, description="Ways to cut attention into slices. Null is the recipe's own."
    )
    batch_degree: Sizes | None = Field(
        None,
        description="Parts that a micro-batch is cut into along the batch. 1 does not cut. Null is 1 and the recipe's number.",
    )
    recompute: Annotated[tuple[Operations, ...], Few] | None = Field(
        None,
        description="Lists of operations to compute again; an empty list computes nothing again. Null is the recipe's own list.",
    )
    sp_bytes: Annotated[tuple[Size | None, ...], Few] | None = Field(
        None,
        description="Bytes of a chunk of gradients. A null in the list reduces all gradients at the end of the step. Null is the "
        "recipe's own `reduction` and `sp_bytes`.",
    )
    dispatch: Annotated[tuple[Literal["assignment", "rank"], ...], Few] | None = Field(
        None, description="What a token travels for (`moe.dispatch`). Null is the recipe's own."
    )

    @property
    def settings_of_a_fold(self) -> int:
        """The number of combinations of the given lists for one choice of parallel sizes, without lists that are null."""
        lists = (self.virtual_stages, self.micro_batch, self.kind, self.degree, self.slicing, self.batch_degree, self.recompute)
        return math.prod(len(values) for values in (*lists, self.sp_bytes, self.dispatch) if values is not None)


class TuneSpec(Strict):
    """How `foldray tune` finds the fastest way to train this recipe."""

    trials: int = Field(
        15, ge=1, le=MOST_TURNS, description="Settings to measure, by all tuners of a study together. More trials take longer."
    )
    sampler: SamplerName = Field(
        "ratio",
        description="What picks the next setting. `ratio` learns how far the planner's predictions are off; `planner` follows "
        "the predictions; `gp` and `tpe` are Optuna's.",
    )
    seed: int = Field(0, ge=0, lt=2**32, description="Seed of the sampler's random choices.")
    hardware: str | None = Field(
        None,
        description="Hardware for the planner's predictions: a name that it knows, or a file of `foldray calibrate`. Null "
        "searches without predictions.",
    )
    starts: int = Field(
        5, ge=0, le=MOST_TURNS, description="Settings with the best predictions, which are measured first. It needs `hardware`."
    )
    turns: int = Field(
        4,
        ge=1,
        le=MOST_TURNS,
        description="Turns of a trial. In each turn the setting and the unchanged recipe run one after the other. More turns "
        "reduce noise and take longer.",
    )
    steps: int = Field(3, ge=1, le=MOST_TURNS, description="Timed steps per turn, after one step to warm up.")
    prune: float | None = Field(
        1.3,
        gt=1,
        description="Stop a trial early once it is surely this many times slower than the best one. Null stops no trial early.",
    )
    trial_s: float = Field(
        600,
        gt=0,
        le=MOST_S,
        description="Longest time of one recipe's part of a turn, in seconds; a trial that needs longer fails.",
    )
    beside: bool = Field(
        True,
        description="Keep the unchanged recipe in memory beside the trial, which saves building it again for every turn. Only "
        "`engine.kind: torch` can.",
    )
    memory_gib: float | None = Field(
        None,
        gt=0,
        description="Most memory that a worker may need, in GiB; a setting that needs more cannot win. Null sets no limit.",
    )
    second: Literal["memory"] | None = Field(
        None, description="`memory` also searches for settings that need little memory. Null minimizes only the time of a step."
    )
    parallel: int = Field(1, ge=1, le=MOST_WORKERS, description="Trials that run at the same time, each on nodes of its own.")
    pairs: int = Field(
        9,
        ge=2,
        le=MOST_TURNS,
        description="Turns of the best setting and the unchanged recipe at the end. More pairs make the reported gain more "
        "exact.",
    )
    study: Name = Field("foldray", description="Name of the study. Tuners with the same storage and study share their trials.")
    storage: Url | None = Field(
        None, description="Database URL of the study, as Optuna writes it. Null is a SQLite database in the run storage."
    )
    learn: str | None = Field(
        None,
        description="File to write a corrected hardware description to, after tuning; it needs `hardware`. Null writes none.",
    )
    space: SpaceSpec = SpaceSpec()
