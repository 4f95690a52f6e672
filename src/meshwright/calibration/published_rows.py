"""A row of a table of published runs → what the cost model is asked, with every default it had to take.

Columns and units: docs/design/cost-model.md, "Tables of runs". Measured columns are read for comparison only; nothing here depends on them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from meshwright.calibration.model_dimensions import by_name, looks_like_gpt, shape
from meshwright.calibration.nanotron_sweep import splits_sequence
from meshwright.calibration.source_conventions import (
    Convention,
    applicable_conventions,
    stated_layout_fields,
    with_conventions,
)
from meshwright.costs.machine import Machine
from meshwright.spec.chips import CHIPS, Chip
from meshwright.workload.layouts import ALL_BUT_ATTENTION, FULL, SELECTIVE, Layouts
from meshwright.workload.model_shape import Shape

Text = Mapping[str, str]
PLAN_COLUMNS = ("gpu", "gpus", "tp", "pp", "dp", "micro_batch", "global_batch", "seq", "layers", "hidden")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run as the cost model sees it."""

    shape: Shape
    machine: Machine
    layout: Layouts
    generation: str
    stack: str
    may_recompute: bool = False
    """Whether the row does not say if activations are recomputed, and its software could."""
    first_stage: bool = False
    """Whether the memory that its software prints is that of the first pipeline stage."""
    release: float = 0.0
    """Age of the software: years after the start of 2025, 0 when not known."""


@dataclass(frozen=True)
class Reading:
    """A row read: its case, or the reason why there is none; and the defaults it took."""

    case: Case | None
    assumed: tuple[str, ...]
    reason: str | None


class _NotExpressed(Exception):
    """Why a row cannot be priced."""


STACKS = (
    ("meshwright", r"meshwright"),
    ("jax", r"maxtext|paxml"),
    ("megatron_lm", r"sc21|korthikanti"),
    ("megatron_tuned", r"megascale|mlcommons|mlperf"),
    ("megatron_deepspeed", r"vtrain|bloom|bigscience|chronicles|megatron-deepspeed"),
    ("nanotron", r"playbook|nanotron"),
    ("bridge", r"megatron-bridge|megatron-moe"),
    ("nemo", r"dgxc|nemo|megatron-lm images"),
    ("llm_foundry", r"mosaicml|llm-foundry"),
    ("torchtitan", r"torchtitan|fms-fsdp"),
    ("megatron_lm", r"megatron"),
)
"""(software stack, what names it in a source), most specific first."""
SHARDED_OPTIMIZER = {"bridge", "megatron_tuned", "nemo"}
"""Stacks whose recipes shard the optimizer over replicas unless they say otherwise."""
NEVER_RECOMPUTES = {"nanotron"}
"""Stacks whose published runs kept all activations."""
BALANCED = {"nanotron"}
"""Stacks that cut a pipeline by the cost of layers and head."""
FIRST_STAGE = {"nanotron"}
"""Stacks that print the memory of rank 0."""
IMBALANCE = 1.2
"""Rows of the busiest expert rank over the mean where a source does not say: a guess (benchmarks that force an even load say so)."""
MODE_NOT_PRINTED = {"nanotron"}
"""Stacks whose tables do not say how tensor parallelism treats the sequence."""


def stack_of(source: str, note: str) -> str:
    """The software stack behind a row; `default` when nothing names one."""
    found = next((name for name, pattern in STACKS if re.search(pattern, source.lower())), "default")
    if (
        "megascale" in source.lower()
        and re.search(r"megatron-lm", note, re.IGNORECASE)
        and not note.startswith("MegaScale")
    ):
        return "megatron_lm"
    return found


def read_row(row: Text) -> Reading:
    """What `row` asks. Never raises: what cannot be expressed is a reason."""
    assumed: list[str] = []
    try:
        return Reading(_case(row, assumed), tuple(assumed), None)
    except _NotExpressed as why:
        return Reading(None, tuple(assumed), str(why))


def measured_seconds(row: Text) -> float | None:
    """The run's step time; where it is not given, from its tokens per second, or from its FLOP/s when the source says what they count."""
    seconds = number_or_none(row, "iter_time_s")
    if seconds:
        return seconds
    rate, batch, seq = (number_or_none(row, key) for key in ("tokens_per_s", "global_batch", "seq"))
    if not (batch and seq):
        return None
    return batch * seq / rate if rate else _seconds_from_flops(row, batch * seq, seq)


def _seconds_from_flops(row: Text, tokens: float, seq: float) -> float | None:
    """Seconds of a step whose FLOP/s count 6 FLOPs a parameter and token, and all scores of attention; None where nobody says that."""
    if not any(convention.attention_counted_in_full for convention in applicable_conventions(row)):
        return None
    keys = ("tflops_per_gpu", "gpus", "params", "layers", "hidden")
    rate, gpus, params, layers, hidden = (number_or_none(row, key) or 0.0 for key in keys)
    return (
        tokens * (6 * params + 12 * layers * hidden * seq) / (rate * 1e12 * gpus) if rate and gpus and params else None
    )


def number_or_none(row: Text, key: str) -> float | None:
    """A column's number; None when it is empty or not one."""
    try:
        return _number(row, key)
    except _NotExpressed:
        return None


def fully_specified(row: Text) -> bool:
    """Whether the row, or its source, gives its plan and model size and a time."""
    cells, _ = with_conventions(row)
    return all(cells.get(key) for key in PLAN_COLUMNS) and measured_seconds(row) is not None


def failed(row: Text) -> bool:
    return "FAILED" in (row.get("note") or "")


def _case(row: Text, assumed: list[str]) -> Case:
    conventions = applicable_conventions(row)
    if refusal := next((convention.because for convention in conventions if convention.refused), None):
        raise _NotExpressed(refusal)
    stack = stack_of(row.get("source") or "", row.get("note") or "")
    stack = next((convention.stack for convention in conventions if convention.stack), stack)
    row, said = with_conventions(row)
    assumed += said
    chip = _chip(row, assumed)
    layout = _layout(row, stack, assumed)
    shape_ = _shape(row, assumed)
    machine = _machine(row, chip, layout, assumed)
    if not _size(row, "ep"):
        recipes = stack in SHARDED_OPTIMIZER and shape_.experts
        layout = replace(layout, expert=_recipe_experts(shape_, machine, layout) if recipes else 1.0)
        assumed.append(
            f"ep {layout.expert:g}" + (f" (recipes of {stack} spread experts over the fast domain)" if recipes else "")
        )
    layout = _with_experts(row, shape_, layout, assumed)
    if stack in MODE_NOT_PRINTED:
        layout = replace(layout, sequence=float(splits_sequence(shape_, machine, layout)))
        assumed.append("sequence split by tensor parallelism" if layout.sequence else "sequence kept whole")
    return Case(
        shape=shape_,
        machine=machine,
        layout=layout,
        generation=chip.generation,
        stack=stack,
        first_stage=stack in FIRST_STAGE,
        may_recompute=not row.get("recompute") and stack not in NEVER_RECOMPUTES,
        release=_release_year(row, conventions, assumed),
    )


def _release_year(row: Text, conventions: tuple[Convention, ...], assumed: list[str]) -> float:
    """As `release_of`; what the source's convention says, else the start of 2025, where the row names none."""
    named = release_of(row.get("source") or "", row.get("note") or "")
    stated = next((convention.release for convention in conventions if convention.release), 0.0)
    if not named and not stated:
        assumed.append("release not named: as of 2025.0")
    return named or (stated - 2025.0 if stated else 0.0)


_ROUNDS = {"3.0": 2023.4, "3.1": 2023.8, "4.0": 2024.4, "4.1": 2024.8, "5.0": 2025.4, "5.1": 2025.8}
"""MLPerf training rounds and when they were submitted."""


def release_of(source: str, note: str) -> float:
    """Years after the start of 2025 at which the software named in a row was released; 0 when none is named."""
    mlperf = re.search(r"training_results_v(\d\.\d)", source)
    if mlperf:
        return _ROUNDS.get(mlperf.group(1), 2025.0) - 2025.0
    version = re.search(r"(?:container |ngc|v)(2\d)\.(\d\d)\b", f"{source} {note}")
    return int(version.group(1)) + (int(version.group(2)) - 1) / 12 - 25.0 if version else 0.0


LARGEST = 1e15
"""Above every count, width and number of weights of a run."""


def _number(row: Text, key: str) -> float | None:
    text = (row.get(key) or "").strip()
    if not text:
        return None
    try:
        value = float(text)
    except ValueError as error:
        raise _NotExpressed(f"{key} is {text!r}, not a number") from error
    return value if value == value and abs(value) != float("inf") else None


def _size(row: Text, key: str) -> float | None:
    """A count or a width; None when it is empty or 0. What no run can have is refused here, before it is multiplied."""
    value = _number(row, key)
    if value and not 1 <= value <= LARGEST:
        raise _NotExpressed(f"{key} is {value:g}, not between 1 and {LARGEST:g}")
    return value or None


def _needed(row: Text, key: str) -> float:
    value = _size(row, key)
    if value is None:
        raise _NotExpressed(f"{key} is not given")
    return value


def _or(row: Text, key: str, default: float, assumed: list[str]) -> float:
    value = _size(row, key)
    if value is not None:
        return value
    assumed.append(f"{key} {default:g}")
    return default


def _chip(row: Text, assumed: list[str]) -> Chip:
    text = row.get("gpu") or ""
    plain = re.sub(r"[^A-Z0-9]", "", text.upper())
    if not plain:
        raise _NotExpressed("gpu is not given")
    special = re.match(r"(?:NVIDIA)?(H100|A100)(?:SXM\d?)?(40GB|80GB|9[46]GB)?", plain)
    if special:
        name, size = special.groups()
        wanted = {"40GB": f"{name}-40GB", "94GB": f"{name}-96GB", "96GB": f"{name}-96GB"}.get(size or "", name)
        if size is None:
            assumed.append(f"gpu {name} with 80 GB")
        return CHIPS.get(wanted, CHIPS[name])
    names = sorted(CHIPS, key=len, reverse=True)
    found = next((name for name in names if name.upper().replace("-", "") in plain), None)
    if found is None:
        raise _NotExpressed(f"gpu {text!r} is not in the chip table (known: {', '.join(CHIPS)})")
    return CHIPS[found]


def _shape(row: Text, assumed: list[str]) -> Shape:
    name = row.get("model") or ""
    known = by_name(name)
    dims = dict(known)
    for key, column in (("layers", "layers"), ("hidden", "hidden"), ("heads", "heads"), ("vocab", "vocab")):
        value = _size(row, column)
        if value:
            dims[key] = value
        elif key in dims:
            assumed.append(f"{column} {dims[key]:g} (of {name})")
    if "layers" not in dims or "hidden" not in dims:
        raise _NotExpressed(f"layers or hidden is not given and model {name!r} is not in the family table")
    if known and dims["hidden"] != known["hidden"]:
        assumed.append(f"only sizes of the row: it is not the {name} of the family table")
        dims = {key: dims[key] for key in ("layers", "hidden", "heads", "vocab") if _size(row, key)}
        known = {}
        if "layers" not in dims:
            raise _NotExpressed(f"hidden is not that of {name!r} in the family table, and layers is not given")
    gpt = looks_like_gpt(name)
    _fill(dims, "heads", max(1.0, dims["hidden"] // 128), assumed)
    given_kv = _size(row, "kv_heads")
    if given_kv:
        dims["kv_heads"] = given_kv
    else:
        dims["kv_heads"] = known.get("kv_heads", dims["heads"])
        assumed.append(f"kv_heads {dims['kv_heads']:g}")
    ffn = _size(row, "ffn")
    if ffn and not known.get("experts"):
        dims["ffn"] = ffn
    _fill(dims, "ffn", 4 * dims["hidden"] if gpt else round(8 / 3 * dims["hidden"]), assumed)
    _fill(dims, "vocab", 51200 if gpt else 32000, assumed)
    dims.setdefault("gated", 0 if gpt else 1)
    dims.setdefault("tied", 1 if gpt else 0)
    params = _size(row, "params")
    if params:
        choices = [shape({**dims, "tied": tied}) for tied in (0, 1)]
        return min(choices, key=lambda found: (abs(found.params - params), abs(found.tied - dims["tied"])))
    return shape(dims)


def _fill(dims: dict[str, float], key: str, default: float, assumed: list[str]) -> None:
    if key not in dims:
        dims[key] = default
        assumed.append(f"{key} {default:g}")


def _layout(row: Text, stack: str, assumed: list[str]) -> Layouts:
    ranks, tensor, pipeline = _needed(row, "gpus"), _needed(row, "tp"), _needed(row, "pp")
    context = _or(row, "cp", 1, assumed)
    data = _size(row, "dp") or 0.0
    if not data:
        data = max(1.0, ranks // (tensor * pipeline * context))
        assumed.append(f"dp {data:g} (gpus / tp / pp / cp)")
    zero, shards, keep, offload = _sharding(row.get("zero/fsdp") or "", stack, data, context, assumed)
    return Layouts(
        tensor=tensor,
        pipeline=pipeline,
        virtual=_or(row, "vpp", 1, assumed),
        context=context,
        expert=_size(row, "ep") or 1.0,
        data=data,
        zero=zero,
        shards=shards,
        micro_batch=_or(row, "micro_batch", 1, assumed),
        global_batch=_needed(row, "global_batch"),
        seq=_needed(row, "seq"),
        recompute=_recompute(row.get("recompute") or "", assumed),
        keep_gathered=keep,
        offload=offload,
        offload_activations=float("activation offload" in (row.get("note") or "").lower()),
        balanced=float(stack in BALANCED),
    )


def _recipe_experts(shape_: Shape, machine: Machine, layout: Layouts) -> float:
    """The most expert ranks inside a fast domain that divide the experts and the ranks of a pipeline stage."""
    ranks, experts = int(layout.tensor * layout.context * layout.data), int(shape_.experts)
    most = int(min(machine.domain, ranks, experts))
    return float(next(count for count in range(most, 0, -1) if ranks % count == 0 and experts % count == 0))


def _with_experts(row: Text, shape_: Shape, layout: Layouts, assumed: list[str]) -> Layouts:
    """`layout` with what the row's source says of it; expert ranks are checked against the model and the ranks of a stage."""
    stated = stated_layout_fields(row)
    experts, ranks = float(shape_.experts), layout.tensor * layout.context * layout.data
    if layout.expert > 1 and not experts:
        raise _NotExpressed(
            f"ep is {layout.expert:g}, but {row.get('model')!r} is no mixture of experts in the family table"
        )
    if layout.expert > max(1.0, experts):
        raise _NotExpressed(f"ep is {layout.expert:g}, more than the {experts:g} experts of {row.get('model')!r}")
    if layout.expert > 1 and ranks % layout.expert:
        raise _NotExpressed(
            f"ep is {layout.expert:g}, which does not divide the {ranks:g} ranks of a pipeline stage (tp x cp x dp)"
        )
    if experts and "imbalance" not in stated:
        assumed.append(f"busiest expert rank {IMBALANCE:g} of the mean")
        stated = {**stated, "imbalance": IMBALANCE}
    return replace(layout, **stated)


def _sharding(
    text: str, stack: str, data: float, context: float, assumed: list[str]
) -> tuple[float, float, float, float]:
    """(ZeRO stage, shards, weights kept after forward, optimizer offloaded) of a phrase such as "fsdp2 64"."""
    said = text.lower()
    if not said:
        stage = 1.0 if stack in SHARDED_OPTIMIZER else 0.0
        assumed.append(f"zero {stage:g}" + (f" (recipes of {stack} shard the optimizer)" if stage else ""))
        return stage, data * context, 0.0, 0.0
    stages = ((3.0, r"zero-?3|full_shard|fsdp"), (2.0, r"zero-?2|grad_op"), (1.0, r"zero-?1|dist-?opt"))
    stage = next((number for number, pattern in stages if re.search(pattern, said)), 0.0)
    if "grad_op" in said:
        stage = 2.0
    if said.startswith("ddp") or "fsdp=0" in said:
        stage = 1.0 if stack in SHARDED_OPTIMIZER else 0.0
    count = re.search(r"fsdp2? (\d+)", said)
    shards = min(data, float(count.group(1))) * context if count else data * context
    return stage, max(1.0, shards), float("no reshard" in said), float("offload" in said)


CHEAP = {"norm", "layernorm", "act", "moe_act", "mla_up_proj", "shared_expert"}
"""Modules of Megatron-Core whose repetition takes next to no time."""


def _recompute(text: str, assumed: list[str]) -> float:
    """The mode of a phrase such as "full", "selective" or "selective (norm, act)", the modules of Megatron-Core in brackets."""
    if not text:
        assumed.append("recompute none")
    if text.startswith("full"):
        return FULL
    if not text.startswith("selective"):
        return 0.0
    modules = set(re.findall(r"[a-z_]+", text.lower())) - {"selective"}
    if modules & {"moe", "mlp"}:
        assumed.append("recompute of all but attention")
        return ALL_BUT_ATTENTION
    if modules and modules <= CHEAP:
        assumed.append("recompute none that takes time")
        return 0.0
    return SELECTIVE


def _machine(row: Text, chip: Chip, layout: Layouts, assumed: list[str]) -> Machine:
    per_node = _or(row, "gpus_per_node", chip.per_node, assumed)
    domain = max(per_node, chip.domain)
    number_format, low = _format(row, chip, assumed)
    half = chip.peak_flops.get("bf16", chip.peak_flops.get("fp16", chip.peak_flops["fp32"]))
    wires = row.get("interconnect") or ""
    nic = port_bandwidth(wires, per_node)
    if nic is None:
        nic = chip.nic
        if layout.tensor * layout.pipeline * layout.context * layout.data > domain:
            assumed.append(f"network {nic * 8 / 1e9:g} Gb/s per GPU")
    oversubscription = re.search(r"1:(\d+) oversubscribed", wires)
    return Machine(
        peak=chip.peak_flops.get(number_format, half),
        half_peak=half,
        low=low,
        hbm=chip.hbm,
        memory=chip.memory_bytes,
        link=chip.link,
        nic=nic,
        host=chip.host,
        domain=domain,
        per_node=per_node,
        oversubscribed=float(oversubscription.group(1)) if oversubscription else 1.0,
        pod=3072.0 if oversubscription else float("inf"),
        multiprocessors=float(chip.multiprocessors),
    )


def _format(row: Text, chip: Chip, assumed: list[str]) -> tuple[str, float]:
    """(the chip's name of a number format, its kind as in Machine.low). MLPerf submissions take the narrowest that the chip has."""
    said = (row.get("dtype") or "").lower()
    if not said:
        narrow = ("nvfp4", "fp8") if "mlcommons" in (row.get("source") or "") else ()
        said = next((name for name in narrow if name in chip.peak_flops), "bf16")
        assumed.append(f"dtype {said}")
    kinds = (
        ("nvfp4", 3.0, r"fp4"),
        ("mxfp8", 2.0, r"mx"),
        ("fp8", 2.0, r"fp8.*block"),
        ("fp8", 1.0, r"fp8|float8|e4m3"),
        ("bf16", 0.0, r"bf16|fp16|half"),
    )
    name, low = next(((name, low) for name, low, pattern in kinds if re.search(pattern, said)), ("bf16", 0.0))
    if name != "bf16" and name not in chip.peak_flops:
        assumed.append(f"dtype bf16 ({chip.name} has no {name})")
        return "bf16", 0.0
    return name, low


_PORTS = (
    (r"([\d.]+) ?x ?([\d.]+) ?GB/s", lambda a, b, n: a * b * 1e9 / n),
    (r"([\d.]+) ?x ?(?:HDR|NDR|XDR|EDR)? ?([\d.]+) ?Gb/s", lambda a, b, n: a * b * 1e9 / 8 / n),
    (r"([\d.]+) ?x ?(?:HDR|NDR|XDR|EDR)([\d.]+)", lambda a, b, n: a * b * 1e9 / 8 / n),
    (r"([\d.]+) ?x [^;]*?([\d.]+) ?Gb/s", lambda a, b, n: a * b * 1e9 / 8 / n),
)


def port_bandwidth(text: str, per_node: float) -> float | None:
    """Bytes/s of one GPU's share of the network that a phrase such as "8x HDR200 InfiniBand" describes; None when it does not."""
    compute = text.split("Compute:")[-1]
    compute = re.sub(r"\d+x (Ethernet|NVIDIA BlueField)[^;]*;", "", compute)
    each = re.search(r"([\d.]+) ?Gb/s per GPU", compute)
    if each:
        return float(each.group(1)) * 1e9 / 8
    node = re.search(r"([\d.]+) ?Gb/s per node", compute)
    if node:
        return float(node.group(1)) * 1e9 / 8 / per_node
    if "EFA" in compute:
        return 50e9
    for pattern, share in _PORTS:
        found = re.search(pattern, compute)
        if found:
            return share(float(found.group(1)), float(found.group(2)), per_node)
    return None
