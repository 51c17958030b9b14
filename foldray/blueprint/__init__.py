"""Models as data: sizes and choices, presets, the parameter table, the owners of parameters, FLOPs. No torch."""

from foldray.blueprint.block import AttentionSpec, BlockSpec, FeedForwardSpec, GrowthSpec, MixtureSpec, RopeSpec, ScalingSpec
from foldray.blueprint.flops import forward_flops_per_token, half_flops, step_flops
from foldray.blueprint.layout import Layout, check_length, smallest_slice
from foldray.blueprint.model import ModelSpec
from foldray.blueprint.ownership import GradientPart, Maker, Ownership, Piece, made_at
from foldray.blueprint.parameters import (
    ParameterSpec,
    adapter_pairs,
    count_by_cut,
    count_by_op,
    count_parameters,
    hidden_matrices,
    parameter_table,
)
from foldray.blueprint.presets import PRESETS
from foldray.blueprint.sections import BalanceScope, BiasUpdate, RopeScaling, RouterSpec, Strict
from foldray.blueprint.skew import (
    expert_shares,
    overload,
    pattern_shares,
    rank_shares,
    ranks_of_a_token,
    visits_of_a_token,
)
from foldray.blueprint.stages import Stage, even_sizes, make_stages, stage_positions
