"""The recipe: the one description that every command reads."""

from foldray.recipe.checks import check_trains, slow_on_gpu
from foldray.recipe.data import DataSpec, SourceSpec, ValidationSplit
from foldray.recipe.reading import describe
from foldray.recipe.recipe import Recipe
from foldray.recipe.schedule import ScheduleSpec
from foldray.recipe.sections import (
    CheckpointSpec,
    ClusterSpec,
    EngineSpec,
    FoldSpec,
    MoeSpec,
    OptimizerSpec,
    TrackingSpec,
    TrainingSpec,
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
    "SourceSpec",
    "TrackingSpec",
    "TrainingSpec",
    "ValidationSplit",
    "check_trains",
    "describe",
    "slow_on_gpu",
]
