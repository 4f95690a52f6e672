"""A short notation for the compute order of one rank, used to write schedules.

A phrase is a sequence of words, and each word is one compute action. Example: `F0 I1 W1` is a forward of the rank's first
stage, then the input half and the weight half of a backward of its second stage. Each word means the next micro-batch
of its direction and stage.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from meshwright.schedules.action import Action


class ComputeWriter:
    """Builds one rank's compute actions from phrases. `stages` are the rank's stages.

    A word is a letter and the index of a stage in `stages`. F is a forward, B a whole backward, I the input half and W the
    weight half of a backward. `W` without an index is the oldest pending weight half of any stage: its input half is
    written already, and the weight half is not.
    """

    def __init__(self, stages: Sequence[int]) -> None:
        self.actions: list[Action] = []
        self._stages = stages
        self._next_micro_batch: Counter[tuple[str, int]] = Counter()
        self._pending_weights: deque[tuple[int, int]] = deque()

    def write(self, phrase: str, times: int = 1) -> None:
        """Append the actions of `phrase` `times` times; not at all if `times` is 0 or negative."""
        for _ in range(times):
            self.actions += [self._action(word) for word in phrase.split()]

    def write_pending_weights(self) -> None:
        """Append all pending weight halves, oldest first."""
        self.write("W", len(self._pending_weights))

    def forwards(self, index: int) -> int:
        """Return the number of forwards written so far for the rank's stage `index`."""
        return self._next_micro_batch["forward", index]

    def _action(self, word: str) -> Action:
        """Return the action of one word, and count its micro-batch as written."""
        if word[0] == "W":
            return self._oldest_weight_half(word[1:])
        letter = word[0]
        index = int(word[1])
        stage = self._stages[index]
        micro_batch = self._next_index("forward" if letter == "F" else "backward", index)
        if letter == "F":
            return Action("forward", stage, micro_batch)
        if letter == "B":
            return Action("backward", stage, micro_batch)
        self._pending_weights.append((stage, micro_batch))
        return Action("backward_input", stage, micro_batch)

    def _next_index(self, direction: str, index: int) -> int:
        """Return the next micro-batch of the rank's stage `index` in this direction, and count it as written."""
        self._next_micro_batch[direction, index] += 1
        return self._next_micro_batch[direction, index] - 1

    def _oldest_weight_half(self, index: str) -> Action:
        """Return the oldest pending weight half: of the rank's stage `index`, or of any stage if `index` is empty."""
        pending = next(half for half in self._pending_weights if not index or half[0] == self._stages[int(index)])
        self._pending_weights.remove(pending)
        return Action("backward_weight", *pending)


def warm_then_alternate(forwards: Sequence[Action], backwards: Sequence[Action], warm_up: int) -> list[Action]:
    """Return `warm_up` forwards, then a forward and a backward in turn, then the remaining backwards."""
    order = list(forwards[:warm_up])
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        order += (forward, backward)
    return order + list(backwards[len(forwards) - warm_up :])


def truncate(rank_actions: Sequence[Action], micro_batches: int) -> list[Action]:
    """Return only the actions of the first `micro_batches` micro-batches."""
    return [action for action in rank_actions if action.micro_batch < micro_batches]
