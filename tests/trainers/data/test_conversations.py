"""Conversations in files: reading, packing with masks, and what is no conversation."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foldray.errors import UserError
from foldray.recipe import DataSpec
from tests.trainers.data.chats import CHATML, CHATS, NARROW_TAGGED, chat, make_tokenizer
from trainers.data import conversations
from trainers.data.chat import Chat
from trainers.data.conversations import Reader, encode, pack, summary
from trainers.data.encode import Work
from trainers.data.rows import cut
from trainers.data.shards import Piece
from trainers.data.sources import split_files
from trainers.data.tokenizers import load_tokenizer
from trainers.data.unfit import Unfit


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    return Chat(load_tokenizer(str(make_tokenizer(tmp_path_factory.mktemp("tokenizer")))))


def write(path: Path, *messages: Any, key: str = "messages") -> Path:
    path.write_text("".join(json.dumps({"id": number, key: each}) + "\n" for number, each in enumerate(messages)))
    return path


def files(folder: Path, name: str = "a.jsonl") -> list:
    """Return the files of a name in a folder, as sources."""
    other = write(folder / "held.jsonl", chat("a", "b"))
    spec = DataSpec(source="conversations", path=str(folder / name), tokenizer="x", validation={"path": str(other)})
    return split_files(spec)[0]


def encoded(folder: Path, reader: Reader, seq_len: int, name: str = "a.jsonl") -> Piece:
    (piece,) = encode(Work(list(cut(files(folder, name))), "train"), Unfit("refuse"), reader, seq_len)
    return piece


def test_conversations_are_packed_whole_with_their_masks(tmp_path: Path, chatml: Chat):
    write(tmp_path / "a.jsonl", *CHATS.values())
    found, seq_len = encoded(tmp_path, Reader(chatml, "messages"), 200), 200
    expected = {}
    for messages in CHATS.values():
        ids, trained = chatml.encode(messages, "here")
        trained[0] = False
        expected[tuple(ids.tolist())] = trained.tolist()
    assert len(found.tokens) == len(found.trained) == len(found.lengths)
    assert len(found.tokens) % seq_len == 0
    ends = [*found.starts[1:].tolist(), len(found.tokens)]
    seen, filled = {}, 0
    for start, end in zip(found.starts.tolist(), ends, strict=True):
        (tokens,) = [ids for ids in expected if tuple(found.tokens[start : start + len(ids)].tolist()) == ids]
        stop = start + len(tokens)
        assert start // seq_len == (stop - 1) // seq_len, "a conversation continues in another sequence"
        seen[tokens] = found.trained[start:stop].astype(bool).tolist()
        assert set(found.tokens[stop:end].tolist()) <= {chatml.tokenizer.separator}
        assert not found.trained[stop:end].any()
        filled += end - stop
    assert seen == expected
    assert found.counts == {
        "conversations": len(CHATS), "cut": 0, "left_out": 0, "ended": len(CHATS), "trained": int(found.trained.sum()),
        "filled": filled,
    }  # fmt: skip


def test_a_long_conversation_loses_its_end(tmp_path: Path, chatml: Chat):
    one, long, late = chat("a", "b"), chat("a", "b" * 100), chat("a" * 100, "b")
    write(tmp_path / "a.jsonl", one, long, late, one[:1])
    found = encoded(tmp_path, Reader(chatml, "messages"), 40)
    assert {key: found.counts[key] for key in ("conversations", "cut", "left_out")} == {
        "conversations": 2,
        "cut": 1,
        "left_out": 2,
    }
    ids, trained = chatml.encode(long, "here")
    assert found.tokens[:40].tolist() == ids[:40].tolist()
    assert found.trained[:40].astype(bool).tolist() == trained[:40].tolist()


def test_all_tokens_but_the_first(tmp_path: Path, chatml: Chat):
    write(tmp_path / "a.jsonl", chat("a", "b"), chat("c"))
    found = encoded(tmp_path, Reader(chatml, "messages", masked=False), 64)
    sizes = [len(chatml.encode(messages, "here")[0]) for messages in (chat("a", "b"), chat("c"))]
    at = np.repeat([0, sizes[0]], sizes)
    assert found.starts.tolist() == [0, sizes[0]]
    assert found.trained.tolist() == [int(place > start) for place, start in enumerate(at)] + [0] * (64 - sum(sizes))


def test_nothing_to_train_on(tmp_path: Path, chatml: Chat):
    write(tmp_path / "a.jsonl", chat("a"))
    found = encoded(tmp_path, Reader(chatml, "messages"), 64)
    assert (len(found.tokens), found.starts.tolist(), found.counts["left_out"]) == (0, [], 1)


@pytest.mark.parametrize(("template", "ended"), [(CHATML, 2), (NARROW_TAGGED, 0)], ids=["trained", "outside of the tags"])
def test_how_many_conversations_have_an_answer_with_an_end(tmp_path: Path, template: str, ended: int):
    write(tmp_path / "a.jsonl", chat("a", "b"), chat("a", "b" * 100), chat("c", "d"))  # the second one loses its end
    reader = Reader(Chat(load_tokenizer(str(make_tokenizer(tmp_path / "tokenizer", template)))), "messages")
    assert encoded(tmp_path, reader, 40).counts["ended"] == ended


@pytest.mark.parametrize("seed", range(20))
def test_packing(seed: int):
    draw = random.Random(seed)
    capacity = draw.randrange(1, 60)
    lengths = [draw.randrange(1, capacity + 1) for _ in range(draw.randrange(80))]
    bins = pack(lengths, capacity)
    assert sorted(number for each in bins for number in each) == list(range(len(lengths)))
    assert all(each and sum(lengths[number] for number in each) <= capacity for each in bins)
    assert bins == pack(lengths, capacity)
    assert len([each for each in bins if 2 * sum(lengths[number] for number in each) <= capacity]) <= 1


def test_packing_takes_the_fullest_bin_with_room():
    assert pack([5, 3, 6, 4, 2], 10) == [[2, 3], [0, 1, 4]]
    assert pack([], 10) == []


def test_packing_leaves_little(tmp_path: Path):
    draw = random.Random(0)
    lengths = [min(int(draw.expovariate(1 / 300)) + 10, 2048) for _ in range(2000)]
    assert sum(lengths) / (2048 * len(pack(lengths, 2048))) > 0.99


def test_parquet_and_jsonl_give_the_same(tmp_path: Path, chatml: Chat):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    known = list(CHATS.values())
    write(tmp_path / "a.jsonl", *known, key="turns")
    parquet.write_table(pyarrow.table({"turns": known, "n": range(len(known))}), tmp_path / "a.parquet", row_group_size=3)
    one, other = (encoded(tmp_path, Reader(chatml, "turns"), 200, f"a.{kind}") for kind in ("jsonl", "parquet"))
    assert one.tokens.tolist() == other.tokens.tolist()
    assert one.trained.tolist() == other.trained.tolist()


def call(name: str, arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}


def in_parquet(folder: Path, *given: Any, kind: Any = None) -> list[Any]:
    """Write messages as a table, and return them as they are read."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"messages": pyarrow.array(given, kind)}), folder / "what?.parquet")
    (part,) = cut(files(folder, "what?.parquet"))
    rows = conversations.read_rows(part, "field", "messages", Unfit("replace"))
    return [conversations.messages_of(row.value, row, "field", "messages") for row in rows]


def test_tool_calls_in_parquet_have_no_keys_of_other_calls(tmp_path: Path):
    """A table gives every struct the keys of all others."""
    calls = [call("weather", {"city": "Oslo"}), call("clock", {"zone": {"of": "UTC"}, "days": ["a", None]}), call("stop", {})]
    given = [
        [*chat("Cold?"), *calls, {"role": "tool", "content": "5 °C"}],
        chat("a", "b"),
        [*chat("c"), call("all", {"days": []})],
    ]
    assert in_parquet(tmp_path, *given) == given


def test_a_map_in_parquet_is_an_object(tmp_path: Path):
    pyarrow = pytest.importorskip("pyarrow")
    text = pyarrow.string()
    function = pyarrow.struct({"name": text, "arguments": pyarrow.map_(text, pyarrow.list_(text))})
    kind = pyarrow.list_(
        pyarrow.struct(
            {
                "role": pyarrow.dictionary(pyarrow.int8(), text),
                "tool_calls": pyarrow.list_(pyarrow.struct({"function": function})),
            }
        )
    )
    pairs = [("city", ["Oslo", "Bergen"]), ("zone", None)]
    assert in_parquet(tmp_path, [call("weather", pairs)], kind=kind) == [[call("weather", dict(pairs))]]


def test_half_a_surrogate_and_keys_that_are_null(tmp_path: Path, chatml: Chat):
    (tmp_path / "a.jsonl").write_text('{"messages": [{"role": "user", "content": "a\\ud83d", "name": null}]}\n')
    (row,) = conversations.read_rows(next(cut(files(tmp_path))), "field", "messages", Unfit("replace"))
    assert conversations.messages_of(row.value, row, "field", "messages") == [{"role": "user", "content": "a?"}]


def test_a_message_that_calls_tools_needs_no_content():
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}
    given = [*chat("a"), call, {"role": "tool", "content": "1"}]
    assert conversations.messages_of(given, "here", "field", "messages")[1] == {
        key: value for key, value in call.items() if value is not None
    }


USER = {"role": "user", "content": "a"}
BAD: dict[str, tuple[Any, str]] = {
    "nothing": (None, "is not a list of messages but NoneType in line 2"),
    "text": ("hello", "is not a list of messages but str in line 2"),
    "empty": ([], "is not a list of messages but an empty list in line 2"),
    "object": ({"role": "user"}, "is not a list of messages but dict in line 2"),
    "message": ([USER, "b"], "message 2 in line 2 of {file} is not an object but str"),
    "other keys": ([{"from": "human", "value": "a"}], 'message 1 in line 2 of {file} has no "role"; it has from, value'),
    "other role": ([{"role": "human", "content": "a"}], "has the role 'human'; legal: system, developer, user, assistant, tool"),
    "list as role": ([{"role": ["user"], "content": "a"}], "message 1 in line 2 of {file} has the role ['user']"),
    "no content": ([USER, {"role": "assistant"}], 'message 2 in line 2 of {file} has no text as "content" but nothing'),
    "parts": ([{"role": "user", "content": [{"type": "text"}]}], 'has no text as "content" but list'),
    "number": ([{"role": "user", "content": 3}], 'has no text as "content" but int'),
}


@pytest.mark.parametrize(("given", "rule"), BAD.values(), ids=BAD)
def test_what_is_no_conversation_is_one_line(tmp_path: Path, chatml: Chat, given: Any, rule: str):
    path = write(tmp_path / "a.jsonl", chat("a", "b"), given)
    with pytest.raises(UserError) as caught:
        encoded(tmp_path, Reader(chatml, "messages"), 64)
    assert caught.value.field == "data.messages_field"
    assert rule.format(file=path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_field_and_deep_nesting(tmp_path: Path, chatml: Chat):
    write(tmp_path / "a.jsonl", chat("a", "b"), key="turns")
    with pytest.raises(UserError, match=r"^data.messages_field=messages: is not a field of line 1 of .*; legal: id, turns$"):
        Reader(chatml, "messages").check(files(tmp_path)[0])
    (tmp_path / "a.jsonl").write_text('{"messages": [{"role": "user", "content": "a", "x": ' + "[" * 900 + "]" * 900 + "}]}\n")
    with pytest.raises(UserError, match=r"message 1 in line 1 of .* is nested too deeply"):
        Reader(chatml, "messages").check(files(tmp_path)[0])
    (tmp_path / "a.jsonl").write_text('{"messages": ' + "[" * 100_000 + "\n")
    with pytest.raises(UserError, match=r"line 1 is not JSON"):
        Reader(chatml, "messages").check(files(tmp_path)[0])


def test_conversations_that_cannot_be_used_are_left_out(tmp_path: Path, chatml: Chat):
    good, other = chat("a", "b"), chat("c", "d")
    broken = [
        {"role": "user", "content": "a", "name": {}},
        None,
        [{"role": "robot", "content": "a"}],
        [call("add", {})],
        chat("\ud800"),
    ]
    path = write(tmp_path / "a.jsonl", good, *broken, other)
    skip = Unfit("skip")
    with pytest.raises(UserError, match=r"^data.messages_field=messages: is not a list of messages but dict in line 2 of "):
        encoded(tmp_path, Reader(chatml, "messages"), 64)
    work = Work(list(cut(files(tmp_path))), "train")
    (piece,) = encode(work, skip, Reader(chatml, "messages", rule="skip"), 64)
    assert piece.counts is not None
    assert piece.counts["conversations"] == 2
    where = path.read_text().index("\n") + 1
    assert skip.found == {str(path): (5, 3, f"is not a list of messages but dict in the line at byte {where}")}
    write(path, [call("add", {})], good)  # the template fails, because there is no content
    skip = Unfit("skip")
    assert len(list(encode(Work(list(cut(files(tmp_path))), "train"), skip, Reader(chatml, "messages"), 64))) == 1
    ((count, _, first),) = skip.found.values()
    assert count == 1
    assert first.startswith("has a chat template that fails with the line at byte 0 (UndefinedError: ")
    Reader(chatml, "messages", rule="skip").check(files(tmp_path)[0])
    with pytest.raises(UserError, match="has a chat template that fails with line 1 of "):
        Reader(chatml, "messages").check(files(tmp_path)[0])


def test_check_reads_only_the_first_conversation(tmp_path: Path, chatml: Chat):
    write(tmp_path / "a.jsonl", chat("a", "b"), None)
    Reader(chatml, "messages").check(files(tmp_path)[0])
    (tmp_path / "a.jsonl").write_text("")
    Reader(chatml, "messages").check(files(tmp_path)[0])


def test_what_is_told():
    counts = {"conversations": 7, "cut": 1, "left_out": 2, "trained": 60, "filled": 10}
    meta = {"seq_len": 50, "train": {"sequences": 3, "counts": counts}, "validation": {"sequences": 1, "counts": counts}}
    assert summary(meta) == (
        "conversations: 7 for training, 7 for validation; 2 longer than 50 tokens, cut at their end; 4 without a token to "
        "train on, left out; 60.0% of all tokens count in the loss, and 10.0% only fill sequences up"
    )


def test_a_model_that_does_not_learn_to_stop_is_told():
    counts = {"conversations": 7, "trained": 60, "filled": 10}
    lines = []
    for ended in ({"ended": 0}, {"ended": 1}, {}):  # data of an earlier version do not say it
        split = {"sequences": 3, "counts": {**counts, **ended}}
        lines.append(summary({"seq_len": 50, "train": split, "validation": split}))
    assert ["no answer ends with a token that stops generation" in line for line in lines] == [True, False, False]
