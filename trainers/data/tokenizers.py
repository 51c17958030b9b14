"""Tokenizers: turn text into token ids, and count the bytes of text that each token stands for."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from foldray.errors import MissingPackage, UserError

# Characters per piece. Tokenizers need about 250 bytes of memory per character, and a text file is one document.
_PIECE = 1 << 20
# A tokenizer's folder may also hold a model's weights. Only files with these endings define the tokens.
DEFINING = {".json", ".txt", ".model", ".tiktoken", ".jinja"}
_MOST_BYTES = 1 << 28  # of such a file; the largest in use have a tenth of it
# A text that every tokenizer cuts in its own way: spaces, scripts, digits, accents, an emoji, code.
_SAMPLE = "Hello world,  it's 3.14 and x_1 = (a+b);\n\tdef f(x):\n        return not x\n\nNaïve café, größer ✓ 日本 привет 🎉 end"
_SIGNS = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")  # every tokenizer's folder has at least one of these files


class Tokenizer(Protocol):
    """The interface of tokenizers. Instances are pickled and sent to the workers."""

    vocab_size: int
    """Smallest number that is larger than every id."""
    separator: int
    """Id in front of each document."""
    eos: int | None
    """Id that ends an answer, if the tokenizer has one (Hugging Face's eos token)."""
    fingerprint: str
    """Two tokenizers have the same fingerprint only if they make the same tokens of every text. Files that change no tokens do
    not change it."""

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of a text, unsigned integers [n], without separators."""
        ...

    def measure(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Return `encode(text)`, and the number of UTF-8 bytes that each of its n ids stands for.

        If n > 0, the numbers sum to the bytes of the text.
        """
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids. A separator has none. Bytes that are not UTF-8, such as half a character, become U+FFFD."""
        ...


def load_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer "byte", or the Hugging Face tokenizer in a local folder."""
    if name == "byte":
        return ByteTokenizer()
    folder = _folder_of(name)
    if not os.path.isdir(folder):  # unlike Path.is_dir, this accepts names that are too long
        rule = 'must be "byte" or a folder with a Hugging Face tokenizer; this folder does not exist'
        raise UserError("data.tokenizer", name, rule)
    inner = _from_folder(name, folder)
    return FolderTokenizer(name, inner, _fingerprint(inner) if inner.is_fast else content_of(name))


def _folder_of(name: str) -> Path:
    return Path(os.path.expanduser(name)).absolute()


class ByteTokenizer:
    """A tokenizer whose ids 0…255 are UTF-8 bytes. Its separator is 256."""

    vocab_size = 257
    separator = 256
    eos: int | None = None
    fingerprint = "byte"

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8).astype(np.uint16)

    def measure(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        ids = self.encode(text)
        return ids, np.ones(len(ids), np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(index for index in ids if index < self.separator).decode(errors="replace")


class FolderTokenizer:
    """A Hugging Face tokenizer. It treats special tokens in a text as ordinary text, and takes long text in pieces.

    Args:
        name: the folder's name in the recipe, for errors.
        inner: the tokenizer of `transformers`.
        fingerprint: hash of what makes tokens.
    """

    def __init__(self, name: str, inner: Any, fingerprint: str):
        separator = inner.bos_token_id if inner.bos_token_id is not None else inner.eos_token_id
        if separator is None:
            raise UserError("data.tokenizer", name, "has neither a bos nor an eos token to separate documents with")
        # Ids may have gaps, so the largest id may exceed the number of tokens.
        self.vocab_size = max(len(inner), separator + 1, *(index + 1 for index in inner.get_vocab().values()))
        self.name, self.inner, self.fingerprint = name, inner, fingerprint
        self.separator, self.eos = int(separator), inner.eos_token_id

    def encode(self, text: str) -> np.ndarray:
        return np.concatenate([np.asarray(self._call(piece)["input_ids"], np.uint32) for piece in _pieces(text)])

    def measure(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        if not self.inner.is_fast:
            ids = self.encode(text)
            return ids, _spread(len(text.encode()), len(ids))
        ids, sizes = map(np.concatenate, zip(*map(self._measure_piece, _pieces(text)), strict=True))
        if len(sizes):
            sizes[-1] += len(text.encode()) - sizes.sum()  # text after the last token, and text that became no token
        return ids, sizes

    def decode(self, ids: Sequence[int]) -> str:
        return self.inner.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _measure_piece(self, piece: str) -> tuple[np.ndarray, np.ndarray]:
        out = self._call(piece, return_offsets_mapping=True)
        return np.asarray(out["input_ids"], np.uint32), _bytes_of_offsets(piece, out["offset_mapping"])

    def _call(self, text: str, **options: Any) -> Any:
        # verbose=False, because transformers would warn about documents that are longer than a model's context.
        return self.inner(text, add_special_tokens=False, split_special_tokens=True, verbose=False, **options)


def _pieces(text: str) -> Iterator[str]:
    """Yield a text in pieces of at most _PIECE characters. A piece ends at the end of a line, if it has one."""
    start = 0
    while len(text) - start > _PIECE:
        # Without a line end, rfind returns -1. Then the sum is 0, and the piece gets its full length.
        stop = text.rfind("\n", start, start + _PIECE) + 1 or start + _PIECE
        yield text[start:stop]
        start = stop
    yield text[start:]


def _bytes_of_offsets(text: str, offsets: list[tuple[int, int]]) -> np.ndarray:
    """Return the bytes of n tokens from their character spans, uint32 [n].

    A token stands for the text between the end of the earlier tokens and its own end. So text that the tokenizer skips, such
    as spaces, counts for the next token. A character that became several tokens counts for the first one.
    """
    if not offsets:
        return np.zeros(0, np.uint32)
    utf8 = np.frombuffer(text.encode(), np.uint8)
    at_character = np.append(np.flatnonzero(utf8 & 0xC0 != 0x80), len(utf8))
    ends = at_character[np.maximum.accumulate(np.asarray(offsets)[:, 1])]
    return np.diff(ends, prepend=0).astype(np.uint32)


def _spread(total: int, count: int) -> np.ndarray:
    """Spread `total` bytes over `count` tokens, as evenly as integers allow, uint32 [count]."""
    return np.diff(np.arange(count + 1) * total // max(count, 1)).astype(np.uint32)


def _from_folder(name: str, folder: Path) -> Any:
    try:
        import transformers
        from transformers import AutoTokenizer
        from transformers.utils import logging
    except ImportError:
        raise MissingPackage("data.tokenizer", name, "transformers", "pip install transformers") from None
    if not any(path for sign in _SIGNS for path in folder.glob(sign)):
        raise UserError("data.tokenizer", name, "holds no Hugging Face tokenizer; it lacks tokenizer.json or a similar file")
    _check_files(name, folder)
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # transformers would warn of other mistakes than the one that it then raises
    try:
        # Without trust_remote_code=False, transformers would ask on the terminal whether to run code in the folder.
        inner = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        ours, theirs = _sampled(folder / "tokenizer.json", inner)
    except Exception as error:  # transformers documents no type; it raises OSError, ValueError, JSONDecodeError, KeyError
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise UserError("data.tokenizer", name, f"holds no Hugging Face tokenizer that can be loaded ({reason})") from None
    finally:
        logging.set_verbosity(verbosity)
    if ours != theirs:
        rule = f"has a tokenizer.json of which transformers {transformers.__version__} makes a {type(inner).__name__} with other"
        remedy = "set tokenizer_class to PreTrainedTokenizerFast in its tokenizer_config.json, or install another version"
        raise UserError("data.tokenizer", name, f"{rule} tokens; {remedy}")
    return inner


def _sampled(file: Path, inner: Any) -> tuple[list[int], list[int]]:
    """Return the last tokens of a text by the file of a fast tokenizer, and by what transformers makes of its folder.

    They differ if transformers goes by a class that `tokenizer_config.json` names wrongly, and not by the file. Some versions
    lose the spaces of a text in this way.
    """
    from tokenizers import Tokenizer

    if not inner.is_fast or not file.is_file():
        return [], []
    plain = Tokenizer.from_file(str(file))
    plain.no_truncation()
    plain.no_padding()
    theirs = inner(_SAMPLE, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
    ours = plain.encode(_SAMPLE, add_special_tokens=False).ids
    rest = len(ours) // 2  # the first word may have a space in front, by a setting of either
    return ours[-rest:], theirs[-rest:]


def _check_files(name: str, folder: Path) -> None:
    """Refuse files that transformers might never have read: pipes, devices, and files of more than `_MOST_BYTES`."""
    for path in sorted(folder.iterdir()):
        if path.suffix not in DEFINING or not path.exists():
            continue
        if not path.is_file():
            raise UserError("data.tokenizer", name, f"cannot be read: {path.name} is not a regular file")
        if path.stat().st_size > _MOST_BYTES:
            raise UserError("data.tokenizer", name, f"cannot be read: {path.name} is larger than {_MOST_BYTES >> 20} MiB")


def _fingerprint(inner: Any) -> str:
    """Return a hash of a fast tokenizer as it was loaded, with the tokens between documents and behind answers."""
    parts = inner.backend_tokenizer.to_str(), inner.bos_token_id, inner.eos_token_id
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def content_of(name: str) -> str:
    """Return a hash of all files of a tokenizer, also of those that only chats need."""
    digest = hashlib.sha256()
    for path in sorted(path for path in _folder_of(name).iterdir() if path.suffix in DEFINING and path.is_file()):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()
