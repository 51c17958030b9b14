from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

CORPUS = ["def f(x):\n    return x + 1\n", "漢字 and é\n", "a b c <s> def return"]


@pytest.fixture
def make_tokenizer(tmp_path: Path) -> Callable[..., Path]:
    """A function that writes a byte-level BPE tokenizer of 300 tokens in Hugging Face's format, and returns its folder."""

    def make(bos_token: str | None = "<s>") -> Path:
        tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
        inner = tokenizers.Tokenizer(tokenizers.models.BPE())
        inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = tokenizers.decoders.ByteLevel()
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>"], initial_alphabet=alphabet)
        inner.train_from_iterator(CORPUS * 4, trainer)
        folder = tmp_path / "tokenizer"
        transformers.PreTrainedTokenizerFast(tokenizer_object=inner, bos_token=bos_token).save_pretrained(folder)
        return folder

    return make


@pytest.fixture
def tokenizer_folder(make_tokenizer: Callable[..., Path]) -> Path:
    return make_tokenizer()
