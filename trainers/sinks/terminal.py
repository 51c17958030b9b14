"""Reports on the terminal: the progress of data preparation, the progress line of a run, and the closing table."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import rich.console
from rich.control import Control
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn
from rich.progress import Progress as Bar
from rich.segment import ControlType
from rich.table import Column, Table

from foldray.orders import SEQUENTIAL
from trainers.sinks.run_folder import Summary
from trainers.telemetry import records
from trainers.telemetry.metrics import METRICS, Metric
from trainers.telemetry.records import number

_PLAIN_PERIOD_S = 10.0
_BAR_WIDTH = 30


class Console:
    """The terminal. Reports go to standard output, or to standard error if `json` reserves it for a JSON document."""

    def __init__(self, json: bool = False, out: rich.console.Console | None = None):
        self.out = out or rich.console.Console(stderr=json)
        self._shown = 0.0

    def say(self, text: str) -> None:
        """Print a line without markup."""
        self.out.print(text, markup=False, highlight=False, soft_wrap=True)

    def files(self, done: int, total: int, what: str) -> None:
        """Show the progress of data preparation: a bar on a terminal, or a line now and then in a file."""
        now = time.monotonic()
        if done < total and now - self._shown < (0.1 if self.out.is_interactive else _PLAIN_PERIOD_S):
            return
        self._shown = now
        if not self.out.is_interactive:
            self.say(f"{what}: {done}/{total} files")
            return
        # A bar of rich would hide the cursor until it is stopped, and the preparation may raise an exception before that.
        filled = _BAR_WIDTH * done // max(total, 1)
        self.out.control(Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2)))
        bar = f"[bold]{escape(what)}[/] [green]{'━' * filled}[/][dim]{'━' * (_BAR_WIDTH - filled)}[/] {done}/{total} files"
        self.out.print(bar, highlight=False, end="\n" if done >= total else "")

    def progress(self, name: str, total: int) -> Progress:
        """Return the progress line of a run that ends at step `total`."""
        return Progress(name, total, self)

    def close(self, summary: Summary, view_url: str | None = None, metrics: Sequence[Metric] = METRICS) -> None:
        """Print the closing table, and the command and the URL that show the run in MLflow, on lines to copy."""
        self.out.print()
        self.out.print(closing_table(summary, metrics))
        if summary.mlflow_command:
            self.say(f"\nTo see the run in MLflow, start its server:\n  {summary.mlflow_command}")
        if view_url:
            self.say(f"{'and open' if summary.mlflow_command else 'The run in MLflow:'}\n  {view_url}")


class Progress(records.Sink):
    """The progress of a run: a bar on a terminal, or plain lines in a file. Use it as a context manager.

    A plain line is printed after every tenth of the steps, and at least every ten seconds while steps finish. The training of
    run `name` ends at step `total`.
    """

    def __init__(self, name: str, total: int, console: Console):
        self._name, self._total, self._console = name, total, console
        self._validation: str | None = None
        self._began: tuple[int, float] | None = None
        self._printed = (0, time.monotonic())
        self._bar: Bar | None = None
        self._task = TaskID(0)
        self._tried: dict[str, float] = {}  # seconds of a step by order, until one is chosen

    def __enter__(self) -> Progress:
        if self._console.out.is_interactive:
            name = TextColumn("[bold]{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=2))
            bar = BarColumn(bar_width=None, table_column=Column(ratio=1))
            text = TextColumn("{task.fields[text]}", table_column=Column(no_wrap=True))
            self._bar = Bar(name, bar, MofNCompleteColumn(), text, console=self._console.out, expand=True)
            self._task = self._bar.add_task(escape(self._name), total=self._total, text="starting workers")
            self._bar.start()
        else:
            self._say(f"starting workers, {self._total} steps")
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def take_validation(self, record: records.Validation) -> None:
        bits = record["bits_per_byte"]
        self._validation = f"{record['loss']:.3f} nats/token" if bits is None else f"{bits:.3f} bits/byte"

    def take_resumed(self, record: records.Resumed) -> None:
        self._began = None
        self._printed = (record["step"], self._printed[1])
        self._say(f"continues from step {record['step']}")

    def take_failed(self, record: records.Failed) -> None:
        after = f"goes on from step {record['saved']}" if record["goes_on"] else "gives up"
        self._say(f"after step {record['step']}, {record['what']}; foldray {after}")

    def take_grows(self, record: records.Grows) -> None:
        self._say(f"the cluster has room for more workers; they start from step {record['step']}")

    def take_slow(self, record: records.Slow) -> None:
        name, over = f"rank {record['rank']} on {record['node_ip']}", record["over_others"]
        slow = f"the others wait for {name}, which works {over:.1f} × as long"
        self._say(slow if record["goes_on"] else f"{name} keeps up again")

    def take_spiked(self, record: records.Spiked) -> None:
        loss, median = _number(record["loss"], ".3f"), _number(record["median"], ".3f")
        self._say(f"in step {record['step']}, the loss is {loss}, after a median of {median}")

    def take_placed(self, record: records.Placed) -> None:
        before, after = record["overload"], record["expected"]
        what = f"after step {record['step']}, {record['experts']} experts change places"
        self._say(f"{what}: the fullest rank had {before:.2f} times the mean load, and would have had {after:.2f}")

    def take_tried(self, record: records.Tried) -> None:
        order, seconds = record["order"], number(record["step_time_s"])
        if order is None:
            return
        if not record["chosen"]:
            self._tried[order] = seconds
            return
        count, plain = len(self._tried), self._tried.get(SEQUENTIAL.name, math.nan)
        found = f"{order} is the fastest: {seconds / plain:.2f} × the time of a step in sequence"
        if order == SEQUENTIAL.name:
            found = "none is faster than sequential, which training keeps"
        self._say(f"of {count} orders that were measured, {found}")
        self._tried.clear()

    def take_settled(self, record: records.Settled) -> None:
        order = f"{record['forward']} forward, {record['backward']} backward"
        self._say(f"order of {_pieces(record['degree'])}: {order}")

    def take_listed(self, record: records.Listed) -> None:
        gain, over = record["named_seconds"] / record["seconds"], record["seconds"] / record["bound"]
        words = f"{over:.2f} × the least possible time of a step, {gain:.2f} × as fast as {record['named']}"
        self._say(f"list of {_pieces(record['degree'])} found: {words}, by the simulator")

    def take_drifted(self, record: records.Drifted) -> None:
        now, found = record["step_time_s"], record["found_s"]
        self._say(f"steps now take {now:.3g} s instead of {found:.3g} s, so foldray measures anew")

    def take_step(self, record: records.Step) -> None:
        step, now = record["step"], time.monotonic()
        if record.get("skipped_steps") and not math.isfinite(number(record["grad_norm"])):
            count = record["skipped_steps"]
            self._say(f"step {step} is skipped, because its gradient is not finite; skipped so far: {count}")
        if self._began is None or step < self._began[0]:
            self._began = (step, now)
        parts = [f"loss {_number(record['loss'], '.3f')}"]
        if (further := record.get("mtp_loss")) is not None:
            parts.append(f"further tokens {_number(further, '.3f')}")
        if self._validation is not None:
            parts.append(f"validation {self._validation}")
        parts += [f"{_short(record['tokens_per_s'])} tokens/s", f"{self._left(step, now)} left"]
        if self._bar is not None:
            self._bar.update(self._task, completed=step, text=" · ".join(parts).replace("validation", "val"))
        elif self._is_due(step, now):
            self._printed = (step, now)
            self._say(f"step {step}/{self._total} · {' · '.join(parts)}")

    def _is_due(self, step: int, now: float) -> bool:
        tenths = step * 10 // self._total > self._printed[0] * 10 // self._total
        return tenths or now - self._printed[1] >= _PLAIN_PERIOD_S

    def _left(self, step: int, now: float) -> str:
        assert self._began is not None, "no step has been received"
        first, began = self._began
        return _clock((now - began) / (step - first) * (self._total - step)) if step > first else "–:––"

    def _say(self, text: str) -> None:
        self._console.say(f"{self._name}: {text}")


def closing_table(summary: Summary, metrics: Sequence[Metric] = METRICS) -> Table:
    """Return a table with the results of a run, whose recipe has these metrics: loss, speed, balance of experts, and paths."""
    table = Table(title=f"run {escape(summary.run_id)}", title_justify="left", title_style="bold", show_header=False, box=None)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in _rows(summary, metrics):
        table.add_row(label, text)
    return table


def _rows(summary: Summary, metrics: Sequence[Metric]) -> Iterator[tuple[str, str]]:
    if summary.status != "finished":
        yield "status", f"[bold red]{escape(summary.status)}"
    skipped = summary.metrics.get("skipped_steps")
    yield "steps", f"{summary.steps}, {skipped} of them skipped" if skipped else str(summary.steps)
    yield "final loss", f"{_number(summary.final_loss, '.4f')} nats per token"
    if summary.val_bpb is not None:
        yield "validation", f"{summary.val_bpb:.3f} bits per byte: {_verdict(summary)}"
    elif summary.val_loss is not None:
        yield "validation", f"{_number(summary.val_loss, '.4f')} nats per token that counts"
    for name, part in (summary.val_sources or {}).items():
        bits = "" if part["bits_per_byte"] is None else f", {_number(part['bits_per_byte'], '.3f')} bits per byte"
        yield f"  {escape(name)}", f"{_number(part['loss'], '.4f')} nats per token{bits}"
    for metric in metrics:
        if metric.shown and (value := summary.metrics.get(metric.name)) is not None:
            yield metric.shown[0], escape(metric.shown[1].format(value))
    if summary.load_max_over_mean is not None:
        busiest = f"a step's busiest expert has {summary.load_max_over_mean:.2f}× the even share (layer {summary.busiest_layer})"
        yield "expert balance", busiest
        if summary.rank_max_over_mean is not None and summary.load_entropy is not None:
            yield "rank balance", f"a step's busiest rank has {summary.rank_max_over_mean:.2f}× the even share"
            yield "load entropy", f"{summary.load_entropy:.3f} in the worst layer (1 is even)"
        dead, all_starved = summary.dead_experts or 0, summary.starved_experts or 0  # every dead expert is starved, too
        starved = f", {all_starved} starved" if all_starved > dead else ""
        yield "dead experts", f"[bold red]{dead}[/]{starved}" if dead else f"none{starved}"
    folder = f"{summary.run_dir}/"
    yield "run folder", escape(summary.run_dir)
    yield "checkpoint", escape((summary.checkpoint or "none").removeprefix(folder))
    yield "pictures", escape(", ".join(picture.removeprefix(folder) for picture in summary.pictures) or "none")


def _verdict(summary: Summary) -> str:
    unigram, bigram, value = summary.unigram_bpb, summary.bigram_bpb, summary.val_bpb
    if unigram is None or bigram is None or value is None:
        return "no baselines to compare with"
    if value < bigram:
        return f"[bold green]beats the bigram baseline[/] ({bigram:.3f}; unigram {unigram:.3f})"
    if value < unigram:
        return f"[yellow]beats unigram ({unigram:.3f}), not yet bigram ({bigram:.3f})"
    return f"[bold red]no better than byte frequencies[/] (unigram {unigram:.3f}, bigram {bigram:.3f})"


def _number(value: float | None, form: str) -> Any:
    return "not a number" if value is None or value != value else format(value, form)


def _short(value: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.1f}{letter}"
    return f"{value:.0f}"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _pieces(degree: int) -> str:
    return "whole sequences" if degree == 1 else f"{degree} pieces"
