"""A small project on two ranks, which has the faults that `--peer` must find. Run as a program, it prints their verdicts."""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from torch import nn

from trainers.referee.cases import CASES, IGNORED
from trainers.referee.rank import Layout
from trainers.referee.ranks import run
from trainers.referee.verdicts import judged

FAULTS = {
    "none": "agrees", "scaled": "differs", "one rank": "differs", "missing": "differs", "norm": "differs", "nan": "differs",
    "evaluation": "differs", "error": "does not run",
}  # fmt: skip


class Plain:
    """An embedding and a head, data-parallel by hand."""

    def __init__(self, case, layout, dtype, folder):
        self.case, self.dp, self.fault, self.model = case, layout.dp, layout.settings["fault"], self.alone(case, dtype)

    @staticmethod
    def alone(case, dtype):
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(64, 8), nn.Linear(8, 64, bias=False)).to(dtype)

    @staticmethod
    def loss(case, model, inputs, targets=None):
        label_T = inputs["labels"][:, 1:].flatten()
        total = nn.functional.cross_entropy(
            model(inputs["input_ids"][:, :-1]).flatten(0, 1), label_T, ignore_index=IGNORED, reduction="sum"
        )
        return total / (int((label_T != IGNORED).sum()) if targets is None else targets)

    def evaluate(self, batches, dp_rank, targets):
        loss = self.loss(self.case, self.model, batches.inputs[0][dp_rank], targets).detach()
        return loss * 1.01 if self.fault == "evaluation" else loss

    def train(self, batches, dp_rank, targets):
        if self.fault == "error" and dp_rank == 1:
            raise ValueError("this rank\nhas no experts")
        loss = self.loss(self.case, self.model, batches.inputs[0][dp_rank], targets)
        loss.backward()
        gradients = {name: each.grad / self.dp for name, each in self.model.named_parameters()}
        for gradient in gradients.values():
            dist.all_reduce(gradient)
        norm = float(torch.stack([each.norm() for each in gradients.values()]).norm())
        if self.fault == "scaled" or (self.fault == "one rank" and dp_rank == 1):
            gradients["0.weight"] *= 2
        if self.fault == "nan":
            gradients["0.weight"][0, 0] = torch.nan
        if self.fault == "missing":
            del gradients["0.weight"]
        return loss.detach(), gradients, norm * (0.9 if self.fault == "norm" else 1)

    def pieces(self, gradients, expected):
        for name, gradient in gradients.items():
            yield name, gradient, expected[name]


def verdict(case: str, fault: str) -> dict:
    found = run(Plain, Layout(1, 2, 1, {"fault": fault}), CASES[case], "float64", 120.0)
    return judged(found, "float64")


if __name__ == "__main__":
    torch.set_num_threads(1)
    rows = {fault: verdict("as it is", fault) for fault in FAULTS}
    rows |= {case: verdict(case, "none") for case in ("masked tokens", "masked tokens, counted")}
    json.dump(rows, sys.stdout)
