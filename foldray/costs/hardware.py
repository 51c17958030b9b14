"""Hardware files (peaks, memory and links of a cluster, in YAML), and the constants of the planner."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from foldray.blueprint.model import Strict
from foldray.errors import UserError, nearest
from foldray.files import load_yaml

_HERE = Path(__file__).parent
_MOST = 1e9  # far above any machine; larger values would overflow
Count = Annotated[int, Field(ge=1, le=2**17)]
Tokens = Annotated[int, Field(ge=1, le=2**24)]
Positive = Annotated[float, Field(gt=0, le=1e30)]
Speed = Annotated[float, Field(ge=1e-9, le=_MOST)]
Latency = Annotated[float, Field(ge=0, le=_MOST)]


class Constant(Strict):
    """A number that no data sheet has.

    Args:
        low, high: physical bounds of the value.
        fitted: whether a fit may change the value.
        why: the reason for the value.
    """

    value: float
    low: float
    high: float
    unit: str
    fitted: bool
    why: str


class Counts(Strict):
    """Whole numbers that follow from the software.

    Args:
        tile: rows and columns of the tile of a matrix product that a multiprocessor computes at a time.
        summing: weights of a matrix from which on a GPU's product adds their gradients to the sums itself.
        sums: bytes per element to read and write the sum of a gradient.
        kernels: number of kernels that torch starts for a forward op, by kind of op, and for one "part" of attention.
        calls: calls of the host for an op on a GPU, forward and backward, in units of `issue`. Kinds that are not here have one
            for each kernel, and twice as many in backward.
    """

    tile: int
    summing: int
    sums: int
    kernels: Mapping[str, int]
    calls: Mapping[str, tuple[int, int]]


class Link(Strict):
    """A link of a GPU to other GPUs. Speeds are those of one direction, and of this GPU's share of its node's links."""

    gb_s: Speed = Field(description="nominal GB/s of one GPU in one direction")
    latency_us: Latency = Field(0.0, description="until a message's first byte arrives")
    by_size: tuple[tuple[Count, Speed, Latency], ...] = Field(
        (),
        description="measured: (ranks of a group on this lane, GB/s, µs), smallest first; a group goes by the next smaller one",
    )

    def of(self, ranks: int) -> tuple[float, float]:
        """Return (bytes per second, seconds until the first byte arrives) for a group with `ranks` ranks on this lane."""
        measured = [speed for least, *speed in self.by_size if least <= ranks]
        gb_s, latency_us = measured[-1] if measured else (self.gb_s, self.latency_us)
        return gb_s * 1e9, latency_us * 1e-6


class Host(Strict):
    """A GPU's share of its host, for an optimizer that is there (`engine.offload`)."""

    gb_s: Speed = Field(description="nominal GB/s between host and GPU in one direction")
    memory_gb_s: Speed = Field(description="nominal GB/s of the host's memory")


class Hardware(Strict):
    """A cluster of equal nodes with equal GPUs. A "GPU" may also be a CPU core."""

    name: str
    about: str = ""
    source: str = Field("", description="where the numbers come from")
    gpus_per_node: Count
    gpu: str = Field("", description="name of the GPU as its driver tells it, if the peaks are those of its data sheet")
    peak_tflops: dict[str, Speed] = Field(description="dense, by dtype")
    processors: Count = Field(1, description="multiprocessors of a GPU: tiles of a product that run at once")
    memory_gib: float = Field(gt=0, le=_MOST, description="of one GPU")
    memory_gb_s: Speed
    intra: Link = Field(description="within a node")
    inter: Link = Field(description="between nodes")
    host: Host | None = Field(None, description="of one GPU; without it, the seconds of an optimizer on the host are left out")
    constants: dict[str, float] = Field({}, description="constants that are other here")
    gemm: tuple[tuple[Positive, Positive], ...] = Field(
        (),
        description="measured products: (FLOPs, share of the constant `gemm`), smallest first; between them by their logarithm",
    )
    attention: tuple[tuple[Tokens, Positive], ...] = Field(
        (), description="measured slices: (tokens, share of the constant `attention`), smallest first; between them likewise"
    )

    def peak(self, dtype: str) -> float:
        """Return the peak FLOP/s of one GPU for a dtype."""
        if dtype not in self.peak_tflops:
            raise UserError("dtype", dtype, f"has no peak in hardware {self.name}", self.peak_tflops)
        return self.peak_tflops[dtype] * 1e12


@cache
def constants() -> Mapping[str, Constant]:
    """Return all constants of the planner, by name."""
    return {name: Constant.model_validate(fields) for name, fields in _given()["constants"].items()}


@cache
def counts() -> Counts:
    """Return the planner's counts."""
    return Counts.model_validate(_given()["counts"])


@cache
def _given() -> Mapping[str, Any]:
    return load_yaml("constants", _HERE / "constants.yaml")


def known_hardware() -> list[str]:
    """Return the names of the clusters that come with foldray."""
    return sorted(path.stem for path in (_HERE / "hardware").glob("*.yaml"))


def data_sheet_peak(gpu: str, dtype: str) -> float | None:
    """Return the FLOP/s of a GPU by its data sheet; None if no cluster that comes with foldray has this GPU and dtype.

    Args:
        gpu: the name that the driver tells, such as "NVIDIA H200".
        dtype: dtype of matrix products, as in hardware files.
    """
    clusters = (load_hardware(name) for name in known_hardware())
    return next((known.peak(dtype) for known in clusters if gpu and known.gpu == gpu and dtype in known.peak_tflops), None)


def load_hardware(name: str, field: str = "cluster") -> Hardware:
    """Return a cluster that comes with foldray, or one from a YAML file.

    Args:
        name: name of a cluster, or path of a .yaml or .yml file.
        field: the option or recipe key that names the cluster.
    """
    path = _HERE / "hardware" / f"{name.lower()}.yaml"
    if name.lower() not in known_hardware():
        path = Path(name)
        if path.suffix not in (".yaml", ".yml"):
            known = known_hardware()
            raise UserError(field, name, f"is no known cluster nor a YAML file{nearest(name, known)}", known)
    try:
        hardware = Hardware.model_validate(load_yaml(field, path))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "cluster"
        raise UserError(f"{name}: {key}", first["input"], first["msg"].lower()) from None
    for key, value in hardware.constants.items():
        if key not in constants():
            raise UserError(f"{name}: constants.{key}", value, f"is no constant{nearest(key, constants())}", constants())
    return hardware
