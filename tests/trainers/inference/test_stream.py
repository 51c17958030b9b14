"""Text from tokens, piece by piece."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainers.data.tokenizers import ByteTokenizer, load_tokenizer
from trainers.hugging_face.tokens import write_tokenizer
from trainers.inference.stream import TextStream

TEXT = "größer ✓ 日本\n  x"


def pieces(stream: TextStream, ids: list[int]) -> list[str]:
    return [*(stream.add(index) for index in ids), stream.rest()]


def test_pieces_are_whole_characters_and_come_at_once() -> None:
    byte = ByteTokenizer()
    found = pieces(TextStream(byte.decode), byte.encode(TEXT).tolist())
    assert [piece for piece in found if piece] == list(TEXT)
    assert found.index("ö") == 3  # with the last byte of the character
    assert found[-1] == ""


def test_bytes_that_are_no_text() -> None:
    byte = ByteTokenizer()
    assert pieces(TextStream(byte.decode), [0xFF, 0x61, 0xC3]) == ["", "�a", "", "�"]
    assert byte.decode([0x61, 256, 319, 0x62]) == "ab"  # the separator, and an id that only pads the vocabulary


def test_a_tokenizer_in_a_folder(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    write_tokenizer("byte", tmp_path)
    folder = load_tokenizer(str(tmp_path))
    ids = folder.encode(TEXT).tolist()
    assert folder.decode([folder.separator, *ids]) == TEXT
    assert [piece for piece in pieces(TextStream(folder.decode, [256, *ids]), ids) if piece] == list(TEXT)


def test_the_text_of_a_token_depends_on_those_before_it() -> None:
    words = ["the", "cat", "s"]

    def decode(ids) -> str:  # as SentencePiece does, it puts no space before the first word
        return " ".join(words[index] for index in ids)

    assert pieces(TextStream(decode), [0, 1]) == ["the", " cat", ""]
    assert pieces(TextStream(decode, [0] * 20), [1, 2]) == [" cat", " s", ""]
