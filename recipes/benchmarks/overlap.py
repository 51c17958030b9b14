"""A stack of attention and MoE blocks over a slow link: how much of the all-to-all each schedule hides.

    python recipes/benchmarks/overlap.py [--ratios 0.5 1 1.5] [--length 4096] [--variants stream:4:2 …] [--json FILE]

Two hosts (network namespaces on this machine, which needs root), one core each, joined by a link whose rate is chosen so that the
all-to-alls alone take `ratio` times as long as computation alone, or is given. Everything alternates within a round, in one
process per host:

- C: the same blocks, uncut, without communication. Experts have room for a fixed number of rows (capacity factor 1), so leaving
  the network out changes no shape. Cores are shared with other machines, and get a third slower or faster within a minute: so C
  is measured before and after every variant, and the mean of the two is what the variant is held against. Where the two differ by
  more than a tenth, or the machine below took more than 5 % of a core meanwhile, the variant is measured again, up to three
  times; the least disturbed measurement counts.
- X: the same all-to-alls, uncut, all started at once, with nothing else to do. (Over gloo, whose ends agree on each message
  before it leaves, they take half as long again one after another. Pieces overlap these pauses too: that would be no limit.)
- every variant KIND[:DEGREE[:LAG[:BACKWARD_LAG]]] in the given order, and, with --peers, the same blocks around other MoE layers.
  `stream:DEGREE:best` goes by the simulator, which is asked after rounds of warming up have told what ops cost.

With --hosts 1 there is nothing to hide, and what pieces cost shows. With --peaks, memory is measured instead of time.

Forward and backward are told apart, for the loss is a barrier between them. No schedule of one step can be faster than
max(C_f, X_f) + max(C_b, X_b), the limit. "exposed" is time in which a collective was in flight and nothing was computed.
"× limit" is the median over rounds of a step against its own limit. "simulated" is the step that the simulator expects when it
is fed with the recorded op times. "seen" is how many of the collectives that a list starts ahead of computation were in flight
during some of it, in the worst round.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from common import MALLOC, GatedMlp, processor  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from foldray.comm import Communicator, Groups  # noqa: E402
from foldray.fold import Fold  # noqa: E402
from foldray.model import Batch, Transformer  # noqa: E402
from foldray.planner import Recording, best_overlaps, recorded_cost, replay  # noqa: E402
from foldray.runtime import Execution, Gradients, Trace  # noqa: E402
from foldray.schedule import Ordering, SliceCost, named_ordering  # noqa: E402
from foldray.spec import ModelSpec, Ownership  # noqa: E402
from foldray.timeline import overlaps  # noqa: E402

SIZES = {"hosts": 2, "length": 4096, "hidden": 512, "heads": 8, "inner": 1024, "blocks": 4, "every": 1}
_WARM_UP = 2  # rounds
_SIDES = ("forward_ms", "backward_ms")
_STOLEN, _DRIFT, _TRIES = 0.05, 0.1, 4  # share of a core that may be missing, of C that it may change by; measurements at most


def main() -> None:
    given = _arguments()
    if given.worker is not None:
        Worker(given).serve()
        return
    from tests.lab.hosts import hosts, why_not

    if (reason := why_not()) is not None:
        raise SystemExit(f"no lab on this machine: {reason}")
    found: list[dict[str, Any]] = []
    if given.peaks or given.hosts == 1:
        with hosts(given.hosts) as lab:
            found.append(_peaks(lab, given) if given.peaks else {"link_mbit": 0.0, **_run(lab, given)})
        (report_peaks if given.peaks else report)(found[-1])
    else:
        found = _over_links(given)
    if given.json:
        setting = {"cpu": processor(), "torch": torch.__version__, "command": " ".join(sys.argv), "rounds": given.rounds}
        given.json.write_text(json.dumps({**setting, "model": model_of(given).model_dump(), "runs": found}, indent=1) + "\n")


def _over_links(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Every link of `given.links`, or of `given.ratios`."""
    from tests.lab.hosts import hosts

    found = []
    for rate in given.links or _rates(given):
        with hosts(given.hosts, rate=f"{rate * 1e6:.0f}bit") as lab:
            found.append({"link_mbit": rate, **_run(lab, given)})
        report(found[-1])
    return found


def _rates(given: argparse.Namespace) -> list[float]:
    """Mbit/s at which a step's bytes alone take so many times as long as its computation."""
    from tests.lab.hosts import hosts

    with hosts(given.hosts) as lab:
        alone = _run(lab, given, rounds=3, variants=[])
    return [alone["bytes"] * 8e-3 / (alone["C"]["step_ms"]["median"] * each) for each in given.ratios]


def _peaks(lab: list, given: argparse.Namespace) -> dict[str, Any]:
    """Every variant in processes of its own: what the larger one holds at most during a step, and before it, in MiB."""
    found: dict[str, Any] = {}
    for name in given.variants:
        measured = _run(lab, given, variants=[name])[name]
        found[name] = {key: measured[key] for key in ("peak_mib", "before_mib")}
    return {"peaks": found}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.5, 1.0, 1.5], help="communication to computation")
    parser.add_argument("--links", type=float, nargs="+", metavar="MBIT", help="rates in Mbit/s instead of ratios")
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--variants", nargs="*", default=["sequential", "moe_only:4", "aaam:4", "one_a_one_m:4", "stream:4"])
    parser.add_argument("--peaks", action="store_true", help="measure memory instead, every variant in processes of its own")
    parser.add_argument("--peers", action="store_true", help="also DeepSpeed's MoE layer")
    parser.add_argument("--json", type=Path, help="write every measurement to this file")
    parser.add_argument("--traces", type=Path, help="folder for a Perfetto trace of every variant's last step")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def _run(lab: list, given: argparse.Namespace, rounds: int | None = None, variants: list[str] | None = None) -> dict[str, Any]:
    """One process on every host, each on a core of its own; what the first one found."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        variants = given.variants if variants is None else variants
        own = [f"--{name}={getattr(given, name)}" for name in SIZES]
        own += [f"--rounds={rounds or given.rounds}", f"--store={lab[0].address}:29400", f"--result={result}"]
        own += ["--peaks"] * given.peaks + ["--peers"] * (given.peers and bool(variants))
        own += [f"--traces={given.traces.absolute()}"] if given.traces else []
        command = [sys.executable, __file__, *own, "--variants", *variants]
        # To tell what a process holds at most, all its larger blocks come from the kernel and go back at once.
        malloc = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"} if given.peaks else MALLOC
        workers = [host.popen([*command, f"--worker={i}"], env=malloc, cpu=i) for i, host in enumerate(lab)]
        try:
            codes = [worker.wait(timeout=3600) for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
        if any(codes):
            raise SystemExit(f"the hosts ended with {codes}")
        return json.loads(result.read_text())


def model_of(given: argparse.Namespace) -> ModelSpec:
    router = {"capacity_factor": 1.0, "pad": True, "balance_loss": 0.01}
    return ModelSpec(
        layers=given.blocks, hidden=given.hidden, heads=given.heads, kv_heads=given.heads, head_dim=given.hidden // given.heads,
        ffn_hidden=given.inner, experts=max(given.hosts, 2), topk=1, expert_hidden=given.inner, vocab=64,
        moe_every=given.every, router=router,
    )  # fmt: skip


class Worker:
    """One host's process."""

    def __init__(self, given: argparse.Namespace):
        self.given, self.rank = given, given.worker
        torch.set_num_threads(1)
        torch.manual_seed(given.worker)
        host, port = given.store.split(":")
        store = dist.TCPStore(host, int(port), given.hosts, is_master=self.rank == 0)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=given.hosts)
        fold = Fold(given.hosts, ep=given.hosts)
        self.spec, self.groups = model_of(given), Groups.create(fold, self.rank)
        model = Transformer(Ownership(self.spec, fold), self.groups)
        self.gradients = Gradients(model, self.groups)
        self.execution = Execution(model, self.groups, self.gradients.add)
        self.execution.trace = Trace()
        self.dispatchers = [model.block(layer).moe.dispatcher for layer in self.spec.moe_layers]
        text = torch.randint(0, self.spec.vocab, (1, given.length + 1))
        self.batches = [Batch(text[:, :-1], text[:, 1:])]
        self.cost = SliceCost.of_model(self.spec.hidden, self.spec.heads)
        self.chosen: dict[str, Ordering] = {}  # what the simulator found best, by name
        self.measuring = False

    def serve(self) -> None:
        plan: dict[str, Callable[[], dict[str, float]]] = {name: partial(self.step, name) for name in self.given.variants}
        if self.given.peers:
            plan["deepspeed"] = self.peer()
        found: dict[str, list[dict[str, float]]] = defaultdict(list)
        for number in range(_WARM_UP + self.given.rounds):
            self.measuring = number >= _WARM_UP
            said = f"\rround {number - _WARM_UP + 1} of {self.given.rounds}: "
            if not self.given.peaks:
                self.tell(f"{said}C")
                self.alone = self.together(self.compute_alone)
                found["C"].append(self.alone)
            if plan and not self.given.peaks:
                self.tell(f"{said}X")
                found["X"].append(self.together(self.talk_alone))
            for name, run in plan.items():
                self.tell(f"{said}{name}")
                measured = self.together(run) if self.given.peaks or not self.measuring else self.undisturbed(run)
                found[name].append(measured)
            if not self.measuring:
                found.clear()
        if self.rank == 0:
            document = {name: _medians(each) for name, each in found.items()}
            best = {name: [*ordering.forward, *ordering.backward] for name, ordering in self.chosen.items()}
            self.given.result.write_text(json.dumps({**document, "bytes": self.bytes_sent(), "chosen": best}))
        self.groups.close()

    def tell(self, text: str) -> None:
        if self.rank == 0:
            print(f"{text:<60}", end="", file=sys.stderr)

    def together(self, run: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Run on all hosts; the slowest host's figures, for a step is done when all are. `stolen` is what others had of it."""
        everyone: list[Any] = [None] * self.given.hosts
        dist.barrier()
        begin, before = time.perf_counter(), _stolen(self.rank)
        measured = run()
        measured["stolen"] = (_stolen(self.rank) - before) / (time.perf_counter() - begin)
        dist.all_gather_object(everyone, measured)
        return {key: max(each[key] for each in everyone) for key in measured}

    def undisturbed(self, run: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Measure between two measurements of computation alone, which it is held against, until these agree."""
        tries: list[tuple[float, dict[str, float]]] = []
        while not tries or (tries[-1][0] > 1 and len(tries) < _TRIES):
            measured, before, self.alone = self.together(run), self.alone, self.together(self.compute_alone)
            drift = abs(math.log(self.alone["step_ms"] / before["step_ms"]))
            alone = {f"alone_{side}": (before[side] + self.alone[side]) / 2 for side in _SIDES}
            tries.append((max(drift / _DRIFT, measured["stolen"] / _STOLEN), {**measured, **alone}))
        return min(tries, key=lambda each: each[0])[1]

    def bytes_sent(self) -> int:
        """What one host sends to the other in a step's all-to-alls: out and back, forward and backward, of every MoE block."""
        rows = self.given.length * self.spec.topk // self.given.hosts
        return 4 * len(self.spec.moe_layers) * rows * self.spec.hidden * 4

    def compute_alone(self) -> dict[str, float]:
        """The blocks uncut, with experts' rows going nowhere."""
        for dispatcher in self.dispatchers:
            dispatcher.tokens = Communicator("tokens", self.groups.tokens.ranks, self.rank, None)
        measured = self.step("sequential")
        for dispatcher in self.dispatchers:
            dispatcher.tokens = self.groups.tokens
        return measured

    def talk_alone(self) -> dict[str, float]:
        """A step's all-to-alls, all under way at once: the most that the link carries."""
        rows = self.given.length * self.spec.topk
        x_NH, even = torch.randn(rows, self.spec.hidden), [rows // self.given.hosts] * self.given.hosts
        found = {}
        for direction in ("forward", "backward"):
            dist.barrier()
            begin = time.perf_counter()
            talking = [self.groups.tokens.start_all_to_all(x_NH, even, even) for _ in range(2 * len(self.spec.moe_layers))]
            for pending in talking:
                pending.wait()
            found[f"{direction}_ms"] = (time.perf_counter() - begin) * 1e3
        return {**found, "step_ms": sum(found.values())}

    def step(self, name: str) -> dict[str, float]:
        """Forward and backward; the gradients stay where they are."""
        execution, trace = self.execution, self.execution.trace
        assert trace is not None
        ordering = self.chosen.get(name) or named_ordering(name.removesuffix(":best"), self.given.length, self.cost)
        if ordering != execution.ordering:
            execution.reorder(ordering)
            execution.order(execution.graph(self.batches))  # made before the clock runs
        before = _resident(anew=True)
        execution.train(self.batches)
        peak = _resident()
        self.gradients.zero()
        graph = execution.graph(self.batches)
        everyone: list[Any] = [None] * self.given.hosts
        dist.all_gather_object(everyone, Recording(execution.order(graph), trace.spans))
        if self.given.traces and self.rank == 0:
            self._keep_trace(name, graph, [each.spans for each in everyone], trace.begin)
        if name.endswith(":best") and not self.measuring:  # the last round of warming up counts
            forward, backward = best_overlaps(graph, recorded_cost(graph, everyone))
            self.chosen[name] = ordering._replace(forward=forward, backward=backward)
        claimed, seen = overlaps(graph, execution.order(graph), trace.spans)
        simulated = replay(graph, everyone).seconds * 1e3
        counts = {"claimed": claimed, "missed": claimed - seen, "peak_mib": peak, "before_mib": before}
        return {**trace.times(graph), "simulated_ms": simulated, **counts}

    def _keep_trace(self, name: str, graph: Any, ranks: list, begin: float) -> None:
        from foldray.timeline import perfetto

        self.given.traces.mkdir(parents=True, exist_ok=True)
        (self.given.traces / f"{name.replace(':', '-')}.json").write_text(json.dumps(perfetto(graph, ranks, begin)))

    def peer(self) -> Callable[[], dict[str, float]]:
        """The same blocks around DeepSpeed's MoE layer."""
        stack = _deepspeed_stack(self.spec, self.execution.model, self.given.hosts)
        x_BLH = torch.randn(1, self.given.length, self.spec.hidden)

        def run() -> dict[str, float]:
            self.execution.reorder(Ordering())  # whole sequences
            for parameter in stack.parameters():
                parameter.grad = None
            begin = time.perf_counter()
            loss = stack(x_BLH.clone().requires_grad_()).square().mean()
            turn = time.perf_counter()
            loss.backward()
            end = time.perf_counter()
            return {"step_ms": (end - begin) * 1e3, "forward_ms": (turn - begin) * 1e3, "backward_ms": (end - turn) * 1e3}

        return run


def _deepspeed_stack(spec: ModelSpec, model: Transformer, hosts: int) -> nn.Module:
    """Our norms and attention with DeepSpeed's gate, all-to-all and experts of the same size, capacity 1 as ours."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    from deepspeed.moe.layer import MoE

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([model.block(layer) for layer in range(spec.layers)])
            settings: dict[str, Any] = {"ep_size": hosts, "k": 1, "capacity_factor": 1.0, "use_rts": False}
            made = [MoE(spec.hidden, GatedMlp(spec.hidden, spec.expert_hidden), hosts, **settings) for _ in spec.moe_layers]
            self.moes = nn.ModuleDict({str(layer): moe for layer, moe in zip(spec.moe_layers, made, strict=True)})
            for moe in made:
                moe.set_deepspeed_parallelism()

        def forward(self, x_BLH: Tensor) -> Tensor:
            (place,) = model.places(Batch(*[torch.zeros(x_BLH.shape[:2], dtype=torch.int64)] * 2))
            for layer in range(spec.layers):
                block = model.block(layer)
                x_BLH = block.attend(x_BLH, place)
                moe = self.moes[str(layer)] if spec.is_moe(layer) else None
                x_BLH = block.feed(x_BLH) if moe is None else x_BLH + moe(block.ffn_norm(x_BLH))[0]
            return x_BLH

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # no compiling while we measure
    os.environ |= {"RANK": str(dist.get_rank()), "LOCAL_RANK": "0", "WORLD_SIZE": str(hosts)}
    deepspeed.init_distributed("gloo", verbose=False)
    return Stack()


def _resident(anew: bool = False) -> float:
    """MiB that this process has held at most since it was last asked `anew`."""
    if anew:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def _stolen(core: int) -> float:
    """Seconds that the machine below has given to others while this core had work."""
    (line,) = [line for line in Path("/proc/stat").read_text().splitlines() if line.startswith(f"cpu{core} ")]
    return int(line.split()[8]) / os.sysconf("SC_CLK_TCK")


def _medians(rounds: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    columns = {key: [each[key] for each in rounds] for key in rounds[0]}
    return {key: {"median": statistics.median(c), "min": min(c), "max": max(c), "rounds": c} for key, c in columns.items()}


def limits(run: dict[str, Any], name: str) -> list[float]:
    """The least that any schedule of one step could have taken when a variant was measured, in milliseconds, round by round."""
    alone, talking = run[name], run["X"]
    return [
        sum(max(alone[f"alone_{side}"]["rounds"][r], talking[side]["rounds"][r]) for side in _SIDES)
        for r in range(len(talking["step_ms"]["rounds"]))
    ]


def over_limit(run: dict[str, Any], name: str) -> float:
    """A variant's step against its limit, the median over rounds."""
    return statistics.median(step / least for step, least in zip(run[name]["step_ms"]["rounds"], limits(run, name), strict=True))


def measured(run: dict[str, Any]) -> dict[str, Any]:
    """The variants and peers of a run, by name."""
    return {name: each for name, each in run.items() if isinstance(each, dict) and f"alone_{_SIDES[0]}" in each}


def report_peaks(run: dict[str, Any]) -> None:
    """The table of what processes hold."""
    print(f"{'MiB':<22}{'at most':>9}{'min':>9}{'max':>9}{'before':>9}{'× first':>9}")
    first = next(iter(run["peaks"].values()))["peak_mib"]["median"]
    for name, each in run["peaks"].items():
        peak = each["peak_mib"]
        line = f"{name:<22}{peak['median']:>9.0f}{peak['min']:>9.0f}{peak['max']:>9.0f}{each['before_mib']['median']:>9.0f}"
        print(f"{line}{peak['median'] / first:>9.3f}", flush=True)


def report(run: dict[str, Any]) -> None:
    """The table of one link."""
    print(f"{link_of(run)}, all-to-alls alone {ratio(run):.2f} × computation alone")
    print(f"{'':<22}{'ms':>8}{'min':>8}{'max':>8}{'limit':>8}{'× limit':>9}", end="")
    print(f"{'forward':>9}{'backward':>9}{'exposed':>9}{'simulated':>10}{'seen':>9}")
    for name in ("C", "X", *measured(run)):
        each = run[name]
        step = each["step_ms"]
        line = f"{name:<22}{step['median']:>8.0f}{step['min']:>8.0f}{step['max']:>8.0f}"
        held = name in measured(run)
        line += f"{statistics.median(limits(run, name)):>8.0f}{over_limit(run, name):>9.3f}" if held else " " * 17
        line += f"{each['forward_ms']['median']:>9.0f}{each['backward_ms']['median']:>9.0f}"
        if held and "exposed_comm_ms" in each:
            talked = each["comm_ms"]["median"]
            line += f"{each['exposed_comm_ms']['median'] / talked:>9.1%}" if talked > 1 else f"{'none':>9}"
            claimed, missed = each["claimed"]["median"], each["missed"]["max"]
            line += f"{each['simulated_ms']['median']:>10.0f}{f'{claimed - missed:.0f}/{claimed:.0f}':>9}"
        print(line)
    for name, (forward, lag, backward, backward_lag) in run["chosen"].items():
        print(f"{name}: forward {forward} {lag}, backward {backward} {backward_lag}")
    print(flush=True)


def ratio(run: dict[str, Any]) -> float:
    """All-to-alls alone over computation alone."""
    return run["X"]["step_ms"]["median"] / run["C"]["step_ms"]["median"]


def link_of(run: dict[str, Any]) -> str:
    return f"link {run['link_mbit']:.0f} Mbit/s" if run["link_mbit"] else "no link"


if __name__ == "__main__":
    main()
