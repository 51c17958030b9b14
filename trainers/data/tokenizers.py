"""Text to token ids, and how many bytes of the text each token stands for."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from foldray.errors import MissingPackage, UserError

# Tokenizers take some 250 bytes of memory per character, and a text file is one document, however long.
_PIECE = 1 << 20
# A tokenizer's folder may also hold a model's weights; only these decide what text becomes.
_DEFINING = {".json", ".txt", ".model", ".tiktoken", ".jinja"}
_SIGNS = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")  # one of these is in every tokenizer's folder


class Tokenizer(Protocol):
    """What the packing needs of a tokenizer; instances travel to the workers by pickle."""

    vocab_size: int
    """Smallest number that every id is below."""
    separator: int
    """Id put in front of each document."""
    fingerprint: str
    """Equal for two tokenizers only if they agree on every text."""

    def encode(self, text: str) -> np.ndarray:
        """Ids of a text, unsigned integers [n], without separators."""
        ...

    def measure(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """`encode(text)` and, for each of its n ids, the UTF-8 bytes it stands for; these sum to the text's (if n > 0)."""
        ...


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer "byte", or the Hugging Face tokenizer in a local folder.

    Raises:
        UserError: the folder is missing, holds no tokenizer, or its tokenizer has nothing that can separate documents.
        MissingPackage: a folder was named and `transformers` is not installed.
    """
    if name == "byte":
        return ByteTokenizer()
    folder = Path(os.path.expanduser(name)).absolute()
    if not os.path.isdir(folder):  # unlike Path's, it takes names that no folder could have
        rule = 'must be "byte" or a folder with a Hugging Face tokenizer; there is no such folder'
        raise UserError("data.tokenizer", name, rule)
    return FolderTokenizer(name, _from_folder(name, folder), _content_hash(folder))


class ByteTokenizer:
    """Ids 0…255 are UTF-8 bytes, 256 stands in front of a document."""

    vocab_size = 257
    separator = 256
    fingerprint = "byte"

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8).astype(np.uint16)

    def measure(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        ids = self.encode(text)
        return ids, np.ones(len(ids), np.uint32)


class FolderTokenizer:
    """A Hugging Face tokenizer. Text that reads like a special token is ordinary text to it; long text is taken in pieces.

    Args:
        name: the folder as the recipe gives it, for messages.
        inner: what `transformers.AutoTokenizer` made of the folder.
        fingerprint: hash of the folder's content.
    """

    def __init__(self, name: str, inner: Any, fingerprint: str):
        separator = inner.bos_token_id if inner.bos_token_id is not None else inner.eos_token_id
        if separator is None:
            raise UserError("data.tokenizer", name, "has neither a bos nor an eos token to separate documents with")
        # Ids may have gaps, so that the largest one can exceed the number of tokens.
        self.vocab_size = max(len(inner), separator + 1, *(index + 1 for index in inner.get_vocab().values()))
        self.separator, self.fingerprint, self._inner = int(separator), fingerprint, inner

    def encode(self, text: str) -> np.ndarray:
        return np.concatenate([np.asarray(self._call(piece)["input_ids"], np.uint32) for piece in _pieces(text)])

    def measure(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        if not self._inner.is_fast:
            ids = self.encode(text)
            return ids, _spread(len(text.encode()), len(ids))
        ids, sizes = map(np.concatenate, zip(*map(self._measure_piece, _pieces(text)), strict=True))
        if len(sizes):
            sizes[-1] += len(text.encode()) - sizes.sum()  # what comes after the last token, or became none
        return ids, sizes

    def _measure_piece(self, piece: str) -> tuple[np.ndarray, np.ndarray]:
        out = self._call(piece, return_offsets_mapping=True)
        return np.asarray(out["input_ids"], np.uint32), _bytes_of_offsets(piece, out["offset_mapping"])

    def _call(self, text: str, **options: Any) -> Any:
        # verbose=False: documents are longer than a model's context, and are cut later.
        return self._inner(text, add_special_tokens=False, split_special_tokens=True, verbose=False, **options)


def _pieces(text: str) -> Iterator[str]:
    """A text in pieces of at most _PIECE characters, cut behind a line where there is one."""
    start = 0
    while len(text) - start > _PIECE:
        # rfind gives -1 where there is no line end, so that 0 means: cut anywhere.
        stop = text.rfind("\n", start, start + _PIECE) + 1 or start + _PIECE
        yield text[start:stop]
        start = stop
    yield text[start:]


def _bytes_of_offsets(text: str, offsets: list[tuple[int, int]]) -> np.ndarray:
    """Bytes of n tokens from their character spans, uint32 [n].

    A token stands for what lies between the end of those before it and its own end. So what the tokenizer passes over (spaces,
    say) goes to the next token, and a character that became several tokens to the first of them; nothing is counted twice.
    """
    if not offsets:
        return np.zeros(0, np.uint32)
    utf8 = np.frombuffer(text.encode(), np.uint8)
    at_character = np.append(np.flatnonzero(utf8 & 0xC0 != 0x80), len(utf8))
    ends = at_character[np.maximum.accumulate(np.asarray(offsets)[:, 1])]
    return np.diff(ends, prepend=0).astype(np.uint32)


def _spread(total: int, count: int) -> np.ndarray:
    """`total` bytes over `count` tokens, as evenly as integers allow, uint32 [count]."""
    return np.diff(np.arange(count + 1) * total // max(count, 1)).astype(np.uint32)


def _from_folder(name: str, folder: Path) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise MissingPackage("data.tokenizer", name, "transformers", "pip install transformers") from None
    if not any(path for sign in _SIGNS for path in folder.glob(sign)):
        raise UserError("data.tokenizer", name, "holds no Hugging Face tokenizer; there is no tokenizer.json or the like in it")
    try:
        # Without a word about code of the folder's own, a terminal would be asked whether to run it.
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers promises no type: OSError, ValueError, JSONDecodeError, KeyError were seen
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise UserError("data.tokenizer", name, f"holds no Hugging Face tokenizer that can be loaded ({reason})") from None


def _content_hash(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if path.suffix in _DEFINING and path.is_file()):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()
