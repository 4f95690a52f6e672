"""Stop strings: the text of a request up to the first of them, returned as soon as no stop string can begin in it."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Holds back the end of a growing text while it may be the beginning of a stop string."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = [string for string in strings if string]
        self._held = ""
        self.complete = False
        """Whether the text has reached a stop string; the text before it is complete."""

    def add(self, text: str, *, ends: bool = True) -> str:
        """The text that can be returned now: up to a stop string, or to where one may begin.

        Only a stop string whose last character is in a text that `ends` counts.
        """
        if not self._strings:
            return text
        held, text = len(self._held), self._held + text
        if ends:
            found = [text.find(string, max(0, held - len(string) + 1)) for string in self._strings]
            if positions := [position for position in found if position >= 0]:
                self.complete, self._held = True, ""
                return text[: min(positions)]
        keep = max(possible_start(text, string) for string in self._strings)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """The text held back, once no more follows."""
        text, self._held = self._held, ""
        return text


def possible_start(text: str, string: str) -> int:
    """Length of the longest end of `text` that begins `string`, shorter than it."""
    longest = min(len(text), len(string) - 1)
    return next((length for length in range(longest, 0, -1) if string.startswith(text[-length:])), 0)
