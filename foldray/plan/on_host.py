"""What a plan says of an optimizer on the host: its bytes there, what travels in a step, and the seconds of both."""

from __future__ import annotations

from typing import Any

from foldray.costs.hardware import Hardware
from foldray.costs.memory import GIB
from foldray.costs.offload import Offloaded


def document(host: Offloaded) -> dict[str, Any]:
    """Return it for programs, for the rank that keeps most. Memory is in GiB. Seconds that nobody knows are null."""
    held = {name: bytes_ / GIB for name, bytes_ in host.held._asdict().items()}
    return {"memory_gib": sum(held.values()), "memory": held, "travels_gib": host.travels / GIB, "seconds": host.seconds}


def lines(host: Offloaded, hardware: Hardware) -> list[str]:
    """Return it as text about the first candidate."""
    line = f"the first one's optimizer keeps {sum(host.held) / GIB:.1f} GiB of the host for a GPU; "
    line += f"{host.travels / GIB:.1f} GiB travel in a step"
    if host.seconds is None:
        return ["", line, left_out(hardware)]
    return ["", f"{line}, which with the update takes {host.seconds * 1e3:.0f} ms of it"]


def left_out(hardware: Hardware) -> str:
    """Return why steps have no seconds of an optimizer on the host."""
    return f"steps are without the seconds of the optimizer, because {hardware.name} does not say how fast its host is (host)"
