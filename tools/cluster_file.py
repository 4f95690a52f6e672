"""The cluster file reference of the docs as Markdown: built-in examples and chips come from their declarations."""

from __future__ import annotations

from meshwright.config.presets import CLUSTER_PRESETS, cluster_names
from meshwright.spec.chips import CHIPS, Chip, GiB

_INTRODUCTION = """\
# Cluster file

How do I describe a cluster to the planner and to a run? `make reference` writes this page.

| value of `cluster` | meaning |
|---|---|
| `auto`, or left out | the GPUs of this machine, or one CPU rank |
| a name | a [built-in example](#built-in-examples) |
| a file | a YAML file; its path is relative to the run file |
| a section | the same keys in the run file |

```yaml
gpu: H100                # a chip of the table below, or another together with memory_gib
nodes: 16
gpus_per_node: 8
network:                 # all of it optional: missing values are those of the chip's reference machine
  fabric: roce           # infiniband, roce, efa or tcp; gives the latency
  port_gb_per_s: 50      # one GPU's share of its node's ports, one direction: 400 Gb/s for each GPU
  link_gb_per_s: 450     # inside a domain, one direction
  domain: 8              # GPUs that reach each other at link speed; 64 or 72 on NVL72
  pod_nodes: 8           # nodes with full bandwidth to each other
  oversubscription: 4    # bandwidth inside a pod divided by bandwidth between pods
groups:                  # those of the sixteen nodes that differ; they come last in rank order
  - {nodes: 4, gpu: A100, port_gb_per_s: 25, link_gb_per_s: 300, fabric: infiniband}
```

Bandwidths are in 10⁹ bytes per second: divide Gb/s by 8, and a node's ports by its GPUs. A group inherits missing
values from the cluster, then from its own chip. [Run file](run-file.md#cluster) has every key. A stated latency
(`port_us`, `link_us`, or the fabric's) replaces the fitted one.

`memory_gib` below the chip's memory limits planner and allocator to that amount. `profile` names the figures of a
[measured machine](../how-to/measure-a-machine.md). Ranks fill nodes in order. The last axis of a plan's `mesh` has
neighbouring ranks. [Choose a plan](../how-to/choose-a-plan.md#nodes-of-different-types) explains groups.

## Built-in examples

| name | cluster |
|---|---|
"""
_CHIPS = """
## Chips

Names are matched loosely (`cluster.gpu="rtx 4090"`). Memory is the amount that the driver reports. Peaks are the
vendor's figures without sparsity. Cards without NVLink reach each other over PCIe. Their network bandwidth is a guess,
so set `network.port_gb_per_s`.

- Graphics cards, V100, T4, H20 and Ascend are estimated with guessed shares of their peaks. Their 80% band is a
  factor of three.
- A chip outside the table needs `memory_gib`. It gets a plan and its memory but no step time. A profile adds the
  rates.
- To add a chip, add its datasheet figures to `spec/chips.py` and choose the generation whose constants apply to it.

Bandwidths are those of one chip in one direction, in GB/s: of its memory, to its neighbours and across nodes.

| chip | made for | memory, GiB | peak, TFLOP/s | memory, GB/s | neighbours | across nodes |
|---|---|---:|---|---:|---:|---:|
"""


def page() -> str:
    """The whole page."""
    examples = "".join(f"| `{name}` | {_description(name)} |\n" for name in cluster_names())
    return _INTRODUCTION + examples + _CHIPS + "".join(map(_chip_line, CHIPS.values()))


def _description(name: str) -> str:
    """The comment at the head of a built-in cluster."""
    with (CLUSTER_PRESETS / f"{name}.yaml").open(encoding="utf-8") as file:
        return file.readline().removeprefix("#").strip()


def _chip_line(chip: Chip) -> str:
    peaks = ", ".join(f"{precision} {flops / 1e12:,.6g}" for precision, flops in chip.peak_flops.items())
    rates = [f"{rate / 1e9:,.4g}" for rate in (chip.hbm, chip.link, chip.nic)]
    return f"| {' | '.join([chip.name, _made_for(chip), str(chip.memory_bytes // GiB), peaks, *rates])} |\n"


def _made_for(chip: Chip) -> str:
    if chip.per_node == 1:
        return "workstations"
    return "data centers, on PCIe" if chip.link == chip.host else "data centers"
