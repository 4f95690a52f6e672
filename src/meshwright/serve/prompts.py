"""Token ids of prompts, and the check that a model can continue a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from meshwright.data.text_format import encode_prompt
from meshwright.spec.errors import BadInput

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def prompt_ids(prompt: str | Sequence[int], tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Return the token ids of a prompt, given as text or as ids. Raises BadInput for text if there is no tokenizer."""
    if not isinstance(prompt, str):
        return tuple(prompt)
    if tokenizer is None:
        raise BadInput("a prompt given as text needs an engine with a tokenizer; give token ids")
    return encode_prompt(prompt, tokenizer)


def check_request(ids: Sequence[int], new_tokens: int, *, context: int, vocab: int) -> None:
    """Raise BadInput unless a model can continue the prompt `ids` by at least one new token.

    `context` is the maximum number of tokens of prompt and answer together; token ids are below `vocab`.
    """
    if not ids or min(ids) < 0 or max(ids) >= vocab:
        shown = f"{list(ids[:8])}{' …' if len(ids) > 8 else ''}"
        raise BadInput(f"prompt: expected token ids of 0 to {vocab - 1}, at least one, got {shown}")
    if new_tokens < 1:
        raise BadInput(f"new_tokens: expected at least 1, got {new_tokens}")
    if len(ids) >= context:
        raise BadInput(
            f"a prompt of {len(ids)} tokens leaves no room in a context of {context} tokens; shorten it to {context - 1}"
        )
