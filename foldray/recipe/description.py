"""A recipe without its rules: the sections, and the values that follow from them."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import ValidationError, model_validator

from foldray.blueprint import ModelSpec, Ownership, Strict, smallest_slice
from foldray.fold import Fold
from foldray.graph import Reduction, SliceCost, Slicing
from foldray.orders import AF_PIPE, Ordering, Overlap, Sequences
from foldray.recipe.bounds import Name
from foldray.recipe.data import DataSpec
from foldray.recipe.reading import first_mistake, refuse_booleans
from foldray.recipe.schedule import ScheduleSpec
from foldray.recipe.sections import (
    CheckpointSpec,
    ClusterSpec,
    EngineSpec,
    ExportSpec,
    FoldSpec,
    MoeSpec,
    OptimizerSpec,
    PlacementSpec,
    TrackingSpec,
    TrainingSpec,
)
from foldray.recipe.tuning import TuneSpec


class Description(Strict):
    """One training. The section `model` is required; every other key has a default.

    `Recipe` is a description whose rules have been checked.
    """

    name: Name = "run"
    """First part of the run's id, which names its folder and its MLflow run."""
    model: ModelSpec
    data: DataSpec = DataSpec()
    fold: FoldSpec = FoldSpec()
    placement: PlacementSpec | None = None
    schedule: ScheduleSpec = ScheduleSpec()
    moe: MoeSpec = MoeSpec()
    optimizer: OptimizerSpec = OptimizerSpec()
    training: TrainingSpec = TrainingSpec()
    engine: EngineSpec = EngineSpec()
    precision: Literal["float32", "bfloat16", "float64"] = "float32"
    """Type of weights and activations. `bfloat16` halves their memory and traffic; gradient sums
    and the optimizer stay in float32. `float64` is for checks, with `engine.kind: torch`."""
    checkpoint: CheckpointSpec = CheckpointSpec()
    tracking: TrackingSpec = TrackingSpec()
    cluster: ClusterSpec = ClusterSpec()
    tune: TuneSpec = TuneSpec()
    export: ExportSpec = ExportSpec()

    @model_validator(mode="before")
    @classmethod
    def _placement_has_af_pipe(cls, given: Any) -> Any:
        if not isinstance(given, dict) or given.get("placement") is None:
            return given
        schedule = given.get("schedule", {})
        return {**given, "schedule": {"kind": AF_PIPE.name, **schedule}} if isinstance(schedule, dict) else given

    @classmethod
    def parse(cls, given: dict[str, Any]) -> Self:
        """Validate a mapping, and raise the first mistake as a UserError."""
        refuse_booleans(cls, given)
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            raise first_mistake(cls, error) from None

    @property
    def placed_fold(self) -> Fold:
        """The fold on this recipe's workers."""
        sizes, placement = self.fold.model_dump(), self.placement
        if placement is not None:
            sizes |= {"expert_ranks": placement.experts, "expert_pp": placement.expert_pp}
        return Fold(self.cluster.workers, **sizes)

    @property
    def labels(self) -> tuple[str | None, ...]:
        """The label of Ray's nodes that each worker needs; None for a worker that may run on any node."""
        if self.placement is None:
            return (None,) * self.cluster.workers
        placement = self.placement
        return (placement.attention_nodes,) * placement.attention + (placement.expert_nodes,) * placement.experts

    @property
    def ownership(self) -> Ownership:
        """The pieces of the model that each worker holds."""
        return Ownership(self.model, self.placed_fold, self.schedule.virtual_stages, self.schedule.stage_layers)

    @property
    def slicing(self) -> Slicing | None:
        """How a sequence is cut; None for a sequence that is not cut."""
        return self.ordering.slicing

    def cut(self, kind: str, degree: int, attention_degree: int | None = None) -> Slicing:
        """Cut this recipe's sequences into slices of another kind (`slice_sequence`)."""
        return self._sequences.cut(kind, degree, attention_degree)

    @property
    def _sequences(self) -> Sequences:
        return Sequences(self.data.seq_len, self.slice_cost, self.slice_unit)

    @property
    def slice_cost(self) -> SliceCost:
        """The cost of a slice of attention: the measured cost of the recipe, or its FLOPs."""
        measured = self.schedule.slice_cost
        return SliceCost.of(self.model) if measured is None else SliceCost(*measured)

    @property
    def slice_unit(self) -> int:
        """The length of every slice is a multiple of this number of tokens."""
        return smallest_slice(self.fold.cp, self.fold.tp)

    @property
    def ordering(self) -> Ordering:
        """How sequences are cut, and the order of their pieces."""
        schedule = self.schedule
        return Ordering(
            Overlap(schedule.kind, _number(schedule.lag)),
            Overlap(schedule.backward or schedule.kind, _number(schedule.backward_lag)),
            self._sequences.cut_for(schedule.kind, schedule.degree, schedule.slicing, schedule.slices, schedule.attention_degree),
            schedule.recompute,
            schedule.batch_degree,
            Reduction(schedule.reduction, _number(schedule.sp_bytes)),
            schedule.weight_gradients,
            1 if schedule.ahead is None else schedule.ahead,
            schedule.alive,
        )

    @property
    def accumulation(self) -> int:
        """Micro-batches per optimizer step on every data-parallel place. With uneven shares, the last one has fewer sequences,
        or none, on some places."""
        return -(-self.training.global_batch // (self.placed_fold.dp * self.training.micro_batch))

    def at_degree(self, degree: int) -> Self:
        """Return the same recipe with this degree, at most as many slices of attention, and no other degree to try.

        Raises:
            UserError: the recipe is illegal with this degree.
        """
        given = self.model_dump()
        slices = self.schedule.slices if degree == self.schedule.degree else None
        fewer = self.schedule.attention_degree and min(self.schedule.attention_degree, degree)
        given["schedule"] |= {"degree": degree, "degrees": None, "slices": slices, "attention_degree": fewer}
        return self.parse(given)


def _number(given: int | str | None) -> int | None:
    return given if isinstance(given, int) else None
