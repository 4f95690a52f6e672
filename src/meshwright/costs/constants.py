"""Constants of the cost model that no datasheet gives: one set per GPU generation, and one set per training software
("stack").

constants.yaml lists the constants with the runs to which they were fitted; `python benchmarks/fit_costs.py` writes it.
own.yaml has the constants of this program's own engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from meshwright.costs.bands import Known, known
from meshwright.costs.software import parent_of
from meshwright.spec.chips import CHIPS, Chip
from meshwright.workload.arrays import Array

FILE = Path(__file__).with_name("constants.yaml")
"""The fitted constants of published software."""
OWN_FILE = Path(__file__).with_name("own.yaml")
"""The fitted constants of this program's own engine."""
OWN = "meshwright"
"""The name of this program's own stack."""
MEASURED_GENERATION = "hopper"
"""GPU generation on which this program's own runs were measured."""
MEASURED_CHIP = "H200"
"""Chip on which this program's own runs were measured."""


@dataclass(frozen=True, kw_only=True)
class Constants:
    """The constants of one generation and one stack. Each field is a number, or an array with one element per case.

    A share is relative to the datasheet's figure: with `gemm` 0.8, a large matmul reaches 80% of the peak.
    """

    # Constants of the GPU generation.
    gemm: Array
    """Share of the bf16 peak that a large matmul reaches."""
    gemm_low: Array
    """Share of the fp8 peak that an fp8 matmul reaches, relative to `gemm`.

    With `gemm` 0.8 and `gemm_low` 0.9, an fp8 matmul reaches 72% of the fp8 peak.
    """
    gemm_block: Array
    """As `gemm_low`, for fp8 matmuls with one scale per block."""
    gemm_fp4: Array
    """As `gemm_low`, for fp4 matmuls and the fp4 peak."""
    attention: Array
    """Share of the bf16 peak that attention's two matmuls reach."""
    hbm: Array
    """Share of the memory bandwidth that element-wise kernels reach."""
    link: Array
    """Share of link bandwidth that a collective inside a domain reaches."""
    narrow: Array
    """Size of a matmul's smallest dimension at which the time per FLOP doubles, in elements."""
    tail_us: Array
    """Device time lost at the end of each kernel, microseconds."""
    # Constants of the software stack.
    slow: Array
    """Factor on the device time of this stack, relative to the generation's best kernels."""
    yearly: Array
    """Yearly speed-up of the stack's releases.

    The device time of a release t years after the start of 2025 is divided by `yearly`^t. With 1.1, a release of the
    start of 2027 needs 1/1.21 of the time.
    """
    passes: Array
    """Bytes that the element-wise kernels of one layer's forward move, per token and hidden element."""
    scores: Array
    """Bytes moved per attention score in a forward; 0 for fused attention, which stores no scores."""
    quantise: Array
    """Bytes moved per element to round the inputs of a matmul to a narrow format."""
    host_us: Array
    """Host microseconds of one layer for one micro-batch, forward and backward."""
    host_tensor_us: Array
    """Host microseconds that tensor parallelism adds to `host_us`."""
    ring_us: Array
    """Host microseconds per layer and per tensor rank after the first, with sequence parallelism or in pipelines across
    nodes.
    """
    host_micro_us: Array
    """Host microseconds of one micro-batch outside its layers."""
    tensor_exposed: Array
    """Share of tensor-parallel communication that compute does not hide."""
    expert_exposed: Array
    """Share of expert dispatch and combine that compute does not hide."""
    hide: Array
    """Share of the backward's seconds in which data-parallel communication can overlap with compute."""
    overlap_tax: Array
    """Seconds by which compute becomes slower for each second of communication that overlaps with it."""
    net: Array
    """Share of the network bandwidth that a collective across nodes reaches."""
    net_us: Array
    """Latency of one step of a collective across nodes, microseconds."""
    link_us: Array
    """Latency of one step of a collective inside a domain, microseconds."""
    start_us: Array
    """Time to start a collective, microseconds."""
    messages: Array
    """Number of data-parallel collectives per layer."""
    reduce_bytes: Array
    """Bytes per gradient element that replicas send to each other in the reduction."""
    pipe_us: Array
    """Microseconds that each stage boundary adds to a micro-batch, in addition to the time for its bytes."""
    pipe_exposed: Array
    """Share of the transfers between stages that compute does not hide while the pipeline is full."""
    stall_s: Array
    """Seconds by which a congested network delays a micro-batch at each stage boundary.

    It is 0 if no stalls were observed.
    """
    stall_nodes: Array
    """Number of nodes at which a run's network is congested with probability 0.5."""
    crowd: Array
    """Relative increase of the time of collectives between replicas on a congested network: 0.5 means 1.5 times as
    long.
    """
    bubble: Array
    """Factor on the pipeline's idle time of (p − 1) / v micro-batches, for p stages with v virtual stages on each rank.
    """
    step_ms: Array
    """Milliseconds of each step that depend on nothing else."""
    step_layer_us: Array
    """Microseconds of each step per layer of a rank: launches of the optimizer and of the gradient norm."""
    update: Array
    """Bytes that the optimizer moves per parameter in an update."""
    jitter: Array
    """Relative increase of the step time for each doubling of the number of nodes."""
    sync_ms: Array
    """Milliseconds that each doubling of the number of nodes adds to a step."""
    moe_yearly: Array
    """As `yearly`, for the time of routing outside matmuls (`moe_passes`, `moe_us`)."""
    moe_us: Array
    """Host microseconds that each expert of a rank adds to a layer."""
    moe_passes: Array
    """Bytes moved to permute and combine, per routed token and hidden element.

    For this program's engine they include the activation function.
    """
    # Constants that only this program's engine needs. The defaults switch their terms off for published runs.
    gemm_rowwise: Array = 0.92
    """Rate of an fp8 matmul with one scale per row, relative to an fp8 matmul with one scale per tensor.

    Own engine: a step of Llama-3.2-1B took 0.485 s with one scale per row, and 0.471 s with one scale per tensor
    (benchmarks/results/2026-11-23-levers-one-gpu-H200.jsonl).
    """
    net_tax: Array = 0.05
    """The value of `overlap_tax` for communication across nodes, which takes longer and uses fewer multiprocessors."""
    own_engine: Array = 0.0
    """1 for this program's engine, 0 for other stacks.

    The formulas have further terms for this engine, for example the copies of weights and gradients through buffers.
    For other stacks these terms are 0, because their fitted constants (above all `passes`) already include that time.
    """
    copy_tax: Array = 0.22
    """Slow-down of compute per second of a gather by copy engines, relative to `overlap_tax`, which holds for gathers
    by NCCL kernels.

    Measured on 2 H200s: 0.0506 by copy engines over 0.227 by kernels
    (benchmarks/results/2026-11-21-gathers-2xH200.json). For more devices this is a guess.
    """
    copy_link: Array = 1.34
    """Bandwidth of a gather by copy engines, relative to a gather by kernels.

    Measured as for `copy_tax`: 387 over 289 GB/s.
    """
    moe_back: Array = 2.0
    """Time to permute and combine in a backward, relative to a forward.

    Own engine: from eight runs of Qwen3-30B-A3B on one and two H200s (benchmarks/results/2026-11-23-mixture-1xH200.json
    and -2xH200.json).
    """
    moe_spread: Array = 0.0
    """Bytes added to `moe_passes` if the experts are divided over several ranks.

    They stand for two things: received tokens are sorted again, and the device idles until the host has the token
    counts. Own engine: from two runs on 2 H200s (benchmarks/results/2026-11-22-experts-2xH200.json, `expert-12` and
    `tensor-12`).
    """
    token_passes: Array = 0.0
    """Bytes of device memory moved to reorder the tokens of a layer's exchanges between tensor ranks, per token and
    hidden element.

    A gather of several sequences by kernels delivers tokens ordered by rank. They are reordered after the gather, and
    ordered by rank again before the reduce-scatter. Own engine: from two runs of Llama-3-8B on 2 H200s, as the time in
    addition to matmuls and communication (benchmarks/results/2026-11-22-tensor-2xH200.json and
    2026-11-22-tensor-fsdp-2xH200.json, `tp2-fsdp`).
    """
    copy_engine_tokens: Array = 0.9
    """Exposed time of an exchange between two tensor ranks by copy engines, relative to the exposed time of an exchange
    by kernels.

    Llama-3-8B on 2 H200s: 1.04 instead of 1.22 ms per layer in isolation; 0.12 s less in a step of 1.56 s
    (docs/design/tensor.md).
    """
    copy_engine_tokens_many_ranks: Array = 2.0
    """As `copy_engine_tokens`, for an exchange between more than two tensor ranks.

    Llama-3-8B on 4 H200s: a step took 2.39 s by copy engines and 1.95 s by kernels
    (benchmarks/results/2026-11-22-tensor-4xH200.json). For more ranks this is a guess.
    """
    lone_copies: Array = 1.0
    """1 if a rank without sharding copies weights, and scales and copies gradients, as a sharded rank does.

    0 if such a rank only casts its weights and gradients once (`parallel.fsdp.UnsharedParameterGroup`).
    """
    packing: Array = 1.0
    """Share of the device memory bandwidth at which dense gradients are packed into the buffer of a reduction
    (`kernels.pack`).
    """
    matmul_sums: Array = 1.0
    """Bytes moved if a matmul adds its weight gradient to the sum over micro-batches, relative to an addition after the
    matmul.

    An addition after the matmul reads the gradient (2 bytes per element) and reads and writes the sum (4 + 4 bytes): 10
    bytes. Own engine: the matmul reads and writes the sum, but writes no gradient: 4 + 4 - 2 = 6 bytes. An accumulating
    matmul took as long as a plain matmul (docs/design/executor.md).
    """
    side_copies: Array = 0.0
    """Slow-down of compute by copies on another stream, relative to the time of these copies: copies and compute use
    the same device memory.
    """
    logit_bytes: Array = 16.0
    """Bytes that the loss moves per logit, in addition to the head's matmuls.

    Own engine: 6 bytes, moved at 0.95 of the rate of a copy (`kernels.loss_triton`).
    """
    attention_wide: Array = 1.0
    """Rate of attention with heads wider than 192, relative to `attention`.

    Own engine: measured with heads of 256 and sequences of 4,096 tokens on an H200
    (benchmarks/results/2026-11-29-attention-windows-H200.json).
    """
    flex: Array = 1.0
    """Rate of the forward of flex attention, relative to `attention`.

    Layers with an attention window use flex attention.

    Own engine: the rate over the keys of a window, where each block of queries costs as much as 350 keys in addition
    (`costs.compute.QUERY_BLOCK_KEYS`). With that, predictions for windows of 128 to 4,096 keys and heads of 64 and 128
    are within 4% of the measurements (benchmarks/results/2026-11-29-attention-windows-H200.json).
    """
    flex_wide: Array = 1.0
    """Rate of flex attention with heads wider than 192, relative to `flex`.

    Own engine: from the file named at `flex`, heads of 256 with windows of 512 and 1,024 keys, forward and backward
    together. The backward alone takes 5.6 times as long as the forward.
    """
    flex_capped: Array = 1.0
    """Rate of flex attention that caps scores, relative to flex attention with the same heads and no cap.

    Own engine: from a step of Gemma-2-2B, heads of 256 (benchmarks/results/2026-11-30-families-H200.json).
    """
    flex_backward: Array = 2.5
    """Time of the backward of flex attention, relative to its forward.

    Own engine: from the file named at `flex`, 2.8 to 3.7 with heads of 64 and 128.
    """
    flash: Array = 1.0
    """Rate of the forward of FlashAttention with a window (`window_by_flash`), relative to `attention`.

    As for `flex`, each block of queries costs as much as 350 keys in addition. Own engine: with windows of 128 keys and
    heads of 64 and 128, predictions of forward and backward together are within 2%
    (benchmarks/results/2026-11-30-window-attention-H200.json).
    """
    flash_wide: Array = 1.0
    """Rate of FlashAttention with a window and heads wider than 192, relative to `flash`.

    Own engine: from the file named at `flash`, heads of 256 with windows of 512 and 1,024 keys, within 4%.
    """
    flash_backward: Array = 2.5
    """Time of the backward of FlashAttention with a window, relative to its forward.

    Own engine: from the file named at `flash`, 2.5 to 3.9.
    """
    flash_windows: Array = 1.0
    """1 if FlashAttention computes layers with a window where it can; 0 on CPU ranks, which have no such kernel."""
    fixed_order: Array = 1.0
    """1 if additions in a fixed order make attention's backward slower; 0 on CPU ranks, whose kernels always add in one
    order.
    """
    compiled: Array = 0.0
    """1 if a recomputed block is compiled as one graph.

    Recompute mode `full` then omits the block's last matmul, because no gradient needs its result. Mode `selective`
    then repeats the element-wise operations but not attention.
    """
    ragged_vocab: Array = 1.0
    """Slow-down of the head if its vocabulary is not padded and no multiple of 8, so that its matmuls read unaligned
    memory.
    """
    scatter_bytes: Array = 2.0
    """Bytes per gradient element of a reduce-scatter in the closed form; the simulator uses the dtype of the plan."""
    net_sum: Array = 1.0
    """Bandwidth of an all-reduce, relative to the bandwidth of a gather, to which `net` refers.

    Only over TCP do both figures apply separately; on other fabrics every collective uses `net` × `net_sum`.
    """
    net_ring: Array = 1.0
    """Share of the ports' bandwidth that a TCP ring with more than two ranks in each node reaches.

    Own engine: a value between 0.79 and 0.84. Two runs that are sharded over two emulated nodes of four H200s reach
    these shares of the bandwidth of nodes with two ranks (benchmarks/results/2026-11-22-tcp-13b-8xH200.json,
    `zero3-384`, and 2026-11-22-layered-8xH200.json, `per-micro-batch`).
    """
    net_yield: Array = 0.0
    """Seconds by which a reduction across nodes becomes longer for each second of compute that overlaps with it (TCP
    only).
    """


GENERATION = ("gemm", "gemm_low", "gemm_block", "gemm_fp4", "attention", "hbm", "link", "narrow", "tail_us")
"""Constants that belong to the GPU generation; all others belong to the stack."""
NAMES = tuple(field.name for field in fields(Constants))
"""Names of all constants."""


_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The loader of libyaml if it is installed, because it is ten times as fast; otherwise the loader in Python."""


@cache
def table() -> dict[str, Any]:
    """Return the content of constants.yaml and own.yaml as one table.

    Its keys:

    - `generations`, `stacks`: constants by name of the generation or stack.
    - `measured`: constants of this program's own runs, by stack and generation.
    - `measured_with`: generations and stacks with many fitted runs; `runs`: number of fitted runs of each.
    - `bands`, `own_band`: uncertainty of published runs by class, and of own runs.
    - `memory`: constants of `costs.stack_footprint`.
    - `fitted_on`: number of fitted runs by source; `own_runs`: number of own runs.
    - `best_quartile`: the best quartile of `gemm` over published runs, by generation.
    """
    published, own = (yaml.load(file.read_bytes(), _LOADER) for file in (FILE, OWN_FILE))
    return with_own(published, own)


def with_own(published: dict[str, Any], measured: dict[str, Any]) -> dict[str, Any]:
    """Return the `published` table with this program's own stack added, whose values are in `measured` (the content of
    own.yaml).
    """
    return {
        **published,
        "stacks": {**published["stacks"], OWN: measured["stack"]},
        "own_band": measured["band"],
        "measured": {OWN: measured["measured"]},
        "own_runs": sum(len(runs) for runs in measured.get("fitted_on", {}).values()),
    }


def constants(generation: str, stack: str, values: dict[str, Any] | None = None) -> Constants:
    """Return the constants of one GPU generation and one stack. `values` is the table, by default `table()`.

    If a constant is in several places, the first of these counts: values measured for this stack on this generation;
    the stack; the stack's parent (`costs.software.parent_of`); the generation; `default`. Unknown names of generations
    and stacks have only the values of `default`.
    """
    values = values or table()
    generations = values["generations"]
    stacks = values["stacks"]
    defaults = {**generations["default"], **stacks["default"]}
    measured = values.get("measured", {}).get(stack, {}).get(generation, {})
    shared = stacks.get(parent_of(stack), {})
    return Constants(**{**defaults, **generations.get(generation, {}), **shared, **stacks.get(stack, {}), **measured})


def known_software(stack: str, values: Mapping[str, Any] | None = None) -> Known:
    """Return how well the constants of a stack are known: "measured", "related" or "unknown" (`costs.bands.Known`)."""
    values = values or table()
    return known(stack, parent_of(stack), values["runs"], values["measured_with"])


def is_measured(generation: str, stack: str = OWN) -> bool:
    """Return whether `stack` was measured on `generation`.

    If not, its constants are inferred from other stacks and generations.
    """
    return generation in table()["measured"].get(stack, {})


def unmeasured_chip_constants(chip: Chip) -> dict[str, float]:
    """Return constants of this program's engine on a chip on which it was never measured.

    They replace the constants of the generation.

    - Matmuls: on the measured chip (H200), matmuls of own runs reach a certain share of the fastest matmul measured
      there. They reach the same share of the fastest matmul of this chip, but at most the best quartile of published
      runs on its generation.
    - Links: they reach the share of the published runs on the generation, but at most the share of own runs.
    """
    values = table()
    own = values["measured"][OWN][MEASURED_GENERATION]
    generation = {**values["generations"]["default"], **values["generations"].get(chip.generation, {})}
    best = _best_share(chip)
    measured_best = _best_share(CHIPS[MEASURED_CHIP])
    assert measured_best is not None, "the chip of own runs has a measured matmul rate"
    relative = own["gemm"] / measured_best
    return {
        "gemm": min(relative * (best or generation["gemm"]), values["best_quartile"].get(chip.generation, 1.0)),
        "link": min(generation["link"], own["link"]),
        "slow": 1.0,
    }


def _best_share(chip: Chip) -> float | None:
    """Return the share of the bf16 peak that the chip's fastest measured matmul reaches.

    The result is None without such a measurement.
    """
    return chip.best_bf16_flops / chip.peak_flops["bf16"] if chip.best_bf16_flops else None


def at_release(k: Constants, release: Array) -> Constants:
    """Return the constants for software that was released `release` years after the start of 2025."""
    moe = k.moe_yearly ** -np.asarray(release)
    return replace(
        k, slow=k.slow * k.yearly ** -np.asarray(release), moe_passes=k.moe_passes * moe, moe_us=k.moe_us * moe
    )


def constant_arrays(pairs: Sequence[tuple[str, str]], values: dict[str, Any] | None = None) -> Constants:
    """Return the constants of several (generation, stack) pairs, with arrays of length `len(pairs)` in all fields."""
    by_pair = {pair: constants(*pair, values) for pair in set(pairs)}
    return Constants(**{name: np.array([getattr(by_pair[pair], name) for pair in pairs]) for name in NAMES})
