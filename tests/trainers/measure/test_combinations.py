"""Combinations of settings that no other test meets: each trains like one process (`foldray verify`)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.foldray.parity import make_recipe
from tests.optional import tutel_or_skip
from tests.trainers.measure.test_verify import run_comparison
from trainers.measure.verify import compared

CHUNKS = {"reduction": "chunks", "sp_bytes": 4096}
PIECES = {"kind": "one_a_one_m", "degree": 2}
STREAM = {"kind": "stream", "degree": 2, "lag": 1}
PADDED = {"model": {"router": {"capacity_factor": 1.0, "pad": True, "drop": "position", "balance_loss": 0.1}}}
GATES = {
    "moe": {"backend": "deepspeed", "experts": "grouped"},
    "model": {"router": {"softmax": "before_topk", "normalize": True, "balance_loss": 0.1}},
}
TUTEL = {"moe": {"backend": "tutel", "experts": "grouped"}, "precision": "float32"}
TUTELS_GATE = {**TUTEL, "model": GATES["model"]}
DEEPSPEED = {"engine": {"kind": "deepspeed", "zero": 2}, "precision": "float32"}
DOCUMENTS = {"data": {"seq_len": 16, "mask_documents": True}}
NARROW = {"precision": "bfloat16"}

COMBINATIONS: dict[str, tuple[int, dict[str, int], dict[str, Any]]] = {
    "chunks with virtual stages": (4, {"pp": 2, "ep": 2}, {"schedule": {**PIECES, **CHUNKS, "virtual_stages": 2}}),
    "chunks with virtual stages in DeepSpeed": (
        4, {"pp": 2, "ep": 2}, {"schedule": {**PIECES, **CHUNKS, "virtual_stages": 2}, **DEEPSPEED},
    ),
    "bfloat16 with pieces": (2, {"ep": 2}, {"schedule": STREAM, **NARROW}),
    "bfloat16 with TP": (4, {"tp": 2, "ep": 2}, NARROW),
    "bfloat16 with CP": (4, {"cp": 2, "ep": 4}, {"schedule": PIECES, **NARROW}),
    "bfloat16 with PP": (4, {"pp": 2, "ep": 2}, {"schedule": STREAM, **NARROW}),
    "bfloat16 with ETP": (4, {"tp": 2, "ep": 2, "etp": 2}, NARROW),
    "bfloat16 in DeepSpeed with all": (
        8, {"tp": 2, "cp": 2, "pp": 2, "ep": 4}, {"schedule": {**STREAM, **CHUNKS}, **DEEPSPEED, **NARROW},
    ),
    "DeepSpeed's gates with TP": (4, {"tp": 2, "ep": 2}, {**GATES, **DEEPSPEED}),
    "DeepSpeed's gates with PP": (4, {"pp": 2, "ep": 2}, {**GATES, **DEEPSPEED}),
    "DeepSpeed's gates with ETP": (4, {"ep": 2, "etp": 2}, {**GATES, **DEEPSPEED}),
    "Tutel with TP": (4, {"tp": 2, "ep": 2}, TUTELS_GATE),
    "Tutel with CP": (4, {"cp": 2, "ep": 4}, {**TUTEL, "schedule": PIECES}),
    "Tutel with PP": (4, {"pp": 2, "ep": 2}, {**TUTELS_GATE, "schedule": STREAM}),
    "Tutel with ETP": (4, {"ep": 2, "etp": 2}, {**TUTEL, "schedule": PIECES}),
    "Tutel with padded experts": (4, {"tp": 2, "ep": 4}, {**TUTEL, **PADDED, "schedule": {**PIECES, **CHUNKS}}),
    "Tutel in DeepSpeed": (4, {"tp": 2, "ep": 2, "etp": 2}, {**TUTELS_GATE, **DEEPSPEED, "schedule": CHUNKS}),
    "Tutel in bfloat16": (4, {"ep": 4}, {**TUTELS_GATE, "schedule": PIECES, **NARROW}),
    "Tutel in bfloat16 in DeepSpeed with all": (
        8, {"tp": 2, "cp": 2, "pp": 2, "ep": 4}, {**TUTELS_GATE, "schedule": {**STREAM, **CHUNKS}, **DEEPSPEED, **NARROW},
    ),
    "padded experts and chunks with TP": (4, {"tp": 2, "ep": 4}, {"schedule": {**PIECES, **CHUNKS}, **PADDED}),
    "padded experts and chunks with CP": (
        4, {"cp": 2, "ep": 4}, {"schedule": {**PIECES, **CHUNKS, "slicing": "token_uniform"}, **PADDED},
    ),
    "documents with chunks": (4, {"cp": 2, "ep": 2}, {"schedule": {**PIECES, **CHUNKS}, **DOCUMENTS}),
    "documents in DeepSpeed": (4, {"tp": 2, "cp": 2, "ep": 4}, {"schedule": STREAM, **DOCUMENTS, **DEEPSPEED}),
}  # fmt: skip


@pytest.mark.gate(1 / 2)
@pytest.mark.parametrize("name", COMBINATIONS)
def test_a_combination_trains_like_one_process(ranks, name: str) -> None:
    workers, fold, sections = COMBINATIONS[name]
    if name.startswith("Tutel"):
        tutel_or_skip()
    recipe = make_recipe(workers, fold, **sections)
    found = compared(recipe, ranks(workers).run(run_comparison, recipe)[0])
    assert found.passed, found
