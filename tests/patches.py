"""A patch that can be taken back before its context ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Patch:
    """Another value of an attribute.

    Args:
        owner: the class or module that has the attribute.
    """

    def __init__(self, owner: Any, attribute: str, value: Any):
        self._owner, self._attribute, self._before = owner, attribute, owner.__dict__[attribute]
        setattr(owner, attribute, value)

    def undo(self) -> None:
        setattr(self._owner, self._attribute, self._before)


@contextmanager
def patched(owner: Any, attribute: str, value: Any) -> Iterator[Patch]:
    """Change an attribute for a while."""
    patch = Patch(owner, attribute, value)
    try:
        yield patch
    finally:
        patch.undo()
