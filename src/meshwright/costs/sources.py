"""Says for each part of the machine where the numbers of a prediction come from, for example "datasheet" or "measured"."""

from __future__ import annotations

from meshwright.config.profile_file import load_profile
from meshwright.costs.constants import OWN, constants, is_measured, table
from meshwright.costs.machine_rates import chip_of, is_guessed, machine_of, with_measurements
from meshwright.costs.measured import fits
from meshwright.costs.plan_costs import STACK, as_nodes, band_and_source
from meshwright.spec.chips import CHIPS
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.plan import Plan

GROUPS = (
    "matmuls",
    "attention",
    "device memory",
    "optimizer",
    "links inside a node",
    "network",
    "overlap",
    "host link",
    "software",
)
"""Groups of numbers; all numbers of a group come from one source.

No profile measures the group `software`: element-wise operations, host time, and the fixed time of a step.
"""
STACK_GROUPS = ("optimizer", "overlap", "software")
"""Groups whose numbers depend on the training software, so no datasheet has them."""
NETWORK_KEYS = {"links inside a node": "link_gb_per_s", "network": "port_gb_per_s"}
"""Group → key of `cluster.network` that replaces the datasheet's bandwidth."""
UNMEASURED = "guess; `meshwright profile --out FILE` measures it"
"""The source of numbers that nobody measured."""


def sources(cluster: ClusterSpec, number_format: str = "bf16", plan: Plan | None = None) -> dict[str, str]:
    """Return a text with the source of each group of numbers for `cluster`, and of the 80% band of `plan` if it is
    given.

    - Measured: the error of the fitted formula, the file of the profile, its date.
    - Fitted: the number of runs and the software.
    - Otherwise "datasheet", or a text that says "guess".

    Groups that the cluster does not have are absent, for example "network" with one node. Raises BadInput if the
    profile cannot be read or the cluster is invalid (`costs.machine_rates.machine_of`).
    """
    nodes = as_nodes(cluster)
    absent = {"links inside a node"} if nodes.gpus_per_node == 1 else set()
    absent = {"network"} if nodes.nodes == 1 else absent
    absent |= {"overlap", "links inside a node"} if nodes.ranks == 1 else set()
    source_by_group = {group: _unmeasured_source(cluster, group) for group in GROUPS if group not in absent}
    if plan is not None and not is_guessed(cluster):
        source_by_group["80% band"] = band_and_source(cluster, plan)[1]
    chip = chip_of(nodes)
    if cluster.profile is None or chip is None:
        return source_by_group
    profile = load_profile(cluster.profile)
    k, _ = with_measurements(constants(chip.generation, STACK), machine_of(nodes, number_format), nodes, number_format)
    for group, fit in fits(k, profile, number_format).items():
        if group in source_by_group and fit.count:
            source_by_group[group] = f"{fit}: {cluster.profile}, {profile.date[:10]}"
    if profile.corrections:
        runs = len(profile.corrections)
        source_by_group["matmuls"] += f"; corrected by {runs} run{'s' * (runs > 1)} in {cluster.profile}"
    return source_by_group


def _unmeasured_source(cluster: ClusterSpec, group: str) -> str:
    """Return the source of a group's numbers if no profile measures them."""
    if group in STACK_GROUPS and not (cluster.is_cpu and group != "software"):
        return _share_source(cluster, of_stack=True)
    stated = getattr(cluster.network, NETWORK_KEYS[group]) if cluster.network and group in NETWORK_KEYS else None
    if stated:
        return f"{stated:.4g} GB/s as cluster.network states, share {_share_source(cluster)}"
    if cluster.gpu not in CHIPS:
        return UNMEASURED
    if group == "network" and cluster.emulate_nodes > 1:
        return "measured on another host's loopback"
    if group == "network" and cluster.network and cluster.network.fabric == "tcp":
        return "guess: the datasheet's ports, which TCP rarely fills; set cluster.network.port_gb_per_s to the measured rate"
    return "datasheet" if group == "host link" else f"datasheet, share {_share_source(cluster)}"


def _share_source(cluster: ClusterSpec, *, of_stack: bool = False) -> str:
    """Return the source of the share of a datasheet's figure that is reached; with `of_stack`, of a constant of the
    training software.
    """
    chip = CHIPS.get(cluster.gpu)
    values = table()
    if STACK == OWN and (of_stack or (chip is not None and is_measured(chip.generation))):
        elsewhere = "" if chip is not None and is_measured(chip.generation) else ", on other devices"
        return f"fitted on {values['own_runs']} runs of {STACK}{elsewhere}"
    if chip is None:
        return "a guess"
    if chip.generation not in values["generations"]:
        return f"a guess: no run on {chip.generation} devices was fitted"
    return f"fitted on published runs ({sum(values['fitted_on'].values()):,}, all generations)"
