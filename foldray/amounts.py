"""Amounts of bytes as people read them."""

from __future__ import annotations

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB")
_DECIMAL = ("B", "kB", "MB", "GB", "TB")


def in_bytes(size: float, decimal: bool = False) -> str:
    """Return bytes with three digits in the largest unit that makes at least one, such as "2.5 MiB".

    Decimal units, as for links, are 1000 of the one before, and not 1024.
    """
    step, units = (1000, _DECIMAL) if decimal else (1024, _BINARY)
    unit = 0
    while unit + 1 < len(units) and max(size, float(three_digits(size))) >= step:
        size, unit = size / step, unit + 1
    return f"{three_digits(size)} {units[unit]}"


def three_digits(value: float) -> str:
    """Return a number that is rounded to three digits, without an exponent."""
    return f"{float(f'{value:.3g}'):.15g}"
