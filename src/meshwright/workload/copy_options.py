"""Options of a plan that let copy engines carry transfers instead of NCCL kernels.

The search and the printed plan use them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from meshwright.spec.plan import SHARD_AXES, AxisName, Plan, Transport
from meshwright.spec.plan_keys import PlanKeys


@dataclass(frozen=True)
class CopyOption:
    """A transfer that either copy engines or NCCL kernels can carry."""

    key: Literal["gather_transport", "tensor_transport"]
    """The key of a plan, and of its pins, that chooses between them."""
    column: str
    """The column of the planner's search that is 1 if copy engines carry the transfer."""
    transfer_name: str
    """Name of what is transferred, for messages."""
    axes: tuple[AxisName, ...]
    """The mesh axes whose ranks send to each other."""

    def transport(self, plan: Plan) -> Transport:
        """Return what carries the transfer in `plan`: "nccl" or "copy_engine"."""
        return getattr(plan, self.key)

    def ranks(self, plan: Plan) -> int:
        """Return the number of ranks that send to each other."""
        return prod(plan.axis_size(axis) for axis in self.axes)

    def pin(self, pins: PlanKeys) -> Transport | None:
        """Return the value to which the user pinned the key; None if it is not pinned."""
        return getattr(pins, self.key)


GATHERS = CopyOption("gather_transport", "copied", "gathers", SHARD_AXES)
"""All-gathers of weights between shard ranks."""
TOKENS = CopyOption("tensor_transport", "tokens copied", "tokens", ("tensor",))
"""Exchanges of tokens between tensor ranks."""
COPY_OPTIONS: Sequence[CopyOption] = (GATHERS, TOKENS)


def copied_options(plan: Plan) -> list[CopyOption]:
    """Return the options for which `plan` uses copy engines."""
    return [option for option in COPY_OPTIONS if option.transport(plan) == "copy_engine"]


def transport_fields(copied: Collection[CopyOption]) -> dict[str, Any]:
    """Return the keys of a plan in which copy engines carry the transfers `copied`, and NCCL kernels carry all others.

    Only the gathers use copy engines:

    >>> transport_fields([GATHERS])
    {'gather_transport': 'copy_engine', 'tensor_transport': 'nccl'}
    """
    return {option.key: "copy_engine" if option in copied else "nccl" for option in COPY_OPTIONS}
