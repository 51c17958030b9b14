"""Answers in the chat template of a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from foldray.cli import main
from foldray.errors import UserError
from tests.trainers.data.chats import CHATS, chat, make_tokenizer
from tests.trainers.hugging_face.test_export import make_run
from trainers.inference.model import Model

BROUGHT = 31  # an end that the model had before its training


@pytest.fixture
def step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The checkpoint of an untrained model of conversations, which computes on the CPU."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    make_run(tmp_path / "run")
    file = tmp_path / "run" / "recipe.yaml"
    recipe = yaml.safe_load(file.read_text())
    recipe["data"].update(source="conversations", path="a.jsonl", tokenizer=str(make_tokenizer(tmp_path / "tokenizer")))
    recipe["export"] = {"generation": {"eos_token_id": [BROUGHT], "top_p": 0.9}}
    file.write_text(yaml.safe_dump(recipe))
    return str(tmp_path / "run" / "step_00000003")


def test_an_answer_continues_the_template(step: str) -> None:
    model, told = Model.load(step), list[str]()
    prompt = model.tokenizer.inner.apply_chat_template(  # type: ignore[attr-defined]
        CHATS["system"], add_generation_prompt=True, return_dict=False
    )
    found = model.chat(CHATS["system"], 12, seed=6, told=told.append)
    assert found == model.generate(prompt, 12, seed=6)
    assert "".join(told) == found.text


@pytest.mark.parametrize("end", ["</s>", "<s>", "<|im_end|>", BROUGHT])
def test_an_answer_ends_with_every_end(step: str, monkeypatch: pytest.MonkeyPatch, end: Any) -> None:
    model = Model.load(step)
    ids = iter([104, end if end == BROUGHT else model.tokenizer.inner.convert_tokens_to_ids(end), 105])  # type: ignore[attr-defined]
    assert model.tokenizer.eos != model.tokenizer.separator
    monkeypatch.setattr("trainers.inference.sampling.Sampler.draw", lambda *_: next(ids))
    found = model.chat(chat("Hello"), 3)
    assert (found.tokens, found.stopped) == ([104], "separator")


def test_a_text_ends_with_what_the_model_had_but_not_with_eos(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model.load(step)
    for end, tokens in ((model.tokenizer.eos, 3), (BROUGHT, 0)):
        monkeypatch.setattr("trainers.inference.sampling.Sampler.draw", lambda *_, end=end: end)
        assert len(model.generate("Hello", 3).tokens) == tokens


BAD: list[tuple[Any, str]] = [
    ([], "messages=0: is not a list of messages but an empty list in the conversation"),
    ("hello", "messages=5: message 1 in the conversation is not an object but str"),
    ([{"role": "human", "content": "a"}], "messages=1: message 1 in the conversation has the role 'human'; legal: system"),
]


@pytest.mark.parametrize(("messages", "line"), BAD, ids=str)
def test_what_is_no_conversation_is_refused(step: str, messages: Any, line: str) -> None:
    with pytest.raises(UserError) as caught:
        Model.load(step).chat(messages)
    assert str(caught.value).startswith(line)


def test_the_command(step: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--tokens", "8", "--seed", "4", "--chat"]
    expected = Model.load(step).chat(chat("Hello", system="Be brief."), 8, seed=4)
    assert main(["generate", step, "--prompt", "Hello", "--system", "Be brief.", *options]) == 0
    assert capsys.readouterr().out == expected.text.rstrip("\n") + "\n"
    assert main(["generate", step, "--prompt", "Hello", "--json", *options]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["text"] == Model.load(step).chat(chat("Hello"), 8, seed=4).text != expected.text


def test_a_message_of_the_system_needs_a_chat(step: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", step, "--prompt", "Hello", "--system", "Be brief."]) == 2
    assert capsys.readouterr().err.strip() == "foldray: system=Be brief.: is a message of a conversation, so it needs --chat"


def test_bytes_have_no_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    make_run(tmp_path / "run")
    assert main(["generate", str(tmp_path / "run" / "step_00000003"), "--prompt", "Hello", "--chat"]) == 2
    assert "data.tokenizer=byte: has no chat template" in capsys.readouterr().err


def test_an_exported_model_ends_with_every_end_in_transformers(
    step: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    assert main(["export-hf", step, str(tmp_path / "exported")]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", "</s>"])
    assert (model.generation_config.eos_token_id, model.generation_config.top_p) == ([BROUGHT, *ends], 0.9)
    assert (model.config.bos_token_id, model.config.eos_token_id) == (Model.load(step).tokenizer.separator, [BROUGHT, *ends])
    given = tokenizer.apply_chat_template(CHATS["system"], add_generation_prompt=True, return_tensors="pt")
    theirs = model.generate(**given, max_new_tokens=8, do_sample=False)[0, given["input_ids"].shape[1] :].tolist()
    ours = Model.load(step).chat(CHATS["system"], 8, temperature=0)
    assert theirs[: len(ours.tokens)] == ours.tokens
