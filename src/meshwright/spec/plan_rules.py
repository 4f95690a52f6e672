"""The rules of a plan, each of them once: which values of its keys fit each other, and the model, the data and the
devices of its run.

A rule is data: its key, the condition that breaks it, what is expected instead, and the nearest valid value. The check
of run files and plan files, `untrained`, and the filter of the search (`planner.conflicts`) all read this table. A
condition reads values by key (`RuleInput`). It works on numbers and words and on arrays of them. If it needs a value
that is not known, the rule counts as kept.

Rules of whole plans, which no single value breaks, are in `config.key_rules`: the order of axes and of stages, ranges
of layers, the ranks of a cluster, and the global batch.
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
"""Values of `offload` that offload activations."""
OPTIMIZER = ("optimizer", "both")
"""Values of `offload` that offload the optimizer's state."""
COPY_POLICIES = ("hecate", "fixed")
"""Values of `expert_policy` with copies of experts."""
LAYER_KEYS = (*STRATEGY_KEYS, "linear")
"""Keys that a range of layers can have too."""
_LAYER_DEFAULTS = to_plain(LayerStrategy())
_REQUIRED = object()


class Unknown(Exception):
    """A condition needs a value that is not known."""


class RuleInput:
    """The values that rules read, by key: `tensor` is a key of the plan, `model.heads` a key of the run.

    A value may be an array.

    `layers` has the settings of each range of layers, if layers have settings of their own.
    """

    def __init__(self, read: Callable[[str], Any], layers: Sequence[Mapping[str, Any]] = ()) -> None:
        self._read = read
        self.layers = layers

    def __call__(self, key: str, default: Any = _REQUIRED) -> Any:
        """Return the value of `key`. If it is not known, return `default`, or raise Unknown if there is none."""
        value = self._read(key)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise Unknown
        return default

    def where(self, **values: Any) -> RuleInput:
        """Return the same values, except for some keys of the plan."""
        return RuleInput(lambda key: values[key] if key in values else self._read(key), self.layers)

    def ranks(self, *axes: str) -> Any:
        """Return the product of the numbers of ranks along `axes`; an axis without a value has one rank."""
        return math.prod((self(axis, 1) for axis in axes), start=1)

    @property
    def pipeline(self) -> int:
        """Return the number of pipeline ranks: as given, or one for each row of `stages`."""
        return max(self("pipeline", 1), len(self("stages", ())))

    def values(self, key: str) -> list[Any]:
        """Return the known values of a key that layers can have: of the whole plan, and of each range of layers."""
        return [value for value in (self._read(key), *(layer.get(key) for layer in self.layers)) if value is not None]

    def some(self, key: str, words: Collection[Any]) -> Any:
        """Return whether some layers have one of `words` as their value of `key`."""
        return reduce(or_, (among(value, words) for value in self.values(key)), False)

    def first(self, key: str, words: Collection[Any]) -> Any:
        """Return the first value of `key` that is one of `words`."""
        return next(value for value in self.values(key) if value in words)


def among(value: Any, words: Collection[Any]) -> Any:
    """Return whether `value` is one of `words`; an array for an array."""
    return reduce(or_, (value == word for word in words), False)


Text = str | Callable[[RuleInput], Any]
"""A text, or a function that makes it from the values."""


def always(_: RuleInput) -> bool:
    """Return True: the condition of a rule that only depends on the value of its key."""
    return True


@dataclass(frozen=True)
class PlanRule:
    """A condition that no plan may meet, or that no plan may meet which is trained."""

    key: str
    """The key that a message names: a key of the plan, or with dots a key of a run file."""
    words: str | tuple[str, ...] | None
    """The values of the key to which the rule applies.

    None: all values except 0, false and no value. Empty: all values, and also no value.
    """
    broken: Callable[[RuleInput], Any] | None
    """What must also hold for the rule to be broken. None: the rule is broken if `expected` returns a text."""
    expected: Text = ""
    """What the key should be instead."""
    nearest: Text | None = None
    """The nearest valid value of the key."""
    got: str | None = None
    """What is there, for messages, if it is not the value of the key."""
    untrained: Text = ""
    """What this release cannot train, as text.

    A plan that breaks a rule without `expected` can still be planned and simulated.
    """
    beside: tuple[str, ...] = ()
    """Other keys that the condition reads and that the search chooses."""
    by_layer: bool = False
    """Whether the rule is checked for each range of layers separately."""

    def is_broken(self, given: RuleInput) -> Any:
        """Return whether the rule is broken, as far as the values are known; an array if some values are arrays."""
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
        """Return the nearest valid value of the key for these values, as text; None if none is known."""
        found = self.nearest(given) if callable(self.nearest) else self.nearest
        return None if found is None else str(found)


def text_of(text: Text, given: RuleInput) -> str:
    """Return a text of a rule for these values."""
    return text if isinstance(text, str) else str(text(given))


def _nearest_below(key: str, candidates: Callable[[RuleInput], Sequence[int]]) -> Callable[[RuleInput], Any]:
    """Return a function that finds the nearest valid value of `key` below its present value.

    It returns the largest of `candidates`, which are in ascending order, with which no rule of this axis is broken.
    """
    keys = CONTEXT_AXES if key in CONTEXT_AXES else (key,)

    def nearest(x: RuleInput) -> Any:
        rules = [rule for rule in RULES if rule.key in keys]
        smaller = (size for size in reversed(candidates(x)) if size < x(key))
        return next(
            (size for size in smaller if not any(rule.is_broken(x.where(**{key: size})) for rule in rules)), None
        )

    return nearest


# The table. The arguments of a rule are its key, its words, the condition, what is expected, and the nearest valid
# value, on few lines.
# fmt: off

# Tensor and context ranks


def _tensor_error(x: RuleInput) -> str | None:
    """Return which numbers of tensor ranks can divide heads, widths, experts and sequence, as text, if this number
    cannot.
    """
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
    """Return what is expected of the context ranks along `axis`, if they cannot divide heads and sequence together with
    tensor ranks.
    """
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
    """Return the number of ranks that have different experts."""
    return x.ranks("expert", "tensor")


def _other_experts(x: RuleInput) -> Any:
    """Return the number of a layer's experts that are on other ranks."""
    return x("model.experts") - x("model.experts") // _holders(x)


def _no_copies(x: RuleInput) -> Any:
    """Return whether no experts are copied."""
    return x("expert_policy", "none") == "none"


def _shards(x: RuleInput) -> Any:
    """Return the number of shard and context ranks."""
    return x("shard") * x.ranks(*CONTEXT_AXES)


def _tensor_text(x: RuleInput) -> str:
    return f" ÷ plan.tensor {x('tensor')}" if x("tensor", 1) > 1 else ""


def _bad_slots(x: RuleInput) -> bool:
    """Return whether the number of slots for copied experts is not valid."""
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
    """Return the number of micro-batches of a rank in a step; 0 if it is no whole number, which another rule reports.
    """
    count, rest = divmod(x("train.global_batch"), x("replicate") * x("shard") * x("micro_batch"))
    return 0 if rest else count


def _paired(reason: Text, broken: Callable[[RuleInput], Any], *beside: str) -> PlanRule:
    """Return a rule for the schedule `paired`: two micro-batches cannot run through a layer together, for this reason.
    """
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
    # With a split backward, the inputs of matmuls must stay on the device until the weight gradients are computed.
    PlanRule("schedule", tuple(SPLITS_BACKWARD), lambda x: x.some("offload", ACTIVATIONS),
        untrained=lambda x: f"offload {x.first('offload', ACTIVATIONS)} under {x('schedule')}, which defers weight gradients",
        beside=("offload",)),
)

# Samples of any length, and hybrid ranks

_DIFFERENT = "as ranks of plan.hybrid run different numbers of micro-batches (or plan.schedule = breadth_first)"


def _unpacked(x: RuleInput) -> bool:
    """Return whether samples of different lengths are trained, with a batch in tokens."""
    return x("data.packing") == "none" and x("train.global_batch_tokens") > 0


def _beside_hybrid(x: RuleInput) -> str | None:
    """Return what of the model or of other axes hybrid ranks cannot have, as text; None if there is nothing.

    A kind of layer has the window of the model if it does not set its own; 0 is no window.
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
    """Return whether there are hybrid ranks, and the data and the model allow them."""
    return bool(x("hybrid")) and x("data.packing", "none") == "none" and _beside_hybrid(x) is None


def _cluster(x: RuleInput) -> int:
    """Return the number of all ranks of the cluster."""
    return x("cluster.nodes") * x("cluster.gpus_per_node")


def _beside_ranks(x: RuleInput) -> int:
    """Return the number of ranks that each hybrid rank consists of."""
    return x.pipeline * x("tensor", 1)


def _all_ranks(x: RuleInput) -> str:
    """Return the expected number of hybrid ranks, as text."""
    factors = (("plan.pipeline", x.pipeline), ("plan.tensor", x("tensor", 1)))
    return f"all of the cluster's {_cluster(x)} ranks{''.join(f' ÷ {key} {size}' for key, size in factors if size > 1)}"


def _heads(x: RuleInput) -> int:
    """Return the number of a rank's key/value heads."""
    return exchanged_heads(x("model.kv_heads", 1), x("tensor", 1))


def _capacity_error(x: RuleInput) -> tuple[str, int] | None:
    """Return what is wrong with the size of slots.

    The slots of all hybrid ranks together must hold the longest sample.
    """
    if not (x("hybrid", 0) or x("samples", None)):
        return None
    longer = x("offload_capacity", 0)
    return capacity_error(x("capacity"), x("hybrid", 1), x("tensor", 1), x("train.seq_len"), longer)


def _longer_slots(x: RuleInput) -> bool:
    """Return whether there are normal slots, in addition to which there can be longer slots with offload."""
    return bool(x("capacity", 0)) and bool(x("hybrid", 0) or x("samples", None))


def _longer_error(x: RuleInput) -> str | None:
    """Return which numbers of tokens are valid for slots with offload, as text, if this number is not.

    At most all blocks are offloaded.
    """
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
    """Return the rules for a key of `samples` that slots with offload have: a plan file must have it, and it is at most
    `limit`.
    """

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
        # Ranks have different numbers of micro-batches, so no micro-batch may have a collective of its own. Units
        # stay gathered and gradients whole, or the order is layered.
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
    """Return a text about the first dimension of the linear layers' matmuls that fp8 does not support.

    The result is None if there is none.
    """
    sizes = {key: x(f"model.{key}", None) for key in FP8_WIDTH_KEYS}
    sides = linear_dimensions(sizes, x("train.seq_len", None), x.ranks(*CONTEXT_AXES))
    odd = (f"{name} = {size}" for name, size in sides.items() if x.some("linear", _FP8) and size % FP8_MULTIPLE)
    return next((f"compute, as {side} is no multiple of {FP8_MULTIPLE}, which fp8 matmuls need" for side in odd), None)


def _fp8(broken: Callable[[RuleInput], Any], expected: Text = "", **more: Any) -> PlanRule:
    """Return a rule that applies if some layers multiply in fp8."""
    return PlanRule("linear", (), lambda x: x.some("linear", _FP8) & broken(x), expected, "compute", **more)


def _computed(x: RuleInput) -> tuple[str, ...]:
    """Return the formats in which the cluster's devices compute; bf16 and fp32 for devices that are not known."""
    return formats_on(x("cluster.gpu")) or ("bf16", "fp32")


def _nearest_computed(x: RuleInput) -> str:
    """Return the format to suggest: fp32, which can represent the values of every other format but fp64, or else the
    device's first format.
    """
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
    """Return a rule that applies if some feed-forward networks are computed in tiles."""
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
    # Without the compiler, selective checkpointing holds the saved tensors itself, so they cannot be offloaded.
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
    """Return whether the model has adapters."""
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
"""All rules."""
UNTRAINED = tuple(rule for rule in RULES if rule.untrained)
"""Rules about what this release cannot train."""


def mistakes(given: RuleInput) -> Iterator[tuple[PlanRule, int | None, RuleInput]]:
    """Yield (rule, index of the range of layers, the values there) for the first broken rule of each key.

    The index is None for a key of the whole plan. Rules that only apply to training are left out.
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
    """Yield (None, the values of the whole plan), or for a rule of layers (index, values) of each range of layers."""
    if rule.by_layer and given.layers:
        for index, layer in enumerate(given.layers):
            yield index, given.where(**{key: layer.get(key, _LAYER_DEFAULTS[key]) for key in LAYER_KEYS})
    else:
        yield None, given


def untrained(plan: Plan, key: str | None = None) -> list[str]:
    """Return what of a plan this release cannot train, as texts; with `key`, only what belongs to that key."""
    return list(dict.fromkeys(text for of_key, text in untrained_keys(plan) if key in (None, of_key)))


def untrained_keys(plan: Plan) -> list[tuple[str, str]]:
    """Return (key, text) for everything that this release cannot train."""
    given = input_of(plan)
    return [
        (rule.key, text_of(rule.untrained, values))
        for rule in UNTRAINED
        for _, values in _places(rule, given)
        if rule.is_broken(values)
    ]


def input_of(plan: Plan) -> RuleInput:
    """Return the values of a whole plan, with what follows from it about its model and its data."""
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
