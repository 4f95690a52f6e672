"""Which instance gets a request, by the rule of the server's router (`server.instances`)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

CROWDED, SLACK = 1.25, 4
"""The instance with a prefix may have this factor of the fewest requests, and so many beside them."""


class RequestRouting:
    """Chooses the instance with the fewest requests, or one that has got the longest known prefix and is not crowded."""

    def __init__(self) -> None:
        self._instance_of: dict[Hashable, int] = {}

    def choose(self, requests: Sequence[int], answered: Sequence[int], prefixes: Sequence[Hashable] = ()) -> int:
        """Index of an instance, by their unfinished and their answered requests; `prefixes` of the prompt, short ones first."""
        chosen = min(range(len(requests)), key=lambda index: (requests[index], answered[index]))
        fewest = requests[chosen]
        for prefix in reversed(prefixes):
            index = self._instance_of.get(prefix)
            if index is not None and requests[index] <= CROWDED * fewest + SLACK:
                chosen = index
                break
        for prefix in prefixes:
            self._instance_of[prefix] = chosen
        return chosen
