"""What stands between the two products of a feed-forward network: one table.

`model.ffn` takes a row's name, or `module:NAME` for a row that stands in a module of the user's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from foldray.tables import find_row


class Activation(NamedTuple):
    """An activation.

    Args:
        name: as recipes have it.
        gated: whether the first product has two halves, a gate beside the values, or values alone.
        kernel: where its `foldray.kernels.activations.Kernel` stands, or a function of the first product, as `module:NAME`.
    """

    name: str
    gated: bool
    kernel: str

    @property
    def inwards(self) -> tuple[str, ...]:
        """The matrices of the first product, in the order of their columns."""
        return ("gate", "up") if self.gated else ("up",)


ACTIVATIONS: Mapping[str, Activation] = {
    row.name: row
    for row in (
        Activation("gated_silu", True, "foldray.kernels.activations:GATED_SILU"),
        Activation("gelu", False, "foldray.kernels.activations:GELU"),
    )
}


def find_activation(name: str) -> Activation:
    """A row by its name, or by `module:NAME`.

    Raises:
        UserError: there is none.
    """
    return find_row("model.ffn", ACTIVATIONS, Activation, name)
