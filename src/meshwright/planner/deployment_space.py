"""Lists the deployments that the planner considers for a model and a cluster.

- Colocated instances, in every tensor degree that fits: each instance computes prompts and decodes.
- Prefill and decode instances, each role in every tensor degree that fits.
- For MoE models, colocated instances that divide the experts over several groups of devices. This release serves such
  instances if a group has one device. The planner shows the others next to its choice.

A reward model is served on one device and generates no text, so it has only colocated instances of one device.

A large cluster is planned as several equal units of a few instances, and only one unit is simulated. So the simulation
takes as long as for a small cluster, but the share of devices for a role is a multiple of one instance in a unit. A
router over all units would balance load a little better than predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product

from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.deployment import Deployment, InstanceSpec, Quantisation, ServingSoftwareName
from meshwright.spec.divisors import divisors
from meshwright.spec.errors import OutOfResources
from meshwright.spec.inference_layout import split_error
from meshwright.spec.model import ModelSpec

UNIT_INSTANCES = 8
"""A unit has space for at least this many instances of the smallest tensor degree, if the cluster has."""
TOKEN_BUDGETS = (256, 512, 1024, 2048, 4096, 8192)
"""Maximum numbers of prompt tokens of a step that are tried.

A small budget limits the time of a step; a large one computes prompts faster.
"""
EXPERT_BUDGETS = (512, 2048, 8192)
"""The same for instances with several groups of experts."""
PREFILL_BUDGET = 2048
"""Maximum number of prompt tokens of a step of a prefill instance."""
DECODE_BUDGET = 256
"""Maximum number of prompt tokens of a step of a decode instance, which computes no whole prompt."""


@dataclass(frozen=True)
class DeploymentSpace:
    """The possible deployments of one unit of a cluster."""

    units: int
    """Number of equal units in the cluster. Devices outside the units stay idle."""
    deployments: tuple[Deployment, ...]
    """Every deployment of one unit that fits."""

    def whole(self, deployment: Deployment) -> Deployment:
        """Return the deployment on all units of the cluster."""
        grown = tuple(replace(instance, count=self.units * instance.count) for instance in deployment.instances)
        return replace(deployment, instances=grown)


def deployment_space(
    model: ModelSpec,
    cluster: ClusterSpec,
    quantisation: Quantisation,
    check: Callable[[InstanceSpec], object],
    *,
    software: ServingSoftwareName | None = None,
) -> DeploymentSpace:
    """Return all deployments of a unit that fit. `check` raises OutOfResources for an instance that does not fit.

    Raises OutOfResources if no tensor degree fits, with the reason for the largest degree.
    """
    budgets = _fitting_budgets(model, cluster, check)
    units = max(1, cluster.ranks // (UNIT_INSTANCES * min(budgets)))
    devices = cluster.ranks // units
    groups = [*_colocated(budgets, devices)]
    if model.head != "score":
        groups += [*_disaggregated(budgets, devices), *_expert_parallel(model, devices, check)]
    deployments = tuple(
        Deployment(instances=instances, quantisation=quantisation, software=software) for instances in groups
    )
    return DeploymentSpace(units, deployments)


def _fitting_budgets(
    model: ModelSpec, cluster: ClusterSpec, check: Callable[[InstanceSpec], object]
) -> dict[int, list[int]]:
    """Return the token budgets with which an instance fits, by tensor degree.

    A tensor degree must divide the devices of a node. In a cluster with a single node it need not, and may leave
    devices idle. Raises OutOfResources if nothing fits.
    """
    per_node = cluster.ranks_per_node
    single = cluster.ranks == per_node
    budgets, reason = _budgets_of(model, range(1, per_node + 1) if single else divisors(per_node), check)
    if not budgets:
        larger = [degree for degree in (2, 4, 8, 16, 32, 64) if degree > per_node]
        fitting = min(_budgets_of(model, larger, check)[0], default=None)
        expected = "a smaller model" if fitting is None else f"at least {fitting}, or a smaller model"
        key = "cluster.gpus_per_node"
        raise OutOfResources(f"{key}: expected {expected}, got {per_node}: {reason}", key=key)
    return budgets


def _budgets_of(
    model: ModelSpec, degrees: Iterable[int], check: Callable[[InstanceSpec], object]
) -> tuple[dict[int, list[int]], OutOfResources]:
    """Return the token budgets with which an instance fits, by tensor degree, and the reason of the last instance that
    does not fit.
    """
    budgets: dict[int, list[int]] = {}
    reason = OutOfResources("no tensor degree divides the model")
    for tensor in degrees:
        if split_error(model, tensor) is not None or (model.head == "score" and tensor > 1):
            continue
        for budget in TOKEN_BUDGETS:
            try:
                check(InstanceSpec(tensor=tensor, token_budget=budget))
            except OutOfResources as error:
                reason = error
                break
            budgets.setdefault(tensor, []).append(budget)
    return budgets, reason


def _colocated(budgets: dict[int, list[int]], devices: int) -> Iterator[tuple[InstanceSpec, ...]]:
    """Yield deployments of as many colocated instances as fit on `devices`.

    `budgets` has token budgets by tensor degree.

    Suppose that one device holds the model with steps of 2,048 tokens, and two devices with steps of 4,096. On 4
    devices:

    >>> for instances in _colocated({1: [2048], 2: [4096]}, devices=4):
    ...     print(instances)
    (InstanceSpec(role='both', count=4, tensor=1, expert=1, token_budget=2048),)
    (InstanceSpec(role='both', count=2, tensor=2, expert=1, token_budget=4096),)
    """
    for tensor in (tensor for tensor in budgets if tensor <= devices):
        for budget in budgets[tensor]:
            yield (InstanceSpec(count=devices // tensor, tensor=tensor, token_budget=budget),)


def _disaggregated(budgets: dict[int, list[int]], devices: int) -> Iterator[tuple[InstanceSpec, ...]]:
    """Yield deployments of prefill and decode instances.

    Each role has its own tensor degree, and as few devices as possible stay idle.
    """
    for prefill, decode in product(budgets, repeat=2):
        prefill_budget = max(budget for budget in budgets[prefill] if budget <= PREFILL_BUDGET)
        for count in range(1, (devices - decode) // prefill + 1):
            decoders, idle = divmod(devices - count * prefill, decode)
            if idle < prefill:
                yield (
                    InstanceSpec(role="prefill", count=count, tensor=prefill, token_budget=prefill_budget),
                    InstanceSpec(role="decode", count=decoders, tensor=decode, token_budget=DECODE_BUDGET),
                )


def _expert_parallel(
    model: ModelSpec, devices: int, check: Callable[[InstanceSpec], object]
) -> Iterator[tuple[InstanceSpec, ...]]:
    """Yield deployments of instances in which several groups of devices divide the experts, in all degrees that fit."""
    if not model.experts:
        return
    for tensor in divisors(devices):
        if split_error(model, tensor) is not None:
            continue
        for expert in (degree for degree in divisors(devices // tensor) if degree > 1 and model.experts % degree == 0):
            for budget in EXPERT_BUDGETS:
                instance = InstanceSpec(
                    count=devices // (tensor * expert), tensor=tensor, expert=expert, token_budget=budget
                )
                try:
                    check(instance)
                except OutOfResources:
                    break
                yield (instance,)
