"""The tokens that end texts, by the files of a model's folder. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from meshwright.data.chat_template import TOKENIZER_CONFIG, read_object, special_tokens

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
KNOWN_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<|im_end|>")
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"


class EndTokens(NamedTuple):
    """The end tokens of a model."""

    document: int | None
    """Id of the token that ends a document; None if the tokenizer has no such token."""
    stops: tuple[int, ...]
    """Ids of the tokens that end a generated text, ascending."""


def end_tokens(folder: Path, tokenizer: Tokenizer) -> EndTokens:
    """The end tokens that the folder of this tokenizer names; if none does, a token whose name is known for an end.

    A document's end is named by `tokenizer_config.json`, `special_tokens_map.json` or `config.json`, in this order of trust. All these
    and the ones in `generation_config.json` end a generated text. A token for padding is an end only where one of the files says so.
    Raises BadInput for a file that is not JSON.
    """
    config, generation = read_object(folder / CONFIG), read_object(folder / GENERATION_CONFIG)
    special = folder_special_tokens(folder)
    by_text = tokenizer.token_to_id(special["eos_token"]) if "eos_token" in special else None
    documents = [*([] if by_text is None else [by_text]), *_ids(config, "eos_token_id", tokenizer)]
    stops = {*documents, *_ids(generation, "eos_token_id", tokenizer)}
    if not documents:
        pads = {special.get("pad_token")}
        for values in (config, generation):
            pads |= {tokenizer.id_to_token(id) for id in _ids(values, "pad_token_id", tokenizer)}
        known = (tokenizer.token_to_id(name) for name in KNOWN_ENDS if name not in pads)
        documents = [id for id in known if id is not None][:1]
    return EndTokens(documents[0] if documents else None, tuple(sorted(stops or documents)))


def folder_special_tokens(folder: Path) -> dict[str, str]:
    """The special tokens that a folder names, such as `bos_token`; tokenizer_config.json comes before special_tokens_map.json."""
    return special_tokens({**read_object(folder / SPECIAL_TOKENS_MAP), **read_object(folder / TOKENIZER_CONFIG)})


def _ids(values: Mapping[str, Any], key: str, tokenizer: Tokenizer) -> Iterator[int]:
    """The ids under a key, one or a list, that the tokenizer has."""
    value = values.get(key)
    for id in value if isinstance(value, list) else [value]:
        whole = isinstance(id, int) and not isinstance(id, bool) and 0 <= id < 2**31
        if whole and tokenizer.id_to_token(id) is not None:
            yield id
