"""Text to token ids, and how many bytes of the text each token stands for."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from foldray.errors import MissingPackage, UserError

# A tokenizer's folder may also hold a model's weights; only these decide what text becomes.
_DEFINING = {".json", ".txt", ".model", ".tiktoken", ".jinja"}


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
    folder = Path(name).expanduser().absolute()
    if not folder.is_dir():
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
    """A Hugging Face tokenizer. Text that reads like a special token is ordinary text to it.

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
        return np.asarray(self._call(text)["input_ids"], np.uint32)

    def measure(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        if not self._inner.is_fast:
            ids = self.encode(text)
            return ids, _spread(len(text.encode()), len(ids))
        out = self._call(text, return_offsets_mapping=True)
        return np.asarray(out["input_ids"], np.uint32), _bytes_of_offsets(text, out["offset_mapping"])

    def _call(self, text: str, **options: Any) -> Any:
        # verbose=False: documents are longer than a model's context, and are cut later.
        return self._inner(text, add_special_tokens=False, split_special_tokens=True, verbose=False, **options)


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
    ends[-1] = len(utf8)
    return np.diff(ends, prepend=0).astype(np.uint32)


def _spread(total: int, count: int) -> np.ndarray:
    """`total` bytes over `count` tokens, as evenly as integers allow, uint32 [count]."""
    return np.diff(np.arange(count + 1) * total // max(count, 1)).astype(np.uint32)


def _from_folder(name: str, folder: Path) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise MissingPackage("data.tokenizer", name, "transformers", "pip install transformers") from None
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # transformers promises no type: OSError, ValueError, JSONDecodeError, KeyError were seen
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise UserError("data.tokenizer", name, f"holds no Hugging Face tokenizer that can be loaded ({reason})") from None


def _content_hash(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if path.suffix in _DEFINING and path.is_file()):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()
