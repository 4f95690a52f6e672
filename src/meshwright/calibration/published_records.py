"""Reads a record of a table of published runs as inputs of the cost model, and lists the defaults that it assumes.

Columns and units: docs/design/cost-model.md, "Tables of runs". Measured columns are read only to compare them with
predictions; nothing else here depends on them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from meshwright.calibration.model_dimensions import dimensions_by_name, looks_like_gpt, shape_from_dimensions
from meshwright.calibration.nanotron_sweep import splits_sequence
from meshwright.calibration.source_conventions import (
    Convention,
    applicable_conventions,
    stated_layout_fields,
    with_conventions,
)
from meshwright.costs.device_rates import BLOCKWISE, FOUR_BIT, TENSORWISE, Machine
from meshwright.costs.software import IMBALANCE, TrainingSoftware, software_named, software_of
from meshwright.spec.chips import CHIPS, Chip
from meshwright.spec.errors import BadInput
from meshwright.workload.layouts import ALL_BUT_ATTENTION, FULL, SELECTIVE, Layouts
from meshwright.workload.model_shape import Shape

Record = Mapping[str, str]
"""A row of a table: column → cell."""
PLAN_COLUMNS = ("gpu", "gpus", "tp", "pp", "dp", "micro_batch", "global_batch", "seq", "layers", "hidden")
"""Columns that a record needs to state its plan and model completely."""


@dataclass(frozen=True, kw_only=True)
class PublishedCase:
    """A published run as inputs of the cost model."""

    shape: Shape
    machine: Machine
    layout: Layouts
    generation: str
    """GPU generation of its devices, as in constants.yaml."""
    stack: str
    """Set of constants of its software, as in constants.yaml."""
    may_recompute: bool = False
    """Whether the record does not state recomputation, and its software could have used it."""
    first_stage: bool = False
    """Whether its software prints the memory of the first pipeline stage."""
    release: float = 0.0
    """Release date of its software in years after the start of 2025; 0 if it is not known."""


@dataclass(frozen=True)
class RecordReading:
    """The result of reading a record."""

    case: PublishedCase | None
    """The inputs of the cost model; None if the record cannot be predicted."""
    assumed: tuple[str, ...]
    """The assumed defaults, one text each."""
    reason: str | None
    """Why the record cannot be predicted; None if it can."""


class _CannotBePriced(Exception):
    """A record cannot be predicted; the message says why."""


def read_record(record: Record) -> RecordReading:
    """Return the reading of `record`.

    It never raises: if the record cannot be predicted, the reading has the reason.
    """
    assumptions: list[str] = []
    try:
        return RecordReading(_case(record, assumptions), tuple(assumptions), None)
    except _CannotBePriced as refusal:
        return RecordReading(None, tuple(assumptions), str(refusal))


def measured_seconds(record: Record) -> float | None:
    """Return the run's measured step time in seconds; None if the record has none.

    It is stated directly, or follows from tokens per second, or from FLOP/s if the source says how FLOPs are counted.
    """
    seconds = number_or_none(record, "iter_time_s")
    if seconds:
        return seconds
    rate, batch, seq = (number_or_none(record, key) for key in ("tokens_per_s", "global_batch", "seq"))
    if not (batch and seq):
        return None
    return batch * seq / rate if rate else _seconds_from_flops(record, batch * seq, seq)


def _seconds_from_flops(record: Record, tokens: float, seq: float) -> float | None:
    """Return the seconds of a step from its FLOP/s; None unless the source states how it counts FLOPs.

    It must count 6 FLOPs per parameter and token, and all attention scores.
    """
    if not any(convention.attention_counted_in_full for convention in applicable_conventions(record)):
        return None
    keys = ("tflops_per_gpu", "gpus", "params", "layers", "hidden")
    rate, gpus, params, layers, hidden = (number_or_none(record, key) or 0.0 for key in keys)
    return (
        tokens * (6 * params + 12 * layers * hidden * seq) / (rate * 1e12 * gpus) if rate and gpus and params else None
    )


def number_or_none(record: Record, key: str) -> float | None:
    """Return the number in a column; None if the cell is empty or has no number."""
    try:
        return _number(record, key)
    except _CannotBePriced:
        return None


def fully_specified(record: Record) -> bool:
    """Return whether the record or its source states plan, model size and step time."""
    cells, _ = with_conventions(record)
    return all(cells.get(key) for key in PLAN_COLUMNS) and measured_seconds(record) is not None


def failed(record: Record) -> bool:
    """Return whether the run failed."""
    return "FAILED" in (record.get("note") or "")


def _case(record: Record, assumed: list[str]) -> PublishedCase:
    """Return the inputs of the cost model for `record`, and add the assumed defaults to `assumed`.

    Raises _CannotBePriced.
    """
    conventions = applicable_conventions(record)
    if refusal := next((convention.because for convention in conventions if convention.refused), None):
        raise _CannotBePriced(refusal)
    software, stack = _software(record, conventions)
    record, convention_notes = with_conventions(record)
    assumed += convention_notes
    chip = _chip(record, assumed)
    layout = _layout(record, software, chip, assumed)
    model_shape = _shape(record, assumed)
    machine = _machine(record, chip, layout, assumed)
    if not _size(record, "ep"):
        follows_recipe = software.shards_optimizer and model_shape.experts
        layout = replace(layout, expert=_recipe_experts(model_shape, machine, layout) if follows_recipe else 1.0)
        assumed.append(
            f"ep {layout.expert:g}"
            + (f" (recipes of {software.name} spread experts over the fast domain)" if follows_recipe else "")
        )
    layout = _with_experts(record, model_shape, layout, software, assumed)
    if not software.states_sequence_split and not record.get("sequence"):
        layout = replace(layout, sequence=float(splits_sequence(model_shape, machine, layout)))
        assumed.append("sequence split by tensor parallelism" if layout.sequence else "sequence kept whole")
    return PublishedCase(
        shape=model_shape,
        machine=machine,
        layout=layout,
        generation=chip.generation,
        stack=stack,
        first_stage=software.prints_first_stage,
        may_recompute=not record.get("recompute") and software.recomputes,
        release=_release_year(record, conventions, software, assumed),
    )


def _software(record: Record, conventions: tuple[Convention, ...]) -> tuple[TrainingSoftware, str]:
    """Return the software of the record and the name of its constants: as stated, or else as the source implies."""
    if stated := (record.get("software") or "").strip():
        try:
            software = software_named(stated)
        except BadInput as error:
            raise _CannotBePriced(str(error)) from error
        return software, software.constants
    source = record.get("source") or ""
    note = record.get("note") or ""
    software = software_of(source, note, 2025.0 + release_of(source, note))
    return software, next((convention.stack for convention in conventions if convention.stack), software.constants)


def _release_year(
    record: Record, conventions: tuple[Convention, ...], software: TrainingSoftware, assumed: list[str]
) -> float:
    """Return the release date of the record's software in years after the start of 2025.

    The first of these counts: a release that the record names; the release of the source's convention; the date of a
    software that the record states. If there is none, it is the start of 2025.
    """
    named = release_of(record.get("source") or "", record.get("note") or "")
    stated = next((convention.release for convention in conventions if convention.release), 0.0)
    if not stated and record.get("software"):
        stated = software.date
    if not named and not stated:
        assumed.append("release not named: as of 2025.0")
    return named or (stated - 2025.0 if stated else 0.0)


_MLPERF_ROUNDS = {"3.0": 2023.4, "3.1": 2023.8, "4.0": 2024.4, "4.1": 2024.8, "5.0": 2025.4, "5.1": 2025.8}
"""MLPerf training round → date of its submissions."""


def release_of(source: str, note: str) -> float:
    """Return the release date of the software that a record names, in years after the start of 2025.

    The result is 0 if it names none.
    """
    mlperf = re.search(r"training_results_v(\d\.\d)", source)
    if mlperf:
        return _MLPERF_ROUNDS.get(mlperf.group(1), 2025.0) - 2025.0
    version = re.search(r"(?:container |ngc|v)(2\d)\.(\d\d)\b", f"{source} {note}")
    version = version or re.search(r"\b20(2\d)-(\d\d)\b", f"{source} {note}")
    if version:
        return int(version.group(1)) + (int(version.group(2)) - 1) / 12 - 25.0
    year = re.search(r"\b20(2\d)$", source)
    return int(year.group(1)) + 0.5 - 25.0 if year else 0.0


LARGEST_SIZE = 1e15
"""Upper limit for counts, widths and numbers of parameters in a record."""


def _number(record: Record, key: str) -> float | None:
    """Return the number in a column; None if it is empty or not finite. Raises _CannotBePriced if it is no number."""
    text = (record.get(key) or "").strip()
    if not text:
        return None
    try:
        value = float(text)
    except ValueError as error:
        raise _CannotBePriced(f"{key} is {text!r}, not a number") from error
    return value if value == value and abs(value) != float("inf") else None


def _size(record: Record, key: str) -> float | None:
    """Return a count or a width; None if it is empty or 0.

    Impossible values are rejected here, before they are multiplied.
    """
    value = _number(record, key)
    if value and not 1 <= value <= LARGEST_SIZE:
        raise _CannotBePriced(f"{key} is {value:g}, not between 1 and {LARGEST_SIZE:g}")
    return value or None


def _required_size(record: Record, key: str) -> float:
    """Return a count or a width. Raises _CannotBePriced if it is not given."""
    value = _size(record, key)
    if value is None:
        raise _CannotBePriced(f"{key} is not given")
    return value


def _size_or_default(record: Record, key: str, default: float, assumed: list[str]) -> float:
    """Return a count or a width; if it is not given, return `default` and add that to `assumed`."""
    value = _size(record, key)
    if value is not None:
        return value
    assumed.append(f"{key} {default:g}")
    return default


def _chip(record: Record, assumed: list[str]) -> Chip:
    """Return the chip of a record; the spelling of its name may vary."""
    gpu = record.get("gpu") or ""
    simplified = re.sub(r"[^A-Z0-9]", "", gpu.upper())
    if not simplified:
        raise _CannotBePriced("gpu is not given")
    variant = re.match(r"(?:NVIDIA)?(H100|A100)(?:SXM\d?)?(40GB|80GB|9[46]GB)?", simplified)
    if variant:
        name, size = variant.groups()
        chip_name = {"40GB": f"{name}-40GB", "94GB": f"{name}-96GB", "96GB": f"{name}-96GB"}.get(size or "", name)
        if size is None:
            assumed.append(f"gpu {name} with 80 GB")
        return CHIPS.get(chip_name, CHIPS[name])
    longest_first = sorted(CHIPS, key=len, reverse=True)
    chip_name_in_text = next((name for name in longest_first if name.upper().replace("-", "") in simplified), None)
    if chip_name_in_text is None:
        raise _CannotBePriced(f"gpu {gpu!r} is not in the chip table (known: {', '.join(CHIPS)})")
    return CHIPS[chip_name_in_text]


def _shape(record: Record, assumed: list[str]) -> Shape:
    """Return the shape of a record's model: sizes from its columns, then from the table of families, then by default."""
    name = record.get("model") or ""
    family_dims = dimensions_by_name(name)
    dims = dict(family_dims)
    for key, column in (("layers", "layers"), ("hidden", "hidden"), ("heads", "heads"), ("vocab", "vocab")):
        value = _size(record, column)
        if value:
            dims[key] = value
        elif key in dims:
            assumed.append(f"{column} {dims[key]:g} (of {name})")
    if "layers" not in dims or "hidden" not in dims:
        raise _CannotBePriced(f"layers or hidden is not given and model {name!r} is not in the family table")
    if family_dims and dims["hidden"] != family_dims["hidden"]:
        assumed.append(f"only sizes of the record: it is not the {name} of the family table")
        dims = {key: dims[key] for key in ("layers", "hidden", "heads", "vocab") if _size(record, key)}
        family_dims = {}
        if "layers" not in dims:
            raise _CannotBePriced(f"hidden is not that of {name!r} in the family table, and layers is not given")
    gpt = looks_like_gpt(name)
    _set_default(dims, "heads", max(1.0, dims["hidden"] // 128), assumed)
    given_kv = _size(record, "kv_heads")
    if given_kv:
        dims["kv_heads"] = given_kv
    else:
        dims["kv_heads"] = family_dims.get("kv_heads", dims["heads"])
        assumed.append(f"kv_heads {dims['kv_heads']:g}")
    for key in ("experts", "top_k", "expert_ffn"):
        if value := _size(record, key):
            dims[key] = value
    gated = _switch(record, "gated")
    if gated is not None:
        dims["gated"] = gated
    if dims.get("experts"):
        missing = [key for key in ("top_k", "expert_ffn") if key not in dims]
        if missing:
            raise _CannotBePriced(f"{missing[0]} is not given, with {dims['experts']:g} experts")
        if dims["top_k"] > dims["experts"]:
            raise _CannotBePriced(f"top_k is {dims['top_k']:g}, more than the {dims['experts']:g} experts")
    ffn = _size(record, "ffn")
    if ffn and not dims.get("experts"):
        dims["ffn"] = ffn
    _set_default(dims, "ffn", 4 * dims["hidden"] if gpt else round(8 / 3 * dims["hidden"]), assumed)
    _set_default(dims, "vocab", 51200 if gpt else 32000, assumed)
    dims.setdefault("gated", 0 if gpt else 1)
    dims.setdefault("tied", 1 if gpt else 0)
    params = _size(record, "params")
    if params:
        choices = [shape_from_dimensions({**dims, "tied": tied}) for tied in (0, 1)]
        return min(choices, key=lambda candidate: (abs(candidate.params - params), abs(candidate.tied - dims["tied"])))
    return shape_from_dimensions(dims)


def _set_default(dims: dict[str, float], key: str, default: float, assumed: list[str]) -> None:
    """Set a dimension that is missing, and add it to `assumed`."""
    if key not in dims:
        dims[key] = default
        assumed.append(f"{key} {default:g}")


def _layout(record: Record, software: TrainingSoftware, chip: Chip, assumed: list[str]) -> Layouts:
    """Return the layout of a record, without its experts."""
    ranks = _required_size(record, "gpus")
    tensor = _required_size(record, "tp")
    pipeline = _required_size(record, "pp")
    context = _size_or_default(record, "cp", 1, assumed)
    data = _size(record, "dp") or 0.0
    if not data:
        data = max(1.0, ranks // (tensor * pipeline * context))
        assumed.append(f"dp {data:g} (gpus / tp / pp / cp)")
    zero, shards, keep, offload = _sharding(record.get("zero/fsdp") or "", software, data, context, assumed)
    if _switch(record, "optimizer_sharding") is not None and zero < 2:
        zero = float(_switch(record, "optimizer_sharding") or 0.0)
    attention, unfused = _attention_kernel(record, chip, assumed)
    return Layouts(
        tensor=tensor,
        pipeline=pipeline,
        virtual=_size_or_default(record, "vpp", 1, assumed),
        context=context,
        expert=_size(record, "ep") or 1.0,
        data=data,
        zero=zero,
        shards=shards,
        micro_batch=_size_or_default(record, "micro_batch", 1, assumed),
        global_batch=_required_size(record, "global_batch"),
        seq=_required_size(record, "seq"),
        recompute=_recompute(record.get("recompute") or "", assumed),
        keep_gathered=keep,
        offload=offload,
        offload_activations=float("activation offload" in (record.get("note") or "").lower()),
        balanced=float(software.balances_stages),
        sequence=_switch(record, "sequence") or 0.0,
        attention=attention,
        unfused=unfused,
    )


def _switch(record: Record, key: str) -> float | None:
    """Return 1 for yes, 0 for no, and None for a blank cell."""
    text = (record.get(key) or "").strip().lower()
    if not text:
        return None
    if text in ("1", "yes", "true", "on"):
        return 1.0
    if text in ("0", "no", "false", "off"):
        return 0.0
    raise _CannotBePriced(f"{key} is {text!r}, expected yes or no")


_HOPPER_ATTENTION = {"cudnn": 0.63, "te": 0.63, "flash3": 0.63, "flash2": 0.36, "sdpa": 0.36}
"""Share of an H200's bf16 peak that a kernel of causal attention reaches, if heads were infinitely wide
(`costs.compute.SMALL_HEAD`).

Measured: 500 and 282 TFLOP/s for forward and backward together, with heads of 128 and 8,192 tokens (docs/results.md).
"""
_KERNEL_WORDS = (
    ("unfused", "unfused|eager|math|none"),
    ("cudnn", "cudnn"),
    ("te", r"\bte\b|transformer.?engine"),
    ("flash3", "(fa|flash.*)[34]"),
    ("flash2", "fa2|fa|flash"),
    ("sdpa", "sdpa"),
    ("fused", "fused"),
)
"""(name of a kernel, regular expression for the cell); specific ones come first."""


def _attention_kernel(record: Record, chip: Chip, assumed: list[str]) -> tuple[float, float]:
    """Return what the record says about its attention kernel.

    The first number is the share of the peak that the kernel reaches, 0 if it is not known. The second is 1 if the
    scores are stored in memory (unfused attention).
    """
    text = (record.get("attention") or "").strip().lower()
    if not text:
        return 0.0, 0.0
    kernel = next((name for name, pattern in _KERNEL_WORDS if re.search(pattern, text)), None)
    if kernel is None:
        names = ", ".join(name for name, _ in _KERNEL_WORDS)
        raise _CannotBePriced(f"attention is {text!r}, expected one of {names}")
    if kernel == "unfused":
        return 0.0, 1.0
    share = _HOPPER_ATTENTION.get(kernel, 0.0) if chip.generation == "hopper" else 0.0
    if not share:
        assumed.append(f"attention at the rate of {chip.generation} runs: {kernel} was not measured there")
    return share, 0.0


def _recipe_experts(model_shape: Shape, machine: Machine, layout: Layouts) -> float:
    """Return the largest number of expert ranks inside a fast domain that divides both the experts and the ranks of a
    pipeline stage.
    """
    ranks = int(layout.tensor * layout.context * layout.data)
    experts = int(model_shape.experts)
    limit = int(min(machine.domain, ranks, experts))
    return float(next(count for count in range(limit, 0, -1) if ranks % count == 0 and experts % count == 0))


_SWITCHES = {"one_copy": "one_copy", "overlap": "exchange_overlaps", "layer_graphs": "layer_graphs", "eager": "eager"}
"""Column → the field of `Layouts` that it sets."""


def _with_experts(
    record: Record, model_shape: Shape, layout: Layouts, software: TrainingSoftware, assumed: list[str]
) -> Layouts:
    """Return `layout` with the fields that the record, its source or its software states.

    Raises _CannotBePriced if the expert ranks do not fit the model or the ranks of a stage.
    """
    stated = {**software.layout, **stated_layout_fields(record)}
    stated |= {key: value for column, key in _SWITCHES.items() if (value := _switch(record, column)) is not None}
    if balance := (record.get("balance") or "").strip().lower():
        stated["imbalance"] = 1.0 if balance in ("forced", "even", "balanced") else _balance(record)
    experts = float(model_shape.experts)
    ranks = layout.tensor * layout.context * layout.data
    if layout.expert > 1 and not experts:
        raise _CannotBePriced(
            f"ep is {layout.expert:g}, but {record.get('model')!r} is no MoE model in the family table"
        )
    if layout.expert > max(1.0, experts):
        raise _CannotBePriced(f"ep is {layout.expert:g}, more than the {experts:g} experts of {record.get('model')!r}")
    if layout.expert > 1 and ranks % layout.expert:
        raise _CannotBePriced(
            f"ep is {layout.expert:g}, which does not divide the {ranks:g} ranks of a pipeline stage (tp x cp x dp)"
        )
    if experts and "imbalance" not in stated:
        assumed.append(f"busiest expert rank {IMBALANCE:g} of the mean")
        stated = {**stated, "imbalance": IMBALANCE}
    return replace(layout, **stated)


def _balance(record: Record) -> float:
    """Return the tokens of the busiest expert rank relative to the mean."""
    value = number_or_none(record, "balance")
    if value is None or not 1 <= value <= LARGEST_SIZE:
        raise _CannotBePriced(
            f"balance is {record.get('balance')!r}, expected forced, or tokens of the busiest expert rank over the mean"
        )
    return value


def _sharding(
    text: str, software: TrainingSoftware, data: float, context: float, assumed: list[str]
) -> tuple[float, float, float, float]:
    """Return what a text such as "fsdp2 64" says about sharding: (ZeRO stage, shard ranks, 1 if weights stay gathered,
    1 if offloaded).
    """
    stated_text = text.lower()
    if not stated_text:
        stage = 1.0 if software.shards_optimizer else 0.0
        assumed.append(f"zero {stage:g}" + (f" (recipes of {software.name} shard the optimizer)" if stage else ""))
        return stage, data * context, 0.0, 0.0
    stages = ((3.0, r"zero-?3|full_shard|fsdp"), (2.0, r"zero-?2|grad_op"), (1.0, r"zero-?1|dist-?opt"))
    stage = next((number for number, pattern in stages if re.search(pattern, stated_text)), 0.0)
    if "grad_op" in stated_text:
        stage = 2.0
    if stated_text.startswith("ddp") or "fsdp=0" in stated_text:
        stage = 1.0 if software.shards_optimizer else 0.0
    shard_text = re.search(r"fsdp2? (\d+)", stated_text)
    shards = min(data, float(shard_text.group(1))) * context if shard_text else data * context
    return stage, max(1.0, shards), float("no reshard" in stated_text), float("offload" in stated_text)


CHEAP_MODULES = {"norm", "layernorm", "act", "moe_act", "mla_up_proj", "shared_expert"}
"""Modules of Megatron-Core whose recomputation takes almost no time."""


def _recompute(text: str, assumed: list[str]) -> float:
    """Return the recompute mode of a text such as "full", "selective" or "selective (norm, act)", with modules of
    Megatron-Core.
    """
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
    if modules and modules <= CHEAP_MODULES:
        assumed.append("recompute none that takes time")
        return 0.0
    return SELECTIVE


def _machine(record: Record, chip: Chip, layout: Layouts, assumed: list[str]) -> Machine:
    """Return the rates of the devices and the network of a record."""
    per_node = _size_or_default(record, "gpus_per_node", chip.per_node, assumed)
    domain = max(per_node, chip.domain)
    number_format, low = _matmul_format(record, chip, assumed)
    interconnect = record.get("interconnect") or ""
    nic = port_bandwidth(interconnect, per_node)
    if nic is None:
        nic = chip.nic
        if layout.tensor * layout.pipeline * layout.context * layout.data > domain:
            assumed.append(f"network {nic * 8 / 1e9:g} Gb/s per GPU")
    oversubscription = re.search(r"1:(\d+) oversubscribed", interconnect)
    return Machine(
        peak=chip.peak_flops.get(number_format, chip.half_peak),
        half_peak=chip.half_peak,
        matmul_format=low,
        hbm=chip.hbm,
        memory=chip.memory_bytes,
        link=chip.link,
        nic=nic,
        host=chip.host,
        domain=domain,
        per_node=per_node,
        oversubscribed=float(oversubscription.group(1)) if oversubscription else 1.0,
        pod=3072.0 if oversubscription else float("inf"),
        sustained=chip.sustained,
        multiprocessors=float(chip.multiprocessors),
    )


def _matmul_format(record: Record, chip: Chip, assumed: list[str]) -> tuple[str, float]:
    """Return (the number format in the chip table, its `Machine.matmul_format`).

    An MLPerf record without a format has the narrowest format of its chip.
    """
    dtype_text = (record.get("dtype") or "").lower()
    if not dtype_text:
        narrow_dtypes = ("nvfp4", "fp8") if "mlcommons" in (record.get("source") or "") else ()
        dtype_text = next((name for name in narrow_dtypes if name in chip.peak_flops), "bf16")
        assumed.append(f"dtype {dtype_text}")
    dtype_patterns = (
        ("nvfp4", FOUR_BIT, r"fp4"),
        ("mxfp8", BLOCKWISE, r"mx"),
        ("fp8", BLOCKWISE, r"fp8.*block"),
        ("fp8", TENSORWISE, r"fp8|float8|e4m3"),
        ("bf16", 0.0, r"bf16|fp16|half"),
    )
    name, format_class = next(
        ((name, format_class) for name, format_class, pattern in dtype_patterns if re.search(pattern, dtype_text)),
        ("bf16", 0.0),
    )
    if name != "bf16" and name not in chip.peak_flops:
        assumed.append(f"dtype bf16 ({chip.name} has no {name})")
        return "bf16", 0.0
    return name, format_class


_PORTS = (
    (r"([\d.]+) ?x ?([\d.]+) ?GB/s", lambda ports, rate, gpus: ports * rate * 1e9 / gpus),
    (r"([\d.]+) ?x ?(?:HDR|NDR|XDR|EDR)? ?([\d.]+) ?Gb/s", lambda ports, rate, gpus: ports * rate * 1e9 / 8 / gpus),
    (r"([\d.]+) ?x ?(?:HDR|NDR|XDR|EDR)([\d.]+)", lambda ports, rate, gpus: ports * rate * 1e9 / 8 / gpus),
    (r"([\d.]+) ?x [^;]*?([\d.]+) ?Gb/s", lambda ports, rate, gpus: ports * rate * 1e9 / 8 / gpus),
)
"""Regular expressions for the ports of a node: their number and the rate of each.

The function returns bytes/s per GPU of the node.
"""


def port_bandwidth(text: str, per_node: float) -> float | None:
    """Return the network bytes/s per GPU from a text such as "8x HDR200 InfiniBand"; None if it states no rate.

    `per_node` is the number of GPUs of a node.
    """
    compute_network = text.split("Compute:")[-1]
    compute_network = re.sub(r"\d+x (Ethernet|NVIDIA BlueField)[^;]*;", "", compute_network)
    per_gpu = re.search(r"([\d.]+) ?Gb/s per GPU", compute_network)
    if per_gpu:
        return float(per_gpu.group(1)) * 1e9 / 8
    node_rate = re.search(r"([\d.]+) ?Gb/s per node", compute_network)
    if node_rate:
        return float(node_rate.group(1)) * 1e9 / 8 / per_node
    if "EFA" in compute_network:
        return 50e9
    for pattern, port_rate in _PORTS:
        match = re.search(pattern, compute_network)
        if match:
            return port_rate(float(match.group(1)), float(match.group(2)), per_node)
    return None
