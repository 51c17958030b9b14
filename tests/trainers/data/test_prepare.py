from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import lzma
import os
import shutil
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import ray

from foldray.errors import UserError
from foldray.recipe import DataSpec
from trainers.data import drafts
from trainers.data.baselines import byte_pairs, count_pairs, fit
from trainers.data.drafts import draft, publish
from trainers.data.encode import Work, deal, encode, run_all
from trainers.data.packed import PackedData, is_intact
from trainers.data.prepare import prepare
from trainers.data.rows import cut
from trainers.data.sources import split_files
from trainers.data.tokenizers import ByteTokenizer, content_of, load_tokenizer
from trainers.data.unfit import Unfit

pytestmark = pytest.mark.usefixtures("ray_session")


def corpus(folder: Path, sizes: list[int], held: str = "00") -> DataSpec:
    """Write text files of some sizes, each with its own letter. Files that match `held` are for validation."""
    folder.mkdir(exist_ok=True)
    for index, size in enumerate(sizes):
        (folder / f"{index:02d}.txt").write_text(chr(ord("a") + index) * size)
    validation = {"path": str(folder / f"{held}.txt")}
    return DataSpec(source="text", path=str(folder / "*.txt"), seq_len=8, validation=validation)


def stream(split) -> list[int]:
    """Return the tokens of a split in the order of the text."""
    order = np.arange(len(split)) if split._order is None else np.argsort(split._order)
    rows = split.tokens(order)
    return [int(rows[0, 0]), *rows[:, 1:].flatten().tolist()]


def expected(texts: list[str], seq_len: int) -> list[int]:
    tokens = [token for text in texts for token in (256, *text.encode())]
    return tokens[: (len(tokens) - 1) // seq_len * seq_len + 1]


def test_packs_files_in_order(tmp_path: Path):
    data = corpus(tmp_path / "text", [30, 25, 0, 40])
    packed = prepare(data, 257, tmp_path / "cache")
    assert stream(packed.train) == expected(["b" * 25, "d" * 40], 8)  # an empty document leaves no trace
    assert stream(packed.validation) == expected(["a" * 30], 8)
    assert packed.meta["train"]["documents"] == 2
    assert packed.meta["train"]["bytes"] == 65
    assert packed.train.segments([0, 3]).tolist() == [[0] * 8, [0, 0] + [1] * 6]


def test_order_of_results_is_that_of_the_works(tmp_path: Path):
    class SlowFirst(ByteTokenizer):
        def measure(self, text: str) -> tuple[np.ndarray, np.ndarray]:
            time.sleep(2 * text.startswith("b"))
            return super().measure(text)

    # The first work is the slowest, so its result would come last if the order were not kept.
    works = [Work([part], "validation") for part in cut(split_files(corpus(tmp_path / "text", [9] * 10))[0])]

    def task(work: Work) -> int:
        (piece,) = encode(work, Unfit("refuse"), SlowFirst(), "text")
        return int(piece.tokens[1])

    assert list(run_all(works, task)) == list(range(ord("b"), ord("b") + 9))


@pytest.mark.parametrize(("least", "works"), [(1, 9), (25, 4), (1 << 20, 1)])
def test_result_does_not_depend_on_how_work_is_dealt(tmp_path: Path, monkeypatch, least: int, works: int):
    sizes = range(8, 20)
    data, dealt = corpus(tmp_path / "text", list(sizes), held="0[0-2]"), []

    def recorded(parts, split, **_):
        dealt.append(deal(parts, split, least=least))
        return dealt[-1]

    monkeypatch.setitem(prepare.__globals__, "deal", recorded)
    packed = prepare(data, 257, tmp_path / "cache")
    assert len(dealt[0]) == works
    texts = [chr(ord("a") + index) * size for index, size in enumerate(sizes)]
    assert stream(packed.train) == expected(texts[3:], 8)
    assert stream(packed.validation) == expected(texts[:3], 8)
    assert packed.baselines() == pytest.approx(by_hand(packed, texts[3:], texts[:3]))


def by_hand(packed: PackedData, train: list[str], validation: list[str]) -> list[float]:
    pairs = byte_pairs([text.encode() for text in validation])[: packed.validation.bytes()]
    return fit(count_pairs(byte_pairs([text.encode() for text in train])))[:, pairs].mean(axis=1).tolist()


def test_baselines_of_the_first_sequences(tmp_path: Path):
    data = corpus(tmp_path / "text", [50, 60])
    (tmp_path / "text" / "00.txt").write_text("abbb" * 20 + "hello")
    packed = prepare(data, 257, tmp_path / "cache")
    table = fit(count_pairs(byte_pairs([b"b" * 60]))).reshape(2, 257, 256)
    rows = packed.validation.tokens(range(len(packed.validation))).numpy()
    for count in (1, 3, len(packed.validation)):
        before, after = rows[:count, :-1], rows[:count, 1:]  # one document, so no target is a separator
        assert packed.baselines(count) == pytest.approx(table[:, before, after].mean(axis=(1, 2)).tolist())


def test_cache_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    data, told = corpus(tmp_path / "text", [30, 30, 30]), []
    first = prepare(data, 257, tmp_path / "cache", lambda *state: told.append(state))
    assert told[-1] == (3, 3, "tokenizing")
    told.clear()
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    again = prepare(data, 300, tmp_path / "cache", lambda *state: told.append(state))
    assert (again.folder, told) == (first.folder, [])
    other = data.model_copy(update={"seq_len": 9})
    with pytest.raises(RuntimeError, match=r"ray\.init"):
        prepare(other, 257, tmp_path / "cache")
    os.utime(tmp_path / "text" / "01.txt", ns=(1, 1))
    with pytest.raises(RuntimeError, match=r"ray\.init"):
        prepare(data, 257, tmp_path / "cache")


def test_equal_text_is_the_same_data_wherever_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A copy has other paths and times, and perhaps other works. Its sequences are the same."""
    data = corpus(tmp_path / "text", [30, 40, 50])
    first = prepare(data, 257, tmp_path / "cache")
    os.utime(tmp_path / "text" / "01.txt", ns=(1, 1))
    touched = prepare(data, 257, tmp_path / "cache")
    shutil.copytree(tmp_path / "text", tmp_path / "moved")
    there = {"path": str(tmp_path / "moved" / "*.txt"), "validation": {"path": str(tmp_path / "moved" / "00.txt")}}
    monkeypatch.setitem(prepare.__globals__, "deal", lambda parts, split, **_: deal(parts, split, least=1))
    moved = prepare(DataSpec(**{**data.model_dump(), **there}), 257, tmp_path / "cache")
    assert len({each.folder for each in (first, touched, moved)}) == 3
    assert moved.meta["train"]["works"] > first.meta["train"]["works"]
    assert first.content == touched.content == moved.content is not None
    (tmp_path / "text" / "01.txt").write_text("x" * 40)
    assert prepare(data, 257, tmp_path / "cache").content != first.content


def test_broken_cache_is_made_anew(tmp_path: Path):
    data = corpus(tmp_path / "text", [30, 30])
    folder = prepare(data, 257, tmp_path / "cache").folder
    tokens = (folder / "train-000000.tokens").read_bytes()
    (folder / "train-000000.tokens").write_bytes(tokens[:-1])
    assert prepare(data, 257, tmp_path / "cache").folder == folder
    assert (folder / "train-000000.tokens").read_bytes() == tokens
    assert os.listdir(tmp_path / "cache") == [folder.name]


def test_what_an_interruption_leaves_is_not_whole_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(prepare.__globals__, "deal", lambda parts, split, **_: deal(parts, split, least=1))
    data = corpus(tmp_path / "text", [30, 30, 40, 50, 60])
    expected_folder = prepare(data, 257, tmp_path / "other").folder

    def interrupt(done: int, total: int, what: str) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(data, 257, tmp_path / "cache", interrupt)
    draft = tmp_path / "cache" / f".{expected_folder.name}"
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [draft.name]
    assert not is_intact(draft)
    kept = {path.name: path.stat().st_ino for path in draft.glob("train-00000[012].tokens")}
    assert len(kept) == 3
    (draft / "train-000001.tokens").write_bytes(b"half")  # damaged meanwhile
    (draft / "train-000002.done").write_text("{")
    (draft / ".train-000003.tokens.0123abcd").write_text("of a task that was killed")
    told = []
    packed = prepare(data, 257, tmp_path / "cache", lambda *state: told.append(state))
    assert told[-1] == (5, 5, "tokenizing")
    again = {name: (packed.folder / name).stat().st_ino == number for name, number in kept.items()}
    assert again == {"train-000000.tokens": True, "train-000001.tokens": False, "train-000002.tokens": False}
    assert os.listdir(tmp_path / "cache") == [expected_folder.name]
    assert contents(packed.folder) == contents(expected_folder)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_two_preparations_at_once_have_drafts_of_their_own(tmp_path: Path):
    folder = tmp_path / "0123456789abcdef"
    with draft(folder, lambda: (folder / "mine").exists()) as one:
        with draft(folder, lambda: (folder / "mine").exists()) as two:
            assert one != two
            (two / "mine").write_text("two")
        (one / "mine").write_text("one")
    assert (folder / "mine").read_text() == "two"
    assert os.listdir(tmp_path) == [folder.name]
    assert os.listdir(folder) == ["mine"]


def test_drafts_that_nobody_needs_are_swept(tmp_path: Path):
    names = [".0123456789abcdef", ".0123456789abcdee.01234567", ".other", ".0123456789abcdea"]
    for name in names:
        (tmp_path / name).mkdir()
    for name in names[:3]:
        os.utime(tmp_path / name, (1, 1))
    with draft(tmp_path / "0123456789abcdeb", lambda: False):
        assert {path.name for path in tmp_path.iterdir()} == {*names[2:], ".0123456789abcdeb"}


def test_a_cache_that_is_not_shared_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A task that writes to a disk of its own node leaves nothing where the driver looks."""
    data, other = corpus(tmp_path / "text", [30, 30]), tmp_path / "elsewhere"
    other.mkdir()
    encoding = partial(encode, tokenizer=ByteTokenizer(), text_field="text")
    task = partial(prepare.__globals__["_encode"], folder=other, encode=encoding, invalid="refuse")
    monkeypatch.setattr(drafts, "_LOOKS", 1)
    monkeypatch.setattr(drafts, "_LOOK_S", 0.0)
    monkeypatch.setitem(prepare.__globals__, "run_all", lambda calls, _: (task(call) for call in calls))
    with pytest.raises(UserError, match=r"^data.cache=.*: is not the same folder everywhere: node .* has written files"):
        prepare(data, 257, tmp_path / "cache")
    assert os.listdir(tmp_path / "cache") == []


def test_whoever_is_first_publishes(tmp_path: Path):
    data = corpus(tmp_path / "text", [30, 30])
    folder = prepare(data, 257, tmp_path / "cache").folder
    shutil.copytree(folder, other := tmp_path / "draft")
    (other / "mine").touch()
    publish(other, folder, lambda: is_intact(folder))
    assert not (folder / "mine").exists()


def test_jsonl_and_parquet_give_the_same(tmp_path: Path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = ["漢字 and more", "second document", "", "third one, the last"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"id": 1, "body": text}) + "\n" for text in texts))
    parquet.write_table(pyarrow.table({"id": [1] * 4, "body": texts}), tmp_path / "a.parquet", row_group_size=1)
    for kind in ("jsonl", "parquet"):
        shutil.copy(tmp_path / f"a.{kind}", tmp_path / f"v.{kind}")
        validation = {"path": str(tmp_path / f"v.{kind}")}
        path = str(tmp_path / f"a.{kind}")
        data = DataSpec(source=kind, path=path, text_field="body", seq_len=4, validation=validation)
        packed = prepare(data, 257, tmp_path / "cache")
        assert stream(packed.train) == stream(packed.validation) == expected([text for text in texts if text], 4)


def test_folder_tokenizer(tmp_path: Path, tokenizer_folder: Path):
    data = corpus(tmp_path / "text", [0, 0, 0])
    for index in range(3):
        (tmp_path / "text" / f"{index:02d}.txt").write_text(f"def f{index}(x):\n    return 'é'\n" * 5)
    data = data.model_copy(update={"tokenizer": str(tokenizer_folder), "seq_len": 4})
    with pytest.raises(UserError, match=r"^model.vocab=257: must be at least 300"):
        prepare(data, 257, tmp_path / "cache")
    packed = prepare(data, 300, tmp_path / "cache")
    tokenizer = load_tokenizer(str(tokenizer_folder))
    ids = tokenizer.encode((tmp_path / "text" / "01.txt").read_text()).tolist()
    assert stream(packed.train)[: len(ids) + 1] == [tokenizer.separator, *ids]
    assert packed.train.segments(range(len(packed.train))).max() == 1
    text = (tmp_path / "text" / "00.txt").read_bytes()
    assert len(text) - 40 < packed.validation.bytes() <= len(text)
    assert packed.validation.bytes() == len(tokenizer.inner.decode(stream(packed.validation)[1:]).encode())
    assert 0 < packed.baselines().bigram < packed.baselines().unigram < 8


def test_a_folder_of_an_earlier_version_is_used(tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch):
    """It knew a tokenizer by all files in its folder."""
    data = corpus(tmp_path / "text", [30, 30, 30]).model_copy(update={"tokenizer": str(tokenizer_folder), "seq_len": 4})
    folder = prepare(data, 300, tmp_path / "cache").folder
    inputs = {**json.loads((folder / "inputs.json").read_text()), "tokenizer": content_of(str(tokenizer_folder))}
    name = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]
    folder.rename(tmp_path / "cache" / name)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # preparing would fail
    assert prepare(data, 300, tmp_path / "cache").folder.name == name


def test_worker_meets_a_mistake(tmp_path: Path):
    """A worker's UserError arrives unchanged, no files are left behind, and Ray still works."""
    lines = ['{"text": "some text that is long enough"}', '{"other": 1}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "v.jsonl").write_text(lines[0])
    data = DataSpec(source="jsonl", path=str(tmp_path / "a.jsonl"), seq_len=4, validation={"path": str(tmp_path / "v.jsonl")})
    with pytest.raises(UserError, match=r"^data.text_field=text: is not a field of line 2 .*legal: other$") as caught:
        prepare(data, 257, tmp_path / "cache")
    assert caught.value.__cause__ is None
    assert os.listdir(tmp_path / "cache") == []


def test_compressed_plain_and_parquet_are_the_same_data(tmp_path: Path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = [f"line {number} é {'x' * (number % 40)}" for number in range(400)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    pack = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
    pack[".zst"] = partial(pyarrow.Codec("zstd").compress, asbytes=True)
    for ending, each in pack.items():
        for name in ("a", "v"):
            (tmp_path / f"{name}.jsonl{ending}").write_bytes(each(lines))
    for name in ("a", "v"):
        parquet.write_table(pyarrow.table({"text": texts}), tmp_path / f"{name}.parquet", row_group_size=64)
    found = []
    for source, ending in [*(("jsonl", f".jsonl{ending}") for ending in pack), ("parquet", ".parquet")]:
        path, validation = (str(tmp_path / f"{name}{ending}") for name in ("a", "v"))
        data = DataSpec(source=source, path=path, seq_len=16, validation={"path": validation})
        found.append(prepare(data, 257, tmp_path / "cache"))
    assert stream(found[0].train) == expected(texts, 16)
    formats = [json.loads((packed.folder / "inputs.json").read_text())["format"] for packed in found]
    assert formats == [1, 1, 2, 2, 1, 1]  # earlier versions could lose the end of .bz2 and .xz
    for other in found[1:]:
        assert other.folder != found[0].folder
        for path in sorted(found[0].folder.iterdir()):
            if path.suffix != ".json":
                assert (other.folder / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize(("sizes", "name"), [([30, 7], "training"), ([7, 30], "validation"), ([0, 30], "validation")])
def test_too_little_text(tmp_path: Path, sizes: list[int], name: str):
    data = corpus(tmp_path / "text", sizes)
    with pytest.raises(UserError, match=rf"^data.seq_len=8: one sequence needs 9 tokens, but the {name} documents have"):
        prepare(data, 257, tmp_path / "cache")
    assert os.listdir(tmp_path / "cache") == []


def test_cheap_checks_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(prepare.__globals__, "run_all", lambda *_: pytest.fail("went to work"))
    (tmp_path / "a.jsonl").write_text('{"body": "b"}\n')
    (tmp_path / "v.jsonl").write_text('{"text": "b"}\n')
    data = DataSpec(source="jsonl", path=str(tmp_path / "a.jsonl"), validation={"path": str(tmp_path / "v.jsonl")})
    for vocab, spec, message in [
        (256, DataSpec(), r"^model.vocab=256: must be at least 257"),
        (257, DataSpec(tokenizer="gpt2"), r"^data.tokenizer=gpt2"),
        (257, DataSpec(source="text", path="nothing*"), r"^data.path=nothing\*: matches no file"),
        (257, data, r"^data.text_field=text: is not a field .*legal: body"),
    ]:
        with pytest.raises(UserError, match=message):
            prepare(spec, vocab, tmp_path / "cache")


def test_cache_that_cannot_be_written(tmp_path: Path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(UserError, match=r"^data.cache=.*cannot be written"):
        prepare(corpus(tmp_path / "text", [30, 30]), 257, tmp_path / "cache")


def test_text_that_is_not_utf8(tmp_path: Path):
    data = corpus(tmp_path / "text", [30, 30, 30])
    (tmp_path / "text" / "01.txt").write_bytes(b"b" * 29 + b"\xff" + b"b" * 10)
    with pytest.raises(UserError, match=r"^data.invalid=refuse: byte 29 of .*01.txt is not UTF-8; skip leaves"):
        prepare(data, 257, tmp_path / "cache")
    assert os.listdir(tmp_path / "cache") == []
    packed = {rule: prepare(data.model_copy(update={"invalid": rule}), 257, tmp_path / "cache") for rule in ("skip", "replace")}
    texts = ["b" * 29 + "\ufffd" + "b" * 10, "c" * 30]
    assert stream(packed["replace"].train) == expected(texts, 8)
    assert stream(packed["skip"].train) == expected(texts[1:], 8)
    named = {"file": str(tmp_path / "text" / "01.txt"), "documents": 1, "bytes": 1, "at": "byte 29"}
    for rule, each in packed.items():
        assert each.meta["unfit"] == {"rule": rule, "documents": 1, "bytes": 1, "files": 1, "first": [named]}
    with pytest.raises(UserError, match=r"^data.invalid=refuse: byte 29 of .*01.txt is not UTF-8"):
        prepare(data, 257, tmp_path / "cache")  # what another rule has prepared
    (tmp_path / "text" / "01.txt").write_text("fine" * 9)
    assert (
        prepare(data, 257, tmp_path / "cache").folder
        == prepare(data.model_copy(update={"invalid": "replace"}), 257, tmp_path / "cache").folder
    )  # without such text, the rule does not matter


def test_library(tmp_path: Path):
    packed = prepare(DataSpec(), 257, tmp_path)
    sizes = [packed.meta[name]["bytes"] for name in ("train", "validation")]
    assert sum(sizes) == sum(
        len(Path(file.locate()).read_text("utf-8", "replace").encode()) for side in split_files(DataSpec()) for file in side
    )
    assert 3.2 < packed.baselines().bigram < 3.9
    assert sizes[1] - 256 < packed.validation.bytes() <= sizes[1]
