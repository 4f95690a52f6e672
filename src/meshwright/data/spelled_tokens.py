"""Special tokens that appear in messages as text. They must stay text, so that no content can end a turn or begin another one.

Both the template and a message can write `<|im_end|>` into the text of a chat. To tell them apart, each special token in a message is put
between two random marks before the template is rendered. In the rendered text, a special token between marks came from a message.

Such a text is encoded by a second tokenizer, for which special tokens are ordinary text. Before encoding, the special tokens that the
template wrote are replaced by random names, which the second tokenizer knows as tokens.
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
    """The text of a chat, and where messages spelled special tokens in it.

    `spelled` has the ranges [start, stop) of these characters, ascending. It is None if no message spells a special token.
    """

    text: str
    spelled: tuple[Span, ...] | None = None


class SpelledTokens:
    """Finds the special tokens that the values of a chat spell, and encodes them as text."""

    def __init__(self, tokenizer: Tokenizer, named: Iterable[str] = ()) -> None:
        """The special tokens are those the tokenizer declares special, and added tokens `named` in the files of the tokenizer's folder."""
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
        """Matches special tokens as the tokenizer does: the longest one at the earliest position."""
        tokens = self._tokens.values()
        whole = [rf"(?<!\w){re.escape(token.content)}(?!\w)" for token in tokens if token.single_word]
        others = [token.content for token in tokens if not token.single_word]
        alternatives = [any_of(others), *whole] if others else whole
        return re.compile("|".join(alternatives)) if self._tokens else None

    @cached_property
    def _search_normalized(self) -> re.Pattern[str] | None:
        """Matches special tokens that the tokenizer searches for in normalized text. None if there are none or if it does not normalize."""
        if self._tokenizer.normalizer is None:
            return None
        tokens = {self._normalized(token.content) for token in self._tokens.values() if token.normalized}
        return re.compile(any_of(tokens)) if tokens else None

    def _normalized(self, text: str) -> str:
        normalizer = self._tokenizer.normalizer
        return text if normalizer is None else normalizer.normalize_str(text)

    def found_in(self, values: object) -> bool:
        """Whether any text in `values` (values of JSON) spells a special token."""
        if (search := self._search) is None:
            return False
        normalized = self._search_normalized
        return any(
            search.search(text) is not None
            or (normalized is not None and normalized.search(self._normalized(text)) is not None)
            for text in _texts_of(values)
        )

    def write(self, write: Callable[..., str], *values: Any) -> ChatText:
        """Call `write(*values)`, which renders values of JSON, and find in its text the special tokens that the values spelled.

        A special token at the beginning or end of a content has a mark around it: a template that looks for it there does not find it.
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
        """The token ids of characters [start, stop) of a chat. No special token is added."""
        stop = len(chat.text) if stop is None else stop
        if chat.spelled is None:
            return self._tokenizer.encode(chat.text[start:stop], add_special_tokens=False).ids
        return self._as_text.encode(chat, start, stop)

    @cached_property
    def _as_text(self) -> _SpecialAsText:
        """The second tokenizer, made when a chat first needs it."""
        assert self._search is not None, "a chat spells none without special tokens"
        return _SpecialAsText(self._tokenizer, self._tokens, self._search)


class _SpecialAsText:
    """A copy of a tokenizer, without its special tokens, but with one random name as a token for each special token."""

    def __init__(self, tokenizer: Tokenizer, special: Mapping[int, Any], search: re.Pattern[str]) -> None:
        """`special` are the special tokens by their ids; `search` matches them."""
        from tokenizers import AddedToken, Tokenizer

        self._search = search
        self._special = special
        mark = secrets.token_hex(_MARK_BYTES)
        self._names = {token.content: f"{mark}{id:08x}" for id, token in special.items()}
        """The random name that replaces each special token in texts that a template wrote."""
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
        """Name and original id of each added token, by its id in this tokenizer.

        This id may also be a piece of the model if the ids of the original tokenizer have gaps.
        """

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
            if name and name in token:  # `token` may include white space around the name
                ids.append(right)
            elif id in self._special and text[begin:end] == self._special[id].content:
                # This is a piece of the model that equals a special token, as Unigram models have. Encode it in two parts instead.
                parts = text[begin : begin + 1], text[begin + 1 : end]
                ids += [piece.id for part in parts for piece in self._tokenizer.model.tokenize(part)]
            else:
                ids.append(id)
        return ids


def _texts_of(value: object) -> Iterator[str]:
    """Every text in a value of JSON, including the keys of objects."""
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
    """A copy of a value of JSON in which `change` was applied to every text."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_changed(key, change): _changed(item, change) for key, item in value.items()}
    return [_changed(item, change) for item in value] if isinstance(value, (list, tuple)) else value


def any_of(words: Iterable[str]) -> str:
    """A regular expression that matches the longest of `words` at a position. As a trie, it compares each character once."""
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
