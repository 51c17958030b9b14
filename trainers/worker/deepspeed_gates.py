"""DeepSpeed's gates as a backend: they score and choose, foldray drops and dispatches."""

from __future__ import annotations

import torch

from foldray.blueprint import ModelSpec
from foldray.moe import Gate


def deepspeed_gate(model: ModelSpec) -> Gate:
    """A gate that asks DeepSpeed: `top1gating` for one expert per token, `topkgating` for more.

    Both are asked with room for every token, so that nothing is dropped in them: who is dropped is the model's choice.
    """
    from deepspeed.moe.sharded_moe import top1gating, topkgating

    def gate(logits_TE: torch.Tensor, bias_E: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        room = float(model.experts)  # a capacity factor of E holds all tokens, wherever they go
        if model.topk == 1:
            routes = top1gating(logits_TE, room, min_capacity=1, use_rts=False, sparse_routes=True)
        else:
            routes = topkgating(logits_TE, model.topk, room, min_capacity=1, drop_policy="position", sparse_routes=True)
        _, _, _, expert_KT, _, weight_KT, _ = routes
        return expert_KT.T.long().contiguous(), weight_KT.T.contiguous()

    return gate
