"""The Transformer around the MoE layer."""

from foldray.model.transformer import Batch, Losses, Segment, Transformer, add_losses

__all__ = ["Batch", "Losses", "Segment", "Transformer", "add_losses"]
