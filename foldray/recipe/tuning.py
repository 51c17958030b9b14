"""The section `tune` of a recipe: its keys and defaults."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat

from foldray.blueprint import Strict
from foldray.orders import SEARCHED
from foldray.recipe.bounds import (
    MOST_S,
    MOST_TURNS,
    AxisOrder,
    Few,
    MoeAxisOrder,
    Name,
    Operations,
    OrderName,
    SamplerName,
    Seed,
    Size,
    Sizes,
    Turns,
    Url,
    Workers,
    WorkersOrNone,
)

DEGREES = (1, 2, 4, 8)
"""The degrees that a tuner tries if the recipe lists none."""


_SIZES = ("tp", "cp", "pp", "ep", "etp", "attention")


class SpaceSpec(Strict):
    """The settings that `foldray tune` may try: the recipe's own, and all legal combinations of these values.

    A list of one value settles a key. More values may hold a faster setting, but more trials are needed to find it. Where a key
    is null, the recipe's own value is always among those that are tried. Where all keys are null, the recipe's own fold is also
    tried with neighbouring values of the other keys, one at a time, and with every kernel that is installed.
    """

    tp: Sizes | None = None
    """Tensor-parallel sizes. Null is every legal size."""
    cp: Sizes | None = None
    """Context-parallel sizes. Null is every legal size."""
    pp: Sizes | None = None
    """Pipeline-parallel sizes. Null is every legal size."""
    ep: Sizes | None = None
    """Expert-parallel sizes. Null is every legal size."""
    etp: Sizes | None = None
    """Expert-tensor-parallel sizes. Null is every legal size."""
    attention: Annotated[tuple[WorkersOrNone, ...], Few] | Literal["auto"] | None = None
    """Workers for attention; the others are for the experts. 0 is for workers that have both. `auto`
    begins where a roofline of both halves puts the split, which needs `hardware`, and walks from
    the fastest split that it has measured to the next ones. Null is as the recipe says."""
    virtual_stages: Sizes | None = None
    """Stages per pipeline position. Null is the recipe's number."""
    micro_batch: Sizes | None = None
    """Sequences per micro-batch. Null is the recipe's number."""
    kind: tuple[OrderName, ...] | None = Field(
        None, min_length=1, max_length=16, description=f"Kinds of schedule. Null is {', '.join(SEARCHED)} and the recipe's."
    )
    degree: Sizes | None = Field(
        None,
        description=f"Pieces that a sequence is cut into. 1 does not cut. Null is {', '.join(map(str, DEGREES))} and the "
        "recipe's number.",
    )
    attention_degree: Sizes | None = None
    """Most slices of attention (`schedule.attention_degree`); there are never more than pieces. Null is
    the recipe's own."""
    slicing: Annotated[tuple[Literal["token_uniform", "time_uniform", "algorithm1"], ...], Few] | None = None
    """Ways to cut attention into slices. Null is the recipe's own."""
    batch_degree: Sizes | None = None
    """Parts that a micro-batch is cut into along the batch. 1 does not cut. Null is 1 and the
    recipe's number."""
    recompute: Annotated[tuple[Operations, ...], Few] | None = None
    """Lists of operations to compute again; an empty list computes nothing again. Null is the
    recipe's own list."""
    sp_bytes: Annotated[tuple[Size | None, ...], Few] | None = None
    """Bytes of a chunk of gradients. A null in the list reduces all gradients at the end of the
    step. Null is the recipe's own `reduction` and `sp_bytes`."""
    dispatch: Annotated[tuple[Literal["assignment", "rank"], ...], Few] | None = None
    """What a token travels for (`moe.dispatch`). Null is the recipe's own."""
    ep_inside: Sizes | None = None
    """Workers of an expert-parallel group that share a node (`fold.ep_inside`), with `dispatch: rank`.
    Null is the recipe's own."""
    zero: Annotated[tuple[Literal[0, 1, 2], ...], Few] | None = None
    """Stages of ZeRO (`engine.zero`). Null is the recipe's own."""
    backend: Annotated[tuple[Literal["torch", "tutel", "deepspeed"], ...], Few] | None = None
    """Kernels of the MoE layers (`moe.backend`). Null is the recipe's own."""
    order: Annotated[tuple[AxisOrder, ...], Few] | None = None
    """Orders of attention's axes (`fold.order`), which decide what crosses nodes. Null is the
    recipe's own."""
    moe_order: Annotated[tuple[MoeAxisOrder, ...], Few] | None = None
    """Orders of the experts' axes (`fold.moe_order`). Null is the recipe's own."""

    @property
    def settings_of_a_fold(self) -> int:
        """The number of combinations of the given lists for one choice of parallel sizes, without lists that are null."""
        lists = (getattr(self, name) for name in type(self).model_fields if name not in _SIZES)
        return math.prod(len(values) for values in lists if values is not None)


class TuneSpec(Strict):
    """How `foldray tune` finds the fastest way to train this recipe."""

    trials: Turns = 15
    """Settings to measure, by all tuners of a study together. More trials take longer."""
    sampler: SamplerName = "ratio"
    """What picks the next setting. `ratio` learns how far the planner's predictions are off;
    `planner` follows the predictions; `gp` and `tpe` are Optuna's."""
    seed: Seed = 0
    """Seed of the sampler's random choices."""
    hardware: str | None = None
    """Hardware for the planner's predictions: a name that it knows, or a file of `foldray
    calibrate`. Null searches without predictions."""
    starts: Annotated[int, Field(ge=0, le=MOST_TURNS)] = 5
    """Settings with the best predictions, which are measured first. It needs `hardware`."""
    turns: Turns = 4
    """Turns of a trial. In each turn the setting and the unchanged recipe run one after the other.
    More turns reduce noise and take longer."""
    steps: Turns = 3
    """Timed steps per turn, after one step to warm up."""
    prune: Annotated[float, Field(gt=1)] | None = 1.3
    """Stop a trial early once it is surely this many times slower than the best one. Null stops no
    trial early."""
    trial_s: Annotated[float, Field(gt=0, le=MOST_S)] = 600
    """Longest time of one recipe's part of a turn, in seconds; a trial that needs longer fails."""
    beside: bool = True
    """Keep the unchanged recipe in memory beside the trial, which saves building it again for every
    turn. Only `engine.kind: torch` can."""
    memory_gib: PositiveFloat | None = None
    """Most memory that a worker may need, in GiB; a setting that needs more cannot win. Null sets
    no limit."""
    second: Literal["memory"] | None = None
    """`memory` also searches for settings that need little memory. Null minimizes only the time of
    a step."""
    parallel: Workers = 1
    """Trials that run at the same time, each on nodes of its own."""
    pairs: Annotated[int, Field(ge=2, le=MOST_TURNS)] = 9
    """Turns of the best setting and the unchanged recipe at the end. More pairs make the reported
    gain more exact."""
    study: Name = "foldray"
    """Name of the study. Tuners with the same storage and study share their trials."""
    storage: Url | None = None
    """Database URL of the study, as Optuna writes it. Null is a SQLite database in the run
    storage."""
    learn: str | None = None
    """File to write a corrected hardware description to, after tuning; it needs `hardware`. Null
    writes none."""
    space: SpaceSpec = SpaceSpec()
