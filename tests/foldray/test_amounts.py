"""Bytes are told with three digits, in a unit of which there is one or more."""

import pytest

from foldray.amounts import in_bytes

MIB = 1 << 20


@pytest.mark.parametrize(
    ("size", "told"),
    [
        (0, "0 B"), (1023, "1020 B"), (1024, "1 KiB"), (1000 << 10, "1000 KiB"), (5 * MIB // 2, "2.5 MiB"), (MIB - 1, "1020 KiB"),
        (1 << 30, "1 GiB"), (1 << 53, "8190 TiB"),
    ],
)  # fmt: skip
def test_in_powers_of_1024(size: int, told: str) -> None:
    assert in_bytes(size) == told


@pytest.mark.parametrize(
    ("size", "told"), [(999.4, "999 B"), (999.6e9, "1 TB"), (12.34e9, "12.3 GB"), (1e3, "1 kB"), (999_500_000, "1 GB")]
)
def test_in_powers_of_1000(size: float, told: str) -> None:
    assert in_bytes(size, decimal=True) == told
