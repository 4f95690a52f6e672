"""The rules of a plan, each once: which values of its keys go together, with the model, the data and the devices of its run.

A rule is data: its key, the condition that breaks it, what is expected instead, and the nearest valid value. Run files, plan files,
`untrained` and the filter of the search (`planner.conflicts`) read this table. Conditions read values by key (`RuleInput`), work on numbers
and words and on arrays of them, and say nothing where a value that they need is not known.

Rules of whole plans, which no single value breaks, are in `config.key_rules`: the order of axes and of stages, ranges of layers, the ranks
of a cluster, and the global batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any

from meshwright.spec.chips import CHIPS, formats_on
from meshwright.spec.divisors import divisors, nearest_divisor
from meshwright.spec.fields import to_plain
from meshwright.spec.fp8_limits import FP8_MULTIPLE, FP8_WIDTH_KEYS, linear_dimensions
from meshwright.spec.hybrid import (
    REFUSED_BESIDE,
    SCHEDULES,
    capacity_error,
    exchanged_heads,
    hybrid_error,
    schedules_of,
)
from meshwright.spec.layout import (
    adapter_split_error,
    context_split_error,
    expert_split_error,
    tensor_split_error,
)
from meshwright.spec.plan import (
    CONTEXT_AXES,
    PARTIAL_RECOMPUTES,
    RECOMPUTES_MATMULS,
    SPLITS_BACKWARD,
    LayerStrategy,
    Plan,
)
from meshwright.spec.plan_keys import STRATEGY_KEYS, keys_of

ACTIVATIONS = ("activations", "both")
OPTIMIZER = ("optimizer", "both")
"""Values of `offload` that offload activations, and the optimizer's state."""
COPY_POLICIES = ("hecate", "fixed")
"""Values of `expert_policy` with copies of experts."""
LAYER_KEYS = (*STRATEGY_KEYS, "linear")
"""Keys that ranges of layers have too."""
_LAYER_DEFAULTS = to_plain(LayerStrategy())
_REQUIRED = object()


class Unknown(Exception):
    """A condition needs a value that is not known."""


class RuleInput:
    """The values that rules read: `tensor` is a key of the plan, and `model.heads` one of the run.

    `layers` are the ranges of layers where they have settings of their own. A value may be an array.
    """

    def __init__(self, read: Callable[[str], Any], layers: Sequence[Mapping[str, Any]] = ()) -> None:
        self._read = read
        self.layers = layers

    def __call__(self, key: str, default: Any = _REQUIRED) -> Any:
        """The value of `key`; where it is not known `default`, and without one Unknown is raised."""
        value = self._read(key)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise Unknown
        return default

    def where(self, **values: Any) -> RuleInput:
        """The same values but for some keys of the plan."""
        return RuleInput(lambda key: values[key] if key in values else self._read(key), self.layers)

    def ranks(self, *axes: str) -> Any:
        """Ranks along all of `axes` together; an axis without a value has one."""
        return math.prod((self(axis, 1) for axis in axes), start=1)

    @property
    def pipeline(self) -> int:
        """Pipeline ranks: as given, or a row of `stages` for each."""
        return max(self("pipeline", 1), len(self("stages", ())))

    def values(self, key: str) -> list[Any]:
        """The known values of a key of layers: of the whole plan, and of each range of layers."""
        return [value for value in (self._read(key), *(layer.get(key) for layer in self.layers)) if value is not None]

    def some(self, key: str, words: Collection[Any]) -> Any:
        """Whether some layers have one of `words` as their value of `key`."""
        return reduce(or_, (among(value, words) for value in self.values(key)), False)

    def first(self, key: str, words: Collection[Any]) -> Any:
        """The first value of `key` that is one of `words`."""
        return next(value for value in self.values(key) if value in words)


def among(value: Any, words: Collection[Any]) -> Any:
    """Whether `value` is one of `words`; an array for an array."""
    return reduce(or_, (value == word for word in words), False)


Text = str | Callable[[RuleInput], Any]


def always(_: RuleInput) -> bool:
    """The condition of a rule that only depends on the words of its key."""
    return True


@dataclass(frozen=True)
class PlanRule:
    """A condition that no plan may meet, or that none may meet that is trained."""

    key: str
    """The key that a message names: of the plan, or with dots of a run file."""
    words: str | tuple[str, ...] | None
    """The values of the key that the rule is about; none: all but 0, false and no value; empty: all, and no value."""
    broken: Callable[[RuleInput], Any] | None
    """What else holds where the rule is broken; none: `expected` is None where it is not broken."""
    expected: Text = ""
    """What the key should be instead."""
    nearest: Text | None = None
    """The nearest valid value of the key."""
    got: str | None = None
    """What is there, where that is not the value."""
    untrained: Text = ""
    """What this release cannot train, in words: a plan that breaks a rule without `expected` can be planned and simulated."""
    beside: tuple[str, ...] = ()
    """Further keys that the search chooses, where it reads the rule."""
    by_layer: bool = False
    """Whether each range of layers is checked by itself."""

    def is_broken(self, given: RuleInput) -> Any:
        """Whether the rule is broken, as far as the values are known; an array where some values are arrays."""
        try:
            if self.words is None and not given(self.key):
                return False
            words = (self.words,) if isinstance(self.words, str) else self.words
            concerned = among(given(self.key), words) if words else True
            if concerned is False:
                return False
            if self.broken is None:
                return callable(self.expected) and self.expected(given) is not None
            return concerned & self.broken(given)
        except Unknown:
            return False

    def nearest_value(self, given: RuleInput) -> str | None:
        """The nearest valid value of the key for these values, as text; None where none is known."""
        found = self.nearest(given) if callable(self.nearest) else self.nearest
        return None if found is None else str(found)


def text_of(text: Text, given: RuleInput) -> str:
    """A text of a rule for these values."""
    return text if isinstance(text, str) else str(text(given))


def _nearest_below(key: str, candidates: Callable[[RuleInput], Sequence[int]]) -> Callable[[RuleInput], Any]:
    """The largest of `candidates` (smallest first) below the value of `key` with which no rule of such axes is broken."""
    keys = CONTEXT_AXES if key in CONTEXT_AXES else (key,)

    def nearest(x: RuleInput) -> Any:
        rules = [rule for rule in RULES if rule.key in keys]
        smaller = (size for size in reversed(candidates(x)) if size < x(key))
        return next(
            (size for size in smaller if not any(rule.is_broken(x.where(**{key: size})) for rule in rules)), None
        )

    return nearest


# The table: a rule is its key, its words, the condition, what is expected, and the nearest valid value, packed in few lines.
# fmt: off

# Tensor and context ranks


def _tensor_error(x: RuleInput) -> str | None:
    """The tensor ranks that can divide heads, widths, experts and sequence, in words, if these cannot."""
    ranks = x("tensor")
    kinds = x("model.blocks", {})
    heads = x("model.heads")
    kv_heads = x("model.kv_heads")
    own = {f"blocks.{name}.ffn_hidden": kind.get("ffn_hidden") for name, kind in kinds.items()}
    widths = {"ffn_hidden": x("model.ffn_hidden")} | {key: size for key, size in own.items() if isinstance(size, int)}
    return (
        tensor_split_error(ranks, heads, kv_heads, widths, x("model.vocab_size", 0), x("train.seq_len", None))
        or adapter_split_error(ranks, x("model.adapter.kind", ""))
        or expert_split_error(ranks, x("model.experts", 0), x("model.shared_expert_hidden", 0))
    )


def _context_error(x: RuleInput, axis: str) -> str | None:
    """What is expected of the context ranks along `axis`, if they cannot divide heads and sequence beside tensor ranks."""
    ring, ulysses, tensor = (x(name, 1) for name in (*CONTEXT_AXES, "tensor"))
    wrong = context_split_error(ring, ulysses, tensor, x("model.heads"), x("model.kv_heads"), x("train.seq_len", None))
    return wrong[1] if wrong and wrong[0] == axis else None


DIVISIONS = (
    PlanRule("tensor", None, None, _tensor_error, _nearest_below("tensor", lambda x: divisors(x("model.heads")))),
    *(
        PlanRule(axis, None, None, lambda x, axis=axis: _context_error(x, axis),
            _nearest_below(axis, lambda x, axis=axis: divisors(x(axis))))
        for axis in CONTEXT_AXES
    ),
)

# Experts

_NEEDED = "unless plan.expert (or plan.tensor) spreads experts over several ranks"
_PEER = ("peer", "peer_fp8")


def _holders(x: RuleInput) -> Any:
    """Ranks that hold different experts."""
    return x.ranks("expert", "tensor")


def _other_experts(x: RuleInput) -> Any:
    """Experts of a layer that other ranks own."""
    return x("model.experts") - x("model.experts") // _holders(x)


def _no_copies(x: RuleInput) -> Any:
    return x("expert_policy", "none") == "none"


def _shards(x: RuleInput) -> Any:
    """Shard and context ranks."""
    return x("shard") * x.ranks(*CONTEXT_AXES)


def _tensor_text(x: RuleInput) -> str:
    return f" ÷ plan.tensor {x('tensor')}" if x("tensor", 1) > 1 else ""


def _bad_slots(x: RuleInput) -> bool:
    slots = x("expert_slots", 0) if x("in a plan file") else x("expert_slots")
    return not _no_copies(x) and _holders(x) > 1 and not 1 <= slots <= _other_experts(x)


EXPERTS = (
    PlanRule("expert", (), lambda x: x("in a plan file") and x("model.experts") > 0 and x("expert", None) is None,
        "the ranks that a layer's experts are spread over, in a plan file", "1", got="nothing"),
    PlanRule("expert", None, lambda x: x("model.experts") == 0, "no key, as the model is dense (model.experts is 0)"),
    PlanRule("expert", None, lambda x: x("model.experts") % _holders(x) > 0,
        lambda x: f"a divisor of model.experts = {x('model.experts')}{_tensor_text(x)}",
        lambda x: nearest_divisor(x("model.experts") // math.gcd(x("model.experts"), x("tensor", 1)), x("expert"))),
    PlanRule("expert", None, lambda x: not x("hybrid", 0) and _shards(x) % x("expert") > 0,
        lambda x: f"a divisor of plan.shard × context ranks = {_shards(x)}",
        lambda x: math.gcd(_shards(x), x("expert"))),
    PlanRule("expert", None, lambda x: x("hybrid") % x("expert") > 0,
        lambda x: f"a divisor of plan.hybrid = {x('hybrid')}", lambda x: math.gcd(x("hybrid"), x("expert"))),
    PlanRule("expert_policy", COPY_POLICIES, lambda x: _holders(x) == 1, f"none, {_NEEDED}", "none"),
    PlanRule("expert_slots", (), _bad_slots,
        lambda x: f"slots: 1 to the {_other_experts(x)} experts of other ranks, for policy {x('expert_policy')}"),
    *(
        PlanRule(key, None, only, "no key without plan.expert_policy, which says which experts are copied")
        for key, only in (
            ("expert_slots", _no_copies),
            ("expert_keep", _no_copies),
            ("expert_load_window", lambda x: _no_copies(x) and x("expert_placement", "even") == "even"),
        )
    ),
    PlanRule("expert_receive_bound", None, lambda x: x("expert_exchange", "all_to_all") == "all_to_all",
        "no key without plan.expert_exchange: peer"),
    PlanRule("expert_exchange", _PEER, lambda x: x("model.experts") == 0 or _holders(x) == 1, f"all_to_all, {_NEEDED}",
        "all_to_all"),
    PlanRule("expert_exchange", _PEER, lambda x: x("cluster.gpu").lower() == "cpu",
        "all_to_all, as the kernels run on GPUs", "all_to_all"),
    PlanRule("expert_placement", "balanced", lambda x: _holders(x) == 1, "even, as every rank has all experts", "even"),
    PlanRule("expert_placement", "balanced", lambda x: x("expert_policy") == "fixed",
        "even, as policy fixed does not depend on loads", "even"),
    PlanRule("expert_placement", "balanced", lambda x: x("model.groups_per_token", 1) < x("model.expert_groups", 1),
        "even, as tokens choose groups of consecutive experts (model.groups_per_token)", "even"),
    PlanRule("expert_placement_every", None, lambda x: x("expert_placement", "even") == "even",
        "no key without plan.expert_placement: balanced"),
    PlanRule("expert_placement", "balanced", lambda x: x.some("offload", OPTIMIZER),
        untrained="expert_placement: balanced with the optimizer's state in host memory", beside=("offload",)),
)

# Schedules

_NO_EXCHANGE = "no tokens go to experts of other ranks"


def _micro_batches(x: RuleInput) -> int:
    """Micro-batches of a rank in a step; 0 where batch and ranks do not give a whole number, which another rule says."""
    count, rest = divmod(x("train.global_batch"), x("replicate") * x("shard") * x("micro_batch"))
    return 0 if rest else count


def _paired(reason: Text, broken: Callable[[RuleInput], Any], *beside: str) -> PlanRule:
    """Two micro-batches cannot run through a layer together."""
    return PlanRule("schedule", "paired", broken, lambda x: f"another schedule than paired, as {text_of(reason, x)}",
        "1f1b", untrained=lambda x: f"schedule paired, as {text_of(reason, x)}", beside=beside)


SCHEDULING = (
    _paired(_NO_EXCHANGE, lambda x: x("model.experts") == 0),
    _paired(_NO_EXCHANGE, lambda x: x("expert") * x("tensor") == 1, "expert", "tensor"),
    _paired(_NO_EXCHANGE,
        lambda x: (x("expert_policy") == "fixed") & (x("expert") > 0) & (x("expert_slots", 0) >= _other_experts(x))),
    _paired("its micro-batches would be filled differently by samples of any length (data.packing: none)",
        lambda x: x("data.packing") == "none"),
    _paired("it needs plan.pipeline 1", lambda x: x("pipeline") > 1),
    _paired(lambda x: f"exchange {x('expert_exchange')} sends the tokens of one micro-batch at a time",
        lambda x: among(x("expert_exchange"), _PEER)),
    _paired(
        lambda x: f"recompute {x.first('recompute', RECOMPUTES_MATMULS)} would exchange tokens again "
        f"(none and {', '.join(PARTIAL_RECOMPUTES - RECOMPUTES_MATMULS)} do not)",
        lambda x: x.some("recompute", RECOMPUTES_MATMULS), "recompute"),
    _paired(
        lambda x: f"offload {x.first('offload', ACTIVATIONS)} copies the activations of one micro-batch at a time",
        lambda x: x.some("offload", ACTIVATIONS), "offload"),
    _paired(lambda x: f"a rank has {_micro_batches(x)} micro-batches in a step, an odd number",
        lambda x: _micro_batches(x) % 2 == 1),
    # The inputs of matmuls stay on the device until the deferred weight gradients are computed.
    PlanRule("schedule", tuple(SPLITS_BACKWARD), lambda x: x.some("offload", ACTIVATIONS),
        untrained=lambda x: f"offload {x.first('offload', ACTIVATIONS)} under {x('schedule')}, which defers weight gradients",
        beside=("offload",)),
)

# Samples of any length, and hybrid ranks

_DIFFERENT = "as ranks of plan.hybrid run different numbers of micro-batches (or plan.schedule = breadth_first)"


def _unpacked(x: RuleInput) -> bool:
    """Whether samples of any length are trained, by a batch in tokens."""
    return x("data.packing") == "none" and x("train.global_batch_tokens") > 0


def _beside_hybrid(x: RuleInput) -> str | None:
    """What of the model, or of other axes, hybrid ranks cannot have.

    A kind of layer has the model's window where it does not set its own, and 0 is none.
    """
    window = x("model.sliding_window", None)
    kinds = x("model.blocks", {})
    own = [kind.get("sliding_window") for kind in kinds.values()]
    windows = [size if isinstance(size, int) else window for size in own] or [window]
    return hybrid_error(
        {axis: x(axis, 1) for axis in REFUSED_BESIDE},
        windowed=any(isinstance(size, int) and size > 0 for size in windows),
        by_length=x("model.longrope", None) is not None,
        altered_scores=bool(x("model.sinks", False)) or x("model.score_cap", None) is not None,
    )


def _hybrid(x: RuleInput) -> bool:
    """Whether there are hybrid ranks, which data and model can have."""
    return bool(x("hybrid")) and x("data.packing", "none") == "none" and _beside_hybrid(x) is None


def _cluster(x: RuleInput) -> int:
    return x("cluster.nodes") * x("cluster.gpus_per_node")


def _beside_ranks(x: RuleInput) -> int:
    """Ranks of each hybrid rank."""
    return x.pipeline * x("tensor", 1)


def _all_ranks(x: RuleInput) -> str:
    factors = (("plan.pipeline", x.pipeline), ("plan.tensor", x("tensor", 1)))
    return f"all of the cluster's {_cluster(x)} ranks{''.join(f' ÷ {key} {size}' for key, size in factors if size > 1)}"


def _heads(x: RuleInput) -> int:
    return exchanged_heads(x("model.kv_heads", 1), x("tensor", 1))


def _capacity_error(x: RuleInput) -> tuple[str, int] | None:
    """Slots of all hybrid ranks together hold the longest sample."""
    if not (x("hybrid", 0) or x("samples", None)):
        return None
    longer = x("offload_capacity", 0)
    return capacity_error(x("capacity"), x("hybrid", 1), x("tensor", 1), x("train.seq_len"), longer)


def _longer_slots(x: RuleInput) -> bool:
    """Whether there are slots for those with offload to be beside."""
    return bool(x("capacity", 0)) and bool(x("hybrid", 0) or x("samples", None))


def _longer_error(x: RuleInput) -> str | None:
    """The tokens of slots with offload that are valid, in words, if these are not: at most all blocks are offloaded."""
    longer = x("offload_capacity")
    capacity = x("capacity")
    layers = x("model.layers")
    unit = math.lcm(2, x("tensor", 1))
    most = capacity * layers // 2
    if not _longer_slots(x) or (longer > capacity and longer % unit == 0 and longer <= most):
        return None
    multiple = "an even number of" if unit == 2 else f"a multiple of {unit}"
    return f"{multiple} tokens above the {capacity} of other slots and at most {most}, where all {layers} blocks are offloaded"


def _slot_limits(key: str, limit: Callable[[RuleInput], int], of: str) -> tuple[PlanRule, PlanRule]:
    """A key of `samples` that slots with offload have: it is given in a plan file, and at most `limit`."""

    def value(x: RuleInput) -> int:
        return x("samples", {}).get(key) or 0

    return (
        PlanRule(f"plan.samples.{key}", (),
            lambda x: x("in a plan file") and x("offload_capacity") > 0 and _longer_slots(x) and not value(x),
            "a number, as plan.offload_capacity is given", got="none"),
        PlanRule(f"plan.samples.{key}", None,
            lambda x: x("offload_capacity") > 0 and _longer_slots(x) and value(x) > limit(x),
            lambda x: f"at most {limit(x)}: {of}", limit),
    )


SAMPLES = (
    PlanRule("samples", None, lambda x: not x("in a plan file"),
        "no such key outside of a plan file: the planner computes the times", "none", got="a section"),
    PlanRule("samples", None, lambda x: x("data.packing") != "none",
        lambda x: f"no such section, as data.packing is {x('data.packing')}", got="a section"),
    *(
        PlanRule(key, (), lambda x, missing=missing: x("in a plan file") and x("data.packing") == "none" and missing(x),
            "capacity, and samples with alpha and beta, as data.packing is none", got="none")
        for key, missing in (
            ("samples", lambda x: not x("samples", None)),
            ("capacity", lambda x: bool(x("samples")) and not x("capacity", 0)),
        )
    ),
    PlanRule("micro_batch", None, lambda x: _unpacked(x) and x("micro_batch") > 1,
        "1, as data.packing is none: a micro-batch is one slot of samples", "1"),
    *(
        PlanRule(axis, None, lambda x, axis=axis: _unpacked(x) and not x("hybrid", 0) and x(axis) > 1,
            "1, as data.packing is none: this release divides samples on no such axis", "1")
        for axis in ("pipeline", *CONTEXT_AXES, "tensor")
    ),
    PlanRule("hybrid", None, lambda x: x("data.packing") != "none",
        "data.packing = none beside it: hybrid ranks divide samples of any length"),
    PlanRule("hybrid", None, None, _beside_hybrid),
    PlanRule("hybrid", None, lambda x: x("hybrid") * _beside_ranks(x) != _cluster(x), _all_ranks,
        lambda x: None if _cluster(x) % _beside_ranks(x) else _cluster(x) // _beside_ranks(x)),
    PlanRule("hybrid_attention", None, lambda x: not x("hybrid", 0), "no such key without plan.hybrid", "none"),
    PlanRule("hybrid_attention", "ulysses",
        lambda x: _hybrid(x) and not any(_heads(x) % ranks == 0 for ranks in range(2, x("hybrid") + 1)),
        lambda x: f"ring: no number of ranks from 2 to {x('hybrid')} divides a rank's {_heads(x)} key/value heads",
        "ring"),
    PlanRule("capacity", None, lambda x: not x("hybrid", 0) and not x("samples", None),
        "no such key without plan.hybrid, whose slots it sizes", "none"),
    PlanRule("capacity", None, None, lambda x: (_capacity_error(x) or (None,))[0],
        lambda x: (_capacity_error(x) or ("", 0))[1]),
    PlanRule("schedule", None, lambda x: _hybrid(x) and x("schedule") not in schedules_of(x.pipeline),
        lambda x: f"{_either(schedules_of(x.pipeline))}, as plan.hybrid is {x('hybrid')}", SCHEDULES[0]),
    *(
        # One micro-batch has no collective of its own: units stay gathered and gradients whole, or the order is layered.
        PlanRule(key, words, lambda x: _hybrid(x) and x("schedule", "") != "breadth_first", f"{kept}, {_DIFFERENT}",
            kept, by_layer=True)
        for key, words, kept in (("reshard", None, "false"), ("gradients", "shard", "whole"))
    ),
    PlanRule("offload_capacity", None, lambda x: not _longer_slots(x),
        "no such key without plan.hybrid and plan.capacity", "none"),
    PlanRule("offload_capacity", None,
        lambda x: _longer_slots(x) and (x.pipeline > 1 or x("stages", ()) != () or x("model.experts", 0) > 0),
        "none beside pipeline ranks or experts, whose layers have unequal activations", "none"),
    PlanRule("offload_capacity", None, None, _longer_error),
    *_slot_limits("offload_layers", lambda x: x("model.layers"), "the model's blocks"),
    *_slot_limits(
        "offload_shortest",
        lambda x: x("capacity") * x("hybrid", 1) + 1,
        "more than all ranks together hold without offload",
    ),
    PlanRule("offload", ACTIVATIONS, lambda x: x("offload_capacity") > 0 and _longer_slots(x),
        "none or optimizer, as slots with offload have activations of long samples only in host memory", "none",
        by_layer=True),
)

# Number formats

_FP8 = ("fp8_tensorwise", "fp8_rowwise")


def _odd_side(x: RuleInput) -> str | None:
    """The first dimension of the linear layers' matmuls that fp8 cannot have, in words."""
    sizes = {key: x(f"model.{key}", None) for key in FP8_WIDTH_KEYS}
    sides = linear_dimensions(sizes, x("train.seq_len", None), x.ranks(*CONTEXT_AXES))
    odd = (f"{name} = {size}" for name, size in sides.items() if x.some("linear", _FP8) and size % FP8_MULTIPLE)
    return next((f"compute, as {side} is no multiple of {FP8_MULTIPLE}, which fp8 matmuls need" for side in odd), None)


def _fp8(broken: Callable[[RuleInput], Any], expected: Text = "", **more: Any) -> PlanRule:
    """The linear layers of some layers multiply in fp8."""
    return PlanRule("linear", (), lambda x: x.some("linear", _FP8) & broken(x), expected, "compute", **more)


def _computed(x: RuleInput) -> tuple[str, ...]:
    """Formats that the cluster's devices compute in; bf16 and fp32 on devices that are not known."""
    return formats_on(x("cluster.gpu")) or ("bf16", "fp32")


def _nearest_computed(x: RuleInput) -> str:
    """fp32 holds the values of every other format; devices without it have bf16."""
    return "fp32" if "fp32" in _computed(x) else _computed(x)[0]


FORMATS = (
    PlanRule("compute", "fp64", lambda x: x("cluster.gpu") != "cpu",
        lambda x: f"{' or '.join(_computed(x))} on {x('cluster.gpu')}; fp64 runs on cpu only", _nearest_computed),
    *(
        PlanRule(key, "fp64", lambda x: x("cluster.gpu") != "cpu",
            lambda x: f"bf16 or fp32 on {x('cluster.gpu')}; fp64 runs on cpu only", "fp32")
        for key in ("reduce", "reduce_replicas")
    ),
    PlanRule("compute", ("bf16", "fp16", "fp32"),
        lambda x: x("compute") not in (formats_on(x("cluster.gpu")) or (x("compute"),)),
        lambda x: f"{' or '.join(_computed(x))} on {x('cluster.gpu')}", _nearest_computed),
    PlanRule("compute", "fp16", always,
        untrained="computation in fp16 (it does not scale losses; plan.compute=fp32 trains)"),
    PlanRule("gather", "fp8", lambda x: "fp8_tensorwise" not in x.values("linear"),
        "compute, as no layer's `linear` is fp8_tensorwise: other matmuls need the weight as it is", "compute"),
    _fp8(lambda x: x("cluster.gpu") in CHIPS and "fp8" not in CHIPS[x("cluster.gpu")].peak_flops,
        lambda x: f"compute, as {x('cluster.gpu')} has no fp8 matmuls"),
    _fp8(lambda x: x("compute") in ("fp16", "fp64"),
        lambda x: f"compute, as plan.compute is {x('compute')}: fp8 goes with bf16 or fp32"),
    PlanRule("linear", (), None, _odd_side, "compute"),
    _fp8(lambda x: x("tensor") > 1, untrained="matmuls in fp8 with tensor ranks", beside=("tensor",)),
)

# Layers


def _in_tiles(feature: Text, broken: Callable[[RuleInput], Any], *beside: str) -> PlanRule:
    """The feed-forward networks of some layers run in tiles."""
    return PlanRule("mlp_tile", None,
        lambda x: (not x.values("recompute") or x.some("recompute", RECOMPUTES_MATMULS)) & broken(x),
        untrained=lambda x: f"feed-forward networks in tiles with {text_of(feature, x)}", beside=beside)


LAYERS = (
    *(
        PlanRule(key, (), lambda x, key=key: x("layers") is not None and x(key) is not None,
            f"`{key}` inside plan.layers only, as plan.layers is given")
        for key in STRATEGY_KEYS
    ),
    PlanRule("offload", OPTIMIZER, lambda x: bool(x("train.ema_decay")),
        "none or activations, as train.ema_decay averages weights on the device", "none", by_layer=True),
    PlanRule("offload", OPTIMIZER, lambda x: x("train.optimizer.name") != "adamw",
        lambda x: f"none or activations, as train.optimizer is {x('train.optimizer.name')}: "
        "only the state of adamw is updated in host memory",
        "none", by_layer=True),
    # Only the compiler exposes the tensors that it keeps; eager selective checkpointing holds them itself.
    PlanRule("offload", ACTIVATIONS, lambda x: among(x("recompute"), PARTIAL_RECOMPUTES) & (not x("compile")),
        untrained=lambda x: f"offload {x('offload')} with recompute {x('recompute')} where blocks are not compiled",
        beside=("recompute",), by_layer=True),
    _in_tiles("tensor ranks", lambda x: x("tensor") > 1, "tensor"),
    _in_tiles(lambda x: f"{x('schedule')}, which defers weight gradients",
        lambda x: among(x("schedule"), SPLITS_BACKWARD), "schedule"),
    _in_tiles("matmuls in fp8", lambda x: x.some("linear", _FP8)),
)

# Adapters


def _adapted(x: RuleInput) -> bool:
    return bool(x("model.adapter"))


ADAPTERS = (
    _fp8(lambda x: _adapted(x) and x("model.adapter.kind", "") == "dora",
        "compute, as the row lengths of model.adapter.kind = dora follow from weights that are not rounded"),
    PlanRule("mlp_tile", None, _adapted, "0, as tiles do not compute the adapters of model.adapter in this release", "0"),
    PlanRule("expert_policy", COPY_POLICIES, _adapted,
        "none, as copies of experts are for experts that are trained, and model.adapter freezes them", "none"),
    PlanRule("expert_placement", "balanced", _adapted,
        "even, as experts move with their optimizer state, which model.adapter leaves out", "even"),
)
# fmt: on

RULES: tuple[PlanRule, ...] = (*SCHEDULING, *DIVISIONS, *EXPERTS, *SAMPLES, *FORMATS, *LAYERS, *ADAPTERS)
UNTRAINED = tuple(rule for rule in RULES if rule.untrained)
"""Rules of what this release cannot train."""


def mistakes(given: RuleInput) -> Iterator[tuple[PlanRule, int | None, RuleInput]]:
    """(rule, range of layers, the values there) of the first broken rule of each key; None for a key of the whole plan.

    Rules that only training has are left out.
    """
    found = set()
    for rule in RULES:
        if not rule.expected:
            continue
        for index, values in _places(rule, given):
            place = rule.key, index
            if place not in found and rule.is_broken(values):
                found.add(place)
                yield rule, index, values


def _places(rule: PlanRule, given: RuleInput) -> Iterator[tuple[int | None, RuleInput]]:
    """The values of the whole plan, or of each range of layers."""
    if rule.by_layer and given.layers:
        for index, layer in enumerate(given.layers):
            yield index, given.where(**{key: layer.get(key, _LAYER_DEFAULTS[key]) for key in LAYER_KEYS})
    else:
        yield None, given


def untrained(plan: Plan, key: str | None = None) -> list[str]:
    """What of a plan this release cannot train, in words; with `key` only what concerns that key."""
    return list(dict.fromkeys(text for of_key, text in untrained_keys(plan) if key in (None, of_key)))


def untrained_keys(plan: Plan) -> list[tuple[str, str]]:
    """(key, text) of what this release cannot train."""
    given = input_of(plan)
    return [
        (rule.key, text_of(rule.untrained, values))
        for rule in UNTRAINED
        for _, values in _places(rule, given)
        if rule.is_broken(values)
    ]


def input_of(plan: Plan) -> RuleInput:
    """The values of a whole plan, with what it says of its model and its data."""
    values: dict[str, Any] = {**vars(keys_of(plan)), "expert": plan.experts.expert if plan.experts else 1}
    layers = [to_plain(layer) | {"linear": layer.linear or plan.precision.linear} for layer in plan.layers]
    if plan.samples is not None:
        values["data.packing"] = "none"
        if plan.samples.offload is not None:
            layers = [{**layer, "offload": "activations"} for layer in layers]
    if plan.experts is None:
        values["model.experts"] = 0
    values |= dict.fromkeys(LAYER_KEYS)
    return RuleInput(values.get, layers)


def _either(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"
