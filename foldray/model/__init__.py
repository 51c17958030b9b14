"""The Transformer around the MoE layer."""

from foldray.model.batch import IGNORED, Batch, Losses, all_losses
from foldray.model.cache import Cache
from foldray.model.routes import ChosenExperts, Routes
from foldray.model.states import Memory
from foldray.model.transformer import Transformer
