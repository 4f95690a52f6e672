"""Constants of the cost model that no datasheet gives: a set per GPU generation and a set per software stack.

constants.yaml lists them with the runs that they were fitted to; `python benchmarks/fit_costs.py` writes it.
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
OWN_FILE = Path(__file__).with_name("own.yaml")
OWN = "meshwright"
"""The name of this program's own stack."""
MEASURED_GENERATION = "hopper"
MEASURED_CHIP = "H200"
"""The generation and the chip of this program's own runs."""


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Constants of one generation and stack, or arrays of them. Shares are relative to the datasheet's figure."""

    # Of the GPU generation.
    gemm: Array
    """Share of the bf16 peak that a large matmul reaches."""
    gemm_low: Array
    """Share that fp8 matmuls reach of the fp8 peak, relative to `gemm`."""
    gemm_block: Array
    """Share for block-scaled fp8, relative to `gemm`."""
    gemm_fp4: Array
    """Share for fp4, relative to `gemm`."""
    attention: Array
    """Share of the bf16 peak that attention's two matmuls reach."""
    hbm: Array
    """Share of memory bandwidth that element-wise passes reach."""
    link: Array
    """Share of link bandwidth that a collective inside a domain reaches."""
    narrow: Array
    """Width of a matmul's smallest dimension at which its time per FLOP doubles."""
    tail_us: Array
    """Device time lost at the end of each kernel, microseconds."""
    # Of the software stack.
    slow: Array
    """Device time relative to the generation's best kernels."""
    yearly: Array
    """Yearly speed-up of releases: device time is divided by this to the power of the release's year, counted from 2025."""
    passes: Array
    """Element-wise bytes of one layer's forward, per token and hidden element."""
    scores: Array
    """Bytes moved per attention score, forward (0: fused attention)."""
    quantise: Array
    """Bytes moved per element to cast a matmul's inputs to a narrow format."""
    host_us: Array
    """Host time of one layer, forward and backward, of one micro-batch, microseconds."""
    host_tensor_us: Array
    """Host time that tensor parallelism adds to a layer, microseconds."""
    ring_us: Array
    """Microseconds of host time per layer and further tensor rank, in pipelines across nodes or with sequence parallelism."""
    host_micro_us: Array
    """Host time of one micro-batch outside its layers, microseconds."""
    tensor_exposed: Array
    """Share of tensor-parallel communication that compute does not hide."""
    expert_exposed: Array
    """Share of expert dispatch and combine that compute does not hide."""
    hide: Array
    """Share of the backward pass under which data-parallel communication hides."""
    overlap_tax: Array
    """Slow-down of compute by communication that runs beside it, per second of communication."""
    net: Array
    """Share of network bandwidth that a collective across nodes reaches."""
    net_us: Array
    """Latency of one step of a collective across nodes, microseconds."""
    link_us: Array
    """Latency of one step of a collective inside a domain, microseconds."""
    start_us: Array
    """Time to start a collective, microseconds."""
    messages: Array
    """Data-parallel operations per layer."""
    reduce_bytes: Array
    """Bytes per gradient element on the wire between replicas."""
    pipe_us: Array
    """Time that a stage boundary adds to a micro-batch, without its bytes, microseconds."""
    pipe_exposed: Array
    """Share of the steady state's boundary transfers that compute does not hide."""
    stall_s: Array
    """Delay of a micro-batch at a stage boundary of a congested network, seconds (0: no stalls were observed)."""
    stall_nodes: Array
    """Number of nodes at which half of the runs congest the network."""
    crowd: Array
    """Relative increase of the time of collectives between replicas on a congested network."""
    bubble: Array
    """Idle time of the pipeline relative to the ideal (p − 1) / v micro-batches."""
    step_ms: Array
    """Fixed time of one step, milliseconds."""
    step_layer_us: Array
    """Time of one step per layer of a rank (optimizer launches, gradient norm), microseconds."""
    update: Array
    """Bytes that the optimizer moves per parameter."""
    jitter: Array
    """Slow-down per doubling of the number of nodes."""
    sync_ms: Array
    """Time that each doubling of the number of nodes adds to a step, milliseconds."""
    moe_yearly: Array
    """Yearly speed-up, as `yearly`, of routing outside matmuls."""
    moe_us: Array
    """Host time that each expert of a rank adds to a layer, microseconds."""
    moe_passes: Array
    """Bytes of permuting and combining per routed token and hidden element; own engine: with the activation."""
    # Of this program's own engine; for published runs the defaults switch these terms off.
    gemm_rowwise: Array = 0.92
    """Rate of an fp8 matmul with scales per row, relative to one scale per tensor.

    Own engine: measured 0.485 over 0.471 s (benchmarks/results/2026-11-23-levers-one-gpu-H200.jsonl).
    """
    net_tax: Array = 0.05
    """Value of `overlap_tax` for communication across nodes, which takes longer and uses fewer multiprocessors."""
    own_engine: Array = 0.0
    """1 for this program's engine, 0 for other stacks.

    The formulas count more of this engine, for example copies of weights and gradients through buffers. The fitted constants of
    other stacks, `passes` above all, include that time.
    """
    copy_tax: Array = 0.22
    """Slow-down of compute per second of a copy-engine gather, relative to `overlap_tax` of kernels.

    0.0506 over 0.227 on 2 H200s (benchmarks/results/2026-11-21-gathers-2xH200.json). A guess for more devices.
    """
    copy_link: Array = 1.34
    """Bandwidth of a gather by copy engines relative to a gather by kernels (387 over 289 GB/s, same source)."""
    moe_back: Array = 2.0
    """Cost of permuting and combining in a backward, relative to a forward.

    Own engine: from eight runs of Qwen3-30B-A3B on one and two H200s (benchmarks/results/2026-11-23-mixture-1xH200.json and
    -2xH200.json).
    """
    moe_spread: Array = 0.0
    """Bytes added to `moe_passes` if experts are on several ranks.

    Received tokens are sorted again, and the device idles until the host has their counts. Own engine: from two runs on 2 H200s
    (benchmarks/results/2026-11-22-experts-2xH200.json, `expert-12` and `tensor-12`).
    """
    token_passes: Array = 0.0
    """Bytes of device memory moved by a layer's exchanges between tensor ranks, per token and hidden element.

    A gather of several sequences by kernels delivers them ordered by rank, so they are reordered, and back before the scatter.
    Own engine: from two runs of Llama-3-8B on 2 H200s, the time beyond matmuls and communication
    (benchmarks/results/2026-11-22-tensor-2xH200.json and 2026-11-22-tensor-fsdp-2xH200.json, `tp2-fsdp`).
    """
    copy_engine_tokens: Array = 0.9
    """Exposed share of an exchange between two tensor ranks by copy engines, relative to kernels.

    Llama-3-8B on 2 H200s: 1.04 of 1.22 ms per layer without compute, 0.12 s of a step of 1.56 s (docs/design/tensor.md).
    """
    copy_engine_tokens_many_ranks: Array = 2.0
    """Exposed share of such an exchange between more than two tensor ranks.

    With four ranks, a step took 2.39 s instead of 1.95 s by kernels (Llama-3-8B on 4 H200s:
    benchmarks/results/2026-11-22-tensor-4xH200.json). A guess for more ranks.
    """
    lone_copies: Array = 1.0
    """1 if an unsharded rank copies weights, and scales and copies gradients, like sharded ranks.

    0 if it casts weights and gradients once (`parallel.fsdp.UnsharedParameterGroup`).
    """
    packing: Array = 1.0
    """Share of device memory bandwidth at which dense gradients are packed into the reduction buffer (`kernels.pack`)."""
    matmul_sums: Array = 1.0
    """Bytes moved if a matmul accumulates its gradient, relative to a separate pass over both.

    Own engine: the matmul reads and writes the sum but no separate gradient, 6 of 10 bytes. An accumulating matmul took
    as long as a plain matmul (docs/design/executor.md).
    """
    side_copies: Array = 0.0
    """Slow-down of compute by copies on another stream, relative to their time: both use the same device memory."""
    logit_bytes: Array = 16.0
    """Bytes moved per logit by the loss, without the head's matmuls.

    Own engine: 6, of which the kernel moves 0.95 as many per second as a copy (`kernels.loss_triton`).
    """
    attention_wide: Array = 1.0
    """Rate of attention with heads wider than 192, relative to `attention`.

    Own engine: heads of 256 on an H200, sequences of 4,096 tokens (benchmarks/results/2026-11-29-attention-windows-H200.json).
    """
    flex: Array = 1.0
    """Rate of the forward of flex attention, which layers with a window have, relative to `attention`.

    Own engine: of blocks of keys alone; each block of queries costs as much as 350 keys more (`costs.compute.QUERY_BLOCK_KEYS`). With
    that, windows of 128 to 4,096 keys and heads of 64 and 128 are within 4% (benchmarks/results/2026-11-29-attention-windows-H200.json).
    """
    flex_wide: Array = 1.0
    """Rate of flex attention with heads wider than 192, relative to `flex`.

    Own engine: heads of 256 with windows of 512 and 1,024 keys, as above, forward and backward together. Their backward alone takes 5.6
    times their forward.
    """
    flex_capped: Array = 1.0
    """Rate of flex attention that caps scores, relative to that of the same heads without a cap.

    Own engine: from a step of Gemma-2-2B, heads of 256 (benchmarks/results/2026-11-30-families-H200.json).
    """
    flex_backward: Array = 2.5
    """Time of flex attention's backward relative to its forward.

    Own engine: 2.8 to 3.7 with heads of 64 and 128, as above.
    """
    flash: Array = 1.0
    """Rate of the forward of FlashAttention with a window (`window_by_flash`), relative to `attention`; counted as that of flex attention.

    Own engine: windows of 128 keys, forward and backward together within 2% for heads of 64 and 128
    (benchmarks/results/2026-11-30-window-attention-H200.json).
    """
    flash_wide: Array = 1.0
    """Rate of FlashAttention with a window and heads wider than 192, relative to `flash`.

    Own engine: heads of 256 with windows of 512 and 1,024 keys, within 4%, as above.
    """
    flash_backward: Array = 2.5
    """Time of the backward of FlashAttention with a window relative to its forward. Own engine: 2.5 to 3.9, as above."""
    flash_windows: Array = 1.0
    """1 if FlashAttention computes such windows; 0 on CPU ranks, which have no kernel for it."""
    fixed_order: Array = 1.0
    """1 if sums in a fixed order slow attention's backward; 0 on CPU ranks, where its sums always have one order."""
    compiled: Array = 0.0
    """1 if a recomputed block is compiled as one graph.

    `full` then omits the last matmul, whose result no gradient needs. `selective` repeats the element-wise passes but
    not attention.
    """
    ragged_vocab: Array = 1.0
    """Slow-down of a head without padding whose vocabulary is no multiple of 8, so that its matmuls run unaligned."""
    scatter_bytes: Array = 2.0
    """Bytes per gradient element of a reduce-scatter in the closed form; the simulator uses the plan's dtype."""
    net_sum: Array = 1.0
    """Bandwidth of an all-reduce over TCP relative to a gather, to which `net` refers; other fabrics use `net` × `net_sum`."""
    net_ring: Array = 1.0
    """Share of the ports' bandwidth that a TCP ring through more than two ranks per node reaches.

    Own engine: between the values of two runs sharded over two emulated nodes of four H200s, which reach 0.79 and 0.84 of the
    bandwidth of nodes with two (benchmarks/results/2026-11-22-tcp-13b-8xH200.json, `zero3-384`, and 2026-11-22-layered-8xH200.json,
    `per-micro-batch`).
    """
    net_yield: Array = 0.0
    """Time that a reduction across nodes takes longer, relative to the compute beside it (TCP only)."""


GENERATION = ("gemm", "gemm_low", "gemm_block", "gemm_fp4", "attention", "hbm", "link", "narrow", "tail_us")
NAMES = tuple(field.name for field in fields(Constants))


_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The loader of libyaml if it is installed: ten times as fast."""


@cache
def table() -> dict[str, Any]:
    """constants.yaml and own.yaml: `generations`, `stacks`, `measured`, `measured_with`, `bands`, `own_band`, `memory`, `fitted_on`."""
    published, own = (yaml.load(file.read_bytes(), _LOADER) for file in (FILE, OWN_FILE))
    return with_own(published, own)


def with_own(published: dict[str, Any], measured: dict[str, Any]) -> dict[str, Any]:
    """The published table with this program's own stack added."""
    return {
        **published,
        "stacks": {**published["stacks"], OWN: measured["stack"]},
        "own_band": measured["band"],
        "measured": {OWN: measured["measured"]},
        "own_runs": sum(len(runs) for runs in measured.get("fitted_on", {}).values()),
    }


def constants(generation: str, stack: str, values: dict[str, Any] | None = None) -> Constants:
    """The constants of one GPU generation and one stack, whose parent has those that it lacks; unknown names take `default`.

    Values measured for this stack on this generation override those of the generation and of the stack.
    """
    values = values or table()
    generations = values["generations"]
    stacks = values["stacks"]
    defaults = {**generations["default"], **stacks["default"]}
    measured = values.get("measured", {}).get(stack, {}).get(generation, {})
    shared = stacks.get(parent_of(stack), {})
    return Constants(**{**defaults, **generations.get(generation, {}), **shared, **stacks.get(stack, {}), **measured})


def known_software(stack: str, values: Mapping[str, Any] | None = None) -> Known:
    """How far a stack's constants are known."""
    values = values or table()
    return known(stack, parent_of(stack), values["runs"], values["measured_with"])


def is_measured(generation: str, stack: str = OWN) -> bool:
    """Whether `stack` was measured on `generation`; else its constants are inferred from other stacks and generations."""
    return generation in table()["measured"].get(stack, {})


def unmeasured_chip_constants(chip: Chip) -> dict[str, float]:
    """Constants of this program's own engine on a chip without own runs; they replace those of the generation.

    Matmuls reach the same share of the chip's fastest measured matmul as on the measured chip, and at most the best
    quartile of published runs on the generation. Links reach the share of the generation's runs, and at most that of
    own runs.
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
    """Share of the bf16 peak that the fastest measured matmul reaches; None without a measurement."""
    return chip.best_bf16_flops / chip.peak_flops["bf16"] if chip.best_bf16_flops else None


def at_release(k: Constants, release: Array) -> Constants:
    """The constants for software released `release` years after the start of 2025."""
    moe = k.moe_yearly ** -np.asarray(release)
    return replace(
        k, slow=k.slow * k.yearly ** -np.asarray(release), moe_passes=k.moe_passes * moe, moe_us=k.moe_us * moe
    )


def constant_arrays(pairs: Sequence[tuple[str, str]], values: dict[str, Any] | None = None) -> Constants:
    """The constants of each (generation, stack) as arrays."""
    by_pair = {pair: constants(*pair, values) for pair in set(pairs)}
    return Constants(**{name: np.array([getattr(by_pair[pair], name) for pair in pairs]) for name in NAMES})
