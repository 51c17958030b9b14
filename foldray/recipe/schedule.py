"""The section `schedule` of a recipe: its keys, their defaults, and the rules of single keys."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from foldray.blueprint import Strict
from foldray.blueprint.sections import MOST_LAYERS, Layers
from foldray.errors import UserError
from foldray.orders import AUTO, WeightGradients, overlap_kind
from foldray.recipe.bounds import MOST_BYTES, MOST_PIECES, Cost, Degree, Operations, OverlapName, SequenceCount, Size, Sizes
from foldray.tables import among

Lag = Degree | Literal["auto"]


class ScheduleSpec(Strict):
    """The order in which the pieces of a step run. No order changes the gradients beyond rounding, unless experts drop tokens."""

    kind: OverlapName = AUTO.name
    """How pieces overlap. `auto` lets training choose: it measures orders in its first steps, and keeps
    the fastest; if fewer than 200 steps are left, it measures none. `sequential` cuts nothing, and
    hides nothing but dispatches behind shared experts; every other kind lets one piece compute
    while another travels. `weave` and `list` also let one micro-batch compute while rows of
    another one travel. `list` finds its order by the times of the ops in the second and third
    step. `module:NAME` names a kind of your own."""
    backward: Annotated[str, among(("a kind",), overlap_kind)] | None = None
    """Kind of the backward pass. Null is the same as `kind`."""
    degree: Degree = 1
    """Pieces that a sequence is cut into. More pieces hide more communication, but smaller pieces
    compute less efficiently. 1 does not cut."""
    degrees: Sizes | None = None
    """Degrees that training tries in its first steps; it keeps the fastest one. A degree below
    `attention_degree` has as many slices as pieces. Null keeps `degree`."""
    slicing: Literal["token_uniform", "time_uniform", "algorithm1"] = "time_uniform"
    """How attention is cut. `time_uniform` makes the slowest slice as fast as possible,
    `token_uniform` makes slices of equal length, `algorithm1` is FoldMoE's listing."""
    attention_degree: Degree | None = None
    """Slices that attention is cut into, at most `degree`. Each slice costs time of its own, so fewer
    of them can be faster where short MoE pieces hide more. Null is the same as `degree`."""
    slices: Annotated[tuple[Size, ...], Field(max_length=MOST_PIECES)] | None = None
    """Lengths of attention's slices, in tokens; they sum to `data.seq_len`. There are
    `attention_degree` of them. Null lets `slicing` choose the lengths."""
    slice_cost: tuple[Cost, Cost] | None = None
    """Time of a slice of attention, as two coefficients that `foldray bench` measures. `slicing`
    balances slices by it. Null counts floating-point operations."""
    lag: Lag = "auto"
    """Slices of attention between the router of a piece and its experts. A larger lag gives the
    dispatch more time to arrive. Only `stream` has a lag. `auto` times the pieces of the second
    step, simulates every lag, and keeps the fastest; where `one_a_one_m` is faster, it takes
    that."""
    backward_lag: Lag = "auto"
    """The lag of the backward pass. Only `stream` has one."""
    recompute: Operations = ()
    """Operations whose forward runs again before their backward. This saves their activation
    memory, and costs the time of one more forward."""
    offload: Operations = ()
    """Operations that keep what their backward needs in the memory of the host until then, beside
    computation. This saves their activation memory, and takes the link between GPU and host. The
    last block keeps it on the GPU. No operation may be in `recompute` as well."""
    batch_degree: SequenceCount = 1
    """Parts that a micro-batch is cut into along the batch; their pieces overlap too. It must
    divide `training.micro_batch`. `kind: flow` sets it to 2."""
    weight_gradients: WeightGradients = "together"
    """When backward computes the gradients of weights. `together` computes them with those of
    activations. `apart` computes them while the next rows or activations travel, and keeps what
    they need until then. `whole` computes those of all pieces of a block at once, and keeps what
    they need until the last piece has gone backward. The gradients have the same bits. `kind: list`
    and `kind: af_pipe` set it to `apart`."""
    ahead: Annotated[float, Field(ge=0, le=MOST_PIECES)] | None = None
    """How much more a worker may keep than in the pipeline's own order, in micro-batches: 0.5 is
    half of the activations of one. More memory hides more communication. Only `kind: list` has this
    choice. Null is 1."""
    alive: SequenceCount | None = None
    """With the section `placement`: most micro-batches that have started and not ended. Fewer need
    less memory, and let workers wait longer. Only `kind: af_pipe` has this choice. Null is as few
    as make the step nearly as fast as more of them would."""
    reduction: Literal["end", "buckets", "chunks"] = "end"
    """When gradients are summed over workers. `end` waits for the whole backward, `buckets` leave
    once they are full, `chunks` use the gaps between all-to-alls. `kind: flow` sets it to
    `chunks`."""
    sp_bytes: Size | Literal["auto"] | None = None
    """Bytes of a bucket or chunk of gradients. Small ones pay more for starting, large ones make
    all-to-alls wait. `auto` searches in the first training steps. Null is 25 MiB (buckets) or 2.5
    MiB (chunks)."""
    virtual_stages: Layers = 1
    """Stages per pipeline position. 1 is the 1F1B schedule. More stages are interleaved: positions
    idle less, and send more messages."""
    stage_layers: Annotated[tuple[Size, ...], Field(max_length=MOST_LAYERS)] | None = None
    """Blocks of every stage, in order. The slowest stage sets the pace. Null shares the blocks out
    evenly."""
    context: Literal["ring", "all_gather"] = "ring"
    """How context-parallel workers exchange keys and values of whole sequences. `ring` holds those
    of three workers at a time; `all_gather` holds all of them, and sends fewer messages."""
    graphs: Literal["auto", "off", "check"] = "off"
    """Whether ops run as CUDA graphs, which cost the host one call instead of dozens. `auto` captures
    all ops on GPUs whose sizes never change. `check` does so too, runs two steps also without
    graphs, and stops if their gradients differ. Nothing is captured on CPUs."""

    @property
    def opened(self) -> list[str]:
        """The keys whose values training finds."""
        return ["degrees"] * (self.degrees is not None) + ["sp_bytes"] * (self.sp_bytes == "auto")

    @field_validator("graphs", mode="before")
    @classmethod
    def _off(cls, given: Any) -> Any:
        return "off" if given is False else given  # as YAML reads the word

    @field_validator("sp_bytes", mode="before")
    @classmethod
    def _size(cls, given: Any) -> Any:
        if given in (None, "auto") or (isinstance(given, int) and 0 < given <= MOST_BYTES):
            return given
        rule = "must be a whole number of bytes, at least 1, or auto"
        raise UserError("schedule.sp_bytes", given, rule, [f"1…{MOST_BYTES}", "auto", "null"])

    @model_validator(mode="before")
    @classmethod
    def _as_kind_has_it(cls, given: Any) -> Any:
        try:
            row = overlap_kind(given["kind"])
        except (UserError, TypeError, KeyError, AttributeError):
            return given  # validation refuses it, or takes the default
        weights = "apart" if row.weights_apart else "together"
        return {"batch_degree": row.batch_degree, "reduction": row.reduction, "weight_gradients": weights, **given}
