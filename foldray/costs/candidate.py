"""The candidates of a plan: a job (model and batch), one way to train it on a cluster, and the layout of its stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import groupby
from typing import Literal, NamedTuple

from foldray.blueprint import BlockSpec, ModelSpec, Ownership, pattern_shares, stage_positions, step_flops
from foldray.blueprint.placing import spread
from foldray.costs.copying import Copied, CopyRoom, copied
from foldray.errors import UserError
from foldray.fold import Fold
from foldray.graph import Chunk, PipelineGraph, Slicing, StepGraph, cut_buffer
from foldray.orders import Ordering, check_pipeline

FAMILY: Mapping[str, str] = {"dense": "dp_cp", "replicated": "tp_dp_cp", "expert": "edp"}
"""Gradient class → the group family over which gradients of this class are summed."""


Hiding = Literal["nothing", "within", "all"]
"""The all-to-alls that a schedule can hide: none, those within each block (blocks drain), or all."""

DTYPES: Mapping[str, str] = {"float32": "fp32", "bfloat16": "bf16", "float64": "fp64"}
"""The precision of a recipe → the name of the dtype in hardware files."""

PARTS = ("layernorm", "core_attn", "mla_up_proj", "moe")
"""Parts of a block whose forward may run again in its backward, named as Megatron-LM's `recompute_modules`. `moe` is a whole MoE
layer with its router and its all-to-alls."""


class Software(NamedTuple):
    """What training software holds of parameters and logits, and starts to bring rows to experts. The defaults are foldray's;
    published rows have others.

    Args:
        gradients, moments: bytes of a gradient that micro-batches add to, and of one of the optimizer's two moments.
        apart: whether the gradients that a rank owns under ZeRO-1 lie apart from the whole ones, and leave from copies. Otherwise
            they are reduced in place.
        fused_loss: whether gradients of logits take the place of logits, so that no float32 copy of them exists.
        relay_kernels: number of kernels around one that brings rows to ranks once, and passes them on inside a node while others
            arrive, as DeepEP's do; 0 if there is none, and ops of their own pass rows on.
    """

    gradients: int = 4
    moments: int = 4
    apart: bool = True
    fused_loss: bool = False
    relay_kernels: int = 0


OWN_SOFTWARE = Software()


@dataclass(frozen=True)
class Job:
    """The model and batch to train.

    Args:
        seq_len: tokens of a sequence.
        global_batch: sequences of an optimizer step.
        dtype: dtype of activations and weights.
        iterations: iterations of Newton-Schulz of Muon in a step; 0 is AdamW.
        dispatch: what a token travels for (`moe.dispatch` of a recipe).
        wire: how rows are written for the wire (`moe.wire` of a recipe); None leaves them as they are.
        context: how ranks that share a sequence exchange keys and values of whole ones (`schedule.context` of a recipe).
        again: those of `PARTS` that run again. Only published rows have them; foldray's runtime keeps these parts.
        software: what runs the job.
        gradients: how gradients are written on their way to their owner (`engine.wire` of a recipe); None is float32.
        offload: whether the optimizer is on the host (`engine.offload` of a recipe).
        copies: room for copies of experts (`moe.copies` of a recipe); None for no copies.
        places: whether experts change places between ranks by their loads (`moe.place_every` of a recipe).
    """

    model: ModelSpec
    seq_len: int
    global_batch: int
    dtype: str = "bf16"
    iterations: int = 0
    dispatch: Literal["assignment", "rank"] = "assignment"
    wire: Literal["bfloat16", "float8"] | None = None
    context: Literal["ring", "all_gather"] = "ring"
    again: tuple[str, ...] = ()
    software: Software = OWN_SOFTWARE
    gradients: Literal["bfloat16"] | None = None
    offload: bool = False
    copies: CopyRoom | None = None
    places: bool = False

    @property
    def itemsize(self) -> int:
        """Bytes of a number in computation. Only products compute in 8 bits."""
        return {"fp64": 8, "fp32": 4, "tf32": 4}.get(self.dtype, 2)

    def model_under(self, fold: Fold) -> ModelSpec:
        """Return the model. If experts change places, those of its routing pattern have the places that a fold gives them."""
        shares = pattern_shares(self.model) if self.places and fold.ep > 1 else None
        if shares is None:
            return self.model
        order = spread(shares, fold.ep)
        router = self.model.router.model_copy(update={"skew": None, "shares": tuple(shares[expert] for expert in order)})
        return self.model.model_copy(update={"router": router})

    def copied(self, fold: Fold) -> Copied | None:
        """Return the room for copies of experts on a rank; None without any."""
        return None if self.copies is None else copied(self.model_under(fold), fold, self.copies, self.itemsize)

    @cached_property
    def blocks(self) -> tuple[BlockSpec, ...]:
        """The blocks of the model, with those of multi-token prediction."""
        return tuple(map(self.model.block, self.model.all_layers))

    @cached_property
    def different(self) -> tuple[BlockSpec, ...]:
        """The different blocks among them."""
        return tuple(dict.fromkeys(self.blocks))

    @cached_property
    def flops(self) -> tuple[float, float]:
        """FLOPs of a step: those of causal attention, and those of full attention."""
        causal, full = (step_flops(self.model, self.seq_len, self.global_batch, causal) for causal in (True, False))
        return causal, full


class Pieces(NamedTuple):
    """The properties of an ordering that bounds of time and memory depend on.

    Args:
        slicing: how a rank's share of a sequence is cut.
        recompute: kinds of ops whose forward runs again.
        hiding: the all-to-alls that can be hidden.
        batch_degree: number of parts of a micro-batch whose pieces overlap.
        offload: kinds of ops that keep on the host what their backward needs.
    """

    slicing: Slicing
    recompute: tuple[str, ...] = ()
    hiding: Hiding = "nothing"
    batch_degree: int = 1
    offload: tuple[str, ...] = ()

    @property
    def several(self) -> bool:
        """Whether a stage works on several pieces of a micro-batch, so that it hands its output over piece by piece."""
        return self.slicing.degree * self.batch_degree > 1

    @classmethod
    def of(cls, ordering: Ordering, seq_len: int, ranks: int) -> Pieces:
        """Return the pieces of an ordering if `ranks` ranks share a sequence of `seq_len` tokens."""
        slicing = (ordering.slicing or Slicing((seq_len,), (seq_len,))).shared(ranks)
        return cls(slicing, ordering.recompute, _hiding(ordering), ordering.batch_degree, ordering.offload)


def _hiding(ordering: Ordering) -> Hiding:
    if ordering.degree * ordering.batch_degree == 1:
        return "nothing"
    drains = ordering.forward.row.drains and ordering.backward.row.drains
    return "within" if drains and ordering.batch_degree == 1 else "all"


@dataclass(frozen=True)
class Candidate:
    """One way to train a job.

    Args:
        micro_batch: sequences of a micro-batch.
        virtual_stages: stages per pipeline position.
        zero: stage of ZeRO. 0 to 2 are as in training. 3 also shards the weights, and gathers them for every op.
        stage_layers: number of blocks of each stage; None cuts evenly.
    """

    job: Job
    fold: Fold
    ordering: Ordering = field(default_factory=Ordering)
    micro_batch: int = 1
    virtual_stages: int = 1
    zero: int = 1
    stage_layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        _ = self.ownership  # making it checks the fold, also where Python runs no assertions
        if self.micro_batch % self.ordering.batch_degree:
            raise UserError(
                "micro_batch", self.micro_batch, f"must be a multiple of the schedule's {self.ordering.batch_degree} parts"
            )
        if self.job.global_batch % (self.fold.dp * self.micro_batch):
            rule = f"must be a multiple of dp={self.fold.dp} × micro_batch={self.micro_batch}"
            raise UserError("global_batch", self.job.global_batch, rule, [self.fold.dp * self.micro_batch])
        if not self.fold.disjoint:
            check_pipeline(self.pipeline)

    def with_passes(self, count: int) -> Candidate:
        """Return the same candidate with this number of micro-batches in a step."""
        return replace(self, job=replace(self.job, global_batch=count * self.fold.dp * self.micro_batch))

    @cached_property
    def ownership(self) -> Ownership:
        return Ownership(self.job.model, self.fold, self.virtual_stages, self.stage_layers)

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches of one data-parallel place in a step."""
        return self.job.global_batch // (self.fold.dp * self.micro_batch)

    @cached_property
    def stages(self) -> tuple[tuple[BlockSpec, ...], ...]:
        """The blocks of every stage."""
        return tuple(tuple(self.job.blocks[i] for i in stage.layers) for stage in self.ownership.stages)

    @property
    def layout(self) -> PipelineLayout:
        return make_layout(self.stages, self.fold.pp)

    @property
    def pipeline(self) -> PipelineGraph:
        """The graph of the step with stages as its smallest pieces."""
        return PipelineGraph(self.fold.pp, self.micro_batches, self.virtual_stages)

    @cached_property
    def pieces(self) -> Pieces:
        return Pieces.of(self.ordering, self.job.seq_len, self.fold.cp * self.fold.tp)

    @cached_property
    def graph(self) -> StepGraph:
        """The graph of the step that training would run, without reductions."""
        parts = self.micro_batches * self.ordering.batch_degree
        return self.ordering.graph(self.ownership, self.stages, self.job.seq_len, parts, ragged=False)

    @cached_property
    def reducing(self) -> StepGraph:
        """The graph of the same step with the reductions of its gradients, and with copies of experts."""
        grids = self.fold.views.values() if self.fold.disjoint else [self.fold.attention]
        firsts = [grid.ranks[0] + place * grid.stride("pp") for grid in grids for place in range(grid.length("pp"))]
        room = self.job.copied(self.fold)
        copied = self.job.model.moe_layers if room and room.copies else ()
        return replace(self.graph, chunks=tuple(tuple(self._chunks(rank)) for rank in firsts), copied=copied)

    def _chunks(self, rank: int) -> Iterator[Chunk]:
        """Yield the chunks of a rank's float32 gradients. Gradients that only one rank holds are not reduced."""
        for name, parts in self.ownership.gradient_parts(rank).items():
            if self.fold.group_size(FAMILY[name]) > 1:
                yield from cut_buffer(name, parts, 4, self.ordering.reduction.most)


class StageForm(NamedTuple):
    """The form of a stage: its blocks, whether it is the first stage (embedding), and whether it is the last one (head)."""

    blocks: tuple[BlockSpec, ...]
    first: bool
    last: bool


class Content(NamedTuple):
    """The content of a stage, or of all stages of a position together.

    Args:
        blocks: (block, number of such blocks), for all different blocks.
        embedding: whether the content has the embedding.
        head: the block before the last head; None without a head.
    """

    blocks: tuple[tuple[BlockSpec, int], ...]
    embedding: bool
    head: BlockSpec | None

    @property
    def heads(self) -> int:
        """Number of heads. Multi-token prediction has one more for every further token."""
        return 0 if self.head is None else 1 + sum(count for block, count in self.blocks if block.mtp)

    @classmethod
    def of(cls, forms: Sequence[StageForm]) -> Content:
        counts = Counter(block for form in forms for block in form.blocks)
        head = next((form.blocks[-1] for form in forms if form.last), None)
        return cls(tuple(sorted(counts.items(), key=lambda item: item[0].order)), any(form.first for form in forms), head)


@dataclass(frozen=True)
class Positions:
    """The contents of all pipeline positions.

    Args:
        different: the different contents.
        number_at: for every position, the number of its content in `different`.
        last: for every different content, the last position that has it.
    """

    different: tuple[Content, ...]
    number_at: tuple[int, ...]
    last: tuple[int, ...]

    @classmethod
    def of(cls, contents: Sequence[Content]) -> Positions:
        numbers: dict[Content, int] = {}
        number_at = tuple(numbers.setdefault(content, len(numbers)) for content in contents)
        last = dict(zip(number_at, range(len(contents)), strict=True))
        return cls(tuple(numbers), number_at, tuple(last.values()))

    def content(self, place: int) -> Content:
        """Return the content of a position."""
        return self.different[self.number_at[place]]


@dataclass(frozen=True, eq=False)
class PipelineLayout:
    """The stages of a pipeline. `make_layout` returns the same object for equal stages.

    Args:
        forms, contents: the different forms of stages, and their contents.
        form_of: for every stage, the number of its form.
        forms_at: for every position, the numbers of its stages' forms.
        positions: for every position, the content of all its stages together.
    """

    forms: tuple[StageForm, ...]
    contents: tuple[Content, ...]
    form_of: tuple[int, ...]
    forms_at: tuple[tuple[int, ...], ...]
    positions: Positions

    @property
    def pp(self) -> int:
        """Number of pipeline positions."""
        return len(self.forms_at)

    @cached_property
    def backward(self) -> tuple[tuple[tuple[BlockSpec, int], ...], ...]:
        """For every form: its blocks in the order in which they go backward, as (block, how many of them in a row)."""
        return tuple(tuple((block, len([*row])) for block, row in groupby(reversed(form.blocks))) for form in self.forms)

    @cached_property
    def fullest(self) -> list[int]:
        """One position for each kind: among positions with equal stages, the first has most micro-batches in flight."""
        return list({forms: place for place, forms in reversed([*enumerate(self.forms_at)])}.values())


@lru_cache(maxsize=1024)
def make_layout(stages: tuple[tuple[BlockSpec, ...], ...], pp: int) -> PipelineLayout:
    """Return the layout of stages."""
    last = len(stages) - 1
    numbers: dict[StageForm, int] = {}
    form_of = tuple(
        numbers.setdefault(StageForm(blocks, number == 0, number == last), len(numbers)) for number, blocks in enumerate(stages)
    )
    forms, forms_at = tuple(numbers), [list[int]() for _ in range(pp)]
    for form, position in zip(form_of, stage_positions(len(stages), pp), strict=True):
        forms_at[position].append(form)
    return PipelineLayout(
        forms,
        tuple(Content.of([form]) for form in forms),
        form_of,
        tuple(map(tuple, forms_at)),
        Positions.of([Content.of([forms[number] for number in numbers_at]) for numbers_at in forms_at]),
    )
