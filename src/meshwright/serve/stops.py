"""Stop strings: the text of a request up to the first of them, returned as soon as no stop string can begin in it."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable


class StopStrings:
    """Holds back the end of a growing text while it may be the beginning of a stop string.

    The text ends at the first character that completes a stop string. If several stop strings end at that character, the longest counts.
    Examples with the text "abcd": with the stop strings "bc" and "abcd" it is "bc", with "c" and "bc" too; the returned text is "a".
    """

    def __init__(self, search: StringSearch, *, include: bool = False) -> None:
        """`search` looks for the stop strings. With `include` the text includes the stop string that ends it."""
        self._search = search
        self._include = include
        self._state = 0
        self._held = ""
        self.reached: str | None = None
        """The stop string that the text has reached; the text before it is complete."""

    @property
    def complete(self) -> bool:
        """Whether the text has reached a stop string."""
        return self.reached is not None

    @property
    def held(self) -> int:
        """Characters that are held back."""
        return len(self._held)

    def add(self, text: str, *, may_stop: bool = True) -> str:
        """The text that can be returned now: up to a stop string, or to where one may begin.

        Without `may_stop` (tokens before `min_tokens`) a stop string that is completed in this text is ignored. One that only begins in it
        is still found: with the stop string "END", "EN" without `may_stop` and then "D" reaches it.
        """
        if not self._state and not self._search.may_begin(text):
            return text
        self._state, end, self.reached = self._search.advance(self._state, text, may_stop=may_stop)
        text = self._held + text[:end]
        if self.reached is not None:
            self._held = ""
            return text if self._include else text[: len(text) - len(self.reached)]
        certain = len(text) - self._search.length[self._state]
        self._held = text[certain:]
        return text[:certain]

    def finish(self) -> str:
        """The text that was held back; to be called when no more text follows."""
        text = self._held
        self._held = ""
        self._state = 0
        return text


class StringSearch:
    """Search for several strings at a time in a text that arrives in pieces; each character is looked at once.

    The strings form a trie. The state of the search is a node of the trie, by its number: the node of the longest suffix of the text so far
    that is also a prefix of one of the strings. 0 is the root, the empty suffix. Method: Aho and Corasick 1975.
    """

    def __init__(self, strings: Iterable[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self.length = [0]
        """Number of characters of each node's prefix."""
        self._failure = [0]
        """For each node, the node of its longest proper suffix that is in the trie (failure link)."""
        self._complete: list[str | None] = [None]
        """For each node, the longest string that a text in this state ends with."""
        for string in filter(None, strings):
            self._insert(string)
        first = "".join(map(re.escape, self._next[0]))
        self._begin = re.compile(f"[{first}]" if first else "(?!)").search
        self._link()

    def _insert(self, string: str) -> None:
        state = 0
        for character in string:
            following = self._next[state].get(character)
            if following is None:
                following = self._next[state][character] = len(self._next)
                self._next.append({})
                self.length.append(self.length[state] + 1)
                self._failure.append(0)
                self._complete.append(None)
            state = following
        self._complete[state] = string

    def _link(self) -> None:
        """Set the failure links, and let each node inherit the complete string of its link.

        A link leads to a node with a shorter prefix. So nodes are taken by increasing length, and the node of a link is finished first.
        """
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for character, following in self._next[state].items():
                self._failure[following] = self._step(self._failure[state], character)
                queue.append(following)
            if self._complete[state] is None:
                self._complete[state] = self._complete[self._failure[state]]

    def _step(self, state: int, character: str) -> int:
        while (following := self._next[state].get(character)) is None and state:
            state = self._failure[state]
        return following or 0

    def may_begin(self, text: str) -> bool:
        """Whether a string may begin in the text."""
        return self._begin(text) is not None

    def advance(self, state: int, text: str, *, may_stop: bool = True) -> tuple[int, int, str | None]:
        """The state after a text, the end of what was looked at, and the string found there, if one is complete.

        Without `may_stop` the search goes on after a complete string.
        """
        position = 0
        while position < len(text):
            if not state:
                if (begin := self._begin(text, position)) is None:
                    break
                position = begin.start()
            state = self._step(state, text[position])
            position += 1
            if may_stop and (found := self._complete[state]) is not None:
                return state, position, found
            # After an ignored string the state may be a node without children: then nothing has to be held back.
            while state and not self._next[state]:
                state = self._failure[state]
        return state, len(text), None
