"""Options of a plan that move transfers from NCCL kernels to copy engines; used by the search and by the printed plan."""

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
    """The field of a plan and of its pins."""
    column: str
    """The column of a search that is 1 where copy engines carry the transfer."""
    transfer_name: str
    """Name of the tensors that it transfers."""
    axes: tuple[AxisName, ...]
    """Axes between whose ranks it transfers."""

    def transport(self, plan: Plan) -> Transport:
        return getattr(plan, self.key)

    def ranks(self, plan: Plan) -> int:
        """Ranks between which it transfers."""
        return prod(plan.axis_size(axis) for axis in self.axes)

    def pin(self, pins: PlanKeys) -> Transport | None:
        return getattr(pins, self.key)


GATHERS = CopyOption("gather_transport", "copied", "gathers", SHARD_AXES)
TOKENS = CopyOption("tensor_transport", "tokens copied", "tokens", ("tensor",))
COPY_OPTIONS: Sequence[CopyOption] = (GATHERS, TOKENS)


def copied_options(plan: Plan) -> list[CopyOption]:
    """The options for which `plan` uses copy engines."""
    return [option for option in COPY_OPTIONS if option.transport(plan) == "copy_engine"]


def transport_fields(copied: Collection[CopyOption]) -> dict[str, Any]:
    """The fields of a plan in which copy engines carry `copied` and kernels everything else.

    Copy engines carry the gathers alone:

    >>> transport_fields([GATHERS])
    {'gather_transport': 'copy_engine', 'tensor_transport': 'nccl'}
    """
    return {option.key: "copy_engine" if option in copied else "nccl" for option in COPY_OPTIONS}
