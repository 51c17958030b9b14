"""The Transformer around the MoE layer."""

from foldray.model.attention import Place
from foldray.model.slices import KeysAndValues
from foldray.model.transformer import Batch, Losses, Transformer, add_losses

__all__ = ["Batch", "KeysAndValues", "Losses", "Place", "Transformer", "add_losses"]
