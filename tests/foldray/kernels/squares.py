"""An activation that foldray does not have: a gated ReLU (as in ReGLU) whose gate is squared."""

from __future__ import annotations

from torch import Tensor

from foldray.activations import Activation


def gated_squares(up_NW: Tensor) -> Tensor:
    gate_NF, value_NF = up_NW.chunk(2, -1)
    return gate_NF.relu().square() * value_NF


SQUARES = Activation("squares", True, "tests.foldray.kernels.squares:gated_squares")
