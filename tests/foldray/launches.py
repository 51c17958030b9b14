"""Counts what a GPU would launch in the ops of a step: calls of torch's operators that compute, and kernels of our own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from foldray.comm import Groups
from foldray.graph import Op
from foldray.kernels import experts, fused, routing
from foldray.recipe import Recipe
from foldray.runtime.micro_batch import MicroBatch
from tests.foldray.parity import engine_of, own_batches

_UNFILLED = {"aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty_strided"}


class Launches(TorchDispatchMode):
    """Counts by name."""

    def __init__(self) -> None:
        super().__init__()
        self.found = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        schema, listed = func._schema, results if isinstance(results, tuple | list) else [results]
        inputs = {x.untyped_storage()._cdata for x in args if isinstance(x, Tensor)}
        fresh = any(isinstance(x, Tensor) and x.untyped_storage()._cdata not in inputs for x in listed)
        if (fresh and schema.name not in _UNFILLED) or schema.is_mutable:
            self.found[schema.name] += 1
        return results


@contextmanager
def with_kernels() -> Iterator[None]:
    """Let our own kernels take tensors of the CPU, except those in float64, on Triton's interpreter."""
    with ExitStack() as stack:
        for module, name, takes in (
            (fused, "fits", lambda *tensors: all(x.dtype != torch.float64 for x in tensors)),
            (routing, "sorts", lambda expert_TK: True),
        ):
            stack.enter_context(mock.patch.object(module, name, takes))
        yield


@contextmanager
def launches() -> Iterator[Launches]:
    """Count what is launched in here."""
    run, counter = fused.launch, Launches()

    def counted(kernel: str, *args: Any, **kwargs: Any) -> None:
        counter.found[kernel] += 1
        with _disable_current_modes():
            run(kernel, *args, **kwargs)

    with mock.patch.object(fused, "launch", counted), mock.patch.object(routing, "launch", counted), counter:
        yield counter


def launches_of_a_step(recipe: Recipe) -> dict[str, Counter[str]]:
    """Return what each kind of op launches in a step of training on one rank, by name: the most of any op."""
    groups = Groups.create(recipe.placed_fold)
    engine, found = engine_of(recipe, groups), dict[str, Counter[str]]()
    run = MicroBatch.run

    def counted(owner: MicroBatch, op: Op) -> Any:
        with launches() as counter:
            pending = run(owner, op)
        name = f"{op.kind} {op.direction}"
        found[name] = max(found.get(name, Counter()), counter.found, key=lambda each: each.total())
        return pending

    with (
        mock.patch.object(experts, "_implementation", experts._on_gpus),
        mock.patch.object(MicroBatch, "run", counted),
    ):
        engine.train(own_batches(recipe, groups, 0))
    engine.close()
    groups.close()
    return found
