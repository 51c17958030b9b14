"""Lines with which foldray refuses a mistake: `python -m tests.error_lines > docs/troubleshooting.md` asks for each of them."""

from __future__ import annotations

import io
import shlex
from contextlib import chdir, redirect_stderr
from pathlib import Path
from typing import NamedTuple

from foldray.cli import main

ROOT = Path(__file__).parents[1]


class Row(NamedTuple):
    """A mistake, and what helps.

    Args:
        about: the part of the page.
        command: the command line, without `foldray`, in the checkout.
        advice: what to do, if the line itself does not say enough; may be empty.
    """

    about: str
    command: str
    advice: str = ""


RECIPE, FOLD, MODEL, SCHEDULE, RUN, CLUSTER = "Recipes", "Folds and batches", "Models", "Schedules", "Runs", "Clusters and plans"
ROWS = (
    Row(RECIPE, "train mine.yaml", "`foldray recipes` lists those that come with foldray; `--copy .` copies them."),
    Row(RECIPE, "train quickstart training.stepz=5"),
    Row(RECIPE, "train quickstart training.steps=many"),
    Row(RECIPE, "train quickstart training.steps=0"),
    Row(RECIPE, "train quickstart engine.kind=apex"),
    Row(RECIPE, "train quickstart precision=float64"),
    Row(RECIPE, "train quickstart optimizer.kind=muon"),
    Row(RECIPE, "train quickstart data.source=text", "Name a file, a pattern such as `texts/*.txt`, or the address of a store."),
    Row(RECIPE, "train quickstart data.source=conversations data.path=chats.jsonl"),
    Row(RECIPE, "train quickstart training.weights=hub", "`foldray import-hf` writes both keys."),
    Row(RECIPE, "train quickstart data.path=s3://KEY:SECRET@bucket/texts data.source=text"),
    Row(FOLD, "train quickstart fold.ep=3", "`foldray explain` draws a fold, or names the nearest legal ones."),
    Row(FOLD, "train quickstart fold.ep=4 cluster.workers=12"),
    Row(FOLD, "explain --world-size 12 --tp 8 --ep 3"),
    Row(FOLD, "train quickstart fold.tp=2 model.heads=3 model.kv_heads=3"),
    Row(FOLD, "train quickstart fold.cp=2 data.seq_len=127"),
    Row(FOLD, "train quickstart training.global_batch=9", "With `cluster.min_workers`, shares may be uneven."),
    Row(MODEL, "train quickstart model.preset=mixtral"),
    Row(MODEL, "train quickstart model.topk=16"),
    Row(MODEL, "import-hf nowhere mine.yaml"),
    Row(SCHEDULE, "train quickstart schedule.kind=overlap"),
    Row(SCHEDULE, "train quickstart schedule.kind=stream schedule.degree=1000"),
    Row(SCHEDULE, "bench quickstart --schedule stream:4@3"),
    Row(RUN, "status runs/first", "The id of a run is the name of its folder in `cluster.storage`."),
    Row(RUN, "generate runs/first --prompt Hello"),
    Row(RUN, "export-hf runs/first out"),
    Row(CLUSTER, "plan --model mixtral-8x7b --cluster h900 --gpus 8 --seq-len 4096 --global-batch 64",
        "`foldray calibrate` measures your cluster, and writes such a file."),
    Row(CLUSTER, "plan --model mixtral-8x7b --cluster h200 --gpus 7 --seq-len 4096 --global-batch 64 --pp 2"),
    Row(CLUSTER, "train quickstart --resume first --from runs/first/step_00000100"),
)  # fmt: skip
_PAGE = """\
# Troubleshooting

foldray answers a mistake with one line: the key, its value, the rule, and the legal values. The exit code is then 2, and nothing
was written. These are the lines of common mistakes. A script asks foldray for each of them, and a test holds this page to its
answers.

What happens when something fails while a model trains (a lost worker, a full disk, a cut link) is the subject of
[long runs](running.md#what-happens-when-something-fails).

{parts}
"""


def answer(row: Row) -> str:
    """Return the line that a command prints, which must refuse it."""
    out = io.StringIO()
    with chdir(ROOT), redirect_stderr(out):
        code = main(shlex.split(row.command))
    if code != 2 or out.getvalue().count("\n") != 1:
        raise AssertionError(f"foldray {row.command} ended with {code}: {out.getvalue()}")
    return out.getvalue().strip()


def page() -> str:
    """Return the page of all rows, by part."""
    parts = []
    for about in dict.fromkeys(row.about for row in ROWS):
        rows = (
            f"```\n$ foldray {row.command}\n{answer(row)}\n```\n\n{row.advice}".rstrip() for row in ROWS if row.about == about
        )
        parts.append("\n\n".join([f"## {about}", *rows]))
    return _PAGE.format(parts="\n\n".join(parts))


if __name__ == "__main__":
    print(page(), end="")
