"""Code that several benchmarks of this folder use."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

# By default, glibc returns large free blocks to the kernel, so every step gets new pages, with a page fault for each 4 KiB.
# With these settings it keeps them, which makes every variant faster. The trainer uses the same settings for its workers.
# glibc reads them only when a process starts.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(1 << 32), "MALLOC_TRIM_THRESHOLD_": str(1 << 36)}


class GatedMlp(nn.Module):
    """An expert for the MoE layers of other projects: [T, H] → [T, H], with F inner units."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, 2 * inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, -1)
        return self.down(functional.silu(gate) * value)
