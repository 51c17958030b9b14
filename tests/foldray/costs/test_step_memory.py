"""The memory of whole steps: what is alive on the fullest of real ranks at the fullest moment, and what the ledger counts."""

from __future__ import annotations

import gc
import random
from threading import current_thread, main_thread
from typing import Any, NamedTuple

import pytest
from torch import Tensor

from foldray.comm import Groups, Pending
from foldray.costs.device import Device
from foldray.costs.hardware import load_hardware
from foldray.costs.memory import ledger
from foldray.costs.rank import RankCosts
from foldray.errors import UserError
from foldray.recipe import Recipe
from foldray.refold import as_candidate
from tests.foldray.live import Live
from tests.foldray.parity import engine_of, make_recipe, own_batches
from tests.patches import patched

EOS = load_hardware("eos-h100").model_copy(update={"processors": 1})  # runs are those of a CPU
SIZES: dict[str, Any] = {
    "layers": 4, "hidden": 256, "heads": 8, "kv_heads": 4, "head_dim": 32, "ffn_hidden": 512, "expert_hidden": 384,
    "shared_hidden": 0, "experts": 4, "topk": 4, "vocab": 512,
}  # fmt: skip
MODELS: list[dict[str, Any]] = [
    {}, {"shared_hidden": 512}, {"moe_every": 2}, {"latent_rank": 192, "latent_query_rank": 128, "rope_dim": 16, "kv_heads": 8},
    {"attention_sinks": True, "expert_bias": True, "ffn": "gated_clamped"},
    {"mtp_depth": 1}, {"ffn": "gelu", "norm": "layernorm"},
    {"windows": ["linear", "full"], "linear_key_heads": 4, "linear_key_dim": 48},
]  # fmt: skip
FOLDS: list[tuple[int, dict[str, int]]] = [
    (1, {}), (2, {"ep": 2}), (2, {"tp": 2}), (2, {"pp": 2}), (2, {"cp": 2}), (2, {}), (4, {"tp": 2, "ep": 4}),
    (4, {"pp": 2, "ep": 2}), (4, {"ep": 4}),
]  # fmt: skip
SCHEDULES: list[dict[str, Any]] = [
    {"kind": "sequential"}, {"kind": "stream", "degree": 4}, {"kind": "one_a_one_m", "degree": 4}, {"kind": "aaam", "degree": 2},
]  # fmt: skip
AGAIN = [[], ["expert"], ["attention", "ffn", "expert", "shared"]]


class Case(NamedTuple):
    workers: int
    fold: dict[str, int]
    sections: dict[str, Any]

    @property
    def recipe(self) -> Recipe:
        return make_recipe(self.workers, self.fold, **self.sections)

    def __str__(self) -> str:
        sections = self.sections
        model = {key: value for key, value in sections["model"].items() if SIZES.get(key) != value}
        settings = (model, sections["schedule"], sections["precision"], sections["engine"]["zero"], sections["optimizer"]["kind"])
        return " ".join(map(str, (self.fold, *settings, sections["training"]["micro_batch"])))


def cases(count: int) -> list[Case]:
    """Return legal recipes, drawn at random, whose tokens all have all experts, so that no rank has more rows by chance."""
    chance, found = random.Random(0), list[Case]()
    while len(found) < count:
        (workers, fold), model, schedule = chance.choice(FOLDS), chance.choice(MODELS), chance.choice(SCHEDULES)
        sections: dict[str, Any] = {
            "model": SIZES | model, "data": {"seq_len": 512}, "moe": {"experts": "grouped"},
            "schedule": {**schedule, "recompute": chance.choice(AGAIN)}, "precision": chance.choice(["float32", "bfloat16"]),
            "engine": {"kind": "torch", "zero": chance.choice([0, 1, 2])},
            "optimizer": {"kind": chance.choice(["adamw", "muon"]), "lr": 1e-3, "clip": 1.0},
            "training": {"global_batch": 16, "micro_batch": chance.choice([1, 2, 4])},
        }  # fmt: skip
        case = Case(workers, fold, sections)
        try:
            _ = case.recipe
        except UserError:
            continue
        found.append(case)
    return found


def peak(rank: int, recipe: Recipe) -> int:
    """Return the bytes of all that is alive on a rank at the fullest moment of its second step, weights and moments included."""
    arrived = Pending.wait

    def wait(pending: Pending) -> tuple[Tensor, ...]:
        tensors = arrived(pending)
        if current_thread() is main_thread():  # which may get what another thread has made
            live.follow(tensors)
        return tensors

    with Live() as live, patched(Pending, "wait", wait):
        groups = Groups.create(recipe.placed_fold, rank)
        engine = engine_of(recipe, groups)
        for step in range(2):
            gc.collect()
            live.peak = live.now
            engine.train(own_batches(recipe, groups, step))
            engine.update(1e-3)
        engine.close()
    groups.close()
    return live.peak


@pytest.mark.nightly("trains models of width 256 on up to four ranks")
@pytest.mark.parametrize("case", cases(40), ids=str)
def test_the_ledger_counts_what_a_step_needs(ranks, case: Case) -> None:
    """The bytes that are alive at the fullest moment agree within 2.5 %."""
    candidate = as_candidate(case.recipe)
    device = Device.of(candidate.job, EOS)
    counted = ledger(candidate, RankCosts(candidate.job, candidate.fold, device, candidate.micro_batch, candidate.zero))
    fullest = max(ranks(case.workers).run(peak, case.recipe, timeout=240))
    ratio = fullest / (counted.total - counted.workspace)
    print(f"step-memory {ratio:.3f} {case}")
    assert 0.975 <= ratio <= 1.025, counted
