from __future__ import annotations

import json
import pickle
import shutil
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from foldray.errors import MissingPackage, UserError
from tests.trainers.data.chats import make_tokenizer
from trainers.data import tokenizers
from trainers.data.tokenizers import FolderTokenizer, load_tokenizer

TEXT = "def é():\n    return '漢字 🎉'  # <s> is text\n"


def test_bytes_round_trip():
    byte = load_tokenizer("byte")
    ids, sizes = byte.measure(TEXT)
    assert bytes(ids.tolist()).decode() == TEXT
    assert ids.tolist() == byte.encode(TEXT).tolist()
    assert sizes.tolist() == [1] * len(TEXT.encode())
    assert (byte.vocab_size, byte.separator) == (257, 256)


def test_folder(tokenizer_folder: Path):
    tokenizer = pickle.loads(pickle.dumps(load_tokenizer(str(tokenizer_folder))))
    ids = tokenizer.encode(TEXT)
    assert tokenizer.inner.decode(ids.tolist()) == TEXT
    assert len(ids) < len(TEXT.encode())  # the tokenizer merges bytes
    assert tokenizer.separator not in ids  # "<s>" in a text is ordinary text
    assert ids.max() < tokenizer.vocab_size == len(tokenizer.inner)
    assert ids.tolist() == tokenizer.measure(TEXT)[0].tolist()


def test_bytes_of_tokens_follow_the_text(tokenizer_folder: Path):
    tokenizer = load_tokenizer(str(tokenizer_folder))
    ids, sizes = tokenizer.measure(TEXT)
    assert sizes.sum() == len(TEXT.encode())
    for cut in range(1, len(ids)):
        if not (head := tokenizer.inner.decode(ids[:cut].tolist())).endswith("�"):  # the cut is between two characters
            assert sizes[:cut].sum() == len(head.encode())


@pytest.mark.parametrize("piece", [1, 9, 20])
def test_long_text_is_taken_in_pieces(tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch, piece: int):
    monkeypatch.setattr(tokenizers, "_PIECE", piece)
    tokenizer = load_tokenizer(str(tokenizer_folder))
    assert all(0 < len(part) <= piece for part in tokenizers._pieces(TEXT * 3))
    ids, sizes = tokenizer.measure(TEXT * 3)
    assert tokenizer.inner.decode(ids.tolist()) == TEXT * 3
    assert ids.tolist() == tokenizer.encode(TEXT * 3).tolist()
    assert (sizes.sum(), len(sizes)) == (3 * len(TEXT.encode()), len(ids))


def test_pieces_end_with_lines(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tokenizers, "_PIECE", 4)
    assert list(tokenizers._pieces("a\nb\ncdefgh\ni")) == ["a\nb\n", "cdef", "gh\ni"]
    assert list(tokenizers._pieces("")) == [""]


def test_tokenizer_without_offsets_spreads_bytes():
    slow = FolderTokenizer("folder", Slow(), "hash")
    ids, sizes = slow.measure("añb")
    assert (ids.tolist(), sizes.tolist()) == ([0, 1, 2], [1, 1, 2])
    assert slow.measure("")[1].tolist() == []
    assert (slow.separator, slow.vocab_size) == (9, 10)


def test_text_that_no_token_covers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tokenizers, "_PIECE", 4)
    fast = FolderTokenizer("folder", DropsSpaces(), "hash")
    assert fast.measure("  é b        ")[1].tolist() == [
        4,
        10,
    ]  # skipped text counts for the next token, or for the last one at the end
    assert fast.measure("     ")[1].tolist() == []


class Slow:
    is_fast, bos_token_id, eos_token_id = False, None, 9

    def __len__(self) -> int:
        return 4

    def get_vocab(self) -> dict[str, int]:
        return {"a": 0, "</s>": 9}

    def __call__(self, text: str, **options) -> dict[str, list[int]]:
        return {"input_ids": list(range(len(text)))}


class DropsSpaces(Slow):
    is_fast = True

    def __call__(self, text: str, **options) -> dict[str, list]:
        spans = [(place, place + 1) for place, character in enumerate(text) if character != " "]
        return {"input_ids": [1] * len(spans), "offset_mapping": spans}


def test_a_fingerprint_is_of_what_makes_tokens(tokenizer_folder: Path):
    before = load_tokenizer(str(tokenizer_folder)).fingerprint
    others = {
        "model.safetensors": "weights", "config.json": "{}", "chat_template.jinja": "{{ messages }}", "notes.txt": "new",
        "generation_config.json": "{}",
    }  # fmt: skip
    for name, content in others.items():
        (tokenizer_folder / name).write_text(content)
        assert load_tokenizer(str(tokenizer_folder)).fingerprint == before, name
    copy = shutil.copytree(tokenizer_folder, tokenizer_folder.with_name("copy"))
    assert load_tokenizer(str(copy)).fingerprint == before
    found = {before}
    for file, old, new in [
        ("tokenizer.json", '"add_prefix_space": false', '"add_prefix_space": true'),
        ("tokenizer_config.json", '"bos_token": "<s>"', '"bos_token": "a"'),
    ]:
        text = (tokenizer_folder / file).read_text()
        assert old in text
        (tokenizer_folder / file).write_text(text.replace(old, new))
        found.add(load_tokenizer(str(tokenizer_folder)).fingerprint)
    assert len(found) == 3


def test_no_such_folder(tmp_path: Path):
    with pytest.raises(UserError, match=r"^data.tokenizer=.*this folder does not exist"):
        load_tokenizer(str(tmp_path / "gpt2"))


def test_folder_without_tokenizer(tmp_path: Path):
    with pytest.raises(UserError, match=r"^data.tokenizer=.*holds no Hugging Face tokenizer"):
        load_tokenizer(str(tmp_path))


def test_code_in_the_folder_is_not_run(tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """transformers must not ask on the terminal whether to run it, because the next command there may begin with "y"."""
    canary = tmp_path / "canary"
    (tokenizer_folder / "own.py").write_text(f"open({str(canary)!r}, 'w')\nclass Own: pass\n")
    config = json.loads((tokenizer_folder / "tokenizer_config.json").read_text())
    own = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}}
    (tokenizer_folder / "tokenizer_config.json").write_text(json.dumps(config | own))
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda prompt="": asked.append(prompt) or "y")
    with suppress(UserError):  # without its code, the tokenizer may load or not
        load_tokenizer(str(tokenizer_folder))
    assert not asked
    assert not canary.exists()


@pytest.mark.parametrize("kind", ["deepseek_v3", "mixtral", "llama", None])
@pytest.mark.parametrize("name", ["LlamaTokenizer", "LlamaTokenizerFast"])
def test_the_file_of_a_tokenizer_holds_and_not_the_name_of_a_class(tokenizer_folder: Path, name: str, kind: str | None):
    """DeepSeek's folders name such a class for tokenizers like GPT-2's. transformers before 5.22 lost all spaces of some."""
    ids = load_tokenizer(str(tokenizer_folder)).encode(TEXT)
    path = tokenizer_folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tokenizer_class": name}))
    if kind is not None:
        (tokenizer_folder / "config.json").write_text(json.dumps({"model_type": kind}))
    assert load_tokenizer(str(tokenizer_folder)).encode(TEXT).tolist() == ids.tolist()


def test_another_tokenizer_than_the_file_says_is_refused(tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch):
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    made = AutoTokenizer.from_pretrained(tokenizer_folder)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: made)
    load_tokenizer(str(tokenizer_folder))
    made.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    with pytest.raises(UserError, match=r"^data\.tokenizer=.*of which transformers .* with other tokens; set tokenizer_class"):
        load_tokenizer(str(tokenizer_folder))


def test_spaces_as_mixtral_writes_them_are_taken(tmp_path: Path):
    """transformers builds this tokenizer anew, with another rule for spaces and the same tokens."""
    pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, normalizers

    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁▁", "▁▁▁▁", "w", "▁w", "a", "n", "an"]
    merges = [("▁", "▁"), ("▁▁", "▁▁"), ("▁", "w"), ("a", "n")]
    inner = Tokenizer(models.BPE({piece: n for n, piece in enumerate(pieces)}, merges, unk_token="<unk>", byte_fallback=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.add_special_tokens(pieces[:3])
    inner.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "legacy": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text('{"model_type": "mixtral"}')
    found = load_tokenizer(str(tmp_path))
    assert found.inner.convert_ids_to_tokens(found.encode("an    w").tolist())[1:] == ["an", "▁▁▁▁", "w"]


def test_tokenizer_without_separator(tmp_path):
    with pytest.raises(UserError, match="neither a bos nor an eos"):
        load_tokenizer(str(make_tokenizer(tmp_path, None, bos_token=None, eos_token=None)))


def test_transformers_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingPackage, match="pip install transformers"):
        load_tokenizer(str(tmp_path))


def test_encode_is_unsigned(tokenizer_folder: Path):
    for name in ("byte", str(tokenizer_folder)):
        assert np.issubdtype(load_tokenizer(name).encode("a").dtype, np.unsignedinteger)
