"""A MoE backend with DeepSpeed's gates. The gates score and choose experts, and foldray drops and dispatches tokens."""

from __future__ import annotations

import torch

from foldray.blueprint import ModelSpec
from foldray.moe import Gate


def deepspeed_gate(model: ModelSpec) -> Gate:
    """Return a gate that calls DeepSpeed: `top1gating` for one expert per token, `topkgating` for more.

    Both get a capacity for all tokens, of which there may be none, so they drop none. foldray's model decides which tokens are
    dropped.
    """
    from deepspeed.moe.sharded_moe import top1gating, topkgating

    def gate(logits_TE: torch.Tensor, bias_E: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        capacity_factor = float(model.experts)  # with E as the factor, one expert can take all tokens
        if model.topk == 1:
            routes = top1gating(logits_TE, capacity_factor, min_capacity=0, use_rts=False, sparse_routes=True)
        else:
            routes = topkgating(
                logits_TE, model.topk, capacity_factor, min_capacity=0, drop_policy="position", sparse_routes=True
            )
        _, _, _, expert_KT, _, weight_KT, _ = routes
        return expert_KT.T.long().contiguous(), weight_KT.T.contiguous()

    return gate
