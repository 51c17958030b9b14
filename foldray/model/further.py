"""Multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2): blocks that predict further tokens while training.

Module k is a block behind the last one. At position i it takes the state of depth k − 1, and the embedding of token i + k:

    state k at i = final norm k ( block k ( projection [norm(embedding of token i + k) ; norm(state k − 1 at i)] ) )
    loss k       = mean of −log p(token i + k + 1 | state k at i), by the model's own head

State 0 is the model's own, also after its final norm. The report leaves open on which side of the final norm a state is taken.
The code that DeepSeek's and GLM's weights run with takes it behind the norm (Megatron-LM, vLLM).

Positions see only earlier ones, and token i + k is an input, so slices and context parallelism work as in other blocks. The last
k positions have no target. They take the last token of the sequence.

Legend: B sequences, s positions of this rank's piece, S positions of its context-parallel shard, H hidden.
"""

from __future__ import annotations

import torch
from torch import nn

from foldray.blueprint import ModelSpec
from foldray.kernels.later import Later, product
from foldray.model.norms import Norm


class MTPModule(nn.Module):
    """What a block of multi-token prediction has beside the block itself."""

    def __init__(self, model: ModelSpec, later: Later):
        super().__init__()
        self.later = later
        self.embedding_norm, self.hidden_norm = Norm(model), Norm(model)
        self.projection = nn.Parameter(torch.empty(2 * model.hidden, model.hidden))
        self.final_norm = Norm(model)

    def forward(self, x_BsH: torch.Tensor, e_BsH: torch.Tensor) -> torch.Tensor:
        """Return the block's input from the state of the depth before and the embeddings of the later tokens: [B, s, H]."""
        both_BsI = torch.cat((self.embedding_norm(e_BsH), self.hidden_norm(x_BsH)), dim=-1)
        return product(both_BsI, self.projection, self.later)
