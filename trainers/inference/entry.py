"""The commands `foldray generate` and `foldray eval`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, TaskID
from rich.table import Table

from foldray.errors import UserError
from foldray.files import read_text
from trainers.inference.given import check_count
from trainers.inference.model import Model
from trainers.inference.sampling import Sampling
from trainers.inference.scoring import Score
from trainers.inference.trained import Trained
from trainers.telemetry.records import as_json as to_json

_MOST_TEXT = 1 << 30  # bytes of a file


def generate(
    run: str,
    prompt: str,
    tokens: int,
    sampling: dict[str, Any],
    as_json: bool = False,
    chat: bool = False,
    system: str | None = None,
    trust: bool = False,
) -> int:
    """Print a continuation of a prompt, or an answer, as its tokens come, and return 0.

    Values are checked before weights are read, because that takes long.

    Args:
        prompt: the text to continue, or with `chat` the message of a user.
        sampling: the fields of `Sampling`.
        system: with `chat`, the message of the system before the prompt.
    """
    Sampling(**sampling)
    check_count("tokens", tokens)
    if system is not None and not chat:
        raise UserError("system", system, "is a message of a conversation, so it needs --chat")
    model, write = Model.of(Trained.at(run, trust=trust)), None if as_json else _write
    if chat:
        opening = [] if system is None else [{"role": "system", "content": system}]
        generated = model.chat([*opening, {"role": "user", "content": prompt}], tokens, **sampling, told=write)
    else:
        generated = model.generate(prompt, tokens, **sampling, told=write)
    if as_json:
        written = {key: value for key, value in generated._asdict().items() if key != "experts"}
        print(to_json({"run": run, "step": model.step, "prompt": prompt, **written}))
    elif not generated.text.endswith("\n"):
        print(flush=True)
    return 0


def evaluate(run: str, files: Sequence[str], seq_len: int | None = None, as_json: bool = False, trust: bool = False) -> int:
    """Print how well a model predicts text files, each on its own and all together, and return 0.

    Each file is one document. All files are read before weights are, because that takes long.

    Args:
        seq_len: tokens of a window; None is that of the training.
    """
    texts = [_text(file) for file in files]
    if seq_len is not None:
        check_count("seq_len", seq_len)
    trained = Trained.at(run, trust=trust)
    model, length = Model.of(trained), seq_len or trained.recipe.data.seq_len
    scores, errors = list[Score](), Console(stderr=True)
    with Progress(console=errors, disable=not errors.is_terminal, transient=True) as progress:
        for file, text in zip(files, texts, strict=True):
            advance = partial(_advance, progress, progress.add_task(escape(file), total=None))
            scores.append(model.evaluate(text, length, advance))
    together = sum(scores, Score())
    if as_json:
        rows = [{"file": file, **score.as_dict()} for file, score in zip(files, scores, strict=True)]
        print(to_json({"run": run, "step": model.step, "seq_len": length, "files": rows, "together": together.as_dict()}))
        return 0
    out = Console()
    out.print(f"{run}, after {model.step} steps, in windows of {length} tokens\n", markup=False, highlight=False, soft_wrap=True)
    out.print(_table([*zip(files, scores, strict=True), *([("together", together)] if len(files) > 1 else [])]))
    return 0


def _text(file: str) -> str:
    """Return the text of a file, without a mark of the byte order, as training reads it."""
    if not (text := read_text("FILE", file, _MOST_TEXT).removeprefix("\ufeff")):
        raise UserError("FILE", file, "is empty, so there is nothing to predict")
    return text


def _advance(progress: Progress, task: TaskID, done: int, total: int) -> None:
    progress.update(task, completed=done, total=total)


def _table(rows: Sequence[tuple[str, Score]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    table.add_column("file", overflow="fold")
    for name in ("tokens", "bytes", "nats/token", "perplexity", "bits/byte"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, score in rows:
        means = f"{score.loss:.4f}", f"{score.perplexity:,.2f}", f"{score.bits_per_byte:.4f}"
        table.add_row(escape(name), f"{score.tokens:,}", f"{score.bytes:,}", *means)
    return table


def _write(text: str) -> None:
    """Print a piece of text at once. On a terminal, characters that would control it are replaced."""
    if sys.stdout.isatty():
        text = "".join(char if char.isprintable() or char in "\n\t" else "�" for char in text)
    print(text, end="", flush=True)
