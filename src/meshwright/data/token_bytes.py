"""The bytes that each token of a vocabulary adds to a text. They follow from the decoder in tokenizer.json."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class TokenBytes:
    """The bytes of each token, and a name for a token that is shown alone. Results are cached by token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        # The state for pickling is the decoder's part of tokenizer.json.
        decoder: Any = tokenizer.decoder
        self.form = None if decoder is None else _read_form(json.loads(decoder.__getstate__()))
        """How to convert a vocabulary entry to bytes; None if the bytes of a token depend on the tokens around it."""
        added = tokenizer.get_added_tokens_decoder()
        self.special = frozenset(token for token, entry in added.items() if entry.special)
        """Special tokens. Texts leave them out unless a request asks for them."""
        self.all = _Bytes(self)
        """The bytes of each token, including special tokens."""
        self.plain = _Bytes(self, hidden=self.special)
        """The bytes of each token; b"" for a special token."""
        self._names: dict[int, tuple[str, bytes]] = {}

    def at_start(self, token: int) -> bytes:
        """The bytes of a token at the start of a text, where some decoders remove the leading space."""
        entry = self.tokenizer.id_to_token(token)
        return b"" if entry is None or self.form is None else self.form.encode_first(entry)

    def name(self, token: int) -> tuple[str, bytes]:
        """The text and the bytes of a token that is shown alone. Special tokens have them too.

        Bytes that are not valid UTF-8 are named as OpenAI's API does, for example `bytes:\\xe2\\x80`. An id without a token is
        `token_id:…`.
        """
        if (named := self._names.get(token)) is None:
            named = self._names[token] = self._name(token)
        return named

    def _name(self, token: int) -> tuple[str, bytes]:
        if self.tokenizer.id_to_token(token) is None:
            return f"token_id:{token}", b""
        if self.form is None:
            text = self.tokenizer.decode([token], skip_special_tokens=False)
            return text, text.encode("utf-8")
        content = self.all[token]
        try:
            return content.decode("utf-8"), content
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content), content


class _Bytes(dict[int, bytes]):
    """Bytes by token. An entry is computed when it is first asked for. Tokens in `hidden` have no bytes."""

    def __init__(self, tokens: TokenBytes, hidden: frozenset[int] = frozenset()) -> None:
        self._tokenizer = tokens.tokenizer
        self._form = tokens.form
        self._hidden = hidden
        self.texts = _Texts(self)

    def __missing__(self, token: int) -> bytes:
        entry = None if token in self._hidden else self._tokenizer.id_to_token(token)
        content = b"" if entry is None or self._form is None else self._form.encode(entry)
        self[token] = content
        return content


class _Texts(dict[int, str | None]):
    """Text by token, if the bytes of the token are complete characters; None for other tokens."""

    def __init__(self, content: _Bytes) -> None:
        self._content = content

    def __missing__(self, token: int) -> str | None:
        try:
            text = self._content[token].decode("utf-8")
        except UnicodeDecodeError:
            text = None
        self[token] = text
        return text


@dataclass(frozen=True)
class _Form:
    """How an entry of the vocabulary becomes bytes, independently of the tokens around it."""

    replaced: Sequence[tuple[str, str]] = ()
    """(text in an entry, its replacement), applied in order. SentencePiece, for example, replaces "▁" by a space."""
    alphabet: Mapping[str, int] | None = None
    """The byte that each character of an entry represents, if entries are written in such an alphabet; else None."""
    fallback: bool = False
    """Whether an entry such as `<0x0A>` is one byte."""
    first_marker: str = ""
    """Text that is removed from the first token of a text, at every position in the token."""
    first_space: str = ""
    """Character that is removed once from the beginning of a text."""

    @property
    def changes_first(self) -> bool:
        """Whether a token may have other bytes at the start of a text than elsewhere."""
        return bool(self.first_marker or self.first_space)

    def encode(self, entry: str) -> bytes:
        """The bytes of an entry that is not at the start of a text."""
        for old, new in self.replaced:
            entry = entry.replace(old, new)
        if self.fallback and len(entry) == 6 and entry.startswith("<0x") and entry.endswith(">"):
            try:
                return bytes.fromhex(entry[3:5])
            except ValueError:
                pass
        if self.alphabet is not None:
            try:
                return bytes(self.alphabet[character] for character in entry)
            except KeyError:  # an added token is written as itself
                pass
        return entry.encode("utf-8", "replace")

    def encode_first(self, entry: str) -> bytes:
        """The bytes of an entry at the start of a text."""
        if self.first_marker:
            entry = entry.replace(self.first_marker, "")
        return self.encode(entry).removeprefix(self.first_space.encode())


def _read_form(decoder: Mapping[str, Any]) -> _Form | None:
    """How a decoder makes bytes: with a byte alphabet (GPT-2, Llama 3, Qwen) or as SentencePiece (Llama 2, Mistral, Gemma).

    Returns None for a decoder with other steps, or with steps in another order.
    """
    steps = list(_steps(decoder))
    replaced: list[tuple[str, str]] = []
    marker = space = ""
    while steps and steps[0]["type"] in ("Replace", "Metaspace"):
        step = steps.pop(0)
        if step["type"] == "Metaspace":
            replaced.append((step["replacement"], " "))
            marker = "" if step["prepend_scheme"] == "never" else step["replacement"]
        elif "String" in step["pattern"]:
            replaced.append((step["pattern"]["String"], step["content"]))
        else:
            return None
    by_alphabet = fallback = False
    if steps and steps[0]["type"] in ("ByteLevel", "ByteFallback"):
        by_alphabet = steps.pop(0)["type"] == "ByteLevel"
        fallback = not by_alphabet
    fused = by_alphabet or bool(steps and steps[0]["type"] == "Fuse")
    while steps and steps[0]["type"] == "Fuse":
        steps.pop(0)
    if fused and steps and steps[0]["type"] == "Strip":
        step = steps.pop(0)
        if step["stop"] or step["start"] > 1 or not step["content"].isascii():
            return None
        space = step["content"] if step["start"] else ""
    if steps:
        return None
    return _Form(replaced, _byte_alphabet() if by_alphabet else None, fallback, marker, space)


def _steps(decoder: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for part in decoder["decoders"] for step in _steps(part)]


def _byte_alphabet() -> dict[str, int]:
    """The byte of each character in GPT-2's alphabet. Printable Latin-1 represents itself; other bytes have characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}
