"""The tokenizer's files of an exported model, and the tokens that its configuration names."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foldray.errors import UserError
from foldray.recipe import Recipe
from trainers.data.chat import Chat
from trainers.data.tokenizers import DEFINING, ByteTokenizer, FolderTokenizer, Tokenizer, load_tokenizer

_SEPARATOR = "<|document|>"
_OF_MODELS = ("config.json", "generation_config.json")  # files beside a tokenizer that describe its model


def write_tokenizer(name: str, folder: Path) -> Tokenizer:
    """Write the files of a recipe's tokenizer (`data.tokenizer`), and return the tokenizer."""
    tokenizer = load_tokenizer(name)
    if isinstance(tokenizer, ByteTokenizer):
        (folder / "tokenizer.json").write_text(json.dumps(_bytes(tokenizer.separator)))
        roles = {"bos_token": _SEPARATOR, "eos_token": _SEPARATOR}
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **roles, "clean_up_tokenization_spaces": False}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        return tokenizer
    try:
        for path in sorted(Path(os.path.expanduser(name)).iterdir()):
            describes_model = path.name in _OF_MODELS or path.name.endswith(".index.json")
            if path.suffix in DEFINING and path.is_file() and not describes_model:
                shutil.copyfile(path, folder / path.name)
    except OSError as error:
        raise UserError("data.tokenizer", name, f"cannot be copied ({error.strerror or error})") from None
    return tokenizer


def roles(recipe: Recipe, tokenizer: Tokenizer) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the tokens with a role in `config.json`, and all of `generation_config.json`.

    What the model came with stays as it was. Generation ends with those ends, and with those that training has taught.
    """
    kept, ends = recipe.export, _plain(_ends(recipe, tokenizer))
    pad = tokenizer.inner.pad_token_id if isinstance(tokenizer, FolderTokenizer) else None
    tokens = {"bos_token_id": tokenizer.separator, "eos_token_id": ends, "pad_token_id": pad}
    if kept.tokens is not None:
        tokens = {f"{role}_token_id": _plain(ids) if role == "eos" else ids for role, ids in kept.tokens}
    return tokens, {**(kept.generation or tokens), "eos_token_id": ends}


def _ends(recipe: Recipe, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens that end what a model writes, each once: first those that it came with."""
    ends = [*recipe.export.ends]
    sources = {part.source for part in recipe.data.parts.values()}
    if "conversations" in sources:
        ends += Chat(tokenizer).ends
    if sources - {"conversations"}:
        ends.append(tokenizer.separator)  # a text ends where the next one would begin
    return list(dict.fromkeys(ends))


def _plain(ids: Sequence[int]) -> Any:
    """Return ids as `config.json` has them: one alone, or a list."""
    return list(ids) if len(ids) > 1 else next(iter(ids), None)


def _bytes(separator: int) -> dict[str, Any]:
    """Return the document of a tokenizer without merges: every byte of UTF-8 is a token with its own value."""
    special = {"id": _SEPARATOR, "ids": [separator], "tokens": [_SEPARATOR]}
    first, text = {"SpecialToken": {"id": _SEPARATOR, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    second = {"Sequence": {"id": "B", "type_id": 0}}
    no_rules = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    no_parts = dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"))
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": separator, "content": _SEPARATOR, **no_rules, "special": True}],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [first, text],
            "pair": [first, text, first, second],
            "special_tokens": {_SEPARATOR: special},
        },
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            **no_parts,
            **dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False),
            "vocab": {character: byte for byte, character in enumerate(_characters())},
            "merges": [],
        },
    }


def _characters() -> list[str]:
    """Return the character that stands for each byte in byte-level tokenizers (GPT-2): itself, or one behind 255."""
    own = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte if byte in own else next(others)) for byte in range(256)]
