"""Chats, templates and tokenizers for the tests of chat data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.data.conftest import story

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "[INST]", "[/INST]", "<|eot|>", "<|header|>"]
CHATML = (
    "{%- if tools %}{{- '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{%- endif %}"
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.role == 'assistant' %}BEGIN{{- message.content or '' }}"
    "{%- for call in message.tool_calls or [] %}{{- '<tool_call>' + (call.function | tojson) }}{%- endfor %}"
    "{{- '<|im_end|>' }}END{%- else %}{{- message.content + '<|im_end|>' }}{%- endif %}{{- '\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
INSTRUCT = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}{{ '[INST] ' + message.content + ' [/INST]' }}"
    "{% else %}BEGIN{{ ' ' + message.content | trim + eos_token }}END{% endif %}{% endfor %}"
)
HEADERS = (
    "{{ bos_token }}{% for message in messages %}{{ '<|header|>' + message.role + '\n\n' }}"
    "{% if message.role == 'assistant' %}BEGIN{{ message.content | trim + '<|eot|>' }}END"
    "{% else %}{{ message.content | trim + '<|eot|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|header|>assistant\n\n' }}{% endif %}"
)
TEMPLATES = {"chatml": CHATML, "instruct": INSTRUCT, "headers": HEADERS}
FORGETTING = CHATML.replace("{{- message.content or '' }}", "{{- (message.content if loop.last else '(older)') }}")
"""Writes earlier answers otherwise than the last, as templates do that leave out the reasoning of earlier answers."""
WITHOUT_HEADER = "{% for message in messages %}{{ message.role + ': ' + message.content + '\n' }}{% endfor %}"
"""The same with and without add_generation_prompt."""
TOOL_CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [2, "é"]}}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def plain(template: str) -> str:
    return template.replace("BEGIN", "").replace("END", "")


def marked(template: str) -> str:
    return template.replace("BEGIN", "{% generation %}").replace("END", "{% endgeneration %}")


def turns(*contents: str) -> list[dict[str, Any]]:
    """A chat in which user and assistant alternate."""
    return [
        {"role": "assistant" if number % 2 else "user", "content": content} for number, content in enumerate(contents)
    ]


CHATS = [
    turns("Hi", "Hello there."),
    turns(story(1), story(2), "and\n", "  spaced  ", story(3), "é — 漢字 🙂"),
    turns("Again", "Again", "Again", "Again"),
    turns("A\n\nB", "\n\nC\n\n"),
]


def byte_level(*, merges_newlines: bool = False) -> Tokenizer:
    """A byte-level BPE, which keeps every text."""
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _trained(tokenizer, pre_tokenizers.ByteLevel.alphabet(), "\n\n\n" if merges_newlines else "")


def sentence_piece() -> Tokenizer:
    """A BPE as of Llama 2: a space before the text, and spaces as letters."""
    tokenizer: Any = Tokenizer(models.BPE(unk_token="<|endoftext|>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _trained(tokenizer, [], "")


def _trained(tokenizer: Any, alphabet: Sequence[str], ending: str) -> Tokenizer:
    trainer: Any = trainers.BpeTrainer
    texts = [story(number) + ending for number in range(60)]
    tokenizer.train_from_iterator(
        texts, trainer(vocab_size=500, special_tokens=SPECIAL, initial_alphabet=list(alphabet), show_progress=False)
    )
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    return tokenizer


def write_tokenizer(folder: Path, template: str | None, tokenizer: Tokenizer | None = None) -> Path:
    """The tokenizer's files of a Hugging Face folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (tokenizer or byte_level()).save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    if template is not None and "im_end" in template:
        config["eos_token"] = "<|im_end|>"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def write_chats(file: Path, chats: Sequence[Any]) -> Path:
    """A file of chats; a dict is a line as it is."""
    lines = [json.dumps(chat if isinstance(chat, dict) else {"messages": chat}) for chat in chats]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file
