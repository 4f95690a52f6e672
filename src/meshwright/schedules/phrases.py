"""Schedules written as phrases: `F0 I1 W1` is a forward of the rank's first stage, then the two halves of a backward of
its second. Each word takes the next micro-batch of its kind, so a schedule reads like the row of its picture.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from meshwright.schedules.action import Action, overlap


class Row:
    """One rank's compute, written phrase by phrase.

    A word is a letter and the place of the stage on the rank: F forward, B whole backward, I and W its halves. `W` alone
    is the oldest weight half still owed, of whichever stage. `F0&B1` is a pair that overlaps.
    """

    def __init__(self, stages: Sequence[int]) -> None:
        self.actions: list[Action] = []
        self._stages = stages
        self._taken: Counter[tuple[str, int]] = Counter()
        self._owed: deque[tuple[int, int]] = deque()

    def write(self, phrase: str, times: int = 1) -> None:
        for _ in range(times):
            self.actions += [self._read(word) for word in phrase.split()]

    def write_owed(self) -> None:
        """Every weight half still owed, oldest first."""
        self.write("W", len(self._owed))

    def forwards(self, place: int) -> int:
        """How many forwards of the stage at `place` have been written."""
        return self._taken["forward", place]

    def _read(self, word: str) -> Action:
        if "&" in word:
            forward, _, backward = word.partition("&")
            return overlap(self._read(forward), self._read(backward))
        if word[0] == "W":
            return self._weight(word[1:])
        letter, place = word[0], int(word[1])
        stage, micro_batch = self._stages[place], self._next("forward" if letter == "F" else "backward", place)
        if letter == "F":
            return Action("forward", stage, micro_batch)
        if letter == "B":
            return Action("backward", stage, micro_batch)
        self._owed.append((stage, micro_batch))
        return Action("backward_input", stage, micro_batch)

    def _next(self, kind: str, place: int) -> int:
        self._taken[kind, place] += 1
        return self._taken[kind, place] - 1

    def _weight(self, place: str) -> Action:
        owed = next(one for one in self._owed if not place or one[0] == self._stages[int(place)])
        self._owed.remove(owed)
        return Action("backward_weight", *owed)


def warm_then_alternate(forwards: Sequence[Action], backwards: Sequence[Action], warm_up: int) -> list[Action]:
    """`warm_up` forwards, then a forward and a backward in turn, then the backwards left."""
    order = list(forwards[:warm_up])
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        order += (forward, backward)
    return order + list(backwards[len(forwards) - warm_up :])


def keep(row: Sequence[Action], micro_batches: int) -> list[Action]:
    """The row without micro-batches from `micro_batches` on; of a pair the member that stays."""
    kept = []
    for action in row:
        parts = [part for part in action.parts if part.micro_batch < micro_batches]
        kept += [action] if len(parts) == len(action.parts) else parts
    return kept
