"""Reads what config.json says about quantised weights. There is one reader for each method. Torch-free.

A reader returns the schemes that weights of the folder may have. Which scheme a weight has is found from its tensors
(`checkpoint.models.quantized`). The folder's list of modules that are not quantised only serves as a check, because
some programs fuse or rename these modules.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fnmatch import translate
from functools import cached_property
from typing import Any

from meshwright.families.format import HFConfig
from meshwright.spec.engine import WeightFormat
from meshwright.spec.errors import BadInput, nearest, shorten
from meshwright.spec.weight_scheme import FLOAT_SCALES, FP8_BLOCK, POWERS, WeightScheme

KEY = "quantization_config"
"""Key of config.json with the settings."""
CACHE_SCALES = (
    ".k_scale",
    ".v_scale",
    ".k_proj.k_scale",
    ".v_proj.v_scale",
    ".kv_scale",
    ".k_proj.output_scale",
    ".v_proj.output_scale",
)
"""Endings of the names of scales for cached keys and values."""
_SIMPLE = re.compile(r"[\w.\-\\\[\]+*|()?:^$]*")
"""Characters that a pattern may have."""
_UNSAFE = re.compile(r"\)[*+?{]|(?:[*+].*){5}")
"""Parts of a pattern that could make a match very slow for long names: repeated groups, and many repetitions."""

LONGEST_PATTERN = 200
"""Longest pattern that is used."""
MOST_WILDCARDS = 5
"""Wildcard entries with this many `*` or more are not used."""


@dataclass(frozen=True)
class Quantization:
    """What a folder says about its quantised weights."""

    method: str
    """Name of the method, for messages."""
    schemes: tuple[WeightScheme, ...]
    """The schemes that its weights may have."""
    ignored: tuple[str, ...] = ()
    """Modules that are not quantised: names, wildcards, or regular expressions after `re:`."""
    cache_scales: bool = False
    """Whether the folder declares scales of cached keys and values."""

    def ignores(self, module: str) -> str | None:
        """Return the entry of `ignored` that names this module, or a module that contains it. None if there is none.

        Two kinds of entries are not compared: single words such as `gate`, unless they are the whole name, and patterns
        that could be slow.
        """
        parts = module.split(".")
        around = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
        named = next((name for name in around if name in self._names and (name == module or "." in name)), None)
        return named or next((entry for entry, pattern in self._patterns if pattern.match(module)), None)

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(self.ignored)

    @cached_property
    def _patterns(self) -> list[tuple[str, re.Pattern[str]]]:
        return [(entry, pattern) for entry in self.ignored if (pattern := _pattern(entry)) is not None]


def _pattern(entry: str) -> re.Pattern[str] | None:
    """Return the regular expression of an entry with `re:` or wildcards. None for a plain name, and for a pattern that could be slow."""
    if entry.startswith("re:"):
        text = entry.removeprefix("re:")
        if not _SIMPLE.fullmatch(text) or _UNSAFE.search(text) or len(text) > LONGEST_PATTERN:
            return None
        try:
            return re.compile(text)
        except re.error:
            return None
    return re.compile(translate(entry)) if 0 < entry.count("*") < MOST_WILDCARDS else None


def read_quantization(config: Mapping[str, Any], where: str) -> Quantization | None:
    """Read `quantization_config` of a config.json. None if there is none.

    Raises BadInput for a method, key or value that is not supported.
    """
    value = config.get(KEY)
    if not value:
        return None
    if not isinstance(value, Mapping):
        raise BadInput(f"{where}: {KEY}: expected an object with quant_method, got {shorten(repr(value))}")
    section = HFConfig(value, f"{where}: {KEY}")
    method = section.get("quant_method") or ("bitsandbytes" if value.get("load_in_4bit") else None)
    reader = METHODS.get(method) if isinstance(method, str) else None
    if reader is None:
        near = nearest(str(method), METHODS)
        hint = f" (nearest: {near})" if near else ""
        raise section.error("quant_method", method, f"one of {', '.join(METHODS)}{hint}, or unquantized weights")
    found = reader(section)
    section.refuse_unknown(WITHOUT_EFFECT)
    return found


WITHOUT_EFFECT = frozenset(
    {
        "act_group_aware",
        "backend",
        "batch_size",
        "block_name_to_quantize",
        "bnb_4bit_compute_dtype",
        "bnb_4bit_quant_storage",
        "bnb_4bit_use_double_quant",
        "cache_block_outputs",
        "damp_auto_increment",
        "damp_percent",
        "dataset",
        "dequantize",
        "disable_exllama",
        "do_fuse",
        "exllama_config",
        "fuse_max_seq_len",
        "global_compression_ratio",
        "llm_int8_enable_fp32_cpu_offload",
        "llm_int8_has_fp16_weight",
        "llm_int8_threshold",
        "lm_head",
        "max_input_length",
        "meta",
        "model_file_base_name",
        "model_name_or_path",
        "model_seqlen",
        "module_name_preceding_first_block",
        "modules_in_block_to_quantize",
        "modules_to_fuse",
        "pack_dtype",
        "producer",
        "quantization_status",
        "run_compressed",
        "static_groups",
        "tokenizer",
        "true_sequential",
        "use_cuda_fp16",
        "use_exllama",
        "use_optimized_inference",
    }
)
"""Keys about how the folder was made, or about how other programs compute. They do not change the meaning of the weights."""
LISTS = ("ignore", "ignored_layers", "exclude_modules", "modules_to_not_convert", "llm_int8_skip_modules")
"""Keys for the modules that are not quantised. Each method uses some of them."""


def _ignored(section: HFConfig) -> tuple[str, ...]:
    """Return the modules that are not quantised, from all keys in LISTS."""
    entries: list[str] = []
    for key in LISTS:
        value = section.get(key)
        if value is None:
            continue
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise section.error(key, value, "a list of names of modules")
        entries += value
    return tuple(entries)


def _cache_scales(section: HFConfig, *keys: str) -> bool:
    """Return whether one of these keys declares a cache in fp8. Raises BadInput for another format."""
    for key in keys:
        value = section.get(key)
        if isinstance(value, Mapping):
            kind = value.get("type"), value.get("num_bits")
            if kind != ("float", 8):
                raise section.error(key, value, "8-bit floats")
        elif value is not None and value not in ("static", "FP8", "fp8"):
            raise section.error(key, value, "fp8")
        if value is not None:
            return True
    return False


def _fp8(section: HFConfig) -> Quantization:
    """Read FP8: with a scale for each block (DeepSeek, Qwen), or one for the tensor or for each output (AutoFP8, Mistral)."""
    section.expect("fmt", "e4m3")
    section.expect("scale_fmt", "float", "ue8m0")
    section.expect("expert_dtype", "fp8")
    section.expect("activation_scheme", "dynamic", "static")
    block = section.get("weight_block_size")
    usual: dict[str, Any] = {
        "element": "e4m3",
        "scales": (".weight_scale_inv", ".weight_scale"),
        "inputs": (".input_scale", ".activation_scale"),
        "activations": "fp8",
    }
    if block is not None:
        size = _pair(section, "weight_block_size", block)
        dtypes = (*FLOAT_SCALES, "F8_E8M0")
        schemes = [WeightScheme(name="fp8 in blocks", **usual, block=size, scale_dtypes=dtypes)]
    else:
        schemes = _tensor_or_output("fp8", **usual)
    return Quantization("fp8", tuple(schemes), _ignored(section), _cache_scales(section, "kv_cache_scheme"))


def _tensor_or_output(name: str, **usual: Any) -> list[WeightScheme]:
    """Return two schemes, as a weight may have one scale, or one scale for each output. `usual` has the other fields."""
    tensor = WeightScheme(name=f"{name} with a scale per tensor", **usual, block=(0, 0))
    return [tensor, replace(tensor, name=f"{name} with a scale per output", block=(1, 0))]


def _pair(section: HFConfig, key: str, value: Any) -> tuple[int, int]:
    """Return a pair of positive integers: rows and columns of a block. Raises BadInput for another value."""
    numbers = value if isinstance(value, list) else []
    valid = [
        number
        for number in numbers
        if isinstance(number, int) and not isinstance(number, bool) and 0 < number <= 1 << 20
    ]
    if len(valid) != 2 or len(numbers) != 2:
        raise section.error(key, value, f"rows and columns of a block, such as [{FP8_BLOCK}, {FP8_BLOCK}]")
    return valid[0], valid[1]


def _fbgemm(section: HFConfig) -> Quantization:
    """Read FP8 of FBGEMM, with a scale for each output."""
    section.get("activation_scale_ub")
    scheme = WeightScheme(
        name="fp8 with a scale per output", element="e4m3", activations="fp8", inputs=(".input_scale_ub",)
    )
    return Quantization("fbgemm_fp8", (scheme,), _ignored(section))


def _mxfp4(section: HFConfig) -> Quantization:
    """Read MXFP4 as in gpt-oss, which has only its experts in this format."""
    scheme = WeightScheme(
        name="mxfp4",
        element="e2m1",
        packing="blocks",
        values="_blocks",
        scales=("_scales",),
        scale_dtypes=POWERS,
        block=(1, 32),
    )
    return Quantization("mxfp4", (scheme,), _ignored(section))


def _awq(section: HFConfig) -> Quantization:
    """Read AWQ: 4 bits, with a scale and a zero point for each group of inputs. Eight values of different outputs share a word."""
    section.expect("bits", 4)
    section.expect("w_bit", 4)
    for key in ("version", "format"):
        if (value := section.get(key)) is not None and str(value).lower() != "gemm":
            raise section.error(key, value, "gemm")
    section.expect("zero_point", True)
    section.expect("sym", False)
    scheme = WeightScheme(
        name="awq",
        element="int4",
        packing="output words",
        values=".qweight",
        scales=(".scales",),
        zeros=".qzeros",
        block=(1, _group_size(section, "group_size", "q_group_size")),
    )
    return Quantization("awq", (scheme,), _ignored(section))


def _group_size(section: HFConfig, *keys: str) -> int:
    """Return the number of inputs in one group; 0 means all inputs."""
    key = next((key for key in keys if section.get(key) is not None), keys[0])
    if section.get(key) in (-1, None):
        return 0
    return section.integer(key)


def _gptq(section: HFConfig) -> Quantization:
    """Read GPTQ: 4 or 8 bits, with a scale and a zero point for each group of inputs. Values of different inputs share a word."""
    section.expect("bits", 4, 8)
    section.expect("is_marlin_format", False)
    form = section.get("checkpoint_format") or section.get("format") or "gptq"
    if form not in ("gptq", "gptq_v2"):
        raise section.error("checkpoint_format", form, "gptq or gptq_v2")
    section.expect("format", "gptq", "gptq_v2")
    for key in ("sym", "desc_act"):
        section.flag(key, True)
    if section.get("dynamic"):
        raise section.error("dynamic", section.get("dynamic"), "the same bits and groups in all layers")
    bits = section.integer("bits")
    scheme = WeightScheme(
        name=f"gptq with {bits} bits",
        element="int4" if bits == 4 else "int8",
        packing="input words",
        values=".qweight",
        scales=(".scales",),
        zeros=".qzeros",
        zero_offset=1 if form == "gptq" else 0,
        index=".g_idx",
        block=(1, _group_size(section, "group_size")),
    )
    return Quantization("gptq", (scheme,), _ignored(section))


def _bitsandbytes(section: HFConfig) -> Quantization:
    """Read bitsandbytes with 4 bits: each value is an index into a table of 16 numbers, times a scale for its block."""
    four = section.flag("load_in_4bit", False) or section.flag("_load_in_4bit", False)
    if not four or section.flag("load_in_8bit", False) or section.flag("_load_in_8bit", False):
        raise section.error("load_in_4bit", four, "true: 8-bit folders of bitsandbytes are not read")
    section.expect("bnb_4bit_quant_type", "nf4", "fp4")
    kind = section.get("bnb_4bit_quant_type") or "fp4"
    scheme = WeightScheme(
        name=kind, element="map", packing="flat", scales=(".weight.absmax",), scale_dtypes=("F32", "U8")
    )
    return Quantization("bitsandbytes", (scheme,), _ignored(section))


def _modelopt(section: HFConfig) -> Quantization:
    """Read ModelOpt: FP8, or NVFP4 with an FP8 scale for each 16 inputs and one factor for the tensor."""
    algorithm = section.get("quant_algo")
    kinds: dict[Any, Callable[[], list[WeightScheme]]] = {
        "FP8": lambda: _tensor_or_output("fp8", element="e4m3", inputs=(".input_scale",), activations="fp8"),
        "NVFP4": lambda: [
            WeightScheme(
                name="nvfp4 of ModelOpt",
                element="e2m1",
                packing="bytes",
                scale_dtypes=("F8_E4M3",),
                block=(1, 16),
                factor=".weight_scale_2",
                inputs=(".input_scale",),
            )
        ],
    }
    if algorithm not in kinds:
        raise section.error("quant_algo", algorithm, " or ".join(kinds))
    section.expect("group_size", 16)
    for key in ("config_groups", "quant_method"):
        section.get(key)
    cache = _cache_scales(section, "kv_cache_scheme", "kv_cache_quant_algo")
    return Quantization(f"modelopt {algorithm}", tuple(kinds[algorithm]()), _ignored(section), cache)


def _compressed(section: HFConfig) -> Quantization:
    """Read compressed-tensors, which has groups of modules, each with a scheme of its own."""
    groups = section.get("config_groups")
    form = section.get("format")
    if not isinstance(groups, Mapping) or not groups:
        raise section.error("config_groups", groups, "an object with groups of modules")
    for key in ("sparsity_config", "transform_config"):
        if section.get(key):
            raise section.error(key, section.get(key), "none: sparse and rotated weights are not read")
    section.get("version")
    schemes: list[WeightScheme] = []
    for name, group in groups.items():
        where = f"{section.where}: config_groups: {name}"
        if not isinstance(group, Mapping):
            raise BadInput(f"{where}: expected an object with weights, got {shorten(repr(group))}")
        inside = HFConfig(group, where)
        schemes.append(_compressed_group(inside, inside.get("format") or form))
        inside.refuse_unknown()
    return Quantization(
        "compressed-tensors",
        tuple(dict.fromkeys(schemes)),
        _ignored(section),
        _cache_scales(section, "kv_cache_scheme"),
    )


def _compressed_group(group: HFConfig, form: Any) -> WeightScheme:
    """Return the scheme of one group of compressed-tensors. `form` is the group's format."""
    for key in ("targets", "output_activations"):
        group.get(key)
    if group.get("output_activations"):
        raise group.error("output_activations", group.get("output_activations"), "none")
    weights = group.get("weights")
    if not isinstance(weights, Mapping):
        raise group.error("weights", weights, "an object with num_bits, type and strategy")
    args = HFConfig(weights, f"{group.where}: weights")
    for key in ("observer", "observer_kwargs", "dynamic", "scale_dtype", "zp_dtype"):
        args.get(key)
    args.expect("dynamic", False)
    args.expect("actorder", "weight", "static", "group", "dynamic", False)
    symmetric = args.flag("symmetric", True)
    strategy = args.get("strategy")
    kind = args.get("type") or "int"
    bits = args.integer("num_bits", default=8)
    size = args.get("group_size")
    strategy = strategy or {None: "tensor", -1: "channel"}.get(size, "group")
    block = _compressed_block(args, strategy)
    formats = _activations(group)
    inputs = (".input_scale", ".input_zero_point", ".input_global_scale")
    shared: dict[str, Any] = {"block": block, "activations": formats, "inputs": inputs}
    args.refuse_unknown()
    make = COMPRESSED.get(form) if isinstance(form, str) else None
    if make is None:
        near = nearest(str(form), COMPRESSED)
        hint = f" (nearest: {near})" if near else ""
        raise group.error("format", form, f"one of {', '.join(COMPRESSED)}{hint}")
    expected, scheme = make(kind, bits, symmetric, shared)
    if (kind, bits) not in expected:
        names = " or ".join(f"{bits} bits of type {kind}" for kind, bits in expected)
        raise args.error("num_bits", bits, f"{names} with format {form}, with type {kind}")
    if scheme.element in ("e4m3", "e2m1") and not symmetric:
        raise args.error("symmetric", symmetric, f"true with format {form}")
    fixed = {"nvfp4-pack-quantized": (1, 16), "mxfp4-pack-quantized": (1, 32), "mxfp8-quantized": (1, 32)}.get(form)
    if fixed is not None and block != fixed:
        raise args.error("group_size", size, f"{fixed[1]} with format {form}")
    return scheme


def _compressed_block(args: HFConfig, strategy: Any) -> tuple[int, int]:
    """Return (outputs, inputs) that share a scale. 0 means all of them."""
    whole = {"tensor": (0, 0), "channel": (1, 0)}
    args.get("group_size")
    structure = args.get("block_structure")
    if strategy in whole:
        return whole[strategy]
    if strategy == "block":
        return _pair(args, "block_structure", structure)
    if strategy in ("group", "tensor_group"):
        return 1, args.integer("group_size")
    raise args.error("strategy", strategy, "tensor, channel, group, tensor_group or block")


def _activations(group: HFConfig) -> WeightFormat | None:
    """Return the 8-bit format of activations. None if they have none, or if their rounding is not symmetric."""
    activations = group.get("input_activations")
    if activations is None:
        return None
    if not isinstance(activations, Mapping):
        raise group.error("input_activations", activations, "an object or none")
    found: dict[tuple[Any, Any], WeightFormat] = {("float", 8): "fp8", ("int", 8): "int8"}
    if activations.get("symmetric", True) is not True:
        return None
    return found.get((activations.get("type", "int"), activations.get("num_bits", 8)))


Made = tuple[set[tuple[str, int]], WeightScheme]
"""What a format of compressed-tensors allows: pairs of (type, bits), and the scheme of its weights."""


def _floats(kind: str, bits: int, symmetric: bool, shared: Mapping[str, Any]) -> Made:
    """Return the scheme of FP8."""
    name = {(0, 0): "fp8 with a scale per tensor", (1, 0): "fp8 with a scale per output"}.get(
        shared["block"], "fp8 in blocks"
    )
    return {("float", 8)}, WeightScheme(name=name, element="e4m3", **shared)


def _integers(kind: str, bits: int, symmetric: bool, shared: Mapping[str, Any]) -> Made:
    """Return the scheme of INT8, one value per byte."""
    zeros = None if symmetric else ".weight_zero_point"
    return {("int", 8)}, WeightScheme(name="int8", element="int8", zeros=zeros, **shared)


def _naive(kind: str, bits: int, symmetric: bool, shared: Mapping[str, Any]) -> Made:
    """Return the scheme of FP8 or INT8, by the type."""
    return (_floats if kind == "float" else _integers)(kind, bits, symmetric, shared)


def _packed(kind: str, bits: int, symmetric: bool, shared: Mapping[str, Any]) -> Made:
    """Return the scheme of INT4 or INT8 with several values in a 32-bit word."""
    return {("int", 4), ("int", 8)}, WeightScheme(
        name=f"int{bits} in groups of {shared['block'][1]}" if shared["block"][1] else f"int{bits}, packed",
        element="int4" if bits == 4 else "int8",
        packing="words",
        values=".weight_packed",
        zeros=None if symmetric else ".weight_zero_point",
        index=".weight_g_idx",
        shape_name=".weight_shape",
        **shared,
    )


def _nvfp4(kind: str, bits: int, symmetric: bool, shared: Mapping[str, Any]) -> Made:
    """Return the scheme of NVFP4. Unlike in ModelOpt, the factor of the tensor divides the scales."""
    return {("float", 4)}, WeightScheme(
        name="nvfp4",
        element="e2m1",
        packing="bytes",
        values=".weight_packed",
        scale_dtypes=("F8_E4M3",),
        factor=".weight_global_scale",
        divides=True,
        **shared,
    )


def _mxfp4_packed(kind: str, bits: int, symmetric: bool, shared: Mapping[str, Any]) -> Made:
    """Return the scheme of MXFP4, two values in a byte."""
    return {("float", 4)}, WeightScheme(
        name="mxfp4", element="e2m1", packing="bytes", values=".weight_packed", scale_dtypes=POWERS, **shared
    )


def _mxfp8(kind: str, bits: int, symmetric: bool, shared: Mapping[str, Any]) -> Made:
    """Return the scheme of MXFP8."""
    return {("float", 8)}, WeightScheme(name="mxfp8", element="e4m3", scale_dtypes=POWERS, **shared)


COMPRESSED: dict[str, Callable[[str, int, bool, Mapping[str, Any]], Made]] = {
    "float-quantized": _floats,
    "int-quantized": _integers,
    "naive-quantized": _naive,
    "pack-quantized": _packed,
    "nvfp4-pack-quantized": _nvfp4,
    "mxfp4-pack-quantized": _mxfp4_packed,
    "mxfp8-quantized": _mxfp8,
}
"""Formats of compressed-tensors. A function receives type, bits, symmetry, and the fields that all schemes share."""
METHODS: dict[str, Callable[[HFConfig], Quantization]] = {
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm,
    "compressed-tensors": _compressed,
    "mxfp4": _mxfp4,
    "awq": _awq,
    "gptq": _gptq,
    "bitsandbytes": _bitsandbytes,
    "modelopt": _modelopt,
}
"""The reader for each value of `quant_method`."""
