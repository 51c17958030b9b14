"""Given experts: logits and gradients are those of transformers whose routers are made to choose the same ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from foldray.comm import Groups
from foldray.model import Batch
from tests.foldray.parity import sample, some_experts
from tests.trainers.hugging_face.oracle import FAMILIES, by_our_names, filled, mean_loss, saved, widened
from tests.trainers.hugging_face.test_families import imported

REPLAYED = [row for row in FAMILIES if row[0] in ("Mixtral", "Qwen3Moe", "DeepseekV3")]


class _Forced(TorchFunctionMode):
    """Lets `topk` over the experts choose given ones, block by block."""

    def __init__(self, experts: int, chosen: Iterator[torch.Tensor]):
        super().__init__()
        self._experts, self._chosen = experts, chosen

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not torch.topk or args[0].shape[-1] != self._experts:
            return function(*args, **(kwargs or {}))
        expert_TK = next(self._chosen)
        return torch.return_types.topk((args[0].gather(-1, expert_TK), expert_TK))


@pytest.mark.parametrize(("family", "sizes"), REPLAYED, ids=[family for family, _ in REPLAYED])
def test_logits_and_gradients(tmp_path: Path, family: str, sizes: dict[str, Any]) -> None:
    theirs = saved(tmp_path / "hub", family, sizes)
    recipe = imported(tmp_path / "hub", tmp_path / "recipe.yaml")
    engine, text_BL = filled(recipe, groups := Groups.create(recipe.placed_fold)), sample(3, 3, 14, 320)
    expert_MBLK = some_experts(recipe, 0, free=0)[:, :3, :13]
    chosen = expert_MBLK.flatten(1, 2).to(torch.int64)
    batch = Batch(text_BL[:, :-1], text_BL[:, 1:], None, expert_MBLK)
    with widened(), _Forced(recipe.model.experts, iter(chosen)):
        expected = theirs(text_BL[:, :-1]).logits
    torch.testing.assert_close(engine.model.head_logits(engine.model.hidden(batch)), expected, atol=1e-9, rtol=1e-9)
    assert not torch.allclose(engine.model.logits(text_BL[:, :-1]), expected, atol=1e-3)
    with _Forced(recipe.model.experts, iter(chosen)):
        mean_loss(theirs, text_BL).backward()
    engine.train([batch])
    slopes = by_our_names(theirs, recipe, tmp_path / "slopes", gradients=True)
    for local, parameter in engine.model.named_parameters():
        for name, index in engine.model.global_parts[local]:
            ours = engine.gradients.views[parameter][index]
            torch.testing.assert_close(ours, slopes.pop(name), atol=1e-9, rtol=1e-9, msg=name)
    assert not slopes
    groups.close()
