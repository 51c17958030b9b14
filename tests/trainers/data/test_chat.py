"""Chat templates: tokens and masks beside those of transformers, and templates that cannot be used."""

from __future__ import annotations

import json
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foldray.errors import UserError
from tests.trainers.data.chats import (
    CHATML,
    CHATML_TAGGED,
    CHATS,
    INST,
    NARROW_TAGGED,
    PLAIN,
    ROLES,
    TAGGED,
    THINKING,
    chat,
    make_tokenizer,
)
from trainers.data.chat import Chat, covered
from trainers.data.conversations import Reader
from trainers.data.tokenizers import content_of, load_tokenizer


def chat_of(folder: Path, template: str | None = CHATML, **options: Any) -> Chat:
    return Chat(load_tokenizer(str(make_tokenizer(folder, template, **options))))


def theirs(chat: Chat, messages: list[dict[str, Any]], **options: Any) -> dict[str, list[int]]:
    return chat.tokenizer.inner.apply_chat_template(messages, return_dict=True, **options)


@pytest.mark.parametrize("messages", CHATS.values(), ids=CHATS)
@pytest.mark.parametrize("template", TAGGED.values(), ids=TAGGED)
def test_with_tags_tokens_and_mask_are_those_of_transformers(tmp_path: Path, template: str, messages: list[dict]):
    chat = chat_of(tmp_path, template)
    assert chat.has_tags
    expected = theirs(chat, messages, return_assistant_tokens_mask=True)
    ids, trained = chat.encode(messages, "here")
    assert ids.tolist() == expected["input_ids"]
    assert trained.tolist() == list(map(bool, expected["assistant_masks"]))


@pytest.mark.parametrize("messages", CHATS.values(), ids=CHATS)
def test_without_tags_the_mask_is_that_of_the_same_template_with_tags(tmp_path: Path, messages: list[dict]):
    plain, tagged = chat_of(tmp_path / "plain"), chat_of(tmp_path / "tagged", CHATML_TAGGED)
    assert not plain.has_tags
    ids, trained = plain.encode(messages, "here")
    assert ids.tolist() == theirs(plain, messages)["input_ids"]
    assert trained.tolist() == tagged.encode(messages, "here")[1].tolist()


# As many templates do, it looks at the first message, and begins every conversation in the same way.
LOOKS = "{%- if messages[0]['role'] != 'system' -%}{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{%- endif -%}"


@pytest.mark.parametrize("looks", ["", LOOKS])
def test_a_conversation_may_begin_with_the_assistant(tmp_path: Path, looks: str):
    plain, tagged = chat_of(tmp_path / "plain", looks + CHATML), chat_of(tmp_path / "tagged", looks + CHATML_TAGGED)
    says = "Hello! <|im_start|>assistant\n"
    for messages in (chat("", says, "3 plus 4?", "7.")[1:], chat("", says)[1:]):
        ids, trained = plain.encode(messages, "here")
        assert ids.tolist() == theirs(plain, messages)["input_ids"]
        assert trained.tolist() == tagged.encode(messages, "here")[1].tolist()
        written = [f"{each['content']}<|im_end|>\n" for each in messages if each["role"] == "assistant"]
        assert plain.tokenizer.inner.decode(ids[trained]) == "".join(written)


@pytest.mark.parametrize("template", [INST.replace("{{ raise_exception('turns must alternate') }}", ""), CHATML + "?"])
def test_a_first_answer_whose_beginning_nobody_knows_is_refused(tmp_path: Path, template: str):
    with pytest.raises(
        UserError, match=r"puts no generation prompt in front of message 1 of line 7, which is the assistant's, so"
    ):
        chat_of(tmp_path, template).encode(chat("", "Hello!")[1:], "line 7")


@pytest.mark.parametrize("messages", CHATS.values(), ids=CHATS)
def test_without_a_generation_prompt_the_answer_follows_the_question(tmp_path: Path, messages: list[dict]):
    chat = chat_of(tmp_path, INST)
    ids, trained = chat.encode(messages, "here")
    assert ids.tolist() == theirs(chat, messages)["input_ids"]
    written = [f" {each['content'].strip()}</s>" for each in messages if each["role"] == "assistant"]
    assert chat.tokenizer.inner.decode(ids[trained]) == "".join(written)


@pytest.mark.parametrize("template", PLAIN.values(), ids=PLAIN)
def test_what_is_trained_follows_the_prompt_that_generation_begins_with(tmp_path: Path, template: str):
    chat, messages = chat_of(tmp_path, template), CHATS["system"]
    ids, trained = chat.encode(messages, "here")
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = chat.prompt(messages[:number])
            assert prompt == theirs(chat, messages[:number], add_generation_prompt=True)["input_ids"]
            assert ids[: len(prompt)].tolist() == prompt
            assert trained[len(prompt) - 1 :][:2].tolist() == [False, True]


def test_all_tokens(tmp_path: Path):
    chat = chat_of(tmp_path, THINKING)  # who wrote what cannot be told, and need not be
    ids, trained = chat.encode(CHATS["several turns"], "here", masked=False)
    assert ids.tolist() == theirs(chat, CHATS["several turns"])["input_ids"]
    assert trained.tolist() == [True] * len(ids)


def test_a_character_of_several_tokens_is_trained_whole(tmp_path: Path):
    """transformers leaves out all but the first token of the last character."""
    narrow, messages = chat_of(tmp_path, NARROW_TAGGED), chat("What?", "Ja 🎉")
    ids, trained = narrow.encode(messages, "here")
    assert narrow.tokenizer.inner.decode(ids[trained]) == "Ja 🎉"
    few = np.asarray(theirs(narrow, messages, return_assistant_tokens_mask=True)["assistant_masks"], bool)
    assert narrow.tokenizer.inner.decode(ids[few]) != "Ja 🎉"


def test_random_texts(tmp_path: Path):
    draw, alphabet = random.Random(0), "ab 3.\n\t{}%<>|_é漢🎉\u0301\u200d"
    plain, tagged = chat_of(tmp_path / "plain"), chat_of(tmp_path / "tagged", CHATML_TAGGED)
    for _ in range(200):
        messages = chat(*("".join(draw.choices(alphabet, k=draw.randrange(12))) for _ in range(draw.randrange(2, 6))))
        ids, trained = plain.encode(messages, "here")
        assert ids.tolist() == tagged.encode(messages, "here")[0].tolist()
        assert trained.tolist() == tagged.encode(messages, "here")[1].tolist()
        written = [f"{each['content']}<|im_end|>\n" for each in messages if each["role"] == "assistant"]
        assert plain.tokenizer.inner.decode(ids[trained]) == "".join(written)


def test_tokens_that_straddle_an_end_are_the_assistants():
    offsets = [(0, 3), (3, 5), (5, 5), (5, 8), (8, 9)]
    assert covered(offsets, [(4, 6)]).tolist() == [False, True, True, True, False]
    assert covered(offsets, [(0, 1), (8, 9)]).tolist() == [True, False, False, False, True]
    assert covered(offsets, [(3, 3)]).tolist() == [False] * 5
    assert covered([], [(0, 9)]).tolist() == []


def test_it_travels_to_workers(tmp_path: Path):
    chat = pickle.loads(pickle.dumps(chat_of(tmp_path)))
    assert chat.encode(CHATS["unicode"], "here")[1].any()


def test_a_template_in_the_configuration(tmp_path: Path):
    folder = make_tokenizer(tmp_path, None)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": CHATML}))
    assert Chat(load_tokenizer(str(folder))).encode(CHATS["one turn"], "here")[1].any()


def test_the_template_is_part_of_the_content_of_a_folder_alone(tmp_path: Path):
    """Conversations know their tokenizer by the content of its folder, and text by what makes tokens."""
    folders = [str(make_tokenizer(tmp_path / "one")), str(make_tokenizer(tmp_path / "two", INST))]
    assert len({load_tokenizer(folder).fingerprint for folder in folders}) == 1
    assert len(set(map(content_of, folders))) == 2


def test_no_template(tmp_path: Path):
    with pytest.raises(UserError, match=r"^data.tokenizer=byte: has no chat template"):
        Chat(load_tokenizer("byte"))
    with pytest.raises(UserError, match=r"^data.tokenizer=.*: has no chat template; it needs one in tokenizer_config.json"):
        chat_of(tmp_path, None)


def test_a_template_that_does_not_show_who_wrote_what(tmp_path: Path):
    chat = chat_of(tmp_path, THINKING)
    assert chat.encode(CHATS["one turn"], "here")[1].any()
    with pytest.raises(
        UserError, match=r"shows message 2 of line 7 differently when other messages follow.*generation"
    ) as caught:
        chat.encode(CHATS["several turns"], "line 7")
    assert "\n" not in str(caught.value)


def test_a_generation_prompt_that_begins_no_message(tmp_path: Path):
    chat = chat_of(tmp_path, CHATML.replace("'<|im_start|>assistant\n'", "'<|im_start|>assistant\n<think>\n'"))
    with pytest.raises(UserError, match=r"begins message 3 of line 7 in another way than its generation prompt"):
        chat.encode(CHATS["system"], "line 7")
    thoughtful = [{**each, "content": "<think>\n" + each["content"]} for each in CHATS["one turn"]]
    ids, trained = chat.encode(thoughtful, "line 7")
    assert chat.tokenizer.inner.decode(ids[trained]) == "It is 7.<|im_end|>\n"


ENDS = {
    "of the template": (CHATML, ["<|im_end|>", "</s>"]), "outside of the tags": (NARROW_TAGGED, ["<|im_end|>", "</s>"]),
    "eos": (INST, ["</s>"]), "the next role": (ROLES, ["[INST]", "</s>"]), "the last one": (
        INST.replace("+ eos_token", "+ (eos_token if loop.last else '<|im_end|>')"), ["</s>"]
    ),
    "none": ("{% for each in messages %}{{ each.role + ': ' + each.content }}{% endfor %}", ["</s>"]),
    "never an answer": ("{{ messages[0].content }}", ["</s>"]), "fails": ("{{ 1 // 0 }}", ["</s>"]),
}  # fmt: skip


@pytest.mark.parametrize(("template", "ends"), ENDS.values(), ids=ENDS)
def test_what_ends_an_answer(tmp_path: Path, template: str, ends: list[str]):
    chat = chat_of(tmp_path, template)
    assert chat.tokenizer.inner.convert_ids_to_tokens(chat.ends) == ends


def test_a_token_of_the_next_role_that_ends_an_answer_is_trained(tmp_path: Path):
    roles = chat_of(tmp_path, ROLES)
    ids, trained = roles.encode(CHATS["several turns"], "here")
    assert ids.tolist() == theirs(roles, CHATS["several turns"])["input_ids"]
    assert roles.tokenizer.inner.decode(ids[trained]) == "7.[INST]12.[INST]Any time."


BAD = {
    "{{ raise_exception('never\nhappy') }}": "fails with line 3 (TemplateError: never)",
    "{% for message in messages %}": "TemplateSyntaxError: Unexpected end of template",
    "{{ messages[0].name.first }}": "UndefinedError: 'dict object' has no attribute 'name'",
    "{{ 1 // 0 }}": "ZeroDivisionError",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}": "SecurityError: access to attribute '__class__' of 'str' object is unsafe",
    "{{ messages.append(1) }}": "SecurityError",
    "{{ lipsum.__globals__['os'].system('true') }}": "SecurityError: access to attribute '__globals__'",
    "{% include 'secret' %}": "TypeError: no loader for this environment specified",
    "{{ messages[0]['content'] | attr('__class__') | string | length / 0 }}": "fails with line 3",
    "{% generation %}{{ 1 // 0 }}{% endgeneration %}": "ZeroDivisionError",
}


@pytest.mark.parametrize(("template", "fragment"), BAD.items(), ids=BAD)
def test_a_template_at_fault_is_one_line(tmp_path: Path, template: str, fragment: str):
    chat = chat_of(tmp_path, template)
    for masked in (True, False):
        with pytest.raises(UserError) as caught:
            chat.encode(CHATS["one turn"], "line 3", masked)
        assert caught.value.field == "data.tokenizer"
        assert fragment in str(caught.value)
        assert "\n" not in str(caught.value)


def test_code_in_the_folder_does_not_run(tmp_path: Path):
    folder = make_tokenizer(tmp_path)
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "auto_map": {"AutoTokenizer": [None, "evil.Evil"]}}))
    Chat(load_tokenizer(str(folder))).encode(CHATS["one turn"], "here")
    assert not (tmp_path / "ran").exists()


def test_a_slow_tokenizer_has_no_offsets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    chat = chat_of(tmp_path)
    monkeypatch.setattr(type(chat.tokenizer.inner), "is_fast", False)
    with pytest.raises(UserError, match="is not a fast tokenizer"):
        Reader(chat, "messages")


def test_a_text_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("trainers.data.chat._MOST_TEXT", 20)
    with pytest.raises(UserError, match=r"makes a text of .* characters of line 9; at most 20"):
        chat_of(tmp_path).encode(CHATS["one turn"], "line 9")
