"""The table of activations. An activation is the function between the two matrix products of a feed-forward network.

`model.ffn` takes the name of a row, or `module:NAME` for a row in a user's module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from foldray.tables import find_row


class Activation(NamedTuple):
    """An activation.

    Args:
        name: the name in recipes.
        gated: whether the first product has two halves, a gate and values. Without a gate, it has values only.
        kernel: `module:NAME` of a `foldray.kernels.activations.Kernel`, or of a plain function of the first product.
        beside: number of tensors like its result that its backward needs beside the gradients of both sides and the result.
    """

    name: str
    gated: bool
    kernel: str
    beside: int = 0

    @property
    def inwards(self) -> tuple[str, ...]:
        """The matrices of the first product, in the order of their columns."""
        return ("gate", "up") if self.gated else ("up",)


ACTIVATIONS: Mapping[str, Activation] = {
    row.name: row
    for row in (
        Activation("gated_silu", True, "foldray.kernels.activations:GATED_SILU"),
        Activation("gated_clamped", True, "foldray.kernels.activations:GATED_CLAMPED", beside=1),
        Activation("gelu", False, "foldray.kernels.activations:GELU"),
    )
}


def find_activation(name: str) -> Activation:
    """Return a row by its name, or by `module:NAME`."""
    return find_row("model.ffn", ACTIVATIONS, Activation, name)
