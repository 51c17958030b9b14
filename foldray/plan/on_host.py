"""What a plan says of the host: bytes of an optimizer or of activations there, what travels in a step, and the seconds."""

from __future__ import annotations

from typing import Any

from foldray.costs.hardware import Hardware
from foldray.costs.memory import GIB
from foldray.costs.moved import Moved
from foldray.costs.offload import Offloaded


def document(host: Offloaded) -> dict[str, Any]:
    """Return it for programs, for the rank that keeps most. Memory is in GiB. Seconds that nobody knows are null."""
    held = {name: bytes_ / GIB for name, bytes_ in host.held._asdict().items()}
    return {"memory_gib": sum(held.values()), "memory": held, "travels_gib": host.travels / GIB, "seconds": host.seconds}


def activations(moved: Moved) -> dict[str, Any]:
    """Return the same for activations, which travel beside computation."""
    return {"memory_gib": moved.held / GIB, "travels_gib": moved.travels / GIB}


def lines(host: Offloaded | None, moved: Moved | None, hardware: Hardware) -> list[str]:
    """Return both as text about the first candidate."""
    found = list[str]()
    if host is not None:
        line = f"the first one's optimizer keeps {sum(host.held) / GIB:.1f} GiB of the host for a GPU; "
        line += f"{host.travels / GIB:.1f} GiB travel in a step"
        if host.seconds is None:
            found += ["", line, left_out(hardware)]
        else:
            found += ["", f"{line}, which with the update takes {host.seconds * 1e3:.0f} ms of it"]
    if moved is not None:
        line = f"the first one's operations keep {moved.held / GIB:.1f} GiB of the host for a GPU; "
        found += ["", f"{line}{moved.travels / GIB:.1f} GiB travel in a step"]
        found += [left_out(hardware, "activations")] if hardware.host is None else []
    return found


def left_out(hardware: Hardware, what: str = "optimizer") -> str:
    """Return why steps have no seconds of what is on the host."""
    return f"steps are without the seconds of the {what}, because {hardware.name} does not say how fast its host is (host)"
