"""The recipe: the one description that every command reads."""

from foldray.recipe.reading import describe
from foldray.recipe.recipe import Recipe
from foldray.recipe.schedule import ScheduleSpec
from foldray.recipe.sections import (
    CheckpointSpec,
    ClusterSpec,
    DataSpec,
    EngineSpec,
    FoldSpec,
    MoeSpec,
    OptimizerSpec,
    TrackingSpec,
    TrainingSpec,
    ValidationSplit,
)

__all__ = [
    "CheckpointSpec",
    "ClusterSpec",
    "DataSpec",
    "EngineSpec",
    "FoldSpec",
    "MoeSpec",
    "OptimizerSpec",
    "Recipe",
    "ScheduleSpec",
    "TrackingSpec",
    "TrainingSpec",
    "ValidationSplit",
    "describe",
]
