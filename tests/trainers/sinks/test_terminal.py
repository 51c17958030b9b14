"""Reports on a terminal, in a log, and beside JSON."""

import io
import math
import time
from typing import Any

import pytest
import rich.console

from tests.trainers.telemetry.records import resumed, run, step, validation
from trainers.sinks.run_folder import Summary
from trainers.sinks.terminal import Console, closing_table


def console(terminal: bool, width: int = 100) -> Console:
    out = rich.console.Console(file=io.StringIO(), force_terminal=terminal, width=width, _environ={"TERM": "xterm"})
    return Console(out=out)


def text(of: Console) -> str:
    assert isinstance(of.out.file, io.StringIO)
    return of.out.file.getvalue()


def summary(**changes: Any) -> Summary:
    values: dict[str, Any] = {
        "run_id": "quickstart-1", "run_dir": "/runs/quickstart-1", "status": "finished", "steps": 300,
        "metrics": {"skipped_steps": 0, "tokens_per_s": 12345.0, "mfu": 0.413, "product_share": 0.519, "drop_rate": 0.012},
        "final_loss": 1.5, "val_loss": 1.75, "val_bpb": 2.5, "val_sources": None,
        "unigram_bpb": 4.87, "bigram_bpb": 3.62, "load_max_over_mean": 1.18, "busiest_layer": 2, "dead_experts": 0,
        "rank_max_over_mean": 1.07, "load_entropy": 0.9912, "starved_experts": 0,
        "checkpoint": "/runs/quickstart-1/checkpoint_300", "pictures": ("/runs/quickstart-1/loss.png",),
        "mlflow_uri": "sqlite:////runs/mlflow.db", "mlflow_run_id": "ab", "mlflow_command": "mlflow server --port 5000",
    }  # fmt: skip
    return Summary(**{**values, **changes})


def table(of: Summary) -> str:
    shown = console(False)
    shown.out.print(closing_table(of))
    return text(shown)


def test_a_log_gets_a_line_per_tenth_of_the_steps():
    shown = console(False)
    with shown.progress("r-1", 100) as progress:
        for record in run(100):
            progress.take(record)
    lines = text(shown).splitlines()
    assert len(lines) == 11
    assert lines[0] == "r-1: starting workers, 100 steps"
    assert lines[-1].startswith("r-1: step 100/100 · loss ")
    assert "bits/byte" in lines[-1]
    assert "12.3k tokens/s" in lines[-1]


def test_skipped_steps_are_told_and_counted():
    shown = console(False)
    with shown.progress("r-1", 3) as progress:
        for record in (step(1), {**step(2), "grad_norm": math.nan, "skipped_steps": 4}, {**step(3), "skipped_steps": 4}):
            progress.take(record)
    told = [line for line in text(shown).splitlines() if "skipped" in line]
    assert told == ["r-1: step 2 is skipped, because its gradient is not finite; skipped so far: 4"]
    assert "300, 4 of them skipped" in table(summary(metrics={"skipped_steps": 4}))
    assert "skipped" not in table(summary())


@pytest.mark.parametrize(
    ("chosen", "seconds", "found"),
    [
        ("stream:4", 0.9, "stream:4 is the fastest: 0.75 × the time of a step in sequence"),
        ("sequential", 1.2, "none is faster than sequential, which training keeps"),
    ],
)
def test_the_chosen_order_is_told_beside_the_plain_one(chosen: str, seconds: float, found: str) -> None:
    shown, tried = console(False), {"kind": "tried", "degree": 1, "sp_bytes": None, "chosen": False}
    with shown.progress("r-1", 300) as progress:
        for order, took in (("sequential", 1.2), ("stream:4", 1.0), ("list", 1.3)):
            progress.take({**tried, "order": order, "step_time_s": took})
        progress.take({**tried, "order": chosen, "step_time_s": seconds, "chosen": True})
        progress.take({**tried, "order": None, "step_time_s": 1.0, "chosen": True})  # a choice of sizes alone
    assert [line for line in text(shown).splitlines() if "orders" in line] == [f"r-1: of 3 orders that were measured, {found}"]


def test_the_loss_of_further_tokens_is_told_apart():
    shown = console(False)
    with shown.progress("r-1", 1) as progress:
        progress.take({**step(1), "mtp_loss": 3.25})
    assert "step 1/1 · loss 2.000 · further tokens 3.250 · " in text(shown)


def test_a_log_gets_a_line_every_ten_seconds(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    shown = console(False)
    with shown.progress("r-1", 10_000) as progress:
        for count in range(1, 41):
            now[0] += 1.0
            progress.take(step(count))
    lines = text(shown).splitlines()[1:]
    assert len(lines) == 4
    assert lines[0].endswith("2:46:30 left")


def test_a_terminal_gets_one_line_that_updates():
    shown = console(True)
    with shown.progress("r-1", 20) as progress:
        for record in run(20):
            progress.take(record)
    assert "20/20" in text(shown)
    assert "\x1b[2K" in text(shown)
    assert text(shown).count("\n") <= 2


def test_going_on_is_said_and_the_time_left_counted_anew():
    shown = console(False)
    with shown.progress("r-1", 100) as progress:
        for record in (step(9), step(10), resumed(50), step(60), validation(60), step(61)):
            progress.take(record)
    assert "r-1: continues from step 50\n" in text(shown)
    assert "step 60/100 · loss 2.000 · 12.3k tokens/s · –:–– left" in text(shown)


def test_a_loss_that_is_no_number_is_called_so():
    shown = console(False)
    with shown.progress("r-1", 1) as progress:
        progress.take(step(1, loss=float("nan")))
    assert "loss not a number" in text(shown)


@pytest.mark.parametrize("terminal", [True, False])
def test_files_are_counted(terminal):
    shown = console(terminal)
    for done in range(0, 101):
        shown.files(done, 100, "tokenizing")
    assert text(shown).endswith("100/100 files\n")
    assert text(shown).count("\n") <= 2


def test_json_keeps_standard_output_free(capsys):
    shown = Console(json=True)
    shown.files(3, 3, "tokenizing")
    with shown.progress("r-1", 1) as progress:
        progress.take(step(1))
    shown.close(summary(), "http://127.0.0.1:5000/#/x")
    out, err = capsys.readouterr()
    assert out == ""
    assert "r-1: step 1/1" in err
    assert "beats the bigram" in err


def test_the_closing_table_says_it_all():
    shown = table(summary())
    for words in ("quickstart-1", "300", "1.5000 nats", "2.500 bits per byte: beats the bigram baseline (3.620; unigram 4.870)",
                  "12,345 tokens/s", "41.3% of the data sheet", "51.9% of the speed of measured matrix products",
                  "1.18× the even share (layer 2)", "1.20%",
                  "busiest rank has 1.07× the even share", "0.991 in the worst layer (1 is even)",
                  "checkpoint_300", "loss.png"):  # fmt: skip
        assert words in shown
    assert "status" not in shown


@pytest.mark.parametrize(
    ("bits", "verdict"),
    [(4.0, "beats unigram (4.870), not yet bigram (3.620)"), (5.0, "no better than byte frequencies"), (2.0, "beats the bigram")],
)
def test_the_verdict_on_validation(bits, verdict):
    assert verdict in table(summary(val_bpb=bits))


def test_conversations_have_no_bytes_to_compare():
    shown = table(summary(val_bpb=None, unigram_bpb=None, bigram_bpb=None))
    assert "1.7500 nats per token that counts" in shown
    assert "per byte" not in shown
    told = console(False)
    with told.progress("r-1", 2) as progress:
        for record in (step(1), {**validation(1), "loss": 1.75, "bits_per_byte": None}, step(2)):
            progress.take(record)
    assert "validation 1.750 nats/token" in text(told)


@pytest.mark.parametrize(
    ("dead", "starved", "row"), [(0, 0, "none"), (0, 3, "none, 3 starved"), (2, 2, "2"), (2, 3, "2, 3 starved")]
)
def test_dead_and_starved_experts(dead, starved, row):
    shown = table(summary(dead_experts=dead, starved_experts=starved)).splitlines()
    assert [line.split(maxsplit=2)[2].strip() for line in shown if "dead experts" in line] == [row]


def test_what_is_not_known_is_left_out():
    names = (
        "val_loss",
        "val_bpb",
        "load_max_over_mean",
        "checkpoint",
        "final_loss",
        "mlflow_command",
    )
    shown = table(summary(**dict.fromkeys(names), metrics={}, pictures=(), status="failed"))
    assert "failed" in shown
    assert "MFU" not in shown
    assert "products" not in shown
    assert "not a number" in shown


def test_commands_are_printed_unbroken():
    command = "mlflow server --backend-store-uri sqlite:////a/very/long/folder/[1]/mlflow.db --host 127.0.0.1"
    shown = console(True, width=40)
    shown.close(summary(mlflow_command=command), "http://127.0.0.1:5000/#/experiments/1/runs/abc")
    assert command in text(shown)
    assert "http://127.0.0.1:5000/#/experiments/1/runs/abc" in text(shown)


def test_the_sources_of_a_mixture_have_rows_of_their_own():
    sources = {"code": {"loss": 1.25, "bits_per_byte": 1.5}, "[chats]": {"loss": None, "bits_per_byte": None}}
    lines = table(summary(val_sources=sources)).splitlines()
    assert any("code" in line and "1.2500 nats per token, 1.500 bits per byte" in line for line in lines)
    assert any("[chats]" in line and line.strip().endswith("not a number nats per token") for line in lines)
