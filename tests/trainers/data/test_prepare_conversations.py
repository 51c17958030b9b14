"""Conversations prepared on Ray: what is on the disk, what is read of it, and when it is prepared again."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foldray.errors import UserError
from foldray.recipe import DataSpec
from tests.trainers.data.chats import CHATS, chat, make_tokenizer
from trainers.data.chat import Chat
from trainers.data.encode import deal
from trainers.data.packed import PackedData, Split
from trainers.data.prepare import prepare
from trainers.data.tokenizers import load_tokenizer
from trainers.data.unfit import unfit_summary

pytestmark = pytest.mark.usefixtures("ray_session")
SEQ_LEN = 96


def corpus(folder: Path, **changes: Any) -> DataSpec:
    """Write conversations into three files, the last for validation."""
    if not (folder / "tokenizer").exists():
        make_tokenizer(folder / "tokenizer")
        for number in range(3):
            turns = [chat(f"What is {a} plus {number}?", f"It is {a + number}.") for a in range(12)]
            lines = [json.dumps({"messages": each}) for each in [*turns, chat("?", "no " * 80), *CHATS.values()]]
            (folder / f"{number}.jsonl").write_text("\n".join(lines))
    given = {"tokenizer": str(folder / "tokenizer"), "seq_len": SEQ_LEN, "validation": {"path": str(folder / "2.jsonl")}}
    return DataSpec(source="conversations", path=str(folder / "*.jsonl"), **{**given, **changes})


def trained_tokens(split: Split) -> list[list[int]]:
    """Return the trained tokens of every conversation in a split, in any order."""
    rows = range(len(split))
    tokens, trained, segments = split.tokens(rows).numpy(), split.trained(rows).numpy(), split.segments(rows).numpy()
    found: dict[int, list[int]] = {}
    for row, place in np.argwhere(trained):
        found.setdefault(int(segments[row, place]), []).append(int(tokens[row, place + 1]))
    return sorted(found.values())


def expected(data: DataSpec, names: list[str]) -> list[list[int]]:
    encode = Chat(load_tokenizer(data.tokenizer)).encode
    lines = [json.loads(line) for name in names for line in (Path(data.path or "").parent / name).read_text().split("\n")]
    found = []
    for line in lines:
        ids, trained = encode(line["messages"], "here")
        found.append(ids[:SEQ_LEN][trained[:SEQ_LEN]].tolist())
    return sorted(each for each in found if each)


@pytest.mark.parametrize("least", [1, 1 << 20])
def test_what_is_read_is_what_the_assistant_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, least: int):
    monkeypatch.setitem(prepare.__globals__, "deal", lambda parts, split, **_: deal(parts, split, least=least))
    data = corpus(tmp_path)
    packed = prepare(data, 300, tmp_path / "cache")
    assert trained_tokens(packed.train) == expected(data, ["0.jsonl", "1.jsonl"])
    assert trained_tokens(packed.validation) == expected(data, ["2.jsonl"])
    for split in (packed.train, packed.validation):
        assert split.masked
        assert split.trained(range(len(split))).any(1).all(), "a sequence has nothing to train on"
    assert packed.meta["train"]["counts"]["cut"] == 4  # two of each file
    assert packed.baselines() is None
    again = PackedData.open(packed.folder)
    assert again.train.trained([1, 0]).tolist() == packed.train.trained([1, 0]).tolist()


def test_the_cache_depends_on_what_the_data_depend_on(tmp_path: Path):
    folders = {prepare(corpus(tmp_path, **changes), 300, tmp_path / "cache").folder for changes in ({}, {"train_on": "all"}, {})}
    assert len(folders) == 2
    template = tmp_path / "tokenizer" / "chat_template.jinja"
    template.write_text(template.read_text().replace("user", "human") + " ")
    assert prepare(corpus(tmp_path), 300, tmp_path / "cache").folder not in folders


def test_text_has_no_masks(tmp_path: Path):
    for number in range(2):
        (tmp_path / f"{number}.txt").write_text("some text " * 40)
    packed = prepare(DataSpec(source="text", path=str(tmp_path / "*.txt"), seq_len=8), 257, tmp_path / "cache")
    assert not packed.train.masked
    assert packed.train.trained([0, 1]).all()
    assert packed.baselines() is not None


def test_a_mistake_beyond_the_first_line_comes_from_a_worker(tmp_path: Path):
    data = corpus(tmp_path)
    with (tmp_path / "1.jsonl").open("a") as lines:
        lines.write('\n{"messages": [{"role": "robot", "content": "a"}]}\n')
    with pytest.raises(
        UserError, match=r"^data.messages_field=messages: message 1 in line \d+ of .*1.jsonl has the role 'robot'"
    ):
        prepare(data, 300, tmp_path / "cache")
    assert os.listdir(tmp_path / "cache") == []
    packed = prepare(corpus(tmp_path, invalid="skip"), 300, tmp_path / "cache")
    line = unfit_summary(packed.meta)
    assert re.fullmatch(
        r"1 documents in 1 files cannot be used; .*1.jsonl \(1, the first: message 1 in the line .*'robot'\)", str(line)
    )
    with pytest.raises(UserError, match="has the role 'robot'"):
        prepare(data, 300, tmp_path / "cache")  # what another rule has prepared


def test_nobody_to_train(tmp_path: Path):
    data = corpus(tmp_path, invalid="skip")
    (tmp_path / "2.jsonl").write_text("\n".join(json.dumps({"messages": each}) for each in (chat("nobody answers"), [])))
    with pytest.raises(
        UserError,
        match=r"^data.seq_len=96: no conversation for validation has a token to train on among its first 96; 1 documents in 1 "
        r"files cannot be used; .*2.jsonl \(1, the first: is not a list of messages but an empty list in ",
    ):
        prepare(data, 300, tmp_path / "cache")
    assert os.listdir(tmp_path / "cache") == []


def test_masks_that_do_not_go_with_tokens_are_refused(tmp_path: Path):
    packed = prepare(corpus(tmp_path), 300, tmp_path / "cache")
    mask = packed.folder / "train-000000.trained"
    mask.write_bytes(mask.read_bytes()[:-1])
    with pytest.raises(UserError, match="holds no complete packed data"):
        PackedData.open(packed.folder)
