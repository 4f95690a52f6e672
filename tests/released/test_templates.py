"""The answers found in the texts of released chat templates are those that their training variants mark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from meshwright.data.corpus import CorpusDocument
from meshwright.data.encode_chat import encode_chats
from tests.released.chats import compared
from tests.released.templates import SHAPES, Template, page, released_templates

TEMPLATES = released_templates()
PAGE = Path(__file__).parents[2] / "docs/reference/chat-templates.md"


@pytest.mark.skipif(not TEMPLATES, reason="make test-models installs trl")
def test_every_released_template_is_read() -> None:
    verdicts = {template.name: [template.verdict(shape) for shape in SHAPES] for template in TEMPLATES}
    assert len(verdicts) == 34
    refused = {name: str(each) for name, found in verdicts.items() for each in found if "refused" in each.refusal}
    assert not refused
    assert not [name for name, found in verdicts.items() if "DIFFERENT" in map(str, found)]
    assert all(found[0].spans and found[1].spans for found in verdicts.values())


@pytest.mark.parametrize("template", TEMPLATES, ids=[template.name for template in TEMPLATES])
def test_the_tokens_that_are_trained_on_are_those_of_the_ranges(template: Template) -> None:
    tokenizer = byte_tokenizer(template)
    for shape in SHAPES:
        chat = template.chat(shape)
        verdict = template.verdict(shape)
        if isinstance(chat, str) or not verdict.spans:
            continue
        text, spans = template.ranges(chat)
        (encoded,) = encode_chats([CorpusDocument("f", 1, "k", text, 0, tuple(spans))], tokenizer, [], "uint32", 1)
        assert encoded.weights is not None
        trained = [id for id, bit in zip(encoded.tokens.tolist(), encoded.weights.tolist(), strict=True) if bit]
        assert tokenizer.decode(trained, skip_special_tokens=False) == "".join(verdict.spans)


@pytest.mark.parametrize("template", TEMPLATES, ids=[template.name for template in TEMPLATES])
def test_ten_conversations_have_the_text_of_transformers(template: Template) -> None:
    from transformers import PreTrainedTokenizerFast

    wrapped: Any = PreTrainedTokenizerFast
    theirs = wrapped(tokenizer_object=byte_tokenizer(template), chat_template=template.source, **template.named)
    outcomes = compared(template.source, template.named, theirs)
    assert not [outcome for outcome in outcomes if outcome is not None and outcome.startswith("DIFFERENT")]
    assert outcomes[:3] == [None] * 3


@pytest.mark.skipif(not TEMPLATES, reason="make test-models installs trl")
def test_the_page_is_that_of_the_released_templates() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(TEMPLATES)


def byte_tokenizer(template: Template) -> Tokenizer:
    """A tokenizer of bytes with the tokens of the template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer: Any = Tokenizer(models.BPE({letter: id for id, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(template.special)
    tokenizer.add_tokens([token for token in template.added if token not in template.special])
    return tokenizer
