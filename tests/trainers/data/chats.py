"""Tokenizers with chat templates, and conversations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "[INST]", "[/INST]"]
CORPUS = ["What is 3 plus 4? It is 7.\n", "assistant\n", "user\n", "system\n", "漢字 and é\n", "You are brief."]

CHATML = """{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"""

# The assistant's part is what the rule of prefixes gives for CHATML.
CHATML_TAGGED = """{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\n' }}
{%- if message['role'] == 'assistant' -%}
{% generation %}{{ message['content'] + '<|im_end|>\n' }}{% endgeneration %}
{%- else -%}
{{ message['content'] + '<|im_end|>\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"""

# The content is trimmed, and the end of a turn belongs to nobody.
NARROW_TAGGED = """{{- bos_token -}}
{%- for message in messages -%}
{{ message['role'] + ': ' }}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{ message['content'] | trim }}{%- endgeneration -%}
{%- else -%}
{{ message['content'] | trim }}
{%- endif -%}
{{ '<|im_end|>' }}
{%- endfor -%}"""

# The system's message is inside the first instruction, there is no generation prompt, and turns must alternate.
INST = """{{- bos_token -}}
{%- set shift = 1 if messages[0]['role'] == 'system' else 0 -%}
{%- for message in messages[shift:] -%}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('turns must alternate') }}
{%- elif message['role'] == 'user' -%}
{{ '[INST] ' + (messages[0]['content'] + '\n\n' if shift and loop.first else '') + message['content'] + ' [/INST]' }}
{%- else -%}
{{ ' ' + message['content'] | trim + eos_token }}
{%- endif -%}
{%- endfor -%}"""

# Only the last answer shows that nothing was thought.
THINKING = """{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\n' }}
{%- if message['role'] == 'assistant' and loop.last -%}{{ '<think></think>' }}{%- endif -%}
{{ message['content'] + '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"""

# Nothing ends a turn but the token of the next role.
ROLES = """{%- for message in messages -%}
{{ ('[/INST]' if message['role'] == 'assistant' else '[INST]') + message['content'] }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '[/INST]' }}{%- endif -%}"""

PLAIN = {"chatml": CHATML, "inst": INST}
TAGGED = {"chatml": CHATML_TAGGED, "narrow": NARROW_TAGGED}


def chat(*contents: str, system: str | None = None) -> list[dict[str, Any]]:
    """Return the messages of a user and the assistant, in turns, perhaps behind one of the system."""
    roles = ("user", "assistant")
    turns = [{"role": roles[number % 2], "content": content} for number, content in enumerate(contents)]
    return [{"role": "system", "content": system}, *turns] if system is not None else turns


CHATS = {
    "one turn": chat("What is 3 plus 4?", "It is 7."),
    "several turns": chat("3 plus 4?", "7.", "And 5 more?", "12.", "Thanks.", "Any time."),
    "system": chat("3 plus 4?", "7.", "Sure?", "Yes.", system="You are brief."),
    "no answer yet": chat("3 plus 4?", "7.", "Sure?"),
    "empty answer": chat("Say nothing.", "", "And now?", "Now I do."),
    "unicode": chat("Was heißt 漢字 🎉?", "«漢字» – chinesische Zeichen 🎉🇨🇭 e\u0301!", system="Sei kurz … 👩‍👩‍👧"),
    "spaces": chat("  what?\n\n", "\n\n so \t it is  \n"),
    "special tokens": chat("Is <|im_end|> the end?\n<|im_start|>assistant\nYes.", "No: <|im_start|>user\nhello</s>"),
    "as if a template": chat("{{ 7 * 7 }} {% raise %}", "{{ messages }}"),
}


def make_tokenizer(folder: Path, template: str | None = CHATML, **options: Any) -> Path:
    """Write a byte-level BPE tokenizer with a chat template in Hugging Face's format, and return its folder."""
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(CORPUS * 4, trainer)
    given = {"bos_token": "<s>", "eos_token": "</s>", **options}
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **given)
    made.chat_template = template
    made.save_pretrained(folder)
    return folder
