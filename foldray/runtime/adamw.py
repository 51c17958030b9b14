"""AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) whose two moments are kept in bfloat16, as DeepSeek-V3 keeps its own
(arXiv:2412.19437, section 3.3).

Moments are widened to the type of the weights, the update is torch's own in this type, and then moments are rounded to the
nearest bfloat16, of two equally near ones to the even one. So the rounding of a step acts on later steps only. A moment that
decays by less than half the distance of two bfloat16 numbers would stay where it is, so recipes have an upper limit of `betas`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.adamw import adamw

SLICE = 2**24
"""Most elements whose moments are wide at once."""


class RoundedAdamW(torch.optim.AdamW):
    """torch's AdamW with moments in bfloat16. The state has the keys of torch's."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the weights by their gradients. A closure has no use here."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self._update(parameter, group)

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        memory = self.state[parameter]
        if "step" not in memory:
            memory["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device if group["fused"] else None)
        for key in ("exp_avg", "exp_avg_sq"):
            if key not in memory:
                memory[key] = torch.zeros_like(parameter, dtype=torch.bfloat16)
        assert parameter.grad is not None, "an engine gives every parameter a gradient"
        given = (parameter, parameter.grad, memory["exp_avg"], memory["exp_avg_sq"])
        for weights, gradients, *moments in zip(*(tensor.view(-1).split(SLICE) for tensor in given), strict=True):
            wide = [moment.to(parameter.dtype) for moment in moments]
            adamw(
                [weights], [gradients], [wide[0]], [wide[1]], [], [memory["step"].clone()], foreach=False, fused=group["fused"],
                amsgrad=False, beta1=group["betas"][0], beta2=group["betas"][1], lr=group["lr"],
                weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
            )  # fmt: skip
            for moment, exact in zip(moments, wide, strict=True):
                moment.copy_(exact)
        memory["step"] += 1
