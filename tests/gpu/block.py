"""Measures a training step of one block at real sizes: time, speed, host, kernels, memory.

Beside it runs Hugging Face's Mixtral, with each implementation of experts in transformers that trains here. The best counts.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile

from foldray.blueprint.flops import step_flops
from foldray.comm import Groups
from foldray.model import Batch, Transformer
from foldray.orders import Ordering
from foldray.recipe import Recipe
from foldray.runtime.peak import matmul_peak
from tests.gpu.report import Report
from trainers.worker.engines import make_engine

Name = TypeVar("Name", str, int)

ROUNDS = 7
BLOCKS: dict[str, dict[str, Any]] = {
    "4096/14336, 8 experts, top 2": {"hidden": 4096, "heads": 32, "kv_heads": 8, "expert_hidden": 14336, "experts": 8, "topk": 2},
    "6144/16384, 8 experts, top 2": {"hidden": 6144, "heads": 48, "kv_heads": 8, "expert_hidden": 16384, "experts": 8, "topk": 2},
    "2048/768, 128 experts, top 8": {"hidden": 2048, "heads": 32, "kv_heads": 4, "expert_hidden": 768, "experts": 128, "topk": 8},
}
DEGREES = (1, 2, 4, 8)
LENGTHS = (8192, 32768)


def run(report: Report, lengths: tuple[int, ...] = LENGTHS) -> None:
    device = torch.device("cuda")
    peak = report.check("block", "peak, TFLOP/s", lambda: matmul_peak(device, torch.bfloat16) / 1e12)
    for name, sizes in BLOCKS.items():
        for length in lengths:
            report.check("block", f"{name}, {length} tokens", lambda s=sizes, n=length: measure(report, s, n, peak))
            torch.cuda.empty_cache()


def measure(report: Report, sizes: dict[str, Any], length: int, peak: float) -> dict[str, Any]:
    """Measure the degrees and Hugging Face's blocks in turns. Each row has its median, minimum and maximum in milliseconds."""
    model = {**sizes, "layers": 1, "head_dim": 128, "ffn_hidden": sizes["expert_hidden"], "vocab": 1024, "moe_every": 1}
    device, text = torch.device("cuda"), torch.randint(0, 1024, (1, length + 1), device="cuda")
    given = [Batch(text[:, :-1], text[:, 1:])]
    with drawn_on_gpu():
        recipe = block_recipe(model, length, {})
        groups = Groups.create(recipe.placed_fold)
        engine: Any = make_engine(recipe, groups, device)
    orderings = {f"{d} pieces": block_recipe(model, length, pieces(d)).ordering for d in DEGREES}
    flops = step_flops(recipe.model, length, 1)

    def prepare(name: str) -> None:
        if name in orderings:
            engine.execution.reorder(orderings[name])
            engine.execution.step(given)  # builds the list before the clock starts
        else:
            peers[name].prepare()

    peers = mixtrals(report, model, text)
    steps: dict[str, Any] = {name: lambda: engine.train(given) for name in orderings}
    steps |= {name: peer.step for name, peer in peers.items()}
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for number in range(2 + ROUNDS):
        for name, step in steps.items():
            prepare(name)
            took[name].append(timed(step))
            if number < 2:
                took[name].clear()
    rows = {}
    for name, step in steps.items():
        prepare(name)
        device_ms, host_ms = zip(*took[name], strict=True)
        rows[name] = row = {
            "ms": statistics.median(device_ms), "min": min(device_ms), "max": max(device_ms),
            "host_ms": statistics.median(host_ms), "product_share": flops / statistics.median(device_ms) / peak / 1e9,
            **kernels_of(step), "peak_gib": peak_of(step),
        }  # fmt: skip
        report.say(f"  {name:24} " + " ".join(f"{key} {value:.3g}" for key, value in row.items() if key != "by_name"))
        for kernel in list(row["by_name"].items())[:12] if name in ("1 pieces", "4 pieces", *peers) else ():
            report.say("      {}: {}".format(*kernel))
    if peers:
        best = min(peers, key=lambda name: rows[name]["ms"])
        for name in orderings:
            rows[name] |= {"best_peer": best, "best_peer_over_this": rows[best]["ms"] / rows[name]["ms"]}
        ratio = rows["1 pieces"]["best_peer_over_this"]
        report.say(f"  the best of Hugging Face is {best}: {ratio:.2f} × the time of the whole block")
    return rows


def pieces(degree: int) -> dict[str, Any]:
    """Return the schedule of a step in pieces."""
    return {"kind": "stream", "degree": degree} if degree > 1 else {}


def block_recipe(model: dict[str, Any], length: int, schedule: dict[str, Any], ranks: int = 1) -> Recipe:
    return Recipe.parse(
        {
            "model": model,
            "data": {"seq_len": length},
            "precision": "bfloat16",
            "engine": {"kind": "torch"},
            "fold": {"ep": ranks},
            "cluster": {"workers": ranks},
            "training": {"global_batch": ranks},
            "optimizer": {"kind": "sgd"},
            "schedule": schedule,
        }
    )


def drawn_on_gpu() -> Any:
    """Draw initial weights on the GPU. The CPU would take minutes, and time does not depend on them."""
    return mock.patch.object(Transformer, "_initialise", _draw)


@torch.no_grad()
def _draw(model: Transformer, seed: int) -> None:
    for parameter in model.parameters():
        parameter.fill_(1.0) if parameter.dim() == 1 else parameter.normal_(0.0, 0.02)


class Peer(NamedTuple):
    """A step of another project's block, and what is to be called before others have run."""

    prepare: Callable[[], None]
    step: Callable[[], None]


def mixtrals(report: Report, model: dict[str, Any], text: torch.Tensor) -> dict[str, Peer]:
    """Return transformers' Mixtral with one block of these sizes, by the implementation of its experts."""
    try:
        from transformers import MixtralConfig, MixtralForCausalLM
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ModuleNotFoundError as error:
        report.say(f"  left out: Hugging Face ({error})")
        return {}
    config = MixtralConfig(
        vocab_size=1024, hidden_size=model["hidden"], intermediate_size=model["expert_hidden"], num_hidden_layers=1,
        num_attention_heads=model["heads"], num_key_value_heads=model["kv_heads"], head_dim=128,
        num_local_experts=model["experts"], num_experts_per_tok=model["topk"], max_position_embeddings=32768,
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    try:
        with text.device:
            mixtral = MixtralForCausalLM(config).train()
    finally:
        torch.set_default_dtype(torch.float32)

    def step() -> None:
        mixtral(input_ids=text[:, :-1], labels=text[:, :-1], use_cache=False).loss.backward()

    peers = {}
    for kind in ("eager", *sorted(ALL_EXPERTS_FUNCTIONS)):
        peer = Peer(partial(mixtral.set_experts_implementation, kind), step)
        if (reason := _why_not(peer, mixtral)) is None:
            peers[f"Hugging Face {kind}"] = peer
        else:
            report.say(f"  left out: Hugging Face {kind} ({reason})")
    return peers


def _why_not(peer: Peer, module: torch.nn.Module) -> str | None:
    """Return why a peer cannot train here: a package, a kind of GPU or memory is missing, or it computes no gradients."""
    module.zero_grad()
    try:
        peer.prepare()
        peer.step()
    except Exception as error:  # of any kind, since other projects' kernels raise what they like
        return f"{type(error).__name__}: {error}".splitlines()[0]
    finally:
        torch.cuda.empty_cache()  # what did not fit
    return None if all(parameter.grad is not None for parameter in module.parameters()) else "some weights get no gradient"


def timed(step: Any) -> tuple[float, float]:
    """Return the milliseconds of a step on the GPU, and until the host came back."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    started = time.perf_counter()
    begin.record()
    step()
    end.record()
    host = time.perf_counter() - started
    torch.cuda.synchronize()
    return begin.elapsed_time(end), host * 1e3


def steps_in_turns(engine: Any, given: list[Batch], orderings: Mapping[Name, Ordering], rounds: int) -> dict[Name, list[float]]:
    """Return the milliseconds of a step by ordering, round by round, after two rounds to warm up."""
    took: dict[Name, list[float]] = {name: [] for name in orderings}
    for number in range(2 + rounds):
        for name, ordering in orderings.items():
            engine.execution.reorder(ordering)
            engine.execution.step(given)  # builds the list before the clock starts
            milliseconds, _ = timed(lambda: engine.train(given))
            took[name] += [milliseconds] if number >= 2 else []
    return took


def kernels_of(step: Any) -> dict[str, Any]:
    """Return number of kernels, the milliseconds of all of them, and each kernel by name, that which takes longest first."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        step()
        torch.cuda.synchronize()
    took, times = Counter[str](), Counter[str]()
    for event in profiled.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            took[event.name[:90]] += event.device_time / 1e3
            times[event.name[:90]] += 1
    by_name = {name: f"{ms:.3f} ms, {times[name]} times" for name, ms in took.most_common()}
    return {"kernels": times.total(), "busy_ms": sum(took.values()), "by_name": by_name}


def peak_of(step: Any) -> float:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30
