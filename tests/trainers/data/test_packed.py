"""Reading packed data. The tests use the shard writer, without Ray."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foldray.errors import UserError
from tests.trainers.checkpoints.damage import Payload
from trainers.data import shards
from trainers.data.baselines import byte_pairs, count_pairs, fit
from trainers.data.order import SampleOrder
from trainers.data.packed import FORMAT, Batches, PackedData, Split
from trainers.data.shards import Index, Piece, costs, passing
from trainers.data.shards import write as write_work

SEP, SEQ_LEN = 256, 5  # no document has a multiple of 5 tokens
DOCUMENTS = [b"The 1st document.", b"2", b"Three", b"and a fourth, somewhat longer."]


TABLE = fit(count_pairs(byte_pairs(DOCUMENTS)))


def piece(documents: list[bytes]) -> Piece:
    tokens = np.array([token for document in documents for token in (SEP, *document)], np.uint16)
    return Piece(tokens, (tokens != SEP).astype(np.uint32), np.flatnonzero(tokens == SEP), byte_pairs(documents))


def write_split(folder: Path, name: str, works: list[list[Piece]], masked: bool = False) -> dict[str, Any]:
    """Write the files of a split, and return its counts."""
    index = Index(SEQ_LEN)
    for number, pieces in enumerate(works):
        index.add(write_work(folder, name, number, pieces, {}))
    if name == "validation" and not masked:
        index.add_costs(costs(folder, number, offset, SEQ_LEN, TABLE) for number, offset in enumerate(index.offsets))
    return index.finish(folder, name, masked)


def write(folder: Path, cuts: list[int], shuffled: bool = False, pieces: int = 1) -> Split:
    """Write DOCUMENTS as a split, in works that end before the documents in `cuts`, each in pieces of some documents."""
    name = "validation" if shuffled else "train"
    works = [DOCUMENTS[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(DOCUMENTS)], strict=True)]
    found = [[piece(work[at : at + pieces]) for at in range(0, len(work), pieces)] for work in works]
    return Split(folder, name, {"seq_len": SEQ_LEN, "dtype": "uint16", name: write_split(folder, name, found)})


STREAM = [token for document in DOCUMENTS for token in (SEP, *document)]


@pytest.mark.parametrize("pieces", [1, 2, 9])
@pytest.mark.parametrize("cuts", [[], [1], [1, 2, 3], [0, 1, 1, 4]])
def test_every_token_is_predicted_once_in_order(tmp_path: Path, cuts: list[int], pieces: int):
    split = write(tmp_path, cuts, pieces=pieces)
    tokens = split.tokens(range(len(split)))
    assert len(split) == (len(STREAM) - 1) // SEQ_LEN
    assert tokens[:, 1:].flatten().tolist() == STREAM[1 : len(split) * SEQ_LEN + 1]
    assert tokens[:, :-1].flatten().tolist() == STREAM[: len(split) * SEQ_LEN]
    assert split.tokens([]).shape == (0, SEQ_LEN + 1)
    assert len(list(tmp_path.glob("train-*.tokens"))) <= len(cuts) + 1


def test_few_files_are_open_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("trainers.data.packed._MOST_OPEN", 2)
    split = write(tmp_path, [1, 2, 3])
    rows = [len(split) - 1, 0, *range(len(split))]
    assert split.tokens(rows).tolist() == write(tmp_path, [1, 2, 3]).tokens(rows).tolist()
    assert len(split._works._open) == 2


def test_segments_are_document_numbers(tmp_path: Path):
    split = write(tmp_path, [2, 3])
    number = np.cumsum(np.array(STREAM) == SEP) - 1
    assert split.segments(range(len(split))).flatten().tolist() == number[: len(split) * SEQ_LEN].tolist()


@pytest.mark.parametrize("cuts", [[], [1, 3]])
def test_masks_stay_beside_their_tokens(tmp_path: Path, cuts: list[int]):
    """Vowels count."""
    works = []
    for start, stop in zip([0, *cuts], [*cuts, len(DOCUMENTS)], strict=True):
        whole = piece(DOCUMENTS[start:stop])
        marks = np.isin(whole.tokens, list(b"aeiou")).astype(np.uint8)
        works.append([replace(whole, trained=marks, pairs=None, counts={"vowels": int(marks.sum())})])
    counts = write_split(tmp_path, "validation", works, masked=True)
    split = Split(tmp_path, "validation", {"seq_len": SEQ_LEN, "dtype": "uint16", "validation": counts})
    rows = range(len(split))
    assert split.masked
    assert split.trained(rows).tolist() == np.isin(split.tokens(rows)[:, 1:], list(b"aeiou")).tolist()
    assert counts["counts"] == {"vowels": sum(token in b"aeiou" for token in STREAM if token < 256)}


@pytest.mark.parametrize("cuts", [[], [1, 3], [0, 1, 1, 2, 3, 4]])
def test_bytes_leave_out_separators(tmp_path: Path, cuts: list[int]):
    split = write(tmp_path, cuts, shuffled=True)
    for count in range(len(split) + 1):
        targets = split.tokens(range(count))[:, 1:]
        assert split.bytes(count) == int((targets != SEP).sum())
    assert split.bytes() == split.bytes(len(split))


@pytest.mark.parametrize("at_once", [1, 7, 1 << 20])
def test_costs_are_those_of_the_targets_for_any_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int):
    monkeypatch.setattr(shards, "_BYTES", at_once)
    found = []
    for number, cuts in enumerate([[], [1, 3], [0, 1, 1, 2, 3, 4]]):
        (folder := tmp_path / str(number)).mkdir()
        split = write(folder, cuts, shuffled=True)
        found.append(np.load(folder / "validation-bits.npy"))
    assert all((each == found[0]).all() for each in found)  # the same bits
    by_position = iter(TABLE[:, byte_pairs(DOCUMENTS)].T)
    spent = [np.zeros(2) if token == SEP else next(by_position) for token in STREAM]
    places = split._order
    assert places is not None
    expected = np.cumsum([np.sum(spent[at * SEQ_LEN + 1 : (at + 1) * SEQ_LEN + 1], axis=0) for at in places], axis=0).T
    assert found[0][:, 1:] == pytest.approx(expected, abs=1e-6)


def test_shuffled_split_is_a_permutation(tmp_path: Path):
    plain, mixed = write(tmp_path, []), write(tmp_path, [2], shuffled=True)
    rows, mixed_rows = plain.tokens(range(len(plain))).tolist(), mixed.tokens(range(len(plain))).tolist()
    assert sorted(rows) == sorted(mixed_rows)
    assert rows != mixed_rows


def test_no_such_sequence(tmp_path: Path):
    split = write(tmp_path, [])
    for index in (-1, len(split)):
        with pytest.raises(IndexError, match=str(len(split))):
            split.tokens([0, index])


@pytest.mark.parametrize(("dp", "micro_batch"), [(1, 1), (1, 4), (2, 2), (4, 1), (4, 3), (12, 1), (5, 1), (7, 2), (5, 3), (1, 8)])
def test_every_dp_takes_the_same_samples(tmp_path: Path, dp: int, micro_batch: int):
    split, global_batch = write(tmp_path, []), 12
    whole = SampleOrder(5, len(split))(0, 3 * global_batch)
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
    counts = {name: write_split(folder, name, [[piece(DOCUMENTS)]]) for name in ("train", "validation")}
    for path in passing(folder):
        path.unlink()
    sizes = {path.name: path.stat().st_size for path in folder.glob("*.npy")}
    unfit = {"rule": "refuse", "documents": 0, "bytes": 0, "files": 0, "first": []}
    meta = {"format": FORMAT, "seq_len": SEQ_LEN, "dtype": "uint16", "sizes": sizes, "unfit": unfit, **counts}
    (folder / "meta.json").write_text(json.dumps(meta))
    return meta


def test_what_an_earlier_version_prepared_is_hashed_where_it_lies(tmp_path: Path):
    meta = packed(tmp_path)
    found = PackedData.open(tmp_path).content
    assert found
    for split in ("train", "validation"):
        del meta[split]["content"]
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    earlier = PackedData.open(tmp_path)
    assert (earlier.content, earlier.hashed()) == (None, found)
    tokens = np.memmap(tmp_path / "train-000000.tokens", np.uint16)
    tokens[3] ^= 1
    tokens.flush()
    assert PackedData.open(tmp_path).hashed() != found


FORGED: list[Callable[[dict[str, Any]], Any]] = [
    lambda meta: [],
    lambda meta: meta.update(sizes=[]),
    lambda meta: meta.update(seq_len="5"),
    lambda meta: meta["sizes"].update({"../../secret.npy": 1}),
    lambda meta: meta["train"].update(works=2),
    lambda meta: meta["train"].update(works=1 << 40),
    lambda meta: meta.update(dtype="object"),
    lambda meta: meta.update(dtype="uint32"),
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
    """Pickles and arrays of another shape, type or content are refused, even if the file has the size in meta.json."""
    meta, canary = packed(tmp_path), tmp_path / "canary"
    order = np.load(tmp_path / "validation-order.npy")
    for other in (np.array([Payload(canary)], object), order[:-1], order.astype(float), order.reshape(1, -1)):
        refuse(tmp_path, meta, "validation-order.npy", other, r"validation-order\.npy holds (no|another) array.*delete it")
    np.save(tmp_path / "validation-order.npy", order)
    meta["sizes"]["validation-order.npy"] = (tmp_path / "validation-order.npy").stat().st_size
    tokens, documents = np.load(tmp_path / "train-index.npy")[:, 0]
    (tmp_path / "train-000000.tokens").write_bytes(b"")
    refuse(tmp_path, meta, "train-index.npy", np.array([[0], [documents]]), r"train-index\.npy has other counts than meta.json")
    refuse(tmp_path, meta, "train-index.npy", np.array([[tokens], [documents]]), "holds no complete packed data")
    assert not canary.exists()


def refuse(folder: Path, meta: dict[str, Any], name: str, other: np.ndarray, told: str) -> None:
    np.save(folder / name, other, allow_pickle=True)
    meta["sizes"][name] = (folder / name).stat().st_size
    (folder / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(UserError, match=told) as error:
        PackedData.open(folder)
    assert "pickle" not in str(error.value)
