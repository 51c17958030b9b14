"""Reading packed data, and the order of sequences. The tests use the shard writer, without Ray."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foldray.errors import UserError
from trainers.data.encode import Encoded
from trainers.data.packed import FORMAT, Batches, PackedData, SampleOrder, Split, sample_order
from trainers.data.shards import SplitWriter

SEP, SEQ_LEN = 256, 5  # no document has a multiple of 5 tokens
DOCUMENTS = [b"The 1st document.", b"2", b"Three", b"and a fourth, somewhat longer."]


def piece(documents: list[bytes]) -> Encoded:
    tokens = np.array([token for document in documents for token in (SEP, *document)], np.uint16)
    starts = np.flatnonzero(tokens == SEP)
    return Encoded(tokens, (tokens != SEP).astype(np.uint32), starts, np.zeros(0), False, 0)


def write(folder: Path, cuts: list[int], shard_bytes: int = 1 << 20, shuffled: bool = False) -> Split:
    """Write DOCUMENTS as a split, in pieces that end before the documents in `cuts`."""
    writer = SplitWriter(folder, "train", SEQ_LEN, np.dtype(np.uint16), shard_bytes)
    for start, stop in zip([0, *cuts], [*cuts, len(DOCUMENTS)], strict=True):
        writer.add(piece(DOCUMENTS[start:stop]))
    return Split(folder, "train", {"seq_len": SEQ_LEN, "train": writer.finish(shuffled)})


STREAM = [token for document in DOCUMENTS for token in (SEP, *document)]


@pytest.mark.parametrize("shard_bytes", [1, 22, 34, 1 << 20])
@pytest.mark.parametrize("cuts", [[], [1], [1, 2, 3]])
def test_every_token_is_predicted_once_in_order(tmp_path: Path, cuts: list[int], shard_bytes: int):
    split = write(tmp_path, cuts, shard_bytes)
    tokens = split.tokens(range(len(split)))
    assert len(split) == (len(STREAM) - 1) // SEQ_LEN
    assert tokens[:, 1:].flatten().tolist() == STREAM[1 : len(split) * SEQ_LEN + 1]
    assert tokens[:, :-1].flatten().tolist() == STREAM[: len(split) * SEQ_LEN]
    shards = [np.load(path) for path in sorted(tmp_path.glob("train-0*.npy"))]
    assert sum(len(shard) - 1 for shard in shards) == len(split) * SEQ_LEN  # nothing is left in the last shard
    assert len(shards) == 1 or max(shard.nbytes for shard in shards) <= max(shard_bytes, 2 * (SEQ_LEN + 1))


def test_segments_are_document_numbers(tmp_path: Path):
    split = write(tmp_path, [2])
    number = np.cumsum(np.array(STREAM) == SEP) - 1
    assert split.segments(range(len(split))).flatten().tolist() == number[: len(split) * SEQ_LEN].tolist()


@pytest.mark.parametrize("shard_bytes", [1, 22, 1 << 20])
@pytest.mark.parametrize("cuts", [[], [1, 3]])
def test_masks_stay_beside_their_tokens(tmp_path: Path, cuts: list[int], shard_bytes: int):
    """Vowels count."""
    writer = SplitWriter(tmp_path, "train", SEQ_LEN, np.dtype(np.uint16), shard_bytes)
    for start, stop in zip([0, *cuts], [*cuts, len(DOCUMENTS)], strict=True):
        whole = piece(DOCUMENTS[start:stop])
        marks = np.isin(whole.tokens, list(b"aeiou")).astype(np.uint8)
        writer.add(replace(whole, trained=marks, pairs=None, counts={"vowels": int(marks.sum())}))
    counts = writer.finish(shuffled=True)
    split = Split(tmp_path, "train", {"seq_len": SEQ_LEN, "train": counts})
    rows = range(len(split))
    assert split.masked
    assert split.trained(rows).tolist() == np.isin(split.tokens(rows)[:, 1:], list(b"aeiou")).tolist()
    assert counts["counts"] == {"vowels": sum(token in b"aeiou" for token in STREAM if token < 256)}


@pytest.mark.parametrize("shuffled", [False, True])
def test_bytes_leave_out_separators(tmp_path: Path, shuffled: bool):
    split = write(tmp_path, [1, 3], shuffled=shuffled)
    for count in range(len(split) + 1):
        targets = split.tokens(range(count))[:, 1:]
        assert split.bytes(count) == int((targets != SEP).sum())
    assert split.bytes() == split.bytes(len(split))


def test_shuffled_split_is_a_permutation(tmp_path: Path):
    plain, mixed = write(tmp_path, []), write(tmp_path, [], shuffled=True)
    rows, mixed_rows = plain.tokens(range(len(plain))).tolist(), mixed.tokens(range(len(plain))).tolist()
    assert sorted(rows) == sorted(mixed_rows)
    assert rows != mixed_rows


def test_no_such_sequence(tmp_path: Path):
    split = write(tmp_path, [])
    for index in (-1, len(split)):
        with pytest.raises(IndexError, match=str(len(split))):
            split.tokens([0, index])


def test_epochs_are_permutations_and_differ():
    order = SampleOrder(seed=3, count=50)
    epochs = [order(start, start + 50).tolist() for start in (0, 50, 100)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in [*epochs, sample_order(4, 50, 0, 50).tolist()]}) == 4


def test_order_depends_on_seed_and_position_alone():
    whole = sample_order(7, 11, 0, 60)
    order = SampleOrder(7, 11)
    for start, stop in [(40, 60), (0, 1), (9, 25), (30, 30), (5, 60)]:  # forwards and backwards, across epochs
        assert order(start, stop).tolist() == whole[start:stop].tolist()


def test_order_never_changes():
    # A checkpoint resumes in the middle of an order. The literal order shows if a version of NumPy changes it.
    assert sample_order(0, 8, 0, 16).tolist() == GOLDEN


GOLDEN = [0, 3, 7, 5, 1, 2, 6, 4, 3, 7, 4, 2, 1, 6, 5, 0]


@pytest.mark.parametrize(("dp", "micro_batch"), [(1, 1), (1, 4), (2, 2), (4, 1), (4, 3), (12, 1), (5, 1), (7, 2), (5, 3), (1, 8)])
def test_every_dp_takes_the_same_samples(tmp_path: Path, dp: int, micro_batch: int):
    split, global_batch = write(tmp_path, []), 12
    whole = sample_order(5, len(split), 0, 3 * global_batch)
    batches = [Batches(split, seed=5) for _ in range(dp)]
    for step in range(3):
        taken = [
            batches[rank].indices(step, m, rank, dp, micro_batch, global_batch)
            for m in range(-(-global_batch // (dp * micro_batch)))
            for rank in range(dp)
        ]
        assert np.concatenate(taken).tolist() == whole[step * global_batch : (step + 1) * global_batch].tolist()


def test_resume_by_step(tmp_path: Path):
    split = write(tmp_path, [])
    through, resumed = Batches(split, seed=1), Batches(split, seed=1)
    seen = [through.indices(step, 0, 0, 1, 4, 4).tolist() for step in range(9)]
    assert [resumed.indices(step, 0, 0, 1, 4, 4).tolist() for step in (6, 7, 8)] == seen[6:]
    assert seen[0] != seen[1]


def test_open_refuses_what_is_not_whole(tmp_path: Path):
    with pytest.raises(UserError, match="holds no complete packed data"):
        PackedData.open(tmp_path)
    (tmp_path / "meta.json").write_text(json.dumps({"format": FORMAT, "sizes": {"train-00000.npy": 10}}))
    with pytest.raises(UserError, match="holds no complete packed data"):
        PackedData.open(tmp_path)


def packed(folder: Path) -> dict[str, Any]:
    """Write a complete folder of packed data, and return its meta.json."""
    counts = {}
    for name in ("train", "validation"):
        writer = SplitWriter(folder, name, SEQ_LEN, np.dtype(np.uint16))
        writer.add(whole := piece(DOCUMENTS), np.ones((2, len(whole.tokens))))
        counts[name] = writer.finish(shuffled=name == "validation")
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    unfit = {"rule": "refuse", "documents": 0, "bytes": 0, "files": 0, "first": []}
    meta = {"format": FORMAT, "seq_len": SEQ_LEN, "sizes": sizes, "unfit": unfit, **counts}
    (folder / "meta.json").write_text(json.dumps(meta))
    return meta


FORGED: list[Callable[[dict[str, Any]], Any]] = [
    lambda meta: [],
    lambda meta: meta.update(sizes=[]),
    lambda meta: meta.update(seq_len="5"),
    lambda meta: meta["sizes"].update({"../../secret.npy": 1}),
    lambda meta: meta["train"].update(shards=["../../secret.npy"]),
    lambda meta: meta["train"].update(sequences=-1),
    lambda meta: meta.pop("validation"),
]


@pytest.mark.parametrize("forge", FORGED)
def test_forged_meta_is_not_whole(tmp_path: Path, forge: Callable[[dict[str, Any]], Any]):
    meta = packed(tmp_path)
    assert len(PackedData.open(tmp_path).train) == meta["train"]["sequences"]
    other = forge(meta)
    (tmp_path / "meta.json").write_text(json.dumps(other if isinstance(other, list) else meta))
    with pytest.raises(UserError, match="holds no complete packed data"):
        PackedData.open(tmp_path)


def test_open_refuses_arrays_of_others(tmp_path: Path):
    """Pickles and arrays of another shape or type are refused, even if the file has the size in meta.json."""
    meta, shard = packed(tmp_path), tmp_path / "train-00000.npy"
    canary = tmp_path / "canary"
    whole = np.load(shard)
    damaged = (np.array([Payload(canary)], object), whole[:-1], whole.astype(np.int16), whole.reshape(1, -1))
    for other in damaged:
        np.save(shard, other, allow_pickle=True)
        meta["sizes"][shard.name] = shard.stat().st_size
        (tmp_path / "meta.json").write_text(json.dumps(meta))
        with pytest.raises(UserError, match=r"train-00000\.npy holds (no|another) array.*delete it") as told:
            PackedData.open(tmp_path)
        assert "pickle" not in str(told.value)
    assert not canary.exists()


class Payload:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)
