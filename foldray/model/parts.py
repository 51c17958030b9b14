"""Maps the parameters of modules to the parameters of the whole model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from torch import nn

from foldray.blueprint.parts import Parts


@runtime_checkable
class Packed(Protocol):
    """A module that keeps several of the model's parameters in one tensor, to compute one product instead of several."""

    def parts(self) -> Parts:
        """Return the model's parameters inside each tensor. Names are relative to the module."""


def parts_below(modules: Iterable[tuple[str, nn.Module]]) -> Parts:
    """Return the parts of every parameter of these modules (`nn.Module.named_modules`), by full names."""
    all_parts: Parts = {}
    for prefix, module in modules:
        dot = f"{prefix}." if prefix else ""
        packed = module.parts() if isinstance(module, Packed) else None
        for name, _ in module.named_parameters(recurse=False):
            parts = [(name, ())] if packed is None else packed[name]
            all_parts[dot + name] = [(dot + part, index) for part, index in parts]
    return all_parts
