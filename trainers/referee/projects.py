"""The projects that `foldray verify --peer` tries: their versions, layouts and cases."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from foldray.errors import MissingPackage
from trainers.referee.cases import CASES
from trainers.referee.rank import Layout, Peer


@dataclass(frozen=True)
class Project:
    """A project.

    Args:
        package: its name on the index.
        tried: the version that docs/notebook/referee.md tells of.
        install: what pip installs for it.
        peer: the module of this folder that has its class, and the class (`Peer`).
        imports: what every rank needs; ranks are forked after these imports.
        dtypes: the types of numbers that it permits, the default first.
        layouts: layouts by name.
        cases: names of the cases that it can have.
    """

    package: str
    tried: str
    install: str
    peer: tuple[str, str]
    imports: Sequence[str]
    dtypes: Sequence[str]
    layouts: Mapping[str, Layout]
    cases: Sequence[str] = tuple(CASES)

    def load(self) -> tuple[type[Peer], str]:
        """Import the project. Return its class and the installed version.

        Raises:
            MissingPackage: it, or a package that it needs, is not installed.
        """
        try:
            for name in self.imports:
                importlib.import_module(name)
            module = importlib.import_module(f"trainers.referee.{self.peer[0]}")
        except ModuleNotFoundError as error:
            missing = (error.name or self.package).partition(".")[0]
            raise MissingPackage("peer", self.package, missing, f"pip install {self.install}") from None
        return getattr(module, self.peer[1]), importlib.metadata.version(self.package)


_ONE = ("as it is",)
PROJECTS: Mapping[str, Project] = {
    "transformers": Project(
        "transformers", "5.23.0", "transformers==5.23.0 accelerate==1.15.0", ("huggingface", "Transformers"),
        ("transformers.trainer", "accelerate", "torch.distributed.fsdp", "torch.distributed.tensor", "torch._dynamo"),
        ("float64", "float32", "float16"),
        {
            "dp4 ep2": Layout(), "dp4 ep4": Layout(ep=4), "tp2 dp2 ep4": Layout(2, 2, 4), "tp2 dp2 ep2": Layout(2, 2, 2),
            "tp2 dp2": Layout(2, 2, 1), "tp2 ep2": Layout(2, 1, 2),
            "tp2 ep2 (all_reduce)": Layout(2, 1, 2, {"ep_implementation": "all_reduce"}),
            "dp4 ep2 (2 replicas)": Layout(settings={"fsdp_size": 2, "dp_replicate_size": 2}),
            "tp2 ep2 (flag)": Layout(2, 1, 2, {"enable_expert_parallel": True, "ep_size": None, "fsdp_size": None}, _ONE),
        },
    ),
    "deepspeed": Project(
        "deepspeed", "0.19.8", "deepspeed==0.19.8 transformers==5.23.0", ("deepspeed", "DeepSpeed"),
        ("trainers.referee.on_cpu", "deepspeed", "transformers.trainer", "torch._dynamo"),
        ("float32", "float64"),
        {
            "dp4 ep2 (ZeRO-2)": Layout(), "dp4 ep2 (ZeRO-0)": Layout(settings={"stage": 0}),
            "dp4 ep2 (ZeRO-1)": Layout(settings={"stage": 1}), "dp4 ep2 (ZeRO-3)": Layout(settings={"stage": 3}),
            "tp2 dp2 ep4 (ZeRO-2)": Layout(2, 2, 4), "tp2 dp2 ep2 (ZeRO-2)": Layout(2, 2, 2),
            "tp2 dp2 ep4 (ZeRO-1)": Layout(2, 2, 4, {"stage": 1}),
            "dp4 ep2 (as installed)": Layout(settings={"repaired": False}, cases=_ONE),
            "tp2 dp2 ep4 (plan of transformers)": Layout(2, 2, 4, {"plan": True}, _ONE),
        },
    ),
    "torchtitan": Project(
        "torchtitan", "0.3.0", "torchtitan==0.3.0 triton", ("torchtitan", "Torchtitan"),
        ("trainers.referee.on_cpu", "torchtitan"),
        ("float32",),
        {
            "dp4 ep2": Layout(), "dp4 ep4": Layout(ep=4), "tp2 dp2 ep4": Layout(2, 2, 4), "tp2 dp2 ep2": Layout(2, 2, 2),
            "tp2 dp2": Layout(2, 2, 1), "tp2 ep2": Layout(2, 1, 2), "dp4 ep2 (2 replicas)": Layout(settings={"replicas": 2}),
            "dp4 ep2 (spmd_types)": Layout(settings={"backend": "spmd_types"}, cases=_ONE),
        },
        ("as it is", "masked tokens", "router", "sigmoid scores", "idle experts", "shared expert", "accumulation"),
    ),
    "megatron": Project(
        "megatron-core", "0.16.1", "megatron-core==0.16.1", ("megatron", "Megatron"),
        ("megatron.core.transformer.moe.moe_layer",),
        ("float64", "float32"),
        {
            f"{name} ({dispatcher})": Layout(tp, dp, ep, {"etp": etp, "dispatcher": dispatcher}, cases)
            for dispatcher in ("alltoall", "allgather")
            for name, tp, dp, ep, etp, cases in (
                ("dp4 ep2", 1, 4, 2, 1, ()), ("dp4 ep4", 1, 4, 4, 1, ()), ("tp2 dp2 ep2", 2, 2, 2, 1, ()),
                ("tp2 dp2 ep4", 2, 2, 4, 1, ()), ("tp2 dp2 ep2 etp2", 2, 2, 2, 2, ()),
            )
        } | {
            "dp4 ep2 (as installed)": Layout(settings={"dispatcher": "allgather", "as_installed": True}, cases=_ONE),
        },
        ("as it is", "router", "sigmoid scores", "shared expert", "idle experts"),
    ),
}  # fmt: skip
"""Projects by the name that `--peer` takes."""
