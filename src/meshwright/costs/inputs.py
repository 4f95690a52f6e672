"""What a cost is asked about, as arrays: model shapes, machines, layouts, and the constants that hold for each.

Every field is a number or a NumPy array; arrays of one length stand side by side (structure of arrays) and numbers hold
for all. So one call prices one layout, a hundred thousand layouts of one model, or every row of a table of runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import numpy as np

from meshwright.spec.plan import RECOMPUTES

Array = Any
"""A float or a float64 array; arrays of one call share one length."""
SELECTIVE, ALL_BUT_ATTENTION, FULL = (
    float(RECOMPUTES.index(mode)) for mode in ("selective", "all_but_attention", "full")
)
"""As `Layouts.recompute` has them: from the second on a forward's products are repeated."""
ROWWISE = 4.0
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A decoder's dimensions. Widths are per token and layer, over all heads."""

    layers: Array
    hidden: Array
    vocab: Array
    heads: Array
    query_width: Array
    """heads × query-key head size."""
    value_width: Array
    """heads × value head size."""
    kv_width: Array
    """Keys and values together as they are kept and exchanged."""
    attention_params: Array
    """Matrix weights of one attention layer."""
    attention_layers: Array
    full_attention: Array
    """Scores computed, as a share of those where a token sees all before it. A published model's short windows count as none."""
    mixer_layers: Array
    """State-space or linear-attention layers."""
    mixer_params: Array
    ffn: Array
    """Width of dense feed-forward layers."""
    dense_layers: Array
    moe_layers: Array
    experts: Array
    top_k: Array
    expert_ffn: Array
    shared_ffn: Array
    expert_in: Array
    """Width an expert reads and writes (hidden, unless experts work in a smaller space)."""
    gated: Array
    """1 when a feed-forward layer has a gate matrix beside up and down."""
    tied: Array
    """1 when the head shares the embedding's weights."""
    expert_bias: Array = 0.0
    """1 when experts have biases."""
    parallel: Array = 0.0
    """1 when all layers are dense and attention and feed-forward network share what tensor ranks exchange."""

    @property
    def dense_params(self) -> Array:
        """Weights of all layers outside the routed experts."""
        mats = 2 + self.gated
        attention = self.attention_layers * self.attention_params + self.mixer_layers * self.mixer_params
        feed = self.dense_layers * mats * self.hidden * self.ffn
        router = self.hidden * self.experts + 2 * self.hidden * self.expert_in * (self.expert_in < self.hidden)
        return attention + feed + self.moe_layers * (mats * self.hidden * self.shared_ffn + router)

    @property
    def expert_params(self) -> Array:
        """Weights of all routed experts of all layers."""
        return self.moe_layers * self.experts * (2 + self.gated) * self.expert_in * self.expert_ffn

    @property
    def table_params(self) -> Array:
        """Weights of the embedding (the head has as many unless tied)."""
        return self.vocab * self.hidden

    @property
    def params(self) -> Array:
        return self.dense_params + self.expert_params + (2 - self.tied) * self.table_params


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Identical devices: peaks in FLOP/s, bandwidths in bytes/s of one device and direction."""

    peak: Array
    """Peak of matrix products in the format the plan computes in."""
    half_peak: Array
    """Peak in bf16 or fp16 (attention, head)."""
    low: Array
    """0 bf16/fp16, 1 fp8 with one scale a tensor, 2 block-scaled fp8, 3 fp4, 4 (`ROWWISE`) fp8 with one scale a row."""
    hbm: Array
    memory: Array
    link: Array
    nic: Array
    domain: Array
    """Devices that see each other at link speed."""
    per_node: Array
    host: Array = 25e9
    """To host memory, one direction, when no other device of the node copies."""
    oversubscribed: Array = 1.0
    """Division of bandwidth above a pod."""
    pod: Array = np.inf
    """Devices below the oversubscribed level."""
    multiprocessors: Array = 0.0
    """Processors that each make one tile of a product at a time; 0 where tiles do not matter or are not known."""


@dataclass(frozen=True, kw_only=True)
class Layouts:
    """How one step is spread. `zero` 0 copies all states, 1 shards the optimizer, 2 gradients too, 3 weights too."""

    tensor: Array
    pipeline: Array
    virtual: Array
    context: Array
    expert: Array
    """Ranks that the experts of one layer are spread over, tensor ranks among them."""
    data: Array
    zero: Array
    shards: Array
    """Ranks over which a `zero` stage shards (at most data × context)."""
    micro_batch: Array
    global_batch: Array
    seq: Array
    recompute: Array
    """The mode's place in `RECOMPUTES`; in published runs selective repeats attention's core."""
    keep_gathered: Array = 0.0
    """1 when gathered weights stay after forward."""
    gathered_bytes: Array = 2.0
    """Of a block's weight while it is gathered."""
    copied: Array = 0.0
    """1 when copy engines gather weights, on links of a communicator of their own."""
    tokens_copied: Array = 0.0
    """1 when tensor ranks copy their tokens beside the products."""
    gather_once: Array = 0.0
    """1 when they stay for the whole step, all its micro-batches."""
    reduce_once: Array = 0.0
    """1 when sharded gradients are summed over ranks once a step rather than once a micro-batch."""
    replica_bytes: Array = 0.0
    """Bytes per gradient element on the wire between replicas of sharded weights; 0 leaves it to the stack."""
    fill: Array = 1.0
    """Idle time at the pipeline's ends over 1F1B's with as many virtual stages (a schedule that splits the backward has less)."""
    in_flight: Array = 0.0
    """Micro-batches whose activations the first pipeline rank holds at once (`schedules.in_flight`); 0 as 1F1B does."""
    in_flight_last: Array = 0.0
    """The same of the last pipeline rank."""
    vee: Array = 0.0
    """1 when the first pipeline rank holds both ends of the model (schedules that lay their stages in a V)."""
    loss_chunk: Array = 4096.0
    """Tokens whose logits exist at once (train.loss_chunk)."""
    offload: Array = 0.0
    """1 when the optimizer's state is in host memory."""
    state_bytes: Array = 12.0
    """Of a parameter in host memory then: two moments, and the master weight where weights are gathered in a narrower format."""
    offload_activations: Array = 0.0
    """Share of layers of which what backward needs waits in host memory: two of them stay; 0 for a layer that is none of them."""
    slowest: Array = 1.0
    """Compute time of the slowest rank over the mean (`benchmarks/stragglers.py`): all others wait for it."""
    ulysses: Array = 1.0
    """Context ranks that exchange heads; over the others, `ring`, keys and values are passed round."""
    layered: Array = 0.0
    """1 when all micro-batches pass a layer before the next one is gathered (breadth-first accumulation)."""
    imbalance: Array = 1.0
    """Tokens of the busiest expert rank over the mean."""
    one_copy: Array = 0.0
    """1 when a token is sent once to each domain that has some of its experts, and spread from there (DeepEP and kin)."""
    exchange_beside: Array = 0.0
    """1 when another micro-batch computes while tokens travel to their experts and back (DualPipe and kin)."""
    domains_per_token: Array = 0.0
    """Domains that the router sends a token to at most; 0 where it does not limit them."""
    host_sizes: Array = 1.0
    """1 when the host must learn how many rows each local expert gets before it can launch their products."""
    balanced: Array = 0.0
    """1 when stages are cut by the cost of layers and head rather than by number of layers."""
    dealt: Array = 0.0
    """1 when they are cut so that the slowest rank has the least to do, however its virtual stages differ: this program's."""
    sequence: Array = 0.0
    """1 when tensor parallelism keeps only its share of the sequence of what it does not split by width."""
    port: Array = 1.0
    """Bandwidth of the ports that its groups use over the machine's (unlike nodes: less where only a slower network joins them)."""
    tensor_stride: Array = 0.0
    """Ranks from one member of an axis's groups to the next (`spec.layout.Layout.stride`); 0 where axes lie tensor, context, shards,
    replicas, pipeline from the innermost outward."""
    ring_stride: Array = 0.0
    ulysses_stride: Array = 0.0
    shard_stride: Array = 0.0
    replicate_stride: Array = 0.0
    pipeline_stride: Array = 0.0

    @property
    def ranks(self) -> Array:
        return self.tensor * self.pipeline * self.context * self.data

    def gradients_stay(self, tied: Array) -> Array:
        """Where `spec.layout.gradients_stay`; `tied` as in `Shape`."""
        return (
            (self.micro_batches <= 1)
            & (self.ranks == self.pipeline)
            & ((np.asarray(self.pipeline) == 1) | (np.asarray(tied) == 0))
        )

    @property
    def expert_shard(self) -> Array:
        """Ranks that the parameters of each expert are split over."""
        return np.maximum(1.0, self.shards * self.tensor / np.maximum(self.expert, 1.0))

    @property
    def tensor_step(self) -> Array:
        """Ranks from one tensor rank to the next; below the same of the other axes."""
        return np.where(self.tensor_stride > 0, self.tensor_stride, 1.0)

    @property
    def ring(self) -> Array:
        return self.context / self.ulysses

    @property
    def ulysses_step(self) -> Array:
        return np.where(self.ulysses_stride > 0, self.ulysses_stride, self.tensor)

    @property
    def ring_step(self) -> Array:
        return np.where(self.ring_stride > 0, self.ring_stride, self.tensor * self.ulysses)

    @property
    def shard_step(self) -> Array:
        return np.where(self.shard_stride > 0, self.shard_stride, self.tensor)

    @property
    def replicate_step(self) -> Array:
        return np.where(self.replicate_stride > 0, self.replicate_stride, self.tensor * self.shards)

    @property
    def data_step(self) -> Array:
        """Over shards and replicas together, on average where other axes lie between them."""
        ranks = self.data * self.context
        span = np.maximum(self.shard_step * self.shards, self.replicate_step * np.maximum(1.0, ranks / self.shards))
        placed = (self.shard_stride > 0) | (self.replicate_stride > 0)
        return np.where(placed, span / ranks, self.tensor)

    @property
    def pipeline_step(self) -> Array:
        return np.where(self.pipeline_stride > 0, self.pipeline_stride, self.tensor * self.context * self.data)

    @property
    def micro_batches(self) -> Array:
        """Micro-batches of one replica in one step."""
        return np.maximum(1.0, np.ceil(self.global_batch / (self.data * self.micro_batch) - 1e-9))


UNEVEN = 0.2
"""What the busiest of many expert ranks gets beyond the mean where nobody says: 1.2 times the mean. Balanced by a weak loss alone, 32 ranks
with one expert each got 1.35 to 2.1 times the mean in real training (LAER-MoE's traces, ASPLOS 2026)."""


def usual_imbalance(expert_ranks: Array) -> Array:
    """Tokens of the busiest of so many expert ranks over the mean: 1 for one rank, and the more ranks the nearer to 1 + `UNEVEN`."""
    return 1 + UNEVEN * (1 - 1 / np.maximum(expert_ranks, 1.0))


def side_by_side(rows: Sequence[T]) -> T:
    """Rows of one class with scalar fields → one object whose fields are float64 arrays."""
    cls: Any = type(rows[0])
    return cls(**{f.name: np.array([getattr(row, f.name) for row in rows], dtype=np.float64) for f in fields(cls)})
