"""The few numbers that no datasheet gives: one set per GPU generation, one per software stack.

constants.yaml holds them beside the names of the runs they were fitted on; `python benchmarks/fit_costs.py` makes it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from meshwright.spec.chips import CHIPS, Chip
from meshwright.workload.arrays import Array

FILE = Path(__file__).with_name("constants.yaml")
OWN_FILE = Path(__file__).with_name("own.yaml")
OWN = "meshwright"
"""The name of this program's own stack."""
HOME, HOME_CHIP = "hopper", "H200"
"""The generation and the chip that its runs were measured on."""


@dataclass(frozen=True, kw_only=True)
class Constants:
    """One column of the table, or many side by side. Shares are of the datasheet's figure."""

    # Of the GPU generation.
    gemm: Array
    """Share of the bf16 peak that a large matrix product reaches."""
    gemm_low: Array
    """The same for fp8, relative to `gemm`."""
    gemm_block: Array
    """The same for block-scaled fp8."""
    gemm_fp4: Array
    attention: Array
    """Share of the bf16 peak that attention's two products reach."""
    hbm: Array
    """Share of memory bandwidth that element-wise passes reach."""
    link: Array
    """Share of link bandwidth that a collective inside a domain reaches."""
    narrow: Array
    """Width of a product's smallest dimension at which its time per FLOP doubles."""
    tail_us: Array
    """Device time lost at the end of each kernel, microseconds."""
    # Of the software stack.
    slow: Array
    """Device time over that of the generation's best kernels."""
    yearly: Array
    """How much faster each year of releases makes it: device time is divided by this to the power of the release's age."""
    passes: Array
    """Element-wise bytes of one layer's forward, per token and hidden element."""
    scores: Array
    """Bytes moved per attention score, forward (0: fused attention)."""
    quantise: Array
    """Bytes moved per element of a product's inputs to bring it to a low format."""
    host_us: Array
    """Host time of one layer, forward and backward, of one micro-batch, microseconds."""
    host_tensor_us: Array
    """What tensor parallelism adds to it."""
    ring_us: Array
    """What each further tensor rank adds to it in a pipeline across nodes, or where the sequence is split."""
    host_micro_us: Array
    """Host time of one micro-batch beside its layers."""
    tensor_exposed: Array
    """Share of tensor-parallel communication that compute does not hide."""
    expert_exposed: Array
    """Share of the exchange of tokens with their experts that compute does not hide."""
    hide: Array
    """Share of the backward pass under which data-parallel communication hides."""
    overlap_tax: Array
    """Slow-down of compute by communication that runs beside it, per second of communication."""
    net: Array
    """Share of network bandwidth that a collective across nodes reaches."""
    net_us: Array
    """Latency of one step across nodes."""
    link_us: Array
    """Latency of one step inside a domain."""
    start_us: Array
    """Time to start a collective."""
    messages: Array
    """Data-parallel operations per layer."""
    reduce_bytes: Array
    """Bytes per gradient element on the wire between replicas."""
    pipe_us: Array
    """Time that a stage boundary adds to a micro-batch, beside its bytes."""
    pipe_exposed: Array
    """Share of the steady state's boundary transfers that compute does not hide."""
    stall_s: Array
    """Seconds that a micro-batch waits at a stage boundary once the network stalls (0: no stalls were seen)."""
    stall_nodes: Array
    """Nodes at which half of the runs overrun the network."""
    crowd: Array
    """Times that collectives between replicas take longer on an overrun network, less one."""
    bubble: Array
    """Idle time of the pipeline over the ideal (p − 1) / v micro-batches."""
    step_ms: Array
    """Time of one step that depends on nothing."""
    step_layer_us: Array
    """Time of one step per layer that a rank holds (optimizer launches, gradient norm)."""
    update: Array
    """Bytes that the optimizer moves per parameter."""
    jitter: Array
    """Slow-down per doubling of the number of nodes."""
    sync_ms: Array
    """What one doubling of the number of nodes adds to a step, milliseconds."""
    moe_yearly: Array
    """As `yearly`, for what routing costs beside its products."""
    moe_us: Array
    """Host time that each expert of a rank adds to a layer."""
    moe_passes: Array
    """Bytes of permuting and combining per routed token and hidden element."""
    # Of this program's own engine; published runs are priced without them.
    gemm_rowwise: Array = 0.92
    """Rate of an fp8 product with scales per row, relative to one scale per tensor.

    Own engine: measured 0.485 over 0.471 s (benchmarks/results/2026-11-23-levers-one-gpu-H200.jsonl).
    """
    net_tax: Array = 0.05
    """As `overlap_tax`, by communication across nodes: it takes longer, on fewer of the device's multiprocessors."""
    copies: Array = 0.0
    """1 if copies of weights and gradients through buffers are counted separately, 0 if `passes` includes them."""
    copy_tax: Array = 0.22
    """Slow-down of compute by a copy-engine gather, relative to `overlap_tax` of kernels.

    Per second; 0.0506 over 0.227 on 2 H200s (benchmarks/results/2026-11-21-gathers-2xH200.json). A guess for more devices.
    """
    copy_link: Array = 1.34
    """Bandwidth of a gather on copy engines over that of one by kernels (387 over 289 GB/s, as above)."""
    moe_back: Array = 2.0
    """Cost of permuting and combining in a backward, relative to a forward.

    Own engine: from eight runs of Qwen3-30B-A3B on one and two H200s (benchmarks/results/2026-11-23-mixture-1xH200.json and
    -2xH200.json); `moe_passes` is from four later ones (-mixture-sums-).
    """
    moe_spread: Array = 0.0
    """Bytes added to `moe_passes` if experts are on several ranks.

    Rows are sorted again there, and the device waits for the host. Own engine: from two runs on 2 H200s
    (benchmarks/results/2026-11-22-experts-2xH200.json, `expert-12` and `tensor-12`).
    """
    token_passes: Array = 0.0
    """Bytes, beside the wire, of a layer's exchanges between tensor ranks, per token and hidden element.

    Where kernels gather several sequences: they arrive by rank and are reordered, and back. Own engine: from two runs of
    Llama-3-8B on 2 H200s, beyond products and wire (benchmarks/results/2026-11-22-tensor-2xH200.json and
    2026-11-22-tensor-fsdp-2xH200.json, `tp2-fsdp`).
    """
    copied_tokens: Array = 0.9
    """Exposed share of an exchange between two tensor ranks by copy engines, relative to kernels.

    1.04 of 1.22 ms per layer of Llama-3-8B on 2 H200s alone, 0.12 s of a step of 1.56 (docs/design/tensor.md).
    """
    copied_tokens_of_more: Array = 2.0
    """The same between more than two ranks.

    Between four, a step took 2.39 s instead of 1.95 by kernels (Llama-3-8B on 4 H200s:
    benchmarks/results/2026-11-22-tensor-4xH200.json). A guess for more.
    """
    lone_copies: Array = 1.0
    """1 if a rank without sharding copies weights, and scales and copies gradients, like sharded ranks.

    0 if it casts both once (`parallel.fsdp.UnsharedParameterGroup`).
    """
    packing: Array = 1.0
    """Share of device memory's bandwidth at which gradients, experts' left out, are laid into the reduced buffer rank by rank
    (`kernels.pack`)."""
    product_sums: Array = 1.0
    """Bytes moved if a product accumulates its gradient, relative to a separate pass over both.

    Own engine: the sum read and written without the gradient, 6 of 10; an accumulating product took as long as a plain one
    (docs/design/executor.md).
    """
    side_copies: Array = 0.0
    """Share of such copies' time, on their own stream, by which they slow compute down: both use the same memory."""
    logit_bytes: Array = 16.0
    """Bytes moved per logit by the loss, beside the head's products."""
    compiled: Array = 0.0
    """1 if the compiler sees a recomputed block whole.

    `full` then leaves out the last product, whose result no gradient needs, and `selective` repeats the element-wise passes
    and not attention.
    """
    ragged_vocab: Array = 1.0
    """Slow-down of the head if the vocabulary is no multiple of 8 and its products run unaligned, before heads were padded."""
    scatter_bytes: Array = 2.0
    """Bytes per gradient element on the wire inside a sharding group, for the closed form; the simulator asks the plan."""
    net_sum: Array = 1.0
    """Bandwidth of an all-reduce over TCP relative to a gather, to which `net` refers; other fabrics use the product."""
    net_ring: Array = 1.0
    """Share of the ports that a TCP ring through more than two ranks per node reaches.

    Own engine: between the values of two runs sharded over two emulated nodes of four H200s, 0.79 and 0.84 of what nodes of
    two reach (benchmarks/results/2026-11-22-tcp-13b-8xH200.json, `zero3-384`, and 2026-11-22-layered-8xH200.json,
    `per-micro-batch`).
    """
    net_yield: Array = 0.0
    """Share of the compute beside a reduction across nodes by which it takes longer (TCP only)."""


GENERATION = ("gemm", "gemm_low", "gemm_block", "gemm_fp4", "attention", "hbm", "link", "narrow", "tail_us")
NAMES = tuple(field.name for field in fields(Constants))


_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's where it is there: ten times as fast."""


@cache
def table() -> dict[str, Any]:
    """constants.yaml with own.yaml laid in: `generations`, `stacks`, `measured`, `bands`, `memory` and `fitted_on`."""
    published, own = (yaml.load(file.read_bytes(), _LOADER) for file in (FILE, OWN_FILE))
    return with_own(published, own)


def with_own(published: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """A table with this program's own stack beside the published ones."""
    return {
        **published,
        "stacks": {**published["stacks"], OWN: own["stack"]},
        "bands": {**published["bands"], OWN: own["band"]},
        "measured": {OWN: own["measured"]},
        "own_runs": sum(len(runs) for runs in own.get("fitted_on", {}).values()),
    }


def constants(generation: str, stack: str, given: dict[str, Any] | None = None) -> Constants:
    """The constants of one GPU generation and one stack; unknown names take `default`.

    What a stack was measured at on a generation goes before what either is said to do with others.
    """
    rows = given or table()
    chip, software = rows["generations"], rows["stacks"]
    defaults = {**chip["default"], **software["default"]}
    together = rows.get("measured", {}).get(stack, {}).get(generation, {})
    return Constants(**{**defaults, **chip.get(generation, {}), **software.get(stack, {}), **together})


def is_measured(generation: str, stack: str = OWN) -> bool:
    """Whether `stack` ran on `generation`, so that its constants there are no guess from other stacks and generations."""
    return generation in table()["measured"].get(stack, {})


def unmeasured(chip: Chip) -> dict[str, float]:
    """What takes the place of a generation's constants for this program's own engine on a chip that it never ran on.

    Products: as near to the fastest product measured on the chip as own runs come on theirs, and no faster than the best quartile of
    published runs on its generation. Links: what the generation's runs reach, and no more than own runs do.
    """
    rows = table()
    own = rows["measured"][OWN][HOME]
    generation = {**rows["generations"]["default"], **rows["generations"].get(chip.generation, {})}
    best, home = _best_share(chip), _best_share(CHIPS[HOME_CHIP])
    assert home is not None, "the chip of our own runs was measured"
    near = own["gemm"] / home
    return {
        "gemm": min(near * (best or generation["gemm"]), rows["best_quartile"].get(chip.generation, 1.0)),
        "link": min(generation["link"], own["link"]),
        "slow": 1.0,
    }


def _best_share(chip: Chip) -> float | None:
    """Share of the bf16 peak that the fastest measured product reaches; None where nobody measured the chip."""
    return chip.best_bf16_flops / chip.peak_flops["bf16"] if chip.best_bf16_flops else None


def aged(k: Constants, release: Array) -> Constants:
    """The constants for software released `release` years after the start of 2025."""
    moe = k.moe_yearly ** -np.asarray(release)
    return replace(
        k, slow=k.slow * k.yearly ** -np.asarray(release), moe_passes=k.moe_passes * moe, moe_us=k.moe_us * moe
    )


def per_row(pairs: Sequence[tuple[str, str]], given: dict[str, Any] | None = None) -> Constants:
    """The constants of each (generation, stack), as arrays side by side."""
    known = {pair: constants(*pair, given) for pair in set(pairs)}
    return Constants(**{name: np.array([getattr(known[pair], name) for pair in pairs]) for name in NAMES})
