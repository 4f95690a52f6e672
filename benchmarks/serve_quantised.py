"""Seconds in which the engine loads a quantised folder, and its tokens per second, with random weights.

    python benchmarks/serve_quantised.py --model llama3-8b --scheme tensor|output|block|int4 --folder DIR [--weights fp8|int8]

Writes the folder if it is not there: linear layers of the blocks in fp8 with a scale per tensor, output or block of 128 × 128, or in
int4 in groups of 128, the rest in bf16. The requests are those of `serve_offline.py`. Prints one JSON object per measurement. Read the
folder once before (`cat DIR/* > /dev/null`) to measure without the disk.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from serve_offline import TINY, nano_vllm_requests, offline
from torch import Tensor

from meshwright.checkpoint.models.single_device import device_and_dtype
from meshwright.config.presets import MODEL_PRESETS
from meshwright.families.folder import HFTensor, hf_tensors, to_hf_config
from meshwright.serve.engine import Engine
from meshwright.serve.load import load_for_engine
from meshwright.spec.engine import EngineOptions
from meshwright.spec.fields import from_plain
from meshwright.spec.model import ModelSpec

Parts = dict[str, Tensor]
SHARD_BYTES = 4 << 30
INT4: dict[str, Any] = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}


def fp8(weight: Tensor, scale: Tensor) -> Tensor:
    return (weight / scale).to(torch.float8_e4m3fn)


def per_tensor(name: str, weight: Tensor) -> Parts:
    scale = weight.abs().amax() / 448
    return {name: fp8(weight, scale), f"{name}_scale": scale}


def per_output(name: str, weight: Tensor) -> Parts:
    scale = weight.abs().amax(1, keepdim=True) / 448
    return {name: fp8(weight, scale), f"{name}_scale": scale}


def per_block(name: str, weight: Tensor) -> Parts:
    blocks = weight.unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
    scale = blocks.abs().amax((1, 3), keepdim=True) / 448
    return {name: fp8(blocks, scale).view(weight.shape), f"{name}_scale_inv": scale[:, 0, :, 0]}


def in_4_bits(name: str, weight: Tensor) -> Parts:
    groups = weight.unflatten(1, (-1, 128))
    scale = groups.abs().amax(2) / 7
    numbers = ((groups / scale[..., None]).round() + 8).clamp(0, 15).flatten(1).to(torch.uint8)
    packed = (numbers[:, ::2] | numbers[:, 1::2] << 4).contiguous().view(torch.int32)
    shape = torch.tensor(weight.shape)
    return {f"{name}_packed": packed, f"{name}_scale": scale.bfloat16(), f"{name}_shape": shape}


FP8: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
SCHEMES: dict[str, tuple[dict[str, Any], Callable[[str, Tensor], Parts]]] = {
    "tensor": (FP8, per_tensor),
    "output": (FP8, per_output),
    "block": ({**FP8, "weight_block_size": [128, 128]}, per_block),
    "int4": (
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": INT4}},
        },
        in_4_bits,
    ),
}


def main() -> None:
    options = _arguments()
    values = (
        TINY | {"hidden": 128, "ffn_hidden": 256, "head_dim": 64}
        if options.model == "tiny"
        else MODEL_PRESETS[options.model]
    )
    spec = from_plain(ModelSpec, {**values, "vocab_size": values["vocab_size"] or 4096})
    if not options.folder.exists():
        write_folder(options.folder, spec, options.scheme)
    device, dtype = device_and_dtype()
    settings = EngineOptions(weights=options.weights, prefix_cache=False, context=min(2304, spec.max_seq_len))
    start = time.perf_counter()
    model = load_for_engine(options.folder, device, dtype, settings)
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    size = sum(file.stat().st_size for file in options.folder.glob("*.safetensors"))
    common = {
        "benchmark": "serve_quantised",
        "model": options.model,
        "scheme": options.scheme,
        "weights": options.weights,
    }
    print(json.dumps({**common, "bytes": size, "load_seconds": seconds, "gb_per_second": size / seconds / 1e9}))
    engine = Engine(model, options=settings)
    requests = nano_vllm_requests(options.requests, spec.vocab_size)
    if options.model == "tiny":
        requests = [(prompt[:16], 4) for prompt, _ in requests]
    for repeat in range(options.repeats):
        print(json.dumps({**common, "repeat": repeat, **offline(engine, requests)}))


@torch.no_grad()
def write_folder(folder: Path, spec: ModelSpec, scheme: str) -> None:
    """Write a folder of random weights, a shard at a time."""
    folder.mkdir(parents=True)
    quantization, quantise = SCHEMES[scheme]
    (folder / "config.json").write_text(json.dumps({**to_hf_config(spec), "quantization_config": quantization}))
    device = device_and_dtype()[0]
    torch.manual_seed(0)
    files: dict[str, str] = {}
    for number, shard in enumerate(_shards(spec, quantise, device)):
        file = f"model-{number:05d}.safetensors"
        save_file({name: value.cpu().contiguous() for name, value in shard.items()}, folder / file)
        files |= dict.fromkeys(shard, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def _shards(spec: ModelSpec, quantise: Callable[[str, Tensor], Parts], device: torch.device) -> Iterator[Parts]:
    shard: Parts = {}
    for part in (part for parts in hf_tensors(spec).values() for part in parts):
        shard |= _stored(part, quantise, device)
        if sum(value.nbytes for value in shard.values()) > SHARD_BYTES:
            yield shard
            shard = {}
    yield shard


def _stored(part: HFTensor, quantise: Callable[[str, Tensor], Parts], device: torch.device) -> Parts:
    if len(part.shape) == 1:
        return {part.name: torch.ones(part.shape, dtype=torch.bfloat16)}
    weight = torch.randn(part.shape, device=device) * 0.02
    return quantise(part.name, weight) if "_proj" in part.name else {part.name: weight.bfloat16()}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=["tiny", *MODEL_PRESETS], default="llama3-8b")
    parser.add_argument("--scheme", choices=list(SCHEMES), default="output")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--weights", choices=["fp8", "int8"], help="format to which other weights are rounded")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    main()
