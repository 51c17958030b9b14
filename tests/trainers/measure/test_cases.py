"""The cases of `foldray verify --all`: correct code passes all of them, and each of them finds a fault of its class."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch

from foldray.comm import Groups, Pending
from foldray.model import IGNORED, Transformer
from foldray.model.attention_mask import AttentionMask
from foldray.model.layers import FeedForward
from foldray.moe.balance import Balance, Sequences
from foldray.moe.copies import CopiedExperts
from foldray.moe.router import TopKGate
from foldray.recipe import Recipe
from foldray.runtime import Gradients
from foldray.runtime.kept import HostMemory
from foldray.runtime.op_graphs import OpGraph, OpGraphs
from foldray.runtime.weights import Weights
from foldray.windows import FULL
from tests.foldray.parity import make_recipe
from tests.patches import patched
from trainers.measure import comparison
from trainers.measure.cases import CASES, Refused, case_recipe
from trainers.measure.verify import judged, on_rank_all, small

FOLDS = {
    "tp2-cp2-ep4": (4, {"tp": 2, "cp": 2, "ep": 4}, {"kind": "one_a_one_m", "degree": 2}),
    "pp2-cp2-ep2": (4, {"pp": 2, "cp": 2, "ep": 2}, {"kind": "stream", "degree": 2, "lag": 1}),
    "tp2-ep2-etp2": (4, {"tp": 2, "ep": 2, "etp": 2}, {}),
}


def recipe_of(fold: str, **sections: Any) -> Recipe:
    workers, sizes, schedule = FOLDS[fold]
    router = {"softmax": "before_topk", "normalize": True}
    return small(make_recipe(workers, sizes, schedule=schedule, **{"model": {"router": router}, **sections}))


# The faults. Each one wraps a function; the single process runs without it.


def _doubled_gradients(finish: Any) -> Any:
    def wrong(self: Gradients) -> None:
        finish(self)
        self.buffers[0].sums.mul_(2.0)

    return wrong


def _mean_over_ranks(make: Any) -> Any:
    """A mean over the tokens of a rank, then over ranks."""

    def wrong(self: Weights, batches: Any, groups: Groups, *others: Any) -> None:
        make(self, batches, groups, *others)
        tokens = sum((batch.target_BL != IGNORED).sum() for batch in batches)
        sequences = sum(len(batch.target_BL) for batch in batches)
        self._counts.wait()
        self._counts = Pending([], (torch.tensor([sequences, tokens], dtype=torch.float64) * groups.fold.world_size,))

    return wrong


def _mean_of_micro_batches(make: Any) -> Any:
    return lambda self, batches, *others: make(self, batches[:1], *others)


def _one_document(_: Any) -> Any:
    return lambda self, runs: True


def _without_window(mask: Any) -> Any:
    return lambda self, queries, runs: mask(replace(self, window=FULL), queries, runs)


def _detached_router(of: Any) -> Any:
    def wrong(self: Transformer, kind: str, layer: int) -> Any:
        router = {parameter for name, parameter in self.named_parameters() if ".router." in name}
        return [parameter for parameter in of(self, kind, layer) if parameter not in router]

    return wrong


def _slopes(balance: float, z: float) -> Callable[[Any], Any]:
    def wrap(slopes: Any) -> Any:
        def wrong(self: Balance) -> tuple[torch.Tensor, float]:
            slope_BE, slope = slopes(self)
            return slope_BE * balance, slope * z

        return wrong

    return wrap


def _of_one_worker(_: Any) -> Any:
    return lambda self, x: self.sum(x)


def _of_own_pieces(update: Any) -> Any:
    """The counts of a rank, which has only some of a step's sequences or tokens."""
    return lambda self, count_ME: update(self, count_ME // (1 + self.groups.rank % 2) + self.groups.rank)


def _over_all_experts(call: Any) -> Any:
    def wrong(self: TopKGate, logits_TE: torch.Tensor, bias_E: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        expert_TK, weight_TK = call(self, logits_TE, bias_E)
        return expert_TK, weight_TK / logits_TE.sigmoid().sum(-1, keepdim=True)

    return wrong


def _left_from_before(differentiate: Any) -> Any:
    def of_idle(gradient: torch.Tensor | None) -> torch.Tensor | None:
        if gradient is None or gradient.dim() != 3:
            return gradient
        return gradient + (gradient.flatten(1).abs().sum(1) == 0)[:, None, None]

    def wrong(*arguments: Any) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        inputs, parameters = differentiate(*arguments)
        return inputs, [of_idle(gradient) for gradient in parameters]

    return wrong


def _once_per_rank(forward: Any) -> Any:
    return lambda self, x_BsH: forward(self, x_BsH) * self.tensor.size


def _apart(_: Any) -> Any:
    return lambda self: []


def _of_own_piece(enter: Any) -> Any:
    """The next position of a rank's own shard, instead of that of the sequence."""

    def wrong(self: Transformer, x_BsH: torch.Tensor, layer: int, place: Any, *token_BL: torch.Tensor) -> torch.Tensor:
        next_S = torch.cat([place.position_S[1:] - 1, place.position_S[-1:]])
        return enter(self, x_BsH, layer, replace(place, position_S=next_S), *token_BL)

    return wrong


def _by_rank(_: Any) -> Any:
    def wrong(self: Sequences, x_BsK: torch.Tensor) -> torch.Tensor:
        pieces = self.communicator.all_gather(x_BsK).view(self.ranks, *x_BsK.shape)
        return pieces.movedim(0, 1).flatten(1, 2)

    return wrong


def _twice(differentiate: Any) -> Any:
    def wrong(self: OpGraphs, op: Any, gradients: Any) -> list[torch.Tensor]:
        found = differentiate(self, op, gradients)
        return [each * 2 for each in found] if op.kind in self.graph.again else found

    return wrong


def _stay_with_copies(start_home: Any) -> Any:
    return lambda self, sum_of: start_home(self, torch.zeros_like)


def _with_zeros(fetch: Any) -> Any:
    def wrong(self: HostMemory, pieces: Any) -> Any:
        pending = fetch(self, pieces)
        for piece in pieces:
            piece.on_device.zero_()
        return pending

    return wrong


FAULTS: dict[str, tuple[str, Any, str, Callable[[Any], Any]]] = {
    "as it is": ("tp2-cp2-ep4", Gradients, "finish", _doubled_gradients),
    "masked tokens": ("tp2-ep2-etp2", Weights, "__init__", _mean_over_ranks),
    "documents": ("tp2-cp2-ep4", AttentionMask, "_one_document", _one_document),
    "window": ("tp2-cp2-ep4", AttentionMask, "mask", _without_window),
    "router": ("tp2-cp2-ep4", Transformer, "parameters_of", _detached_router),
    "balance loss": ("tp2-cp2-ep4", Balance, "slopes", _slopes(2.0, 1.0)),
    "batch balance": ("tp2-ep2-etp2", Sequences, "sum_of_batch", _of_one_worker),
    "global balance": ("tp2-cp2-ep4", Transformer, "update_biases", _of_own_pieces),
    "z-loss": ("tp2-cp2-ep4", Balance, "slopes", _slopes(1.0, 2.0)),
    "sigmoid scores": ("tp2-cp2-ep4", TopKGate, "__call__", _over_all_experts),
    "idle experts": ("tp2-cp2-ep4", OpGraph, "differentiate", _left_from_before),
    "shared expert": ("tp2-ep2-etp2", FeedForward, "forward", _once_per_rank),
    "tied embedding": ("pp2-cp2-ep2", Transformer, "tied", _apart),
    "further tokens": ("tp2-cp2-ep4", Transformer, "enter", _of_own_piece),
    "dropped tokens": ("tp2-cp2-ep4", Sequences, "whole", _by_rank),
    "recomputation": ("pp2-cp2-ep2", OpGraphs, "differentiate", _twice),
    "activations on the host": ("tp2-cp2-ep4", HostMemory, "fetch", _with_zeros),
    "copied experts": ("tp2-cp2-ep4", CopiedExperts, "start_home", _stay_with_copies),
    "accumulation": ("tp2-ep2-etp2", Weights, "__init__", _mean_of_micro_batches),
}


def run_cases(rank: int, recipe: Recipe, names: list[str] | None = None, planted: bool = False) -> dict[str, Any]:
    groups = Groups.create(recipe.placed_fold, rank)
    try:
        if names is None:
            return on_rank_all(recipe, groups, torch.device("cpu"))
        with ExitStack() as stack:
            if planted:
                _, owner, attribute, wrap = FAULTS[names[0]]
                fault = stack.enter_context(patched(owner, attribute, wrap(getattr(owner, attribute))))
                alone = comparison._one_process

                def without_fault(*arguments: Any) -> Any:
                    fault.undo()
                    return alone(*arguments)

                stack.enter_context(patched(comparison, "_one_process", without_fault))
            return on_rank_all(recipe, groups, torch.device("cpu"), names)
    finally:
        groups.close()


def test_every_case_has_a_fault() -> None:
    assert list(FAULTS) == list(CASES)


@pytest.mark.gate(1)
@pytest.mark.parametrize("name", CASES)
def test_a_case_finds_its_fault_and_passes_correct_code(ranks, name: str) -> None:
    fold = FAULTS[name][0]
    recipe = recipe_of(fold)
    for planted in (True, False):
        found = ranks(4).run(run_cases, recipe, [name], planted)[0]
        (verdict,) = [case for case in judged(recipe, found) if case["case"] == name]
        assert verdict["passed"] is not planted, verdict
    assert verdict["grad_max_rel_diff"] > 0, "the case computes something"


@pytest.mark.gate(1 / 6)
@pytest.mark.parametrize("engine", [{"kind": "torch"}, {"kind": "torch", "zero": 2}, {"kind": "deepspeed", "zero": 2}], ids=str)
@pytest.mark.parametrize("fold", FOLDS)
def test_all_cases_pass(ranks, fold: str, engine: dict[str, Any]) -> None:
    recipe = recipe_of(fold, engine=engine, precision="float32")
    checked = judged(recipe, ranks(4).run(run_cases, recipe)[0])
    assert [case["case"] for case in checked] == list(CASES)
    assert not [case for case in checked if not case.get("passed", "refused" in case)]
    # The torch engine cannot shard an embedding over a pipeline that is tied, or that further tokens need.
    assert sum("refused" in case for case in checked) <= 2


@pytest.mark.gate(1 / 3)
@pytest.mark.parametrize("fold", FOLDS)
def test_cases_pass_with_tokens_that_travel_once_to_each_rank(ranks, fold: str) -> None:
    recipe = recipe_of(fold, moe={"dispatch": "rank", "experts": "grouped"})
    names = ["as it is", "idle experts", "dropped tokens", "recomputation"]
    found = ranks(4).run(run_cases, recipe, names)[0]
    checked = {case["case"]: case for case in judged(recipe, found) if case["case"] in names}
    assert {name: case["passed"] for name, case in checked.items()} == dict.fromkeys(names, True)


def test_a_case_that_a_recipe_cannot_have_says_why() -> None:
    recipe = recipe_of("tp2-ep2-etp2", moe={"backend": "deepspeed", "experts": "grouped"})
    refused = case_recipe(CASES["sigmoid scores"], recipe)
    assert isinstance(refused, Refused)
    assert refused.reason.startswith("moe.backend=deepspeed: ")
