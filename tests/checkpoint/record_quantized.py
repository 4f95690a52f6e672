"""Records stored weights and what their own tools read from them, for `test_quantized.py`.

The tools are not installed with the test extra: `pip install compressed-tensors bitsandbytes`, then
`python -m tests.checkpoint.record_quantized`. compressed-tensors 0.20.1, bitsandbytes 0.50.2 and transformers 5.23 made the file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

FILE = Path(__file__).with_name("quantized.safetensors")
SHAPE, BLOCKED = (24, 128), (136, 200)
Parts = dict[str, Tensor]
Case = tuple[dict[str, Any], Parts, Tensor]
"""A folder's `quantization_config`, the tensors of a weight by the end of their name, and the weight as the tool reads it."""


def record() -> dict[str, Case]:
    """All cases, made by the tools."""
    cases = {name: compressed(name, group) for name, group in COMPRESSED.items()}
    for kind in ("nf4", "fp4"):
        for nested in (False, True):
            cases[f"{kind} {'double' if nested else 'single'}"] = bitsandbytes(kind, nested)
    return cases | {"gpt-oss": gpt_oss()}


def _args(bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False, **more}


_TOKENS = {"fp8": _args(8, "float", "token", dynamic=True), "int8": _args(8, "int", "token", dynamic=True)}
_PER_TENSOR = _args(8, "float", "tensor")
COMPRESSED: dict[str, dict[str, Any]] = {
    "FP8": {"format": "float-quantized", "weights": _PER_TENSOR, "input_activations": _PER_TENSOR},
    "FP8_DYNAMIC": {
        "format": "float-quantized",
        "weights": _args(8, "float", "channel"),
        "input_activations": _TOKENS["fp8"],
    },
    "FP8_BLOCK": {
        "format": "float-quantized",
        "weights": _args(8, "float", "block", block_structure=[128, 128]),
        "input_activations": {**_args(8, "float", "group", dynamic=True), "group_size": 128},
    },
    "W8A8": {"format": "int-quantized", "weights": _args(8, "int", "channel"), "input_activations": _TOKENS["int8"]},
    "W8A8_ASYM": {
        "format": "int-quantized",
        "weights": _args(8, "int", "channel", symmetric=False),
        "input_activations": _TOKENS["int8"],
    },
    "W8A16": {"format": "pack-quantized", "weights": _args(8, "int", "channel")},
    "W4A16": {"format": "pack-quantized", "weights": _args(4, "int", "group", group_size=32)},
    "W4A16_CHANNEL": {"format": "pack-quantized", "weights": _args(4, "int", "channel")},
    "W4A16_ASYM": {"format": "pack-quantized", "weights": _args(4, "int", "group", group_size=64, symmetric=False)},
    "W4AFP8": {
        "format": "pack-quantized",
        "weights": _args(4, "int", "group", group_size=128),
        "input_activations": _TOKENS["fp8"],
    },
    "NVFP4A16": {"format": "nvfp4-pack-quantized", "weights": _args(4, "float", "tensor_group", group_size=16)},
    "MXFP4": {"format": "mxfp4-pack-quantized", "weights": _args(4, "float", "group", group_size=32)},
    "MXFP8": {"format": "mxfp8-quantized", "weights": _args(8, "float", "group", group_size=32)},
}


def compressed(name: str, group: dict[str, Any]) -> Case:
    """A weight compressed and decompressed by compressed-tensors."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    weights = group["weights"]
    more = {"scale_dtype": torch.uint8} if group["format"].startswith("mx") else {}
    scheme = QuantizationScheme(**{**group, "weights": {**weights, **more}}, targets=["Linear"])
    torch.manual_seed(len(name))
    weight = torch.randn(BLOCKED if "BLOCK" in name else SHAPE, dtype=torch.bfloat16)
    state: Parts = {"weight": weight, **_scales(weight, weights, group["format"])}
    tool = BaseCompressor.get_value_from_registry(group["format"])
    packed = tool.compress(dict(state), scheme)
    read = tool.decompress(dict(packed), scheme)["weight"]
    config = {"quant_method": "compressed-tensors", "format": group["format"], "quantization_status": "compressed"}
    config["config_groups"] = {"group_0": {**group, "targets": ["Linear"]}}
    static = group.get("input_activations", {}).get("dynamic") is False
    parts = {f".{key}": value.contiguous() for key, value in packed.items()}
    return config, parts | ({".input_scale": torch.tensor([0.5])} if static else {}), read.contiguous()


def _scales(weight: Tensor, args: dict[str, Any], form: str) -> Parts:
    """Scales as the tool's observers give them, by the largest magnitudes, and zero points."""
    largest = {(8, "float"): 448.0, (8, "int"): 127.0, (4, "int"): 7.0, (4, "float"): 6.0}[
        args["num_bits"], args["type"]
    ]
    size = args.get("group_size")
    if args["strategy"] == "block":
        rows, columns = (-(-size // 128) for size in weight.shape)
        padded = torch.nn.functional.pad(weight, (0, columns * 128 - weight.shape[1], 0, rows * 128 - weight.shape[0]))
        most = padded.unflatten(1, (columns, 128)).unflatten(0, (rows, 128)).abs().amax((1, 3))
    elif size:
        most = weight.unflatten(1, (-1, size)).abs().amax(2)
    else:
        most = weight.abs().amax(1, keepdim=True) if args["strategy"] == "channel" else weight.abs().amax().view(1)
    scale = most / largest
    if form.startswith("nvfp4"):
        factor = torch.tensor([448.0 * 6.0]) / weight.abs().amax().float()
        return {"weight_scale": (factor * scale.float()).to(torch.float8_e4m3fn).float(), "weight_global_scale": factor}
    if form.startswith("mx"):
        scale = (2.0 ** scale.float().log2().ceil()).to(torch.bfloat16)
    found = {"weight_scale": scale}
    if not args["symmetric"]:
        found["weight_zero_point"] = torch.randint(-5, 6, scale.shape, dtype=torch.int8)
    return found


def bitsandbytes(kind: str, nested: bool) -> Case:
    """A weight of bitsandbytes, whose number of scales is no multiple of the scales that share one."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    torch.manual_seed(nested)
    weight = torch.randn(17 if nested else 14, 1000 if nested else 99, dtype=torch.bfloat16)
    packed, state = quantize_4bit(weight, quant_type=kind, compress_statistics=nested)
    read = dequantize_4bit(packed, state)
    parts = {".weight": packed} | {f".weight.{key}": value for key, value in state.as_dict(packed=True).items()}
    config = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": kind,
        "bnb_4bit_use_double_quant": nested,
    }
    return config, parts, read


def gpt_oss() -> Case:
    """Experts as gpt-oss is released; transformers has (experts, in, out)."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    torch.manual_seed(7)
    blocks = torch.randint(0, 256, (2, 12, 2, 16), dtype=torch.uint8)
    scales = torch.randint(110, 135, (2, 12, 2), dtype=torch.uint8)
    read = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    return {"quant_method": "mxfp4"}, {"_blocks": blocks, "_scales": scales}, read.contiguous()


def load() -> dict[str, Case]:
    """The recorded cases."""
    with safe_open(FILE, "pt") as file:
        configs = json.loads(file.metadata()["configs"])
        cases: dict[str, Case] = {name: (config, {}, torch.empty(0)) for name, config in configs.items()}
        for key in file.keys():  # noqa: SIM118
            name, _, end = key.partition("|")
            config, parts, read = cases[name]
            cases[name] = (
                (config, parts, file.get_tensor(key))
                if not end
                else (config, {**parts, end: file.get_tensor(key)}, read)
            )
    return cases


if __name__ == "__main__":
    made = record()
    tensors = {
        f"{name}|{end}": value for name, (_, parts, read) in made.items() for end, value in {**parts, "": read}.items()
    }
    save_file(tensors, FILE, {"configs": json.dumps({name: config for name, (config, _, _) in made.items()})})
