"""Kinds of failures as a user would add them."""

from __future__ import annotations

from trainers import FailureKind

BUSY = FailureKind("busy", "always", of=lambda error: isinstance(error, ConnectionRefusedError))
HOPELESS = FailureKind("hopeless", "never", of=lambda error: str(error).startswith("Odd: "))
TAKEN = FailureKind("lost")
