"""Repeat the papers' checks of accuracy with small models: training curves that must stay equal.

    python recipes/papers/curves.py folding     # MoE Parallel Folding, section 6.1: a fold against one process
    python recipes/papers/curves.py schedules   # FoldMoE, figure 12a: overlapping schedules against sequential
    python recipes/papers/curves.py placement   # DisagMoE: attention and experts on workers of their own against shared ones
    [--steps 300] [--lr 1e-3] [--precision float32] [--json FILE] [--picture FILE]

The script trains the same recipe several times, on the text of the quickstart, with the torch engine. The losses
of all steps and validations must stay together, and the script prints their largest distance. It starts Ray with a slot for
every worker, whatever the number of cores is. On a laptop this is slow, but the results are the same. Training chooses the
lags of `stream` by the times of its second step, and may choose `one_a_one_m` instead.

Batches are small on purpose. In float32, sums in another order differ in their last digits. About once in a million
decisions, such a digit decides which expert a token goes to. From then on, two trainings diverge, although both are correct.
`folding` and `schedules` make some 150 000 decisions. `placement` trains the whole model of the quickstart, with more of them,
and stays together for 300 steps only in float64.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import ray

from foldray import Recipe
from trainers import FoldTrainer
from trainers.telemetry.history import History
from trainers.telemetry.records import number

Curves = dict[str, dict[int, float]]

# Name → changes to the recipe. The others are compared with the first one.
EXPERIMENTS: dict[str, dict[str, dict[str, Any]]] = {
    "folding": {
        "one process": {"workers": 1},
        "TP2 CP2 PP2 | EP4": {"workers": 8, "fold": {"tp": 2, "cp": 2, "pp": 2, "ep": 4}},
    },
    "schedules": {
        "sequential": {"workers": 2, "fold": {"ep": 2}},
        "one_a_one_m, d = 4": {"workers": 2, "fold": {"ep": 2}, "schedule": {"kind": "one_a_one_m", "degree": 4}},
        "stream, d = 4": {"workers": 2, "fold": {"ep": 2}, "schedule": {"kind": "stream", "degree": 4}},
    },
    "placement": {
        "shared, EP2": {"workers": 2, "fold": {"ep": 2}, "model": {"preset": "tiny"}},
        "1 + 1": {"workers": 2, "placement": {"attention": 1, "experts": 1}, "model": {"preset": "tiny"}},
        "2 + 2, two positions each": {
            "workers": 4, "model": {"preset": "tiny"}, "fold": {"pp": 2},
            "placement": {"attention": 2, "experts": 2, "expert_pp": 2},
        },
    },
}  # fmt: skip
_LEAST = {"float32": 1e-9, "float64": 1e-17}
_COLOURS = ("#2364aa", "#d9630b", "#2f855a")


def recipe(steps: int, lr: float, precision: str, storage: Path, workers: int, **sections: Any) -> Recipe:
    return Recipe.parse(
        {
            "name": f"curves-{workers}",
            "model": {"preset": "tiny", "layers": 2, "moe_every": 2},
            "data": {"source": "stdlib", "seq_len": 128},
            "engine": {"kind": "torch"},
            "precision": precision,
            "optimizer": {"lr": lr, "warmup_steps": 30},
            "training": {"steps": steps, "global_batch": 4, "micro_batch": 2, "eval_every": 25, "eval_sequences": 32},
            "cluster": {"workers": workers, "max_failures": 0, "storage": str(storage)},
            **sections,
        }
    )


def train(steps: int, lr: float, precision: str, storage: Path, **changes: Any) -> Curves:
    """Run one training, and return its training and validation loss by step, in nats per token."""
    result = FoldTrainer(recipe(steps, lr, precision, storage, **changes)).fit()
    history = History.read(Path(result.path) / "metrics.jsonl")
    return {
        "training": {at: number(record["loss"]) for at, record in history.steps.items()},
        "validation": {at: number(record["loss"]) for at, record in history.validations.items()},
    }


def apart(ours: dict[int, float], theirs: dict[int, float]) -> dict[int, float]:
    if ours.keys() != theirs.keys():
        raise RuntimeError("the trainings do not have the same steps")
    return {at: abs(value - theirs[at]) for at, value in ours.items()}


def draw(results: dict[str, Curves], least: float, path: Path) -> None:
    """Draw all curves above, and their distances to the first one below. Distances below `least` are drawn there."""
    from trainers.pictures.canvas import panels, write

    (plain, reference), *others = results.items()
    figure, (above, below) = panels(10, 6, 2, 1, sharex=True, height_ratios=(2, 1))
    figure.suptitle(f"{', '.join(name for name, _ in others)} against {plain}", x=0.01, ha="left", fontweight="bold")
    styles = {"training": "-", "validation": "--"}
    for kind, style in styles.items():
        above.plot(*zip(*reference[kind].items(), strict=True), style, color=_COLOURS[0], linewidth=4, alpha=0.3,
                   label=f"{kind}, {plain}")  # fmt: skip
        for (name, curves), colour in zip(others, _COLOURS[1:], strict=False):
            above.plot(*zip(*curves[kind].items(), strict=True), style, color=colour, linewidth=1.1, label=f"{kind}, {name}")
            distance = {at: max(value, least) for at, value in apart(curves[kind], reference[kind]).items()}
            below.plot(*zip(*distance.items(), strict=True), style, color=colour, linewidth=1.1)
    below.axhline(1e-4, color="#6b7280", linestyle=(0, (5, 3)), linewidth=1)
    at = {"xycoords": ("axes fraction", "data"), "xytext": (4, -3), "textcoords": "offset points", "fontsize": 8}
    below.annotate("0.0001", (1.0, 1e-4), **at)
    below.set_yscale("log")
    below.set_ylabel("distance")
    below.set_xlabel("training step")
    above.set_ylabel("loss (nats per token)")
    above.legend(frameon=False)
    write(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("experiment", choices=EXPERIMENTS)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lr", type=float, default=1e-3, help="peak learning rate (default %(default)s)")
    parser.add_argument("--precision", default="float32", choices=("float32", "float64"), help="(default %(default)s)")
    parser.add_argument("--json", type=Path, help="file for the curves")
    parser.add_argument("--picture", type=Path, help="file for the PNG")
    args = parser.parse_args()
    settings = EXPERIMENTS[args.experiment]
    slots = max(setting["workers"] for setting in settings.values())
    ray.init(num_cpus=slots, include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory() as folder:
        results = {
            name: train(args.steps, args.lr, args.precision, Path(folder), **setting) for name, setting in settings.items()
        }
    (plain, reference), *others = results.items()
    for name, curves in others:
        for kind in curves:
            distance = apart(curves[kind], reference[kind])
            at = max(distance, key=distance.__getitem__)
            print(f"{name}: {kind}: {len(distance)} points, at most {distance[at]:.1e} from {plain} (step {at})")
    if args.json:
        args.json.write_text(json.dumps(results))
    if args.picture:
        draw(results, _LEAST[args.precision], args.picture)


if __name__ == "__main__":
    main()
