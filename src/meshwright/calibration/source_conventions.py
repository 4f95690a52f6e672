"""Conventions of published sources: what a blank cell of their tables means, and what their words mean.

Each convention quotes the text on which it is based. Predictions list the values that it fills in, with that text,
under `assumed`. Conventions follow the source's text; they are not chosen to make predictions accurate.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

Record = Mapping[str, str]
"""A row of a table: column → cell."""


@dataclass(frozen=True, kw_only=True)
class Convention:
    """A convention for the records of one source, or only for those whose columns match `only`."""

    source: str
    """Regular expression for the name of the source, in lower case."""
    because: str
    """The text of the source on which the convention is based."""
    only: Mapping[str, str] = field(default_factory=dict)
    """Column → regular expression that its cell must match."""
    blanks: Mapping[str, str] = field(default_factory=dict)
    """Column → value of a blank cell."""
    read_as: Mapping[str, str] = field(default_factory=dict)
    """Column → value that replaces the value of the cell."""
    layout: Mapping[str, float] = field(default_factory=dict)
    """Values of fields of `workload.layouts.Layouts` for which there is no column."""
    stack: str = ""
    """The training software, if the name of the source implies another one."""
    release: float = 0.0
    """Year of the software, for records that do not name a release."""
    refused: bool = False
    """Whether such records cannot be predicted."""
    attention_counted_in_full: bool = False
    """Whether FLOP/s of the source count 6 FLOPs per parameter and token, and all attention scores, not only the causal
    half.

    See Chowdhery et al. 2022, appendix B.
    """

    def applies_to(self, record: Record) -> bool:
        """Return whether the convention holds for `record`."""
        if not re.search(self.source, (record.get("source") or "").lower()):
            return False
        return all(re.search(pattern, record.get(column) or "", re.IGNORECASE) for column, pattern in self.only.items())


def _recipe(model: str, gpu: str, containers: str, because: str, **layout: float) -> Convention:
    """Return a convention from Megatron-Bridge's performance recipes of a model on a device.

    `containers` is a regular expression.
    """
    only = {"model": model, "gpu": gpu, "note": f"container ({containers})"}
    return Convention(source="megatron-bridge", only=only, layout=layout, because=because)


def _whole_graph(model: str, gpu: str, pull_request: int) -> Convention:
    """Return a convention for recipes in which a whole step is one CUDA graph, from container 26.06 on."""
    return Convention(
        source="megatron-bridge",
        only={"model": model, "gpu": gpu, "note": r"container 26\.0[6-9]", "dtype": "mxfp8"},
        layout={"host_sizes": 0, "exchange_overlaps": 1},
        stack="bridge_graphs",
        because="the step is one graph, matmuls of experts are fused, tokens travel beside compute (recipes of 26.06, pull request "
        f"{pull_request})",
    )


_EXCHANGE_OVERLAPS = "tokens travel beside compute (moe_a2a_overlap in {}_workload_base_configs.py)"

CONVENTIONS = (
    Convention(
        source="llama 3 herd",
        blanks={"vpp": "8", "micro_batch": "1"},
        because="each rank has V chunks, the first of which keeps only the embedding when one of 128 layers is taken from it, so a chunk "
        "has one layer (arXiv 2407.21783, 3.3.2)",
        attention_counted_in_full=True,
    ),
    Convention(
        source="llama 3 herd",
        read_as={"zero/fsdp": "zero-2"},
        because="optimizer states and gradients are sharded, weights stay gathered, gradients are added up over micro-batches "
        "(arXiv 2407.21783, 3.3.2)",
    ),
    Convention(
        source="nemotron-4 340b",
        blanks={"vpp": "8", "micro_batch": "1"},
        release=2024.4,
        because="NVIDIA's recipe for the model: tensor 8, pipeline 12, virtual 8 (Megatron-Bridge nemotron4_340b); report of June "
        "2024",
    ),
    Convention(
        source="deepseek-v3 report",
        blanks={"micro_batch": "1", "vpp": "1", "vocab": "129280"},
        layout={"fill": 14 / 45, "imbalance": 1, "exchange_overlaps": 1, "one_copy": 1, "domains_per_token": 4},
        because="DualPipe: (p/2 - 1)(F&B + B - 3W) idle, with B = 2F, W = F; loads are kept even; a token goes to at most 4 nodes, once to "
        "each, beside compute (arXiv 2412.19437, table 2, 2.1.2, 3.2)",
    ),
    Convention(
        source="deepseek-v3 report",
        only={"dtype": "fp8"},
        read_as={"dtype": "fp8 blockwise"},
        because="tiles of 1 x 128 and blocks of 128 x 128 have scales of their own (arXiv 2412.19437, 3.3.2)",
    ),
    Convention(
        source="deepseek-v3 report|megatron-bridge",
        only={"model": "DeepSeek-V3", "note": r"^(?!.*w/o MTP)"},
        read_as={"layers": "62"},
        because="one more layer predicts a second token (arXiv 2412.19437, 2.2; mtp_num_layers 1 in recipes); its head is not priced",
    ),
    Convention(
        source="sc21 table 2",
        only={"zero/fsdp": "zero-3"},
        stack="deepspeed_2021",
        because="ZeRO-3 is DeepSpeed's, without model parallelism (arXiv 2104.04473, 5.2)",
    ),
    Convention(
        source="pytorch/torchtitan",
        only={"note": "^eager"},
        layout={"eager": 1},
        because="FSDP without torch.compile (table 1 and 3)",
    ),
    Convention(
        source="pytorch/torchtitan",
        only={"note": "^Interleaved 1F1B.*local batch 32"},
        blanks={"vpp": "2", "micro_batch": "4"},
        because="without other settings a looped schedule has two stages a rank, and as many micro-batches as ranks (torchtitan of "
        "December 2024, pipelining_utils.py)",
    ),
    Convention(
        source="training_results_v4.0",
        only={"gpus": "10752|11616"},
        layout={"layer_graphs": 1},
        because="LAYER_CUDA_GRAPH=1 (config_DGXH100_1344x8x6x4x6_mbs1_cg.sh and 1452x8x6x4x6)",
    ),
    Convention(
        source="training_results_v4.1",
        only={"gpu": "^B200"},
        layout={"layer_graphs": 1},
        because="LAYER_CUDA_GRAPH=1 in the configuration with 6 virtual stages and micro-batches of 2 (NVIDIA's, gpt3 on B200)",
    ),
    Convention(
        source="training_results_v5.1 university-of-florida",
        blanks={"dtype": "fp8"},
        layout={"layer_graphs": 1},
        because="its scripts source configurations without fp4, which include config_common_cg.sh (run_1n.sub, run_16n.sub, run_32n.sub)",
    ),
    Convention(
        source="automodel docs/performance-summary",
        layout={"imbalance": 1},
        because="a fake balanced gate is enabled to simulate ideal expert routing (performance-summary.mdx, note)",
    ),
    Convention(
        source="nemo",
        only={"note": "LoRA"},
        refused=True,
        because="LoRA trains adapters only: no gradients of weights, which is not priced",
    ),
    Convention(
        source="megatron-bridge",
        only={"ep": r"^([2-9]|\d\d)"},
        layout={"imbalance": 1},
        because="token distribution among experts is force-balanced (performance-summary.md, footnote)",
    ),
    Convention(
        source="megatron-bridge",
        only={"note": "tokendrop"},
        layout={"host_sizes": 0},
        because="experts take a fixed number of rows and drop the others, so no size comes to the host",
    ),
    _whole_graph("DeepSeek-V3", "^GB", 3983),
    _whole_graph("Qwen3-(30|235)B", "^GB", 4211),
    _whole_graph("Qwen3-30B", "^B300", 4211),
    _whole_graph("GPT-OSS", "^GB", 4173),
    _recipe(
        "DeepSeek-V3",
        "^H100",
        "25",
        f"DeepEP, {_EXCHANGE_OVERLAPS.format('deepseek')}",
        exchange_overlaps=1,
        one_copy=1,
    ),
    _recipe(
        "DeepSeek-V3",
        "^B200",
        r"26\.0[4-9]",
        f"DeepEP, {_EXCHANGE_OVERLAPS.format('deepseek')}",
        exchange_overlaps=1,
        one_copy=1,
    ),
    _recipe("Qwen3-235B", "^H100", "2", _EXCHANGE_OVERLAPS.format("qwen3"), exchange_overlaps=1),
    _recipe("Qwen3-235B", "^B200", r"25\.11", _EXCHANGE_OVERLAPS.format("qwen3"), exchange_overlaps=1),
    _recipe("Qwen3-235B", "^B300", r"26\.02", _EXCHANGE_OVERLAPS.format("qwen3"), exchange_overlaps=1),
    _recipe("Qwen3-30B", "^H100", r"25\.11", _EXCHANGE_OVERLAPS.format("qwen3"), exchange_overlaps=1),
    _recipe("Qwen3-30B", "^H100", "26", "HybridEP (qwen3_workload_base_configs.py)", one_copy=1),
    _recipe("Nemotron-3-Super", "^B200", "26", "HybridEP (perf_recipes/nemotronh/b200/nemotronh.py)", one_copy=1),
    Convention(
        source="megatron-bridge",
        only={"model": "Llama-3.1-70B", "gpu": "^GB300", "dtype": "mxfp8", "note": r"container 26\.02\.01"},
        read_as={"vpp": "5", "micro_batch": "1"},
        because="of the recipe (llama3_workload_base_configs.py) and of the releases around it; printed are those of the sharded row",
    ),
    Convention(
        source="megatron-bridge",
        only={"gpu": "H100", "note": "25.09.*value in parentheses", "dtype": "fp8"},
        read_as={"dtype": "fp8 blockwise"},
        because="in parentheses: weights in blocks of 128 x 128, activations in tiles of 1 x 128 (performance-summary-archive.md, 25.09)",
    ),
    Convention(
        source="megatron-moe-modelzoo",
        only={"note": "^DeepEP"},
        layout={"one_copy": 1},
        because="DeepEP sends a token once to a node",
    ),
    Convention(
        source="megatron-moe-modelzoo",
        only={"note": "1F1B overlap"},
        layout={"exchange_overlaps": 1},
        because="1F1B overlap",
    ),
    Convention(
        source="megatron-moe-modelzoo",
        only={"model": "Qwen3-235B", "note": "^(?!.*dropless)"},
        layout={"imbalance": 1},
        because="commands have --moe-router-force-load-balancing (best_practice/qwen3: readme.md, run_h100_235b.sh)",
    ),
)
"""All conventions, in the order in which they are applied."""


def applicable_conventions(record: Record) -> tuple[Convention, ...]:
    """Return the conventions that hold for `record`."""
    return tuple(convention for convention in CONVENTIONS if convention.applies_to(record))


def with_conventions(record: Record) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the cells of `record` after its source's conventions, and a sentence for each change with its reason."""
    cells = dict(record)
    changes = []
    for convention in applicable_conventions(record):
        blank = {key: value for key, value in convention.blanks.items() if not (cells.get(key) or "").strip()}
        changed = blank | {key: value for key, value in convention.read_as.items() if cells.get(key) != value}
        cells |= changed
        texts = [f"{key} {value}" for key, value in changed.items()]
        texts += [f"{key} {value:.3g}" for key, value in convention.layout.items()]
        texts += [f"stack {convention.stack}"] * bool(convention.stack)
        texts += [f"release {convention.release:g}"] * bool(convention.release)
        if texts:
            changes.append(f"{', '.join(texts)}: {convention.because}")
    return cells, tuple(changes)


def stated_layout_fields(record: Record) -> dict[str, float]:
    """Return the fields of `workload.layouts.Layouts` that the source of `record` states and for which there is no
    column.
    """
    return {key: value for convention in applicable_conventions(record) for key, value in convention.layout.items()}
