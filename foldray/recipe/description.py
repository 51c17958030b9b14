"""What a recipe says: its sections, and what follows from them."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, ValidationError

from foldray.blueprint import ModelSpec, Ownership, Strict, smallest_slice
from foldray.fold import Fold
from foldray.recipe.reading import first_mistake, refuse_booleans
from foldray.recipe.sections import (
    CheckpointSpec,
    ClusterSpec,
    DataSpec,
    EngineSpec,
    FoldSpec,
    MoeSpec,
    Name,
    OptimizerSpec,
    ScheduleSpec,
    TrackingSpec,
    TrainingSpec,
    TuneSpec,
)
from foldray.schedule import Ordering, Reduction, Sequences, SliceCost, Slicing, make_ordering


class Description(Strict):
    """One training, described; `Recipe` is one whose rules have been checked."""

    name: Name = Field("run", description="first part of the run's id")
    model: ModelSpec
    data: DataSpec = DataSpec()
    fold: FoldSpec = FoldSpec()
    schedule: ScheduleSpec = ScheduleSpec()
    moe: MoeSpec = MoeSpec()
    optimizer: OptimizerSpec = OptimizerSpec()
    training: TrainingSpec = TrainingSpec()
    engine: EngineSpec = EngineSpec()
    precision: Literal["float32", "bfloat16", "float64"] = "float32"
    checkpoint: CheckpointSpec = CheckpointSpec()
    tracking: TrackingSpec = TrackingSpec()
    cluster: ClusterSpec = ClusterSpec()
    tune: TuneSpec = TuneSpec()

    @classmethod
    def parse(cls, given: dict[str, Any]) -> Self:
        """Validate a mapping; the first mistake is raised as a UserError."""
        refuse_booleans(cls, given)
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            raise first_mistake(cls, error) from None

    @property
    def placed_fold(self) -> Fold:
        """The fold on this recipe's workers."""
        return Fold(self.cluster.workers, **self.fold.model_dump())

    @property
    def ownership(self) -> Ownership:
        """Which worker holds what of the model."""
        return Ownership(self.model, self.placed_fold, self.schedule.virtual_stages, self.schedule.stage_layers)

    @property
    def slicing(self) -> Slicing | None:
        """How a sequence is cut; None where it is not."""
        return self.ordering.slicing

    def cut(self, kind: str, degree: int) -> Slicing:
        """This recipe's sequences in slices of another kind (`slice_sequence`)."""
        return self._sequences.cut(kind, degree)

    @property
    def _sequences(self) -> Sequences:
        return Sequences(self.data.seq_len, self.slice_cost, self.slice_unit)

    @property
    def slice_cost(self) -> SliceCost:
        """What a slice of attention costs: as measured, or by its FLOPs."""
        measured = self.schedule.slice_cost
        return SliceCost.of_model(self.model.hidden, self.model.heads) if measured is None else SliceCost(*measured)

    @property
    def slice_unit(self) -> int:
        """What every slice's length is a multiple of."""
        return smallest_slice(self.fold.cp, self.fold.tp)

    @property
    def ordering(self) -> Ordering:
        """How sequences are cut, and in which order their pieces go."""
        schedule = self.schedule
        reduction = Reduction(schedule.reduction, None if schedule.sp_bytes == "auto" else schedule.sp_bytes)
        return make_ordering(
            self._sequences, schedule.kind, schedule.degree, schedule.lag, schedule.backward, schedule.backward_lag,
            schedule.slicing, schedule.slices, schedule.batch_degree, reduction, schedule.recompute,
        )  # fmt: skip

    @property
    def accumulation(self) -> int:
        """Micro-batches per optimizer step on every data-parallel place."""
        return self.training.global_batch // (self.placed_fold.dp * self.training.micro_batch)

    def at_degree(self, degree: int) -> Self:
        """The same with sequences in so many pieces, and no other degree to try.

        Raises:
            UserError: that cannot be.
        """
        given = self.model_dump()
        slices = self.schedule.slices if degree == self.schedule.degree else None
        given["schedule"] |= {"degree": degree, "degrees": None, "slices": slices}
        return self.parse(given)
