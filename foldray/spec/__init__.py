"""What a model is: configuration, presets, parameter table, FLOPs. Pure."""

from foldray.spec.flops import forward_flops_per_token, step_flops
from foldray.spec.model import ModelSpec, RouterSpec, Strict
from foldray.spec.parameters import ParameterSpec, count_parameters, parameter_table
from foldray.spec.presets import PRESETS

__all__ = [
    "PRESETS",
    "ModelSpec",
    "ParameterSpec",
    "RouterSpec",
    "Strict",
    "count_parameters",
    "forward_flops_per_token",
    "parameter_table",
    "step_flops",
]
