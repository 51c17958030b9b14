"""The Transformer around the MoE layer."""

from foldray.model.attention import Place
from foldray.model.batch import IGNORED, Batch, Losses, all_losses
from foldray.model.cache import Cache
from foldray.model.slices import KeysAndValues
from foldray.model.transformer import Transformer

__all__ = ["IGNORED", "Batch", "Cache", "KeysAndValues", "Losses", "Place", "Transformer", "all_losses"]
