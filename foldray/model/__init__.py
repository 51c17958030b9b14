"""The Transformer around the MoE layer."""

from foldray.model.transformer import Losses, Transformer

__all__ = ["Losses", "Transformer"]
