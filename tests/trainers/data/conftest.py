from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainers.data.chats import make_tokenizer


@pytest.fixture
def tokenizer_folder(tmp_path: Path) -> Path:
    return make_tokenizer(tmp_path / "tokenizer", None, eos_token=None)
