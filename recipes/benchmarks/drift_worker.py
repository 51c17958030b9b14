"""The process of one host. drift.py starts it. It trains, searches, watches, and measures fixed choices."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from drift import DEGREES, SIZES

from foldray.blueprint import ModelSpec, Ownership
from foldray.comm import Groups
from foldray.fold import Fold
from foldray.model import Batch, Transformer
from foldray.runtime import Execution, Gradients
from foldray.schedule import Ordering, Reduction, Sequences, SliceCost, make_ordering
from trainers.worker.online import WATCHED, Knobs, Online
from tuners import OnlineSearch

_MOST = 2000  # steps; training must have searched twice by then


class Worker:
    """The process of one host."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.rank = args, args.worker
        torch.set_num_threads(1)
        torch.manual_seed(self.rank)
        host, port = args.store.split(":")
        dist.init_process_group(
            "gloo", store=dist.TCPStore(host, int(port), 2, is_master=self.rank == 0), rank=self.rank, world_size=2
        )
        model = ModelSpec(
            layers=args.blocks, hidden=args.hidden, heads=args.heads, kv_heads=args.heads, head_dim=args.hidden // args.heads,
            ffn_hidden=args.inner, experts=4, topk=1, expert_hidden=args.inner, vocab=256,
        )  # fmt: skip
        fold = Fold(2, ep=2)
        self.groups, cost = Groups.create(fold, self.rank), SliceCost.of_model(model.hidden, model.heads)
        sequences, chunks = Sequences(args.length, cost), Reduction("chunks", bytes=1 << 20)
        self.orderings: dict[int, Ordering] = {
            degree: make_ordering(sequences, "one_a_one_m" if degree > 1 else "sequential", degree, reduction=chunks)
            for degree in DEGREES
        }
        transformer = Transformer(Ownership(model, fold), self.groups)
        self.gradients = Gradients(transformer, self.groups)
        self.execution = Execution(transformer, self.groups, self.gradients, self.orderings[2])
        text = torch.randint(0, model.vocab, (1, args.length + 1))
        self.batches = [Batch(text[:, :-1], text[:, 1:])]

    def serve(self) -> None:
        """Train until the second search has ended, then measure the fixed choices. The first host writes the results."""
        records: list[Any] = []
        online = Online(self.execution, self.groups, torch.device("cpu"), self.orderings, sizes=True)
        steps = online.steps(OnlineSearch, records.append)
        next(steps)
        watched = 0
        for number in range(_MOST):
            steps.send(self.step())
            searches = self._agreed(sum(record["kind"] == "tried" and record["chosen"] for record in records))
            self._tell(f"step {number + 1}, {searches} searches")
            watched += searches == 1
            if watched == WATCHED + 1 and self.rank == 0:
                (self.args.folder / "found").touch()
            if searches == 2:
                break
        assert online.chosen is not None
        fixed = self.fixed(online, online.chosen)
        if self.rank == 0:
            (self.args.folder / "result.json").write_text(json.dumps({"records": records, "fixed": fixed}))
        self.groups.close()

    def fixed(self, online: Online, chosen: Knobs) -> dict[str, list[float]]:
        """Return the seconds of steps with what training has found, and with every fixed choice, in turns."""
        choices = {"found": chosen, **{f"{d} pieces, {s >> 10} KiB": Knobs(d, s) for d in DEGREES for s in SIZES}}
        times: dict[str, list[float]] = defaultdict(list)
        for number in range(self.args.rounds):
            self._tell(f"round {number + 1} of the fixed choices")
            for name, knobs in choices.items():
                online.choose(knobs)
                self.step()
                slowest = torch.tensor([self.step(), self.step()], dtype=torch.float64)
                times[name] += self.groups.control.all_reduce(slowest, "max").tolist()
        return times

    def step(self) -> float:
        """Run forward, backward and reductions, and return the seconds."""
        began = time.perf_counter()
        self.execution.train(self.batches)
        self.gradients.zero()
        return time.perf_counter() - began

    def _agreed(self, count: int) -> int:
        return int(self.groups.control.all_reduce(torch.tensor(count), "max"))

    def _tell(self, text: str) -> None:
        if self.rank == 0:
            print(f"\r{text:<60}", end="", file=sys.stderr)
