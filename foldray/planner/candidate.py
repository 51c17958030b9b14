"""What is planned: a model and a batch, and one way to train it on a cluster."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from foldray.blueprint import ModelSpec, Ownership
from foldray.errors import UserError
from foldray.fold import Fold
from foldray.schedule import Chunk, Ordering, Slicing, StepGraph, cut_buffer

FAMILY: Mapping[str, str] = {"dense": "dp_cp", "replicated": "tp_dp_cp", "expert": "edp"}
"""By class of gradient: the family over whose groups it is summed."""


DTYPES: Mapping[str, str] = {"float32": "fp32", "bfloat16": "bf16", "float64": "fp64"}
"""By a recipe's precision: the dtype as hardware files have it."""


@dataclass(frozen=True)
class Job:
    """What is to be trained.

    Args:
        seq_len: tokens of a sequence.
        global_batch: sequences of an optimizer step.
        dtype: of activations and weights.
    """

    model: ModelSpec
    seq_len: int
    global_batch: int
    dtype: str = "bf16"


@dataclass(frozen=True)
class Candidate:
    """One way to train a job.

    Args:
        micro_batch: sequences of a micro-batch.
        zero: 0 to 2 as in training; 3 keeps all weights shared out and gathers them layer by layer, in every micro-batch.

    Raises:
        UserError: the fold does not divide the model, or the batch.
    """

    job: Job
    fold: Fold
    ordering: Ordering = field(default_factory=Ordering)
    micro_batch: int = 1
    virtual_stages: int = 1
    zero: int = 1

    def __post_init__(self) -> None:
        assert self.ownership
        if self.micro_batch % self.ordering.batch_degree:
            raise UserError(
                "micro_batch", self.micro_batch, f"must be a multiple of the schedule's {self.ordering.batch_degree} parts"
            )
        if self.job.global_batch % (self.fold.dp * self.micro_batch):
            rule = f"must be a multiple of dp={self.fold.dp} × micro_batch={self.micro_batch}"
            raise UserError("global_batch", self.job.global_batch, rule, [self.fold.dp * self.micro_batch])

    @cached_property
    def ownership(self) -> Ownership:
        return Ownership(self.job.model, self.fold, self.virtual_stages)

    @property
    def micro_batches(self) -> int:
        """Of one data-parallel rank in a step."""
        return self.job.global_batch // (self.fold.dp * self.micro_batch)

    @cached_property
    def graph(self) -> StepGraph:
        """The step that training would run, without its reductions."""
        kinds = self.job.model.block_kind
        stages = tuple(tuple(kinds(layer) for layer in stage.layers) for stage in self.ownership.stages)
        whole = Slicing((self.job.seq_len,), (self.job.seq_len,))
        slicing = (self.ordering.slicing or whole).shared(self.fold.cp * self.fold.tp)
        return StepGraph(
            stages,
            slicing,
            self.fold.pp,
            self.micro_batches * self.ordering.batch_degree,
            ragged=False,
            recompute=self.ordering.recompute,
            batch_degree=self.ordering.batch_degree,
        )

    @cached_property
    def reducing(self) -> StepGraph:
        """The same step, with the reductions of its gradients."""
        grid, fold = self.fold.attention, self.fold
        firsts = [fold.offset + place * grid.stride("pp") for place in range(fold.pp)]
        return replace(self.graph, chunks=tuple(tuple(self._chunks(rank)) for rank in firsts))

    def _chunks(self, rank: int) -> Iterator[Chunk]:
        """In float32; what one rank alone has is not reduced."""
        for name, parts in self.ownership.gradient_parts(rank).items():
            _, axes = self.fold.axes(FAMILY[name])
            if math.prod(getattr(self.fold, axis) for axis in axes) > 1:
                yield from cut_buffer(name, parts, 4, self.ordering.reduction.most)
