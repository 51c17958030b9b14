"""What ops keep on the host: the same bits and strides, each memory once, nothing on the device meanwhile, and every wait."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch

from foldray.errors import UserError
from foldray.graph import Op
from foldray.kinds import OFFLOAD
from foldray.runtime import Trace
from foldray.runtime.kept import TINY, HostMemory, Kept
from tests.foldray.lanes import strict_lanes
from tests.foldray.parity import engine_on, go_on, make_recipe, model_of, own_batches

KINDS = ["attention", "expert", "ffn"]
SCHEDULES: dict[str, dict[str, Any]] = {
    "sequential": {},
    "stream": {"kind": "stream", "degree": 4},
    "weave": {"kind": "weave"},
    "weights apart": {"kind": "stream", "degree": 2, "weight_gradients": "apart"},
    "weights whole": {"kind": "stream", "degree": 2, "weight_gradients": "whole"},
    "shared again": {"recompute": ["shared"]},
    "parts": {"kind": "stream", "degree": 2, "batch_degree": 2},
}
MODEL = {"layers": 6, "moe_every": 2}


def recipe_of(schedule: dict[str, Any], kinds: list[str] = KINDS, **sections: Any) -> Any:
    model = {**MODEL, **sections.pop("model", {})}
    return make_recipe(1, schedule={**schedule, "offload": kinds}, model=model, training={"micro_batch": 2}, **sections)


class _Saves(torch.autograd.Function):
    """Saves tensors, and tells its backward what it has got back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tell: Callable[..., None], *saved: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, *saved)
        ctx.tell = tell
        return x.sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.tell(*ctx.saved_tensors)
        return gradient * torch.ones(64, 48), *[None] * 6


def saved(host: HostMemory, *more: torch.Tensor) -> tuple[Kept, torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """Save several views of two tensors, and some more tensors."""
    x = torch.randn(64, 48, requires_grad=True)
    views = [x, x.detach().t(), x.detach()[:, 3:7], torch.randn(2 * TINY)[::2].to(torch.bfloat16), torch.ones(3), *more]
    got, kept = list[torch.Tensor](), host.keep(0)
    with kept.hooks():
        y = _Saves.apply(x, lambda *given: got.extend(given), *views[1:])
    return kept, y, [each.detach().clone(memory_format=torch.preserve_format) for each in views], got


def test_each_memory_travels_once_and_comes_back_with_its_bits_and_strides() -> None:
    model = model_of()
    host, weight = HostMemory(model), next(model.parameters())
    host.begin()
    kept, y, views, got = saved(host, weight.t() if weight.dim() > 1 else weight)
    kept.send()
    assert host.sent == 64 * 48 * 4 + TINY * 2, "views travel as one, small tensors stay, and so do weights"
    kept.fetch()
    kept.wait()
    y.backward()
    assert host.fetched == host.sent
    assert len(got) == len(views) == 6
    for back, before in zip(got, views, strict=True):
        assert torch.equal(back, before)
    assert [back.stride() for back in got[:3]] == [(48, 1), (1, 48), (48, 1)]
    assert len({back.untyped_storage().data_ptr() for back in got[:3]}) == 1
    assert got[-1].untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()


def test_a_backward_without_its_tensors_is_refused() -> None:
    host = HostMemory(model_of())
    kept, y, *_ = saved(host, torch.ones(3))
    kept.send()
    with pytest.raises(RuntimeError, match=r"a tensor \(64, 48\) that a backward needs is on the host; nothing has fetched it"):
        y.backward()


@contextmanager
def watched(most: int) -> Iterator[list[int]]:
    """Watch that what has left is not alive before it is fetched, and that few blocks are on their way at a time.

    Args:
        most: blocks at most that have been fetched, and have not gone backward.
    """
    away, back, sizes = dict[Kept, list[weakref.ref]](), dict[tuple[int, Kept], list[weakref.ref]](), list[int]()
    send, fetch, host_send = Kept.send, Kept.fetch, HostMemory.send

    def references(pieces: Any) -> list[weakref.ref]:
        return [weakref.ref(piece.on_device.untyped_storage()) for piece in pieces]

    def alive(of: list[weakref.ref]) -> int:
        return sum(each() is not None for each in of)

    def sending(host: HostMemory, pieces: Any) -> Any:
        going, pending = host_send(host, pieces)
        sizes.append(len(going))
        host.newest = references(going)  # type: ignore[attr-defined]
        return going, pending

    def send_kept(kept: Kept) -> Any:
        pending = send(kept)
        away[kept] = kept._host.newest  # type: ignore[attr-defined]
        assert len(kept._leaving) <= 2
        for other, left in away.items():
            assert other in other._leaving or not alive(left), "what has left is alive"
        return pending

    def fetch_kept(kept: Kept) -> Any:
        left, pieces = away.pop(kept), list(kept._away)
        pending = fetch(kept)
        assert not alive(left), "what was on the host was alive on the device"
        back[id(kept._leaving), kept] = references(pieces)
        there = [other for kind, other in back if kind == id(kept._leaving) and alive(back[kind, other])]
        assert len(there) <= most, f"{len(there)} blocks were fetched"
        return pending

    with (
        patch.object(HostMemory, "send", sending),
        patch.object(Kept, "send", send_kept),
        patch.object(Kept, "fetch", fetch_kept),
    ):
        yield sizes
    assert not away, "something was not fetched"


@pytest.mark.gate(2)
@pytest.mark.parametrize("lanes", ["at once", "strict"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_nothing_on_the_host_is_alive_on_the_device(name: str, lanes: str) -> None:
    schedule = SCHEDULES[name]
    recipe = recipe_of(schedule, precision="float32", moe={"experts": "grouped"})
    # What gradients of weights are computed from stays until they are: for a block more if they wait for all of its pieces.
    later = {"apart": 1, "whole": 1}.get(schedule.get("weight_gradients", "together"), 0)
    most = (2 + later) * schedule.get("batch_degree", 1)
    with strict_lanes() if lanes == "strict" else watched(most) as sizes, engine_on(recipe) as (engine, groups):
        if lanes == "strict":
            with watched(most) as sizes:
                go_on(engine, groups, recipe, range(2))
        else:
            go_on(engine, groups, recipe, range(2))
    parts, passes = schedule.get("batch_degree", 1), recipe.accumulation
    assert len(sizes) == 2 * passes * parts * (5 + 5)  # attention in five blocks, experts or a dense network in the same
    assert all(sizes)


def _hasty(kept: Kept) -> None:
    if kept._sending is not None:
        kept._sending = None
        kept._leaving.remove(kept)
        for piece in kept._away:
            piece.on_device = None


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ((Kept, "wait", lambda kept: None), "nobody has waited for some copies"),
        ((Kept, "let_go", _hasty), "nobody has waited for some copies"),
    ],
    ids=["backward does not wait", "nothing waits until it has left"],
)
def test_a_forgotten_wait_is_found(fault: Any, found: str) -> None:
    recipe = recipe_of({})
    with strict_lanes(), engine_on(recipe) as (engine, groups), patch.object(*fault):  # noqa: SIM117
        with pytest.raises(AssertionError, match=found):
            engine.train(own_batches(recipe, groups, 0))


def test_a_traced_step_has_the_copies() -> None:
    recipe = recipe_of({"kind": "stream", "degree": 2})
    with engine_on(recipe) as (engine, groups):
        engine.execution.trace = Trace()
        go_on(engine, groups, recipe, range(1))
        graph, spans = engine.execution.last, engine.execution.trace.spans
    moves = [op for op in spans if op.kind == OFFLOAD]
    assert {(op.direction, graph.offloaded[op.part]) for op in moves} == {(way, kind) for way in "FB" for kind in KINDS}
    assert all(spans[op].end > spans[op].start for op in moves)


def test_evaluation_keeps_nothing() -> None:
    recipe = recipe_of({})
    with engine_on(recipe) as (engine, groups):
        engine.execution.evaluate(own_batches(recipe, groups, 0))
        assert engine.execution.host.sent == 0
        graph, order = engine.execution.step(own_batches(recipe, groups, 0))
        assert Op(OFFLOAD, "F", 0) in order
        assert not any(op.kind == OFFLOAD and op.layer == 5 for op in order), "the last block goes backward at once"
        assert graph.offloaded == tuple(KINDS)


def test_tables_of_positions_stay() -> None:
    """All blocks and micro-batches share them."""
    recipe = recipe_of({}, ["attention"], model={"layers": 2, "moe_every": 1}, precision="float32", data={"seq_len": 64})
    with engine_on(recipe) as (engine, groups), watched(2):
        sent = list[int]()
        send = HostMemory.send

        def sending(host: HostMemory, pieces: Any) -> Any:
            tables = {table.untyped_storage().data_ptr() for table in engine.model.tables()}
            assert tables & set(pieces), "attention saves them"
            going, pending = send(host, pieces)
            sent.append(len(pieces) - len(going))
            return going, pending

        with patch.object(HostMemory, "send", sending):
            go_on(engine, groups, recipe, range(1))
    assert all(count >= 2 for count in sent)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"schedule": {"offload": ["head"]}}, r"schedule\.offload.*legal: attention, expert, ffn, shared"),
    (
        {"schedule": {"offload": ["expert"], "recompute": ["attention", "expert"]}},
        r"keeps what recompute would compute again: expert may be in one of both lists; legal: \[\]",
    ),
    ({"schedule": {"offload": ["expert", "expert"]}}, "names an operation twice"),
    ({"schedule": {"offload": ["expert"], "graphs": "auto"}}, "a CUDA graph finds it where it was"),
    ({"schedule": {"offload": ["expert"]}, "placement": {"attention": 2, "experts": 2}}, "placement parts them"),
    (
        {"schedule": {"offload": ["expert"]}, "moe": {"backend": "tutel"}, "precision": "float32"},
        "never run with Tutel's kernels",
    ),
]


@pytest.mark.parametrize(("sections", "line"), REFUSED, ids=str)
def test_what_is_refused(sections: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=line) as caught:
        make_recipe(4 if "placement" in sections else 1, **sections)
    assert "\n" not in str(caught.value)
