from __future__ import annotations

import numpy as np
import pytest

from trainers.data.baselines import byte_pairs, count_pairs, fit

A, B, START = ord("a"), ord("b"), 256


def test_pairs_start_anew_in_each_document():
    pairs = byte_pairs([b"ab", b"", b"b"])
    assert pairs.tolist() == [START * 256 + A, A * 256 + B, START * 256 + B]
    assert byte_pairs([]).tolist() == []


def test_bits_by_hand():
    # The training text "aab" has the bytes a, a, b with the predecessors start, a, a.
    unigram, bigram = fit(count_pairs(byte_pairs([b"aab"])))
    assert unigram[A * 256 + A] == pytest.approx(-np.log2(2.5 / (3 + 128)))
    assert unigram[B * 256 + B] == pytest.approx(-np.log2(1.5 / (3 + 128)))
    assert bigram[START * 256 + A] == pytest.approx(-np.log2(1.5 / (1 + 128)))
    assert bigram[A * 256 + B] == pytest.approx(-np.log2(1.5 / (2 + 128)))
    assert bigram[B * 256 + A] == 8  # b has no successor in the training text


def test_probabilities_sum_to_one():
    bits = fit(count_pairs(byte_pairs([b"some text", b"and more"])))
    assert np.allclose(np.exp2(-bits).reshape(2, 257, 256).sum(axis=2), 1)
