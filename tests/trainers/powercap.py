"""Counters of processors' energy in a folder, since few machines let everybody read theirs.

Where the environment names the folder in POWERCAP, a training on Ray reads it.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

MOST = 262_143_328_850  # microjoules, of a counter of 32 bits


def make(folder: Path, processors: int) -> Path:
    """Write counters of processors, 3 J before they begin again, and of what they contain and are contained in."""
    names = {f"intel-rapl:{number}": f"package-{number}" for number in range(processors)}
    for zone, name in {**names, "intel-rapl:0:0": "core", f"intel-rapl:{processors}": "psys"}.items():
        (folder / zone).mkdir(parents=True)
        for file, text in {"name": name, "max_energy_range_uj": MOST, "energy_uj": MOST - 3_000_000}.items():
            (folder / zone / file).write_text(f"{text}\n")
    return folder


def use(folder: Path, processor: int, joules: int) -> None:
    """Move the counter of a processor, and those of its parts."""
    for zone in folder.glob(f"intel-rapl:{processor}*"):
        file = zone / "energy_uj"
        file.write_text(f"{(int(file.read_text()) + joules * 1_000_000) % MOST}\n")


if FOLDER := os.environ.get("POWERCAP"):
    from trainers.telemetry.energy import Energy
    from trainers.worker import loop

    loop.Energy = partial(Energy, powercap=Path(FOLDER))  # type: ignore[assignment, misc]
