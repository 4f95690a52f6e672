"""Chooses the server instance for a request. Used by the router and by its simulator."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Generic, Protocol, TypeVar

REQUEST_TOKENS = 2048
"""An unfinished request on an instance is weighted like this many prompt tokens to compute.

Of the values from 256 to 4,096, this was the best in simulations of the Mooncake conversation trace: 99.0% of requests met the latency
limits. Another rule reached 95.8%: it keeps a prefix on one instance until that has more than 1.25 times the fewest requests plus 4.
Prompts without prefixes were routed alike by both rules.
"""
MOST_PREFIXES = 1 << 17
"""Number of prefixes that are remembered: the most recently used ones."""


class RoutedInstance(Hashable, Protocol):
    """The state of an instance that the routing rule reads."""

    requests: int
    """Unfinished requests that were sent to the instance."""
    answered: int
    """Requests that the instance has answered."""


InstanceT = TypeVar("InstanceT", bound=RoutedInstance)


class RequestRouting(Generic[InstanceT]):
    """Compares, for each instance, the prompt tokens that it has cached already with the number of its unfinished requests."""

    def __init__(self) -> None:
        self._instance_of: OrderedDict[Hashable, InstanceT] = OrderedDict()
        """The instance that received each prefix last."""

    def choose(
        self, instances: Sequence[InstanceT], prefixes: Sequence[Hashable] = (), prefix_tokens: float = 0.0
    ) -> InstanceT:
        """Choose an instance for a request. `prefixes` are prefixes of its prompt, each `prefix_tokens` longer than the one before."""
        known: dict[InstanceT, float] = {}
        instance_of = self._instance_of
        for number, prefix in enumerate(prefixes, 1):
            if (instance := instance_of.get(prefix)) is not None:
                known[instance] = number * prefix_tokens
        chosen = min(instances, key=lambda each: (REQUEST_TOKENS * each.requests - known.get(each, 0.0), each.answered))
        for prefix in prefixes:
            instance_of[prefix] = chosen
            instance_of.move_to_end(prefix)
        while len(instance_of) > MOST_PREFIXES:
            instance_of.popitem(last=False)
        return chosen
