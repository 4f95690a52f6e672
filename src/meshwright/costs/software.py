"""Training software whose steps can be predicted: the name of its constants, and what its recipes do unless a run says
otherwise.

The constants are in constants.yaml, with the runs to which they were fitted. Software with few published runs shares
the constants of software that trains in a similar way.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

from meshwright.spec.named_values import value_named


@dataclass(frozen=True, kw_only=True)
class TrainingSoftware:
    """A training software, as published runs and the option `--software` name it."""

    name: str
    """The name that `--software` takes."""
    constants: str
    """Name of its set of constants in constants.yaml or own.yaml."""
    parent: str = ""
    """Name of the set that has the constants which its own set lacks.

    Its own set lacks some if few runs were published.
    """
    date: float
    """Year of the releases whose runs the constants follow, as a decimal (2024.5 is the middle of 2024).

    A run that does not name a release counts as of this year.
    """
    pattern: str = ""
    """Regular expression for the names of sources (in lower case) whose runs used this software; "" if no name tells.
    """
    shards_optimizer: bool = False
    """Whether its recipes shard the optimizer state over replicas by default (ZeRO-1)."""
    fully_sharded: bool = False
    """Whether it shards weights, gradients and optimizer over all data ranks (FSDP, ZeRO-3)."""
    recomputes: bool = True
    """Whether its published runs may use recomputation where they do not say."""
    balances_stages: bool = False
    """Whether it divides layers among pipeline stages by the compute of layers and head, instead of evenly."""
    prints_first_stage: bool = False
    """Whether it prints the memory of rank 0, not of the fullest rank."""
    states_sequence_split: bool = True
    """Whether its published tables state if tensor parallelism splits the sequence (sequence parallelism)."""
    expert_ranks: bool = True
    """Whether it can divide experts over ranks."""
    virtual_stages: bool = True
    """Whether its pipelines can have several stages on one rank."""
    formats: tuple[str, ...] = ()
    """Number formats narrower than bf16 in its published runs, with the names of `planner.precision_choice`."""
    layout: Mapping[str, float] = field(default_factory=dict)
    """Values of fields of `workload.layouts.Layouts` that its recipes set."""
    about: str = ""
    """Where its constants and recipes come from."""


_DEEPEP = {"one_copy": 1.0}
"""DeepEP sends each token only once to a domain with several of the token's experts."""

SOFTWARE: tuple[TrainingSoftware, ...] = (
    TrainingSoftware(
        name="meshwright",
        constants="meshwright",
        date=2026.9,
        pattern="meshwright",
        about="own runs on H200 (own.yaml)",
    ),
    TrainingSoftware(
        name="maxtext",
        constants="jax",
        date=2024.9,
        pattern="maxtext|paxml",
        fully_sharded=True,
        formats=("fp8-tensor",),
        about="MaxText and PaxML in NVIDIA's benchmarks of 2024, which share the constants of all software",
    ),
    TrainingSoftware(
        name="megatron-lm-2021",
        constants="megatron_lm",
        date=2022.0,
        pattern="sc21|korthikanti",
        about="tables of 2021 and 2022, attention without fused kernels",
    ),
    TrainingSoftware(
        name="mlperf",
        constants="megatron_tuned",
        date=2024.8,
        pattern="megascale|mlcommons|mlperf",
        shards_optimizer=True,
        formats=("fp8-tensor", "nvfp4"),
        about="submissions to MLPerf training and MegaScale: Megatron tuned for one machine",
    ),
    TrainingSoftware(
        name="megatron-deepspeed",
        constants="megatron_deepspeed",
        date=2022.5,
        pattern="vtrain|bloom|bigscience|chronicles|megatron-deepspeed",
        about="runs of 2021 to 2023 on A100 and V100",
    ),
    TrainingSoftware(
        name="deepspeed-2021",
        constants="deepspeed_2021",
        parent="default",
        date=2021.3,
        fully_sharded=True,
        virtual_stages=False,
        expert_ranks=False,
        about="ZeRO-3 without model parallelism, five runs of 2021 on A100",
    ),
    TrainingSoftware(
        name="nanotron",
        constants="nanotron",
        date=2025.0,
        pattern="playbook|nanotron",
        recomputes=False,
        balances_stages=True,
        prints_first_stage=True,
        states_sequence_split=False,
        expert_ranks=False,
        about="the sweep of Hugging Face's playbook, on H100",
    ),
    TrainingSoftware(
        name="megatron-bridge",
        constants="bridge",
        date=2026.5,
        pattern="megatron-bridge|megatron-moe",
        shards_optimizer=True,
        formats=("fp8-tensor", "fp8-block", "mxfp8", "nvfp4"),
        about="NVIDIA's performance tables, containers 25.09 to 26.08",
    ),
    TrainingSoftware(
        name="hai-llm",
        constants="hai_llm",
        parent="bridge",
        date=2024.9,
        pattern="deepseek-v3 report",
        shards_optimizer=True,
        formats=("fp8-block",),
        about="DeepSeek's, one run of its report",
    ),
    TrainingSoftware(
        name="megatron-bridge-graphs",
        constants="bridge_graphs",
        parent="bridge",
        date=2026.5,
        shards_optimizer=True,
        layout={"host_sizes": 0.0, "exchange_overlaps": 1.0, "one_copy": 1.0},
        formats=("mxfp8",),
        about="Megatron-Bridge with the whole step as one graph, on GB200 and GB300 (container 26.06)",
    ),
    TrainingSoftware(
        name="automodel",
        constants="automodel",
        parent="torchtitan",
        date=2026.6,
        pattern="automodel",
        fully_sharded=True,
        layout=_DEEPEP,
        about="FSDP2 with Transformer Engine and DeepEP: NVIDIA's table of August 2026",
    ),
    TrainingSoftware(
        name="nemo",
        constants="nemo",
        date=2024.9,
        pattern="dgxc|nemo|megatron-lm images",
        shards_optimizer=True,
        formats=("fp8-tensor",),
        about="NVIDIA's benchmarks of 2024 and 2025",
    ),
    TrainingSoftware(
        name="llm-foundry",
        constants="llm_foundry",
        date=2023.8,
        pattern="mosaicml|llm-foundry",
        fully_sharded=True,
        virtual_stages=False,
        expert_ranks=False,
        formats=("fp8-tensor",),
        about="MosaicML's tables of 2023, FSDP1",
    ),
    TrainingSoftware(
        name="torchtitan",
        constants="torchtitan",
        date=2025.0,
        pattern="torchtitan|fms-fsdp",
        fully_sharded=True,
        formats=("fp8-tensor",),
        about="torchtitan's tables of 2024 and 2025",
    ),
    TrainingSoftware(
        name="kempnerforge",
        constants="kempnerforge",
        parent="torchtitan",
        date=2026.4,
        pattern="kempnerforge",
        fully_sharded=True,
        about="FSDP2 with tensor ranks on nodes of four GPUs: tables of April and June 2026",
    ),
    TrainingSoftware(
        name="prime-rl",
        constants="prime_rl",
        parent="torchtitan",
        date=2026.8,
        pattern="prime-rl",
        fully_sharded=True,
        about="FSDP2 with torchtitan's experts, one run of October 2026",
    ),
    TrainingSoftware(
        name="olmo-core",
        constants="olmo_core",
        parent="torchtitan",
        date=2025.5,
        pattern="olmo-core",
        fully_sharded=True,
        formats=("fp8-tensor",),
        about="FSDP2, one run of 2025",
    ),
    TrainingSoftware(
        name="scaletorch",
        constants="scaletorch",
        parent="default",
        date=2026.5,
        pattern="scaletorch",
        about="plain PyTorch on Ascend, four runs of 2026",
    ),
    TrainingSoftware(
        name="megatron-core",
        constants="megatron_core",
        parent="bridge",
        date=2026.0,
        pattern="ms-swift|primus",
        shards_optimizer=True,
        formats=("fp8-block",),
        about="Megatron-Core of 2024 or later outside NVIDIA's containers: runs of ms-swift on H20 and of Primus on MI300X",
    ),
    TrainingSoftware(
        name="deepspeed",
        constants="default",
        date=2025.0,
        pattern="deepspeed|colossalai",
        fully_sharded=True,
        expert_ranks=False,
        virtual_stages=False,
        about="no fitted runs of 2024 or later: the constants of all software together",
    ),
    TrainingSoftware(name="other", constants="default", date=2025.0, about="all software together"),
)
"""All software. The first entry whose pattern matches a source counts, so specific patterns come first."""
OTHER = SOFTWARE[-1]
"""The entry for software that is not known."""
IMBALANCE = 1.2
"""Tokens of the busiest expert rank relative to the mean, for a run that does not state it: a guess."""
_FUSED_SINCE = 2023.5
"""Year from which on Megatron-LM has fused attention."""


_PARENTS = {software.constants: software.parent for software in SOFTWARE}
"""Name of a set of constants → name of its parent."""


def parent_of(constants: str) -> str:
    """Return the name of the set that has the constants which this set lacks; "" if there is none."""
    return _PARENTS.get(constants, "")


@cache
def software_named(name: str) -> TrainingSoftware:
    """Return the software with this name; case and punctuation do not matter. Raises BadInput with the nearest name."""
    return value_named(name, {software.name: software for software in SOFTWARE}, "software")


def software_of(source: str, note: str, year: float = 0.0) -> TrainingSoftware:
    """Return the software that the name of a source implies; `OTHER` if it implies none.

    `note` is the source's remark on the run. `year` is the year of the software's release, 0 if unknown: "megatron"
    alone is Megatron-Core or an old Megatron-LM, depending on the year.
    """
    text = source.lower()
    if "megascale" in text and re.search(r"megatron-lm", note, re.IGNORECASE) and not note.startswith("MegaScale"):
        return software_named("megatron-lm-2021")
    found = next((software for software in SOFTWARE if software.pattern and re.search(software.pattern, text)), None)
    if found is None and "megatron" in text:
        return software_named("megatron-core" if year >= _FUSED_SINCE else "megatron-lm-2021")
    return found or OTHER
