"""Published rows of training software: what they become as candidates, their measured speed and memory, and pairs of them."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from foldray.blueprint import step_flops
from foldray.cli import main
from foldray.costs.activations import block_activations
from foldray.costs.candidate import OWN_SOFTWARE, Candidate, Software
from foldray.costs.device import Device
from foldray.costs.memory import GIB, ledger, parameters
from foldray.costs.ops import OpWork
from foldray.costs.prediction import straggling
from foldray.costs.rank import RankCosts
from foldray.costs.whole import whole_seconds
from foldray.fold import Fold
from foldray.plan.rows import STACK, Row, read_rows
from foldray.plan.score import median_errors, pairs, score

PUBLISHED = Path(__file__).parents[3] / "recipes" / "papers" / "published_rows.csv"
ROW = dict.fromkeys(STACK, "") | {
    "id": "A", "model": "Qwen3-30B-A3B", "gpus": "16", "gpu": "H100", "seq": "4096", "gbs": "64", "ep": "16", "precision": "BF16",
    "source": "NVIDIA-NeMo/Megatron-Bridge@1:docs/page.md:10-12",
}  # fmt: skip


def written(folder: Path, *rows: dict[str, str]) -> Path:
    with (folder / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, {key: None for row in rows for key in row})
        writer.writeheader()
        writer.writerows(rows)
    return folder / "rows.csv"


def read(folder: Path, **changed: str) -> Row:
    return read_rows(written(folder, ROW | changed))[0]


def rank_of(candidate: Candidate, row: Row) -> RankCosts:
    return RankCosts(candidate.job, candidate.fold, Device.of(candidate.job, row.hardware), candidate.micro_batch)


@pytest.mark.nightly("simulates steps of 256 GPUs")
def test_every_published_row_has_a_price(capsys: pytest.CaptureFixture) -> None:
    assert main(["plan", "--score", str(PUBLISHED), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert len(document["rows"]) == 41
    assert all(row["step_time_s"] > 0 and row["error"] is not None for row in document["rows"])
    found = document["pairs"]
    assert {pair["thing"] for pair in found} == {"overlap", "dispatcher", "recomputation", "routing", "graphs", "schedule"}
    assert {pair["thing"] for pair in found if not pair["priced"]} == {"routing", "graphs", "schedule"}
    assert document["median_pairs"].keys() == {"overall", "overlap", "dispatcher", "recomputation"}
    assert document["median_pairs"]["overall"] < 0.05


def test_the_table_of_rows_and_pairs(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    rows = [
        ROW | {"id": "first", "step_s": "2.5", "mem_gib": "60", "overlap": "none", "recompute": "none", "dispatcher": "alltoall"},
        ROW | {"id": "second", "step_s": "2", "recompute": "layernorm", "overlap": "none", "dispatcher": "alltoall"},
        ROW
        | {"id": "third", "step_s": "4", "recompute": "layernorm", "overlap": "none", "dispatcher": "alltoall", "graphs": "attn"},
    ]
    assert main(["plan", "--score", str(written(tmp_path, *rows))]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"first .* 60\.0 GiB +[+-]\d\.\d% mbs\?", lines[1])
    assert lines[3].endswith(" mbs? graphs!")
    assert any(re.fullmatch(r"  first +second +recomputation +1\.250 +0\.\d{3} +-\d+\.\d%", line) for line in lines)
    assert any(re.fullmatch(r"  second +third +graphs +0\.500 +no price", line) for line in lines)
    assert lines[-3] == "median absolute error of pairs:"


def test_published_memory_is_predicted_within_6_percent() -> None:
    """Of what the allocator held. Rows of schedules that foldray has not are left out."""
    rows = [row for row in read_rows(PUBLISHED) if row.memory and "schedule" not in row.unpriced]
    assert len(rows) == 8
    for result in score(rows):
        assert result.memory_error == pytest.approx(0, abs=0.06), result.row.name


@pytest.mark.parametrize(
    ("changed", "cut"),
    [
        ({"model": "Qwen3-235B-A22B", "pp": "8", "vp": "4", "gpus": "256", "ep": "32"}, (2, *[3] * 30, 2)),
        ({"model": "Qwen3-235B-A22B", "pp": "8", "vp": "3", "gpus": "256", "ep": "32"}, (3, *[4] * 22, 3)),
        ({"model": "DeepSeek-V3", "pp": "8", "vp": "4", "gpus": "64", "ep": "8"}, (1, *[2] * 29, 1, 1)),
        ({"model": "DeepSeek-V3", "pp": "4", "vp": "2", "gpus": "32", "ep": "8"}, (7, *[8] * 6, 6)),
        ({"pp": "2", "vp": "12", "ep": "8"}, None),
    ],
    ids=str,
)
def test_blocks_that_do_not_fill_stages_evenly(changed: dict, cut: tuple[int, ...] | None, tmp_path: Path) -> None:
    """The embedding and the head count as a block each: 94 + 2 = 32 · 3 = 24 · 4. DeepSeek-V3's last stage keeps a block."""
    row = read(tmp_path, gbs="1024", **changed)
    assert row.candidate.stage_layers == cut
    assert row.candidate.virtual_stages == int(changed["vp"])


def test_what_a_row_becomes(tmp_path: Path) -> None:
    row = read(tmp_path, mbs="2", dispatcher="DeepEP", overlap="EP overlap + delayed wgrad", recompute="mlp layernorm moe_act",
               precision="FP8 (default)", mem_gib="57.5")  # fmt: skip
    candidate, job, ordering = row.candidate, row.candidate.job, row.candidate.ordering
    assert (job.dtype, job.dispatch, job.again, ordering.recompute) == ("fp8", "rank", ("layernorm",), ("ffn",))
    assert (ordering.forward.kind, ordering.weight_gradients, candidate.micro_batch) == ("weave", "apart", 2)
    assert candidate.fold.ep_inside == 8, "two nodes of eight: a token travels once to each node"
    assert job.software == Software(gradients=2, moments=4, apart=False, fused_loss=True, relay_kernels=6)
    assert row.constants == {"crowding": 20 / 132}
    assert row.memory == 57.5 * GIB
    assert row.assumed == row.unpriced == ()
    bare = read(tmp_path, gpu="B200", gbs="", mbs="", seq="")
    assert bare.assumed == ("seq", "gbs", "mbs", "dispatcher", "overlap", "recompute")
    assert (bare.candidate.job.seq_len, bare.candidate.micro_batches, bare.hardware.name) == (4096, 8, "b200")
    assert read_rows(written(tmp_path, ROW), "h200")[0].hardware.name == "h200"
    learned = read(tmp_path, balanced="dropless, learned routing", graphs="attn")
    assert learned.unpriced == ("graphs", "routing")
    skewed = read_rows(written(tmp_path, ROW | {"skew": "1", "balanced": "learned", "schedule": "zbv"}))[0]
    assert (skewed.unpriced, skewed.candidate.job.model.router.skew) == (("schedule",), 1.0)


@pytest.mark.parametrize(
    "given", [{"step_s": "2", "tokens_s_gpu": ""}, {"tokens_s_gpu": "8192"}, {"tflops_gpu": "189.1"}], ids=str
)
def test_measured_speed(given: dict[str, str], tmp_path: Path) -> None:
    """64 sequences of 4096 tokens in 2 s on 16 GPUs: 8192 tokens per GPU and second, of 23.08 GFLOP each."""
    row = read(tmp_path, **given)
    flops = step_flops(row.candidate.job.model, 4096, 64, True)
    assert flops / (64 * 4096) == pytest.approx(23.08e9, rel=1e-3)
    assert row.mfu == pytest.approx(flops / 2 / 16 / 989.5e12, rel=1e-3)


def test_pairs_differ_in_one_thing(tmp_path: Path) -> None:
    """Speeds of 1, 2, … . B and D of A's page differ from A in one thing, C in two, and E was measured with other software."""
    base = ROW | {"gbs": "128"}
    rows = [
        base | {"id": "A", "step_s": "10"},
        base | {"id": "B", "step_s": "5", "recompute": "layernorm", "source": base["source"].replace("10-12", "99")},
        base | {"id": "C", "step_s": "4", "recompute": "layernorm", "dispatcher": "DeepEP"},
        base | {"id": "D", "step_s": "2.5", "balanced": "dropless, learned routing", "overlap": "none"},
        base | {"id": "E", "step_s": "2", "recompute": "moe", "source": "somebody/else:page.md"},
        base | {"id": "F", "step_s": "20", "gbs": "256", "mbs": "1"},
    ]
    scored = score(read_rows(written(tmp_path, *rows)))
    found = {(pair.first.row.name, pair.second.row.name): pair for pair in pairs(scored)}
    assert {names: pair.thing for names, pair in found.items()} == {
        ("A", "B"): "recomputation", ("A", "D"): "routing", ("B", "C"): "dispatcher",
    }  # fmt: skip
    pair = found["A", "B"]
    assert pair.published == pytest.approx(2)
    assert pair.predicted == pytest.approx(scored[0].prediction.seconds / scored[1].prediction.seconds)
    assert pair.error == pytest.approx(pair.predicted / 2 - 1)
    assert not found["A", "D"].priced
    assert median_errors([pair, found["A", "D"]]) == {"overall": abs(pair.error), "recomputation": abs(pair.error)}


def test_a_pair_that_changes_the_batch_compares_tokens(tmp_path: Path) -> None:
    rows = [ROW | {"id": "A", "step_s": "10"}, ROW | {"id": "B", "step_s": "16", "gbs": "128"}]
    (pair,) = pairs(score(read_rows(written(tmp_path, *rows))))
    assert pair.thing == "batch"
    assert pair.published == pytest.approx(2 * 10 / 16)
    longer = ROW | {"id": "C", "step_s": "25", "seq": "8192"}
    (pair,) = pairs(score(read_rows(written(tmp_path, rows[0], longer))))
    assert pair.thing == "sequence"
    assert pair.published == pytest.approx(2 * 10 / 25), "whatever the FLOPs of a token"


def test_a_woven_step_is_extrapolated_from_its_last_rounds(tmp_path: Path) -> None:
    """Twelve micro-batches per position, of which three and four are simulated, take as long as all of them."""
    fold = {"model": "tiny", "gpus": "16", "pp": "2", "ep": "2", "seq": "512", "gbs": "192"}
    row = read(tmp_path, overlap="EP overlap", **fold)
    work = OpWork(row.candidate, Device.of(row.candidate.job, row.hardware))
    assert row.candidate.micro_batches == 24
    (result,) = score([row])
    whole = whole_seconds(row.candidate, work) * (1 + straggling(16, work.rank.device))
    assert result.prediction.seconds == pytest.approx(whole, rel=1e-3)
    apart = score([read(tmp_path, **fold)])[0]
    assert result.prediction.seconds < apart.prediction.seconds


def test_states_of_other_software_by_hand() -> None:
    """ZeRO-1 over two ranks: weights, float32 copies of half of them; whole gradients; two moments of half, each with 2 bytes."""
    own = parameters(Fold(2), 1, 2, {"dp_cp": 1000.0})
    theirs = parameters(Fold(2), 1, 2, {"dp_cp": 1000.0}, None, Software(2, 2, False, True))
    assert own == (2000 + 2000, 4000 + 2000, 4000)
    assert theirs == (2000 + 2000, 2000, 2000)
    assert Software(4, 4, True, False) == OWN_SOFTWARE


def test_a_fused_loss_has_one_copy_of_its_logits(tmp_path: Path) -> None:
    row = read(tmp_path)
    assert ledger(row.candidate, rank_of(row.candidate, row)).logits == 4096 * (151936 + 2048) * 2


def test_parts_that_run_again_cost_time_and_spare_memory(tmp_path: Path) -> None:
    """Moonlight, TP2: 4096 tokens; 8 heads of 192, 192 and 128 columns; an MoE layer whose one remnant is its input."""
    fold = {"model": "Moonlight-16B-A3B", "gpus": "8", "tp": "2", "ep": "8", "gbs": "16"}
    rows = {name: read(tmp_path, recompute=name, **fold) for name in ("none", "core_attn", "mla_up_proj", "layernorm", "moe")}
    ranks = {name: rank_of(row.candidate, row) for name, row in rows.items()}
    block = ranks["none"].job.blocks[-1]
    kept = {name: block_activations(rank, block) for name, rank in ranks.items()}
    spared = {name: kept["none"] - bytes_ for name, bytes_ in kept.items()}
    assert spared["core_attn"] == 4096 * 8 * 4
    assert spared["mla_up_proj"] == 4096 * 8 * (192 + 192 + 128) * 2
    assert spared["layernorm"] == 2 * 2048 * 2048 * 2
    attention = block_activations(ranks["none"], replace(block, moe=None))
    assert kept["moe"] == attention + 2048 * 2048 * 2
    seconds = {name: score([row])[0].prediction.seconds for name, row in rows.items()}
    assert all(seconds["none"] < each for name, each in seconds.items() if name != "none")
    assert seconds["moe"] == max(seconds.values())


def test_the_gradients_of_other_software_take_less_time(tmp_path: Path) -> None:
    """Gradients of two bytes halve their sums in memory and their way over the network."""
    ours, theirs = (read(tmp_path, source=source) for source in ("NVIDIA/Megatron-LM:page", ROW["source"]))
    assert (ours.candidate.job.software.gradients, theirs.candidate.job.software.gradients) == (4, 2)
    long, short = (result.prediction for result in score([ours, theirs]))
    assert short.traffic["dp_cp"] < long.traffic["dp_cp"]
    assert short.breakdown["memory"] < long.breakdown["memory"]


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"gpu": "H1000"}, "A: gpu=H1000: is no known cluster"),
        ({"dispatcher": "pigeon"}, "A: dispatcher=pigeon: is not known; legal: alltoall, deepep, hybridep"),
        ({"overlap": "all"}, "A: overlap=all: is not known"),
        ({"recompute": "layernorm everything"}, "A: recompute=everything: is no module that can run again"),
        ({"precision": "FP4"}, "A: dtype=fp4: has no peak in hardware h100"),
        ({"step_s": "-1"}, "A: step_s=-1: must be a positive number"),
        ({"mem_gib": "much"}, "A: mem_gib=much: must be a positive number"),
        ({"mbs": "0"}, "A: mbs=0: must be a whole number"),
        ({"vp": "4"}, "A: schedule.virtual_stages=4: "),
    ],
    ids=str,
)
def test_mistakes_in_rows_are_told_in_one_line(changed: dict[str, str], line: str, tmp_path: Path, capsys) -> None:
    assert main(["plan", "--score", str(written(tmp_path, ROW | changed))]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"foldray: {line}"), error
    assert error.count("\n") == 1


def test_rows_without_a_gpu_need_a_cluster(tmp_path: Path, capsys) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("row_id,model,method,gpus,seq_len,gbs,cp,tp,ep,pp,etp_effective,mfu_pct\n")
    assert main(["plan", "--score", str(path)]) == 2
    assert capsys.readouterr().err == "foldray: cluster=nothing: is required, because these rows name no GPU\n"
    assert main(["plan", "--model", "tiny"]) == 2
    assert capsys.readouterr().err.startswith("foldray: cluster=nothing: is required, except with --score or --fit")


def test_software_that_reduces_in_place_copies_no_gradients(tmp_path: Path) -> None:
    """With two expert replicas, foldray's own gradients leave from copies, which are more than what this model's ops keep."""
    row = read(tmp_path, model="gpt-oss-120b", gpus="16", ep="8", gbs="16")
    own = replace(row.candidate, job=replace(row.candidate.job, software=OWN_SOFTWARE))
    theirs, ours = (ledger(each, rank_of(each, row)).working for each in (row.candidate, own))
    assert theirs < 2**30 < ours


def test_a_dispatcher_that_takes_multiprocessors_slows_what_computes_beside_it(tmp_path: Path) -> None:
    row = read(tmp_path, dispatcher="HybridEP", overlap="EP overlap")
    assert row.constants == {"crowding": 32 / 132}
    slower, none = (result.prediction.seconds for result in score([row, row._replace(constants={})]))
    assert slower > 1.01 * none
