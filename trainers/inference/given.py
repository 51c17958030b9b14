"""Tokens and texts that a user gives, checked: one clear line for each mistake."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from foldray.errors import UserError
from foldray.recipe.bounds import LONGEST

Tokens = torch.Tensor | Sequence[int] | Sequence[Sequence[int]]
"""Ids of one sequence, or of several of the same length."""


def checked_ids(tokens: Tokens, vocab: int, field: str) -> torch.Tensor:
    """Return ids as int64, or raise a UserError if they are none, or not in the vocabulary."""
    try:  # by way of NumPy, because a tokenizer's ids are uint16 or uint32, which torch does not mix with others
        ids = tokens if isinstance(tokens, torch.Tensor) else torch.as_tensor(np.asarray(tokens))
    except (TypeError, ValueError):
        rule = "must be ids of one sequence, or of several of the same length"
        raise UserError(field, type(tokens).__name__, rule) from None
    if not ids.numel():
        raise UserError(field, "nothing", "must have at least one token")
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise UserError(field, str(ids.dtype), "must be whole numbers, the ids of tokens")
    ids = ids.to(torch.int64)
    low, high = (int(end) for end in ids.aminmax())
    if low < 0 or high >= vocab:
        raise UserError(field, low if low < 0 else high, "is not in the vocabulary", [f"0…{vocab - 1}"])
    return ids


def check_count(field: str, count: int) -> None:
    """Raise a UserError for a number of tokens outside 1 … `LONGEST`. A longer sequence would exhaust the machine."""
    if not 1 <= count <= LONGEST:
        raise UserError(field, count, f"must be at least 1, and at most {LONGEST}")


def utf8(field: str, text: str) -> str:
    """Return a text, or raise a UserError if UTF-8 cannot hold it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(field, text, f"is not UTF-8 text ({error.reason})") from None
    return text
