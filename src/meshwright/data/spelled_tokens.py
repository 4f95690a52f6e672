"""Special tokens that messages spell: they stay text, so that no content ends a turn or begins another.

In the text of a chat the template writes special tokens, and a message may spell some. If one does, its special tokens are put between two
random marks before the template is rendered: then those that stand between the marks in its output came from the message. They are encoded
by a tokenizer for which special tokens are text, and in whose text those of the template have other names.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Span = tuple[int, int]
_MARK_BYTES = 8
"""Random bytes of a mark: too many to guess."""


class ChatText(NamedTuple):
    """The text of a chat, and the ranges [start, stop) of its characters that spell a special token and are text, ascending.

    `spelled` is None if no message spells one.
    """

    text: str
    spelled: tuple[Span, ...] | None = None


class SpelledTokens:
    """Finds the special tokens that the values of a chat spell, and encodes them as text."""

    def __init__(self, tokenizer: Tokenizer, named: Iterable[str] = ()) -> None:
        """Special are the tokens that the tokenizer says are, and those of its added tokens that are `named` in a folder's files."""
        names = set(named)
        added = tokenizer.get_added_tokens_decoder().items()
        self._tokenizer = tokenizer
        self._tokens = {id: token for id, token in added if token.content and (token.special or token.content in names)}

    @property
    def special(self) -> list[str]:
        """The texts of the special tokens."""
        return [token.content for token in self._tokens.values()]

    @cached_property
    def _search(self) -> re.Pattern[str] | None:
        """Finds special tokens as the tokenizer does: the longest of those that begin at the first place."""
        tokens = self._tokens.values()
        whole = [rf"(?<!\w){re.escape(token.content)}(?!\w)" for token in tokens if token.single_word]
        others = [token.content for token in tokens if not token.single_word]
        alternatives = [any_of(others), *whole] if others else whole
        return re.compile("|".join(alternatives)) if self._tokens else None

    @cached_property
    def _search_normalized(self) -> re.Pattern[str] | None:
        """Finds special tokens that the tokenizer looks for in its normalized text, where that is another; None if there are none."""
        if self._tokenizer.normalizer is None:
            return None
        tokens = {self._normalized(token.content) for token in self._tokens.values() if token.normalized}
        return re.compile(any_of(tokens)) if tokens else None

    def _normalized(self, text: str) -> str:
        normalizer = self._tokenizer.normalizer
        return text if normalizer is None else normalizer.normalize_str(text)

    def found_in(self, values: object) -> bool:
        """Whether a text of `values`, which are as of JSON, spells a special token."""
        if (search := self._search) is None:
            return False
        normalized = self._search_normalized
        return any(
            search.search(text) is not None
            or (normalized is not None and normalized.search(self._normalized(text)) is not None)
            for text in _texts_of(values)
        )

    def write(self, write: Callable[..., str], *values: Any) -> ChatText:
        """The text that `write` makes of `values`, which are as of JSON, with the special tokens that these spell.

        A template that looks for special tokens at the beginning or end of a content does not see them.
        """
        if not self.found_in(values):
            return ChatText(write(*values))
        search = self._search
        assert search is not None, "what is found was searched for"
        opening, closing = (secrets.token_hex(_MARK_BYTES) for _ in range(2))
        mark = partial(search.sub, rf"{opening}\g<0>{closing}")
        marked = (_changed(value, mark) for value in values)
        pieces: list[str] = []
        spelled: list[Span] = []
        at = 0
        begin = None
        for piece in re.split(f"({opening}|{closing})", write(*marked)):
            if piece == opening:
                begin = at
            elif piece == closing:
                if begin is not None and search.fullmatch(pieces[-1]):
                    spelled.append((begin, at))
                begin = None
            else:
                pieces.append(piece)
                at += len(piece)
        return ChatText("".join(pieces), tuple(spelled))

    def encode(self, chat: ChatText, start: int = 0, stop: int | None = None) -> list[int]:
        """The token ids of the characters [start, stop) of a chat; no special tokens are added."""
        stop = len(chat.text) if stop is None else stop
        if chat.spelled is None:
            return self._tokenizer.encode(chat.text[start:stop], add_special_tokens=False).ids
        return self._as_text.encode(chat, start, stop)

    @cached_property
    def _as_text(self) -> _SpecialAsText:
        assert self._search is not None, "a chat spells none without special tokens"
        return _SpecialAsText(self._tokenizer, self._tokens, self._search)


class _SpecialAsText:
    """A tokenizer with the model of another, without its special tokens, and with tokens of its own for those that a template writes."""

    def __init__(self, tokenizer: Tokenizer, special: Mapping[int, Any], search: re.Pattern[str]) -> None:
        """`special` are the special tokens by id, which `search` finds."""
        from tokenizers import AddedToken, Tokenizer

        self._search = search
        self._special = special
        mark = secrets.token_hex(_MARK_BYTES)
        self._names = {token.content: f"{mark}{id:08x}" for id, token in special.items()}
        """The names of its own tokens, by the special token in whose place each is."""
        added = tokenizer.get_added_tokens_decoder()
        own: Any = Tokenizer(tokenizer.model)  # shares the model
        own.normalizer = tokenizer.normalizer
        own.pre_tokenizer = tokenizer.pre_tokenizer
        own.add_tokens([token for id, token in added.items() if id not in special])
        own.add_tokens(
            [
                AddedToken(self._names[token.content], lstrip=token.lstrip, rstrip=token.rstrip, normalized=False)
                for token in special.values()
            ]
        )
        self._tokenizer = own
        names = {id: self._names.get(token.content, token.content) for id, token in added.items()}
        self._added = {own.token_to_id(name): (name, id) for id, name in names.items()}
        """Name and right id of each added token, by its id here, which a piece of the model may have too if its ids have gaps."""

    def encode(self, chat: ChatText, start: int, stop: int) -> list[int]:
        """The token ids of the characters [start, stop) of a chat."""
        pieces = []
        at = start
        for begin, end in (*(chat.spelled or ()), (stop, stop)):
            if start <= begin <= stop:
                written = self._search.sub(lambda found: self._names[found[0]], chat.text[at:begin])
                pieces += [written, chat.text[begin : min(end, stop)]]
                at = min(end, stop)
        text = "".join(pieces)
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        ids = list[int]()
        for token, id, (begin, end) in zip(encoding.tokens, encoding.ids, encoding.offsets, strict=True):
            name, right = self._added.get(id, ("", id))
            if name and name in token:  # with the white space that it takes
                ids.append(right)
            elif id in self._special and text[begin:end] == self._special[id].content:
                # A piece of the model's own, as in those of the Unigram method, and not its token for the unknown.
                parts = text[begin : begin + 1], text[begin + 1 : end]
                ids += [piece.id for part in parts for piece in self._tokenizer.model.tokenize(part)]
            else:
                ids.append(id)
        return ids


def _texts_of(value: object) -> Iterator[str]:
    """Every text in a value as of JSON, keys of objects included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts_of(key)
            yield from _texts_of(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts_of(item)


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    """A value as of JSON with every text changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_changed(key, change): _changed(item, change) for key, item in value.items()}
    return [_changed(item, change) for item in value] if isinstance(value, (list, tuple)) else value


def any_of(words: Iterable[str]) -> str:
    """A pattern for the longest of these words at a place, which compares each character once."""
    root: dict[str, Any] = {}
    for word in words:
        node = root
        for character in word:
            node = node.setdefault(character, {})
        node[""] = {}

    def pattern(node: dict[str, Any]) -> str:
        options = [re.escape(character) + pattern(rest) for character, rest in node.items() if character]
        if not options:
            return ""
        optional = "?" if "" in node else ""
        return options[0] if len(options) == 1 and not optional else f"(?:{'|'.join(options)}){optional}"

    return pattern(root)
