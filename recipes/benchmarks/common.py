"""What the benchmarks of this folder share."""

from __future__ import annotations

import platform
from pathlib import Path

from torch import Tensor, nn
from torch.nn import functional

# glibc gives large blocks back to the kernel when they are freed, so every step touches fresh pages, one fault for each 4 KiB.
# To keep them helps every variant; the trainer sets the same for its workers. It is read only when a process starts.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(1 << 32), "MALLOC_TRIM_THRESHOLD_": str(1 << 36)}


class GatedMlp(nn.Module):
    """An expert for a peer's MoE layer: [T, H] → [T, H] over F inner units."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, 2 * inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, -1)
        return self.down(functional.silu(gate) * value)


def processor() -> str:
    """This machine's, as it names itself."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
