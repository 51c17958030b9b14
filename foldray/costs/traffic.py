"""The bytes that a step sends over each group family of a fold, from the same formulas as its seconds.

The planner writes every transfer as seconds of a link. On links of one byte per second, without latency and within one node,
these seconds are the bytes that a rank sends: those that `comm.Traffic` counts, if tokens are spread evenly over experts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from types import MappingProxyType

from foldray.blueprint import BlockSpec, ranks_of_a_token
from foldray.costs.apart import ApartWork, Sides
from foldray.costs.candidate import Candidate, Content, StageForm
from foldray.costs.device import Device
from foldray.costs.hardware import Hardware, Link
from foldray.costs.network import INTRA
from foldray.costs.ops import OpWork
from foldray.kinds import ATTENTION, EMBED, EXPERT, FFN, HEAD, MERGE, ROUTE, SHARED
from foldray.nodes.traffic import ROWS, Edges, Flow, Way

_ONE_BYTE_S = Link(gb_s=1e-9)
_WAYS: Mapping[str, Way] = MappingProxyType({"ep": "exchange", "ep_inside": "exchange", "pp": "chain", ROWS: "routes"})
"""How families send, if not around a ring."""


def edges(candidate: Candidate) -> Edges:
    """Return the traffic of a step, the mean over ranks. Counts of rows, losses and norms are left out: they are few bytes."""
    fold, names = candidate.fold, {"ep": "ep_across" if candidate.fold.ep_inside > 1 else "ep"}
    flows = (Flow(names.get(name, name), _WAYS.get(name, "ring"), sent_bytes) for name, sent_bytes in sent(candidate).items())
    return Edges(fold, tuple(flows))


def sent(candidate: Candidate) -> dict[str, float]:
    """Return the bytes that a rank with a place in the family's grid sends in a step, by family, the mean over these ranks.

    `pp` has the bytes of one direction, and `ROWS` the mean of both. If tokens travel once to each node, `ep` has the bytes
    between nodes.
    """
    fold, job = candidate.fold, candidate.job
    device = Device.of(job, _links_alone(job.dtype))
    work = ApartWork(candidate, Sides(device, device)) if fold.disjoint else OpWork(candidate, device)
    rank, experts = work.rank, work.expert_rank if isinstance(work, ApartWork) else work.rank
    tokens = range(job.seq_len // (fold.cp * fold.tp))
    parts = candidate.micro_batches * candidate.ordering.batch_degree
    by_family = defaultdict[str, float](float)

    def add(kind: str, block: BlockSpec | None, positions: int) -> None:
        for back in (False, True):
            for part in (experts if kind == EXPERT else rank).price(kind, back, tokens, block).works:
                if part.lane == INTRA:
                    by_family[part.what] += part.seconds * parts / positions

    for block in job.blocks:
        moe = (ROUTE, EXPERT, MERGE) if fold.disjoint else rank.mixture
        shared = (SHARED,) if block.moe and block.moe.shared else ()
        for kind in (ATTENTION, *shared, *(moe if block.moe else (FFN,))):
            add(kind, block, fold.moe_pp if kind == EXPERT else fold.pp)
        if fold.disjoint and block.moe:
            rows = len(tokens) * rank.sequences * ranks_of_a_token(rank.model, fold.ep_across)
            row = rank.travelling
            by_family[ROWS] += parts * rows * (row.out + row.scales + row.back) / fold.pp
    add(EMBED, None, fold.pp)
    for _ in range(1 + job.model.mtp_depth):
        add(HEAD, None, fold.pp)
    by_family["pp"] = parts * candidate.virtual_stages * rank.handover.seconds if fold.pp > 1 else 0.0
    whole = Content.of([StageForm(job.blocks, first=True, last=True)])
    for family, count in rank.elements(whole).items():
        held = count / (fold.moe_pp if family == "edp" else fold.pp)
        gradients = rank.scatter(family, 4 * held).seconds
        gathered = rank.network.gather(family, device.bytes * held).seconds
        by_family[family] += gradients + gathered if candidate.zero else 2 * gradients
    return {family: sent_bytes for family, sent_bytes in by_family.items() if sent_bytes}


def _links_alone(dtype: str) -> Hardware:
    """Return GPUs of one node that compute in almost no time, and send a byte per second."""
    fast = 1e9
    return Hardware(
        name="bytes", gpus_per_node=1 << 17, peak_tflops={dtype: fast, "bf16": fast}, memory_gib=1, memory_gb_s=fast,
        intra=_ONE_BYTE_S, inter=_ONE_BYTE_S, constants={"intra": 1.0, "exchange": 1.0, "contention": 0.0},
    )  # fmt: skip
