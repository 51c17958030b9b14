"""Windows of a text, and what losses on them say."""

from __future__ import annotations

import math

import numpy as np
import pytest

from foldray.model import IGNORED
from trainers.inference.scoring import Score, windows

SEPARATOR = 9


def test_windows_do_not_overlap_and_begin_with_the_token_before() -> None:
    first, second = windows(np.arange(1, 9, dtype=np.uint8), SEPARATOR, 3, together=2)
    assert first.token_BL.tolist() == [[SEPARATOR, 1, 2], [3, 4, 5]]
    assert first.target_BL.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert second.token_BL[0, :2].tolist() == [6, 7]
    assert second.target_BL.tolist() == [[7, 8, IGNORED]]
    assert first.segment_BL is None


@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 20])
@pytest.mark.parametrize("together", [1, 2, 5])
def test_every_token_is_predicted_once_from_the_tokens_before_it(length: int, together: int) -> None:
    text, found = np.arange(10, 30, dtype=np.uint16), []
    for batch in windows(text, SEPARATOR, length, together):
        assert batch.token_BL.shape[0] <= together
        for token_L, target_L in zip(batch.token_BL.tolist(), batch.target_BL.tolist(), strict=True):
            count = sum(target != IGNORED for target in target_L)
            before = len(found)
            found += target_L[:count]
            assert token_L[:count] == [SEPARATOR, *text.tolist()][before : before + count]
            assert target_L[count:] == [IGNORED] * (length - count)
    assert found == text.tolist()


def test_means_and_sums() -> None:
    one, two = Score(4, 8, 8 * math.log(2)), Score(1, 8, 0.0)
    assert (one.loss, one.perplexity, one.bits_per_byte) == pytest.approx((2 * math.log(2), 4.0, 1.0))
    assert sum([one, two], Score()) == one + two == Score(5, 16, one.nats)
    assert (one + two).bits_per_byte == pytest.approx(0.5)
    assert one.as_dict()["bits_per_byte"] == one.bits_per_byte
    assert Score(1, 1, 1e6).perplexity == math.inf
