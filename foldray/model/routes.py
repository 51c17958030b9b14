"""The experts of tokens as data: what routers have chosen, and what a batch may bring instead (`Batch.expert_MBLK`).

Legend: M MoE blocks, B sequences, L positions of a whole sequence, s positions of this rank's piece of it, K experts per token.
"""

from __future__ import annotations

from types import TracebackType

import torch

from foldray.blueprint import ModelSpec
from foldray.errors import UserError
from foldray.model.batch import Batch
from foldray.model.transformer import Transformer


class ChosenExperts:
    """The experts that the routers of this rank choose for its tokens in a micro-batch.

    Attributes:
        layers: numbers of this rank's MoE blocks.
        position_s: the positions of its tokens in their sequences, int64.
        expert_MBsK: the experts, int32, once every piece has been put.
    """

    def __init__(self, model: Transformer, batch: Batch, length: int):
        self.layers = [layer for layer, _ in model.routers()]
        self.position_s = model.positions_of(batch, range(length))
        shape = len(self.layers), len(batch.token_BL), length, model.spec.topk
        self.expert_MBsK = torch.empty(shape, dtype=torch.int32, device=batch.token_BL.device)

    def put(self, layer: int, tokens: range, expert_TK: torch.Tensor) -> None:
        """Take the experts of a piece of a block."""
        place = self.expert_MBsK[self.layers.index(layer), :, tokens.start : tokens.stop]
        place.copy_(expert_TK.view(place.shape))


class Routes:
    """Keeps the experts that the routers of a model choose, while it is open. This process must hold all of the model."""

    def __init__(self, model: Transformer):
        self._routers = [router for _, router in model.routers()]
        self._chosen: list[list[torch.Tensor]] = [[] for _ in self._routers]

    def __enter__(self) -> Routes:
        self._hooks = [
            router.register_forward_hook(lambda _, __, routing, kept=kept: kept.append(routing.expert_TK))
            for router, kept in zip(self._routers, self._chosen, strict=True)
        ]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        for hook in self._hooks:
            hook.remove()

    def experts(self, sequences: int = 1) -> torch.Tensor:
        """Return the experts of all tokens so far, which have come slice by slice: int16 [M, B, L, K]."""
        slices = [[expert_TK.unflatten(0, (sequences, -1)) for expert_TK in chosen] for chosen in self._chosen]
        return torch.stack([torch.cat(chosen, dim=1) for chosen in slices]).to(torch.int16)


def checked_experts(experts: torch.Tensor, model: ModelSpec, sequences: int, length: int) -> torch.Tensor:
    """Return experts that a batch may bring, or raise a UserError about `experts`."""
    shape = len(model.moe_layers), sequences, length, model.topk
    if tuple(experts.shape) != shape:
        rule = f"must have the shape {list(shape)}: MoE blocks, sequences, tokens, experts of a token"
        raise UserError("experts", list(experts.shape), rule)
    if experts.is_floating_point() or experts.dtype == torch.bool:
        raise UserError("experts", str(experts.dtype), "must be whole numbers, the numbers of experts")
    low, high = (int(end) for end in experts.aminmax())
    if low < -1 or high >= model.experts:
        rule = "is no expert; −1 leaves the choice to the router"
        raise UserError("experts", low if low < -1 else high, rule, [f"−1…{model.experts - 1}"])
    ordered = experts.sort(-1).values
    repeated = ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any(-1)
    partly = (ordered[..., 0] < 0) & (ordered[..., -1] >= 0)
    for wrong, rule in ((repeated, "has an expert twice"), (partly, "leaves only some of its experts to the router")):
        if bool(wrong.any()):
            block, sequence, token = wrong.nonzero()[0].tolist()
            where = f"[{block}, {sequence}, {token}]"
            raise UserError("experts", experts[block, sequence, token].tolist(), f"at {where} {rule}")
    return experts
