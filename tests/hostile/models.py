"""Hostile folders of transformers, tokenizers and chat templates, and hostile data."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from tests.hostile.row import (
    CANARY,
    LARGE,
    TOUCH,
    Make,
    Row,
    both,
    changed,
    cut,
    deep,
    fifo,
    folder,
    hole,
    linked,
    listening,
    text,
)

IMPORT, TRAIN = "import-hf hub new.yaml --tokenizer byte", "train recipe.yaml data.tokenizer=tokenizer model.vocab=320"
CHAT = "train chat.yaml"
WEIGHTS, INDEX, CONFIG = "hub/model.safetensors", "hub/model.safetensors.index.json", "hub/config.json"
GENERATION = "hub/generation_config.json"
QUERY = "model.layers.0.self_attn.q_proj.weight"
CODE = f"open({CANARY!r}, 'w').close()\nclass Evil:\n    pass\n"


def header(change: Any = None, length: int | None = None) -> Make:
    """Change the header of the file of tensors, or the length that it says."""

    def make(place: Path) -> None:
        path = place / WEIGHTS
        content = path.read_bytes()
        (size,) = struct.unpack("<Q", content[:8])
        told = json.loads(content[8 : 8 + size])
        if change is not None:
            change(told)
        said = json.dumps(told).encode()
        path.write_bytes(struct.pack("<Q", len(said) if length is None else length) + said + content[8 + size :])

    return make


def placed(**changes: Any) -> Make:
    """Write an index that places some tensors elsewhere."""

    def make(place: Path) -> None:
        from safetensors import safe_open

        with safe_open(place / WEIGHTS, "pt") as file:
            names = list(file.keys())
        found = dict.fromkeys(names, "all.safetensors") | {QUERY: changes["at"]}
        _all(place)
        (place / INDEX).write_text(json.dumps({"weight_map": found}))
        (place.parent / "outside.safetensors").unlink(missing_ok=True)

    return make


def _all(place: Path) -> None:
    """Give the file of tensors another name, so that only an index names it."""
    (place / WEIGHTS).rename(place / "hub" / "all.safetensors")


def _offsets(*span: int) -> Make:
    return header(lambda told: told[QUERY].update(data_offsets=list(span)))


def template(content: str) -> Make:
    return text("tokenizer/chat_template.jinja", content)


def chats(content: str | bytes) -> Make:
    return both(*(text(f"chats/{name}.jsonl", content) for name in "abcd"))


def _inner(**keys: Any) -> Make:
    return changed("tokenizer/tokenizer.json", **keys)


_HUB = [
    ("depth in config.json", IMPORT, "its config.json cannot be read", text(CONFIG, deep())),
    ("config.json that is a pipe", IMPORT, "config.json", fifo(CONFIG)),
    ("6 GiB of config.json", IMPORT, "config.json", hole(CONFIG)),
    ("config.json that is a device", IMPORT, "config.json", linked(CONFIG, "/dev/zero")),
    ("half of config.json", IMPORT, "its config.json cannot be read", cut(CONFIG, 40)),
    ("config.json in another encoding", IMPORT, "its config.json cannot be read", text(CONFIG, "{}".encode("utf-16"))),
    ("5000 digits in config.json", IMPORT, "config.json",
     text(CONFIG, '{"model_type": "mixtral", "hidden_size": ' + "9" * 5000 + "}")),
    ("10^30 as a width", IMPORT, "hidden", changed(CONFIG, hidden_size=10**30)),
    ("no number as a width", IMPORT, "config.json", changed(CONFIG, hidden_size=float("nan"))),
    ("a list as a width", IMPORT, "config.json", changed(CONFIG, hidden_size=[48])),
    ("a negative number of layers", IMPORT, "layers", changed(CONFIG, num_hidden_layers=-2)),
    ("10^9 layers", IMPORT, "layers", changed(CONFIG, num_hidden_layers=10**9)),
    ("a theta of text", IMPORT, "config.json", changed(CONFIG, rope_parameters={"rope_type": "default", "rope_theta": "x"})),
    ("code of its own", IMPORT, "has a model of type 'evil'",
     both(changed(CONFIG, model_type="evil", auto_map={"AutoConfig": "evil.Evil"}), text("hub/evil.py", CODE))),
    ("a type for the terminal", IMPORT, "has a model of type", changed(CONFIG, model_type="\x1b[2J")),
    ("a mapping as a type", IMPORT, "has a model of type", changed(CONFIG, model_type={"a": 1})),
    ("tensors outside", IMPORT, QUERY, placed(at="../outside.safetensors")),
    ("tensors at an absolute path", IMPORT, QUERY, placed(at="/etc/passwd")),
    ("tensors at no path", IMPORT, QUERY, placed(at=7)),
    ("depth in the index", IMPORT, "index.json cannot be read", both(_all, text(INDEX, deep()))),
    ("an index that is a pipe", IMPORT, "index.json", both(_all, fifo(INDEX))),
    ("a list in the index", IMPORT, "has no weight_map", both(_all, text(INDEX, '{"weight_map": []}'))),
    ("a name of tensors outside", IMPORT, "no name of a file", changed(CONFIG, transformers_weights="../outside.safetensors")),
    ("depth in how it generates", IMPORT, "generation_config.json cannot be read", text(GENERATION, deep())),
    ("how it generates, as a pipe", IMPORT, "generation_config.json", fifo(GENERATION)),
    ("a million ways to generate", IMPORT, "export.generation",
     text(GENERATION, json.dumps({f"key {number}": number for number in range(10**6)}))),
    ("a header of 2^63 bytes", IMPORT, "its model.safetensors cannot be read", header(length=2**63)),
    ("a header of 0 bytes", IMPORT, "its model.safetensors cannot be read", header(length=0)),
    ("a header beyond the file", IMPORT, "its model.safetensors cannot be read", header(length=10**7)),
    ("tensors that overlap", IMPORT, "its model.safetensors cannot be read", _offsets(0, 18432)),
    ("tensors beyond the file", IMPORT, "its model.safetensors cannot be read", _offsets(10**15, 10**15 + 18432)),
    ("negative places", IMPORT, "its model.safetensors cannot be read", _offsets(-18432, 0)),
    ("a negative shape", IMPORT, "its model.safetensors cannot be read",
     header(lambda told: told[QUERY].update(shape=[-48, 48]))),
    ("a shape of 2^63", IMPORT, "its model.safetensors cannot be read",
     header(lambda told: told[QUERY].update(shape=[2**63, 2**63]))),
    ("another type", IMPORT, "its model.safetensors cannot be read", header(lambda told: told[QUERY].update(dtype="I8"))),
    ("an unknown type", IMPORT, "its model.safetensors cannot be read", header(lambda told: told[QUERY].update(dtype="EVIL"))),
    ("cut tensors", IMPORT, "its model.safetensors cannot be read", cut(WEIGHTS, 5000)),
    ("tensors of 5 bytes", IMPORT, "its model.safetensors cannot be read", cut(WEIGHTS, 5)),
    ("tensors that are a pipe", IMPORT, "model.safetensors", fifo(WEIGHTS)),
    ("tensors that are a socket", IMPORT, "model.safetensors", listening(WEIGHTS)),
    ("tensors that are a folder", IMPORT, "model.safetensors", folder(WEIGHTS)),
    ("tensors that are a device", IMPORT, "model.safetensors", linked(WEIGHTS, "/dev/zero")),
    ("a name for the terminal", IMPORT, "has the tensor", header(lambda told: told.update({"\x1b[2J\n": told.pop(QUERY)}))),
    ("a pickle for tensors", IMPORT, "has none",
     both(lambda place: (place / WEIGHTS).unlink(),
          text("hub/pytorch_model.bin", b"cos\nsystem\n(S'" + TOUCH.encode() + b"'\ntR."))),
    ("a recipe over a link to nowhere", IMPORT, "exists already", linked("new.yaml", "nowhere")),
    ("an unknown quantization", IMPORT, "config.json", changed(CONFIG, quantization_config={"quant_method": ["evil"]})),
    ("a quantization of text", IMPORT, "config.json", changed(CONFIG, quantization_config="evil")),
    ("blocks of 0", IMPORT, "config.json",
     changed(CONFIG, quantization_config={"quant_method": "fp8", "weight_block_size": [0, 0]})),
    ("weights outside, to train from", "train recipe.yaml data.tokenizer=byte training.weights=hub", QUERY,
     placed(at="../outside.safetensors")),
]  # fmt: skip
_TOKENIZERS = [
    ("code of its own", TRAIN, "data.tokenizer=tokenizer",
     both(changed("tokenizer/tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.Evil", None]}, tokenizer_class="Evil"),
          text("tokenizer/evil.py", CODE), text("tokenizer/config.json",
          '{"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil"}}'))),
    ("depth", TRAIN, "data.tokenizer=tokenizer", text("tokenizer/tokenizer.json", deep())),
    ("half a tokenizer", TRAIN, "holds no Hugging Face tokenizer that can be loaded", cut("tokenizer/tokenizer.json", 300)),
    ("a pipe", TRAIN, "data.tokenizer=tokenizer", fifo("tokenizer/tokenizer.json")),
    ("a device", TRAIN, "data.tokenizer=tokenizer", linked("tokenizer/tokenizer.json", "/dev/zero")),
    ("a folder", TRAIN, "data.tokenizer=tokenizer", both(folder("tokenizer/tokenizer.json"))),
    ("6 GiB", TRAIN, "data.tokenizer=tokenizer", hole("tokenizer/tokenizer.json", LARGE, b"{")),
    ("6 GiB of settings", TRAIN, "data.tokenizer=tokenizer", hole("tokenizer/tokenizer_config.json", LARGE, b"{")),
    ("another version", TRAIN, "data.tokenizer=tokenizer", _inner(version="9.9")),
    ("an unknown kind of model", TRAIN, "data.tokenizer=tokenizer", _inner(model={"type": "Evil"})),
    ("merges of unknown tokens", TRAIN, "data.tokenizer=tokenizer",
     _inner(model={"type": "BPE", "vocab": {"a": 0}, "merges": [["evil", "tokens"]]})),
    ("an id of 2^32 - 1", TRAIN, "must be at least 4294967296", _inner(
        added_tokens=[{"id": 2**32 - 1, "content": "<s>", "single_word": False, "lstrip": False, "rstrip": False,
                       "normalized": False, "special": True}],
        model={"type": "BPE", "vocab": {"a": 0, "<s>": 2**32 - 1}, "merges": []})),
    ("a negative id", TRAIN, "data.tokenizer=tokenizer", _inner(model={"type": "BPE", "vocab": {"a": -1}, "merges": []})),
    ("a pattern without an end", TRAIN, "data.tokenizer=tokenizer",
     _inner(pre_tokenizer={"type": "Split", "pattern": {"Regex": "((("}, "behavior": "Isolated", "invert": False})),
    ("a class that is a path", TRAIN, "data.tokenizer=tokenizer",
     both(changed("tokenizer/tokenizer_config.json", tokenizer_class="../../evil"),
          lambda place: (place / "tokenizer/tokenizer.json").unlink(),
          text("tokenizer/vocab.txt", "a\n"))),
    ("settings of wrong types", TRAIN, "data.tokenizer=tokenizer", text("tokenizer/tokenizer_config.json", "[1, 2]")),
    ("special tokens of wrong types", TRAIN, "data.tokenizer=tokenizer",
     changed("tokenizer/tokenizer_config.json", bos_token=[1])),
    ("a pickle", TRAIN, "data.tokenizer=tokenizer",
     both(lambda place: [path.unlink() for path in (place / "tokenizer").iterdir()],
          text("tokenizer/vocab.pkl", b"cos\nsystem\n(S'" + TOUCH.encode() + b"'\ntR."), text("tokenizer/tokenizer.model",
          b"garbage"))),
    ("a name on a hub", "train recipe.yaml data.tokenizer=evil/tokenizer", 'must be "byte" or a folder'),
    ("a folder elsewhere", "train recipe.yaml data.tokenizer=../place/texts", "holds no Hugging Face tokenizer"),
]  # fmt: skip
_TEMPLATES = [
    ("Python's internals", CHAT, "has a chat template that fails", template("{{ ''.__class__.__mro__[1].__subclasses__() }}")),
    ("Python's internals by a filter", CHAT, "has a chat template that fails",
     template("{{ (messages | attr('__class__')).__mro__ }}")),
    ("a call of the system", CHAT, "has a chat template that fails",
     template("{{ cycler.__init__.__globals__.os.system('" + TOUCH + "') }}")),
    ("a file that it includes", CHAT, "has a chat template that fails", template("{% include '/etc/passwd' %}")),
    ("10^9 turns", CHAT, "has a chat template that fails", template("{% for i in range(10**9) %}x{% endfor %}")),
    ("10^15 turns of turns", CHAT, "has a chat template that",
     template("{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3)),
    ("a text of 10^12 characters", CHAT, "has a chat template that fails", template("{{ 'x' * 10**12 }}")),
    ("an endless recursion", CHAT, "has a chat template that fails", template("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}")),
    ("a message for the terminal", CHAT, "has a chat template that fails", template("{{ raise_exception('\x1b[2J\n\nx') }}")),
    ("half a template", CHAT, "has a chat template that fails", template("{% for m in messages %}")),
    ("changes of the messages", CHAT, "has a chat template that fails", template("{{ messages.append(1) }}")),
    ("a template of a number", CHAT, "data.tokenizer=tokenizer",
     both(lambda place: (place / "tokenizer/chat_template.jinja").unlink(),
          changed("tokenizer/tokenizer_config.json", chat_template=5))),
    ("a template that is a pipe", CHAT, "data.tokenizer=tokenizer", fifo("tokenizer/chat_template.jinja")),
]  # fmt: skip
_DATA = [
    ("a text as messages", CHAT, "is not a list of messages but str", chats('{"messages": "hello"}\n')),
    ("numbers as messages", CHAT, "is not an object but int", chats('{"messages": [1, 2]}\n')),
    ("a number as a role", CHAT, "has the role 7", chats('{"messages": [{"role": 7, "content": "x"}]}\n')),
    ("a role for the terminal", CHAT, "has the role", chats(r'{"messages": [{"role": "\u001b[2J", "content": "x"}]}' + "\n")),
    ("a list as a role", CHAT, "has the role", chats('{"messages": [{"role": ["user"], "content": "x"}]}\n')),
    ("a list as content", CHAT, 'has no text as "content" but list', chats('{"messages": [{"role": "user", "content": [1]}]}\n')),
    ("depth", CHAT, "is not JSON", chats('{"messages": ' + deep() + "\n")),
    ("depth in a message", CHAT, "message 1",
     chats('{"messages": [{"role": "user", "content": "x", "y": ' + "[" * 900 + "]" * 900 + "}]}\n")),
    ("5000 digits", CHAT, "is not a list of messages but Decimal", chats('{"messages": ' + "9" * 5000 + "}\n")),
    ("half a line", CHAT, "is not JSON", chats('{"messages": [{"role": "us')),
    ("zero bytes", CHAT, "is not JSON", chats(b"\0" * 1000 + b"\n")),
    ("a line of 6 GiB", CHAT, "line 1", both(*(hole(f"chats/{name}.jsonl") for name in "abcd"))),
    ("Parquet that is none", "train chat.yaml data.path=chats/*.parquet", "is not Parquet",
     both(text("chats/a.parquet", b"PAR1" + b"\0" * 100), text("chats/b.parquet", b"PAR1xxxxPAR1"))),
    ("a compressed file", "train recipe.yaml data.source=jsonl data.path=texts/*.gz", "file that is cut or damaged",
     both(*(text(f"texts/{name}.gz", b"\x1f\x8b\x08" + b"\0" * 100) for name in "ab"))),
    ("a pipe as text", "train recipe.yaml data.path=pipe", "matches no file", fifo("pipe")),
    ("a binary file", "train recipe.yaml", "is not UTF-8 text but binary",
     both(*(text(f"texts/{name}", b"\0\1\2") for name in "abcd"))),
    ("a pattern of a folder", "train recipe.yaml data.path=/", "is a folder"),
    ("a pattern for the terminal", "train recipe.yaml 'data.path=\"\\e[2J*\"'", "data.path"),
]  # fmt: skip
ROWS = [
    *(Row("models of transformers", *row) for row in _HUB),
    *(Row("tokenizers", *row) for row in _TOKENIZERS),
    *(Row("chat templates", *row) for row in _TEMPLATES),
    *(Row("data", *row) for row in _DATA),
]
