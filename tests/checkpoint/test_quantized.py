"""Stored quantised weights against their own tools, and against the published formulas where a tool needs a GPU."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from meshwright.checkpoint.models.hf import export_hf, import_hf
from meshwright.checkpoint.models.quantized import Stored, StoredWeight, find_weight
from meshwright.checkpoint.models.single_device import load_model
from meshwright.families.quantization import read_quantization
from meshwright.kernels.block_matmuls import Fp8Blocks, block_values
from meshwright.models.decoder import Decoder
from meshwright.spec.errors import BadInput, Damaged, MeshwrightError
from meshwright.spec.model import ModelSpec, parameters
from meshwright.spec.weight_scheme import AWQ_ORDER
from tests.checkpoint import record_quantized
from tests.checkpoint.record_quantized import Case, Parts
from tests.models.tiny import GPT_OSS, LLAMA, built

CPU = torch.device("cpu")
RECORDED = record_quantized.load()


def opened(folder: Path, case: Case) -> StoredWeight | None:
    """The weight `w` of a case, in a file of its own."""
    config, parts, read = case
    stacked = any(end.startswith("_") for end in parts)
    shape = (read.shape[0], read.shape[2], read.shape[1]) if stacked else tuple(read.shape)
    save_file({f"w{end}": value for end, value in parts.items()}, folder / "a.safetensors")
    file = safe_open(folder / "a.safetensors", "pt")
    found = read_quantization({"quantization_config": config}, "config.json")
    assert found is not None
    stored = Stored(file.get_slice, lambda name: "a.safetensors", CPU)
    files = dict.fromkeys(file.keys(), "a.safetensors")
    weight = find_weight("w" if stacked else "w.weight", shape, files, found.schemes, stored)
    if weight is not None:
        assert {*weight.names.values()} == {*files}, "every tensor of the folder is accounted for"
    return weight


def check(folder: Path, case: Case) -> StoredWeight:
    """Compare a whole weight and rows of it with what the tool read."""
    weight, read = opened(folder, case), case[2]
    assert weight is not None
    count = weight.shape[0]
    whole = weight.rows(0, count)
    expected = read.mT if weight.scheme.packing == "blocks" else read
    assert torch.equal(whole.to(read.dtype), expected)
    for first, last in ((1, 2), (count // 2 - 1, count), (3, 13))[: 3 if count > 13 else 1]:
        assert torch.equal(weight.rows(first, last), whole[first:last])
    if weight.scheme.native == "fp8 blocks":
        stored = weight.rounded_rows(0, count)
        assert isinstance(stored, Fp8Blocks) and torch.equal(block_values(stored), whole)
    elif weight.scheme.native:
        values, scale = weight.rounded_rows(3, 13)
        assert torch.equal(values.float() * scale, whole[3:13])
    return weight


@pytest.mark.parametrize("name", RECORDED)
def test_weights_are_as_their_tool_reads_them(name: str, tmp_path: Path) -> None:
    check(tmp_path, RECORDED[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", RECORDED)
def test_the_recorded_weights_are_those_of_the_installed_tools(name: str) -> None:
    """Only where the tools are installed; they are no part of the test extra."""
    pytest.importorskip("compressed_tensors")
    pytest.importorskip("bitsandbytes")
    config, parts, read = record_quantized.record()[name]
    recorded = RECORDED[name]
    assert config == recorded[0] and torch.equal(read, recorded[2])
    assert all(torch.equal(value.view(torch.uint8), recorded[1][end].view(torch.uint8)) for end, value in parts.items())


def words(numbers: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Unsigned numbers `(rows, n)` in words of 32 bits `(rows, n · bits / 32)`; number `order[k]` of a word is at place k."""
    count = 32 // bits
    order = order or tuple(range(count))
    rows = []
    for row in numbers.tolist():
        chunks = [row[start : start + count] for start in range(0, len(row), count)]
        values = [sum(chunk[number] << (place * bits) for place, number in enumerate(order)) for chunk in chunks]
        rows.append([value - (1 << 32) if value >= 1 << 31 else value for value in values])
    return torch.tensor(rows, dtype=torch.int32)


def groups_of(inputs: int, size: int, shuffled: bool) -> list[int]:
    found = [number // size for number in range(inputs)]
    random.Random(0).shuffle(found) if shuffled else None
    return found


def by_formula(outputs: int, index: list[int], q: Tensor, z: Tensor, s: Tensor) -> Tensor:
    """(q - z) · s, an output and an input at a time; q `(in, out)`, z and s `(groups, out)`."""
    rows = [
        [(int(q[i, o]) - int(z[group, o])) * float(s[group, o]) for i, group in enumerate(index)]
        for o in range(outputs)
    ]
    return torch.tensor(rows)


def gptq(bits: int, size: int, form: str, shuffled: bool) -> Case:
    """A folder of GPTQ: inputs are packed, zero points along outputs; the first format stores them less 1."""
    torch.manual_seed(bits)
    outputs, inputs = 16, 64
    groups = inputs // (size if size > 0 else inputs)
    q, z = torch.randint(0, 1 << bits, (inputs, outputs)), torch.randint(0, 1 << bits, (groups, outputs))
    s = torch.rand(groups, outputs).half()
    index = groups_of(inputs, size if size > 0 else inputs, shuffled)
    less = 1 if form == "gptq" else 0
    parts = {
        ".qweight": words(q.t(), bits).t().contiguous(),
        ".qzeros": words((z - less) % (1 << bits), bits),
        ".scales": s,
        ".g_idx": torch.tensor(index, dtype=torch.int32),
    }
    config = {"quant_method": "gptq", "bits": bits, "group_size": size, "desc_act": shuffled, "checkpoint_format": form}
    return config, parts, by_formula(outputs, index, q, z, s)


def awq() -> Case:
    """A folder of AWQ: outputs are packed in an order of their own."""
    torch.manual_seed(5)
    outputs, inputs, size = 24, 64, 16
    q, z = torch.randint(0, 16, (inputs, outputs)), torch.randint(0, 16, (inputs // size, outputs))
    s = torch.rand(inputs // size, outputs).half()
    config = {"quant_method": "awq", "bits": 4, "group_size": size, "version": "gemm", "zero_point": True}
    parts = {".qweight": words(q, 4, AWQ_ORDER), ".qzeros": words(z, 4, AWQ_ORDER), ".scales": s}
    return config, parts, by_formula(outputs, groups_of(inputs, size, shuffled=False), q, z, s)


def fp8(scale: Tensor, key: str, **config: Any) -> Case:
    """A folder of method fp8; `scale` for the whole weight, each output or each block of 128 × 128."""
    torch.manual_seed(3)
    weight = torch.randn(130, 132).to(torch.float8_e4m3fn)
    rows, columns = (scale.shape[0], -1) if scale.dim() else (1, 1)
    height = 130 if rows == 1 else 1 if rows == 130 else 128
    factor = scale.float().reshape(rows, columns)
    read = torch.stack(
        [
            torch.stack([weight[o, i].float() * factor[o // height, (i // 128) % factor.shape[1]] for i in range(132)])
            for o in range(130)
        ]
    )
    return {"quant_method": "fp8", "fmt": "e4m3", **config}, {".weight": weight, key: scale}, read


def modelopt() -> Case:
    """NVFP4 of ModelOpt, which multiplies by the second scale; compressed-tensors divides."""
    parts = RECORDED["NVFP4A16"][1]
    factor = 1 / parts[".weight_global_scale"]
    theirs = {
        ".weight": parts[".weight_packed"],
        ".weight_scale": parts[".weight_scale"],
        ".weight_scale_2": factor.view(()),
        ".input_scale": torch.tensor(0.25),
    }
    table = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    rows = []
    for o, row in enumerate(parts[".weight_packed"].tolist()):
        halves = [half for byte in row for half in (byte & 15, byte >> 4)]
        values = [table[half & 7] * (-1 if half > 7 else 1) for half in halves]
        scales = (parts[".weight_scale"][o].float() * factor).tolist()
        rows.append([value * scales[i // 16] for i, value in enumerate(values)])
    return {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}, theirs, torch.tensor(rows)


E8M0 = torch.tensor([[2.0, 0.5], [0.125, 4.0]]).to(torch.float8_e8m0fnu)
BLOCKS = {"weight_block_size": [128, 128]}
FORMULAS: dict[str, Callable[[], Case]] = {
    "gptq": lambda: gptq(4, 16, "gptq", shuffled=False),
    "gptq desc_act": lambda: gptq(4, 16, "gptq", shuffled=True),
    "gptq v2": lambda: gptq(4, 32, "gptq_v2", shuffled=True),
    "gptq 8 bits": lambda: gptq(8, -1, "gptq", shuffled=False),
    "awq": awq,
    "fp8 blocks": lambda: fp8(torch.rand(2, 2), ".weight_scale_inv", **BLOCKS),
    "fp8 ue8m0": lambda: fp8(E8M0, ".weight_scale_inv", scale_fmt="ue8m0", **BLOCKS),
    "fp8 tensor": lambda: fp8(torch.tensor(0.3), ".weight_scale", activation_scheme="static"),
    "fp8 of Mistral": lambda: fp8(torch.tensor(0.3).bfloat16(), ".weight_scale_inv", weight_block_size=None),
    "fp8 output": lambda: fp8(torch.rand(130, 1), ".weight_scale"),
    "nvfp4 of ModelOpt": modelopt,
}


@pytest.mark.parametrize("name", FORMULAS)
def test_weights_are_as_the_published_formula_gives_them(name: str, tmp_path: Path) -> None:
    check(tmp_path, FORMULAS[name]())


WIDE = replace(LLAMA, hidden=128, heads=8, ffn_hidden=256, vocab_size=64)
"""A model whose layers have whole groups of 128 inputs."""


def exported(folder: Path, spec: ModelSpec = WIDE) -> tuple[dict[str, Tensor], Decoder]:
    """An unquantised folder of a random model, and its tensors."""
    model = built(spec, dtype=torch.float32)
    weights = dict(model.named_parameters())
    export_hf(folder, spec, weights.__getitem__, tokenizer=None, run_note="", dtype="fp32")
    return load_file(folder / "model.safetensors"), model


def rewrite(folder: Path, tensors: Parts, quantization: dict[str, Any] | None) -> None:
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))


PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True},
        }
    },
}
DYNAMIC = {"quant_method": "fp8", "activation_scheme": "dynamic", "modules_to_not_convert": ["lm_head"]}


def packed_in_4_bits(tensors: Parts) -> dict[str, Tensor]:
    """Replace the layers' weights of a folder by int4 numbers in groups of 32; returns what they mean."""
    read = {}
    for name in [name for name in tensors if "_proj.weight" in name]:
        weight = tensors.pop(name)
        scale = weight.unflatten(1, (-1, 32)).abs().amax(2) / 7
        numbers = (weight.unflatten(1, (-1, 32)) / scale[..., None]).round().clamp(-8, 7)
        tensors[f"{name}_packed"] = words((numbers.flatten(1) + 8).long(), 4)
        tensors[f"{name}_scale"], tensors[f"{name}_shape"] = scale, torch.tensor(weight.shape)
        read[name] = (numbers * scale[..., None]).flatten(1)
    return read


def in_fp8(tensors: Parts, *, per_output: bool) -> dict[str, Tensor]:
    """Replace the layers' weights of a folder by fp8 numbers; the scales of a layer's tensors differ. Returns what they mean."""
    read = {}
    for name in [name for name in tensors if "_proj.weight" in name]:
        largest = tensors[name].abs().amax(1, keepdim=True) if per_output else tensors[name].abs().amax()
        scale = largest / 448
        tensors[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = scale
        read[name] = tensors[name].float() * scale
    return read


IN_BLOCKS = {**DYNAMIC, "weight_block_size": [128, 128]}
BLOCKS_WIDE = replace(WIDE, hidden=256, heads=2, kv_heads=1, head_dim=128, ffn_hidden=512)
"""A model whose fused weights begin with whole blocks."""


def in_blocks(tensors: Parts) -> dict[str, Tensor]:
    """Replace the layers' weights of a folder by fp8 numbers with a scale for each block of 128 × 128. Returns what they mean."""
    read = {}
    for name in [name for name in tensors if "_proj.weight" in name]:
        outer, inner = tensors[name].shape
        scale = torch.rand(-(-outer // 128), -(-inner // 128)) * 0.001 + 0.001
        whole = scale.repeat_interleave(128, 0)[:outer].repeat_interleave(128, 1)[:, :inner]
        tensors[name] = (tensors[name] / whole).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scale
        read[name] = tensors[name].float() * whole
    return read


def test_a_folder_in_4_bits_is_read_by_rows_and_its_layers_are_fused(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    tensors, _ = exported(folder)
    read = {**tensors, **packed_in_4_bits(tensors)}
    rewrite(folder, tensors, PACKED)
    spec, reader = import_hf(folder)
    layer = "model.layers.1.self_attn"
    whole = torch.cat([read[f"{layer}.{part}_proj.weight"] for part in "qkv"])
    qkv = next(parameter for parameter in parameters(spec) if parameter.name == "layers.1.attention.qkv.weight")
    assert torch.equal(reader.read(qkv), whole) and torch.equal(reader.read_rows(qkv, 100, 161), whole[100:161])
    assert reader.native(qkv) is None


@pytest.mark.parametrize("per_output", [True, False])
def test_fused_layers_keep_a_scale_for_each_output(per_output: bool, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    tensors, _ = exported(folder)
    read = in_fp8(tensors, per_output=per_output)
    rewrite(folder, tensors, DYNAMIC)
    spec, reader = import_hf(folder)
    qkv = next(parameter for parameter in parameters(spec) if parameter.name == "layers.0.attention.qkv.weight")
    assert reader.native(qkv) == "fp8"
    values, scale = reader.read_rounded(qkv, 3, 150)
    whole = torch.cat([read[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv"])
    assert values.dtype == torch.float8_e4m3fn and scale.shape == (147, 1)
    assert torch.equal(values.float() * scale, whole[3:150]) and torch.equal(
        reader.read_rows(qkv, 3, 150), whole[3:150]
    )
    embed = next(parameter for parameter in parameters(spec) if parameter.name == "embed.weight")
    assert reader.native(embed) is None


def in_mxfp4(folder: Path) -> tuple[Parts, dict[str, Tensor]]:
    """A folder of a small gpt-oss as released, with random experts: its tensors, and the experts as a bf16 folder has them."""
    tensors, _ = exported(folder, replace(GPT_OSS, hidden=64, expert_hidden=32))
    torch.manual_seed(0)
    read = {}
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(122, 125, (experts, outputs, inputs // 32), dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
        halves = torch.stack((table[(blocks & 15).long()], table[(blocks >> 4).long()]), -1).flatten(-2)
        read[name] = (halves * 2.0 ** (scales.float() - 127)[..., None]).flatten(-2).mT
    rewrite(
        folder, tensors, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    )
    return tensors, read


def test_gpt_oss_as_released_is_read_as_its_bf16_folder(tmp_path: Path) -> None:
    released, plain = tmp_path / "released", tmp_path / "plain"
    tensors, read = in_mxfp4(released)
    exported(plain, replace(GPT_OSS, hidden=64, expert_hidden=32))
    others = {name: value for name, value in tensors.items() if not name.endswith(("_blocks", "_scales"))}
    rewrite(plain, others | read, None)
    (spec, ours), (_, theirs) = import_hf(released), import_hf(plain)
    assert all(torch.equal(ours.read(parameter), theirs.read(parameter)) for parameter in parameters(spec))
    gate_up = next(parameter for parameter in parameters(spec) if parameter.name.endswith("gate_up"))
    assert torch.equal(ours.read_rows(gate_up, 1, 3), theirs.read(gate_up)[1:3])


@pytest.mark.slow
def test_gpt_oss_as_released_has_the_logits_of_transformers(tmp_path: Path) -> None:
    """Experts in mxfp4, with gates and ups that alternate; transformers expands them."""
    from transformers import AutoModelForCausalLM, Mxfp4Config

    in_mxfp4(tmp_path / "out")
    ours = load_model(tmp_path / "out", CPU, torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, quantization_config=Mxfp4Config(dequantize=True)
    )
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, atol=2e-3, rtol=1e-3)


def compressed_folder(folder: Path) -> Parts:
    """A folder whose layers are in two schemes: GPTQ's index and packed zero points have to be in range."""
    tensors, _ = exported(folder, replace(WIDE, layers=1))
    packed_in_4_bits(tensors)
    rewrite(folder, tensors, PACKED)
    return tensors


def gptq_folder(folder: Path) -> Parts:
    tensors, _ = exported(folder, replace(WIDE, layers=1))
    for name in [name for name in tensors if "_proj.weight" in name]:
        outputs, inputs = tensors.pop(name).shape
        base = name.removesuffix(".weight")
        tensors[f"{base}.qweight"] = torch.zeros(inputs // 8, outputs, dtype=torch.int32)
        tensors[f"{base}.qzeros"] = torch.zeros(inputs // 32, outputs // 8, dtype=torch.int32)
        tensors[f"{base}.scales"] = torch.ones(inputs // 32, outputs, dtype=torch.float16)
        tensors[f"{base}.g_idx"] = torch.arange(inputs, dtype=torch.int32) // 32
    rewrite(folder, tensors, {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True})
    return tensors


UP = "model.layers.0.mlp.up_proj"
BAD: list[tuple[Callable[[Path], Parts], Callable[[Parts], Any], str]] = [
    (
        compressed_folder,
        lambda t: t.pop(f"{UP}.weight_scale"),
        r"no tensor .*up_proj\.weight_scale, which the scheme int4 in g",
    ),
    (
        compressed_folder,
        lambda t: t.pop(f"{UP}.weight_packed"),
        r"no tensor .*up_proj\.weight, which config\.json calls for",
    ),
    (
        compressed_folder,
        lambda t: t.update({f"{UP}.weight_zero_point": torch.zeros(32, 4, dtype=torch.int32)}),
        r"model\.safetensors: .*up_proj\.weight_zero_point has no place beside its weight by quantization_config .*int4",
    ),
    (
        compressed_folder,
        lambda t: t.update({f"{UP}.weight_scale": torch.ones(256, 2)}),
        r"weight_scale: expected shape \(256, 4\) by config\.json and the scheme int4 in groups of 32, got \(256, 2\)",
    ),
    (
        compressed_folder,
        lambda t: t.update({f"{UP}.weight_shape": torch.tensor([256, 64])}),
        r"weight_shape: expected \(256, 128\) by config\.json, got \(256, 64\)",
    ),
    (
        compressed_folder,
        lambda t: t.update({f"{UP}.weight_packed": t[f"{UP}.weight_packed"].float()}),
        r"weight_packed: expected I32 by the scheme int4 in groups of 32, got F32",
    ),
    (gptq_folder, lambda t: t[f"{UP}.g_idx"].fill_(4), r"g_idx: expected groups from 0 to 3, got 4 to 4"),
    (gptq_folder, lambda t: t[f"{UP}.g_idx"].fill_(-1), r"g_idx: expected groups from 0 to 3, got -1 to -1"),
    (
        gptq_folder,
        lambda t: t.update({f"{UP}.weight": torch.zeros(256, 128)}),
        r"up_proj\.\w+ has no place beside its weight by quantization_config .*gptq",
    ),
]


@pytest.mark.parametrize(("make", "change", "message"), BAD)
def test_stored_weights_that_cannot_be_are_refused_by_name(
    make: Callable[[Path], Parts], change: Callable[[Parts], Any], message: str, tmp_path: Path
) -> None:
    tensors = make(tmp_path / "out")
    change(tensors)
    save_file(tensors, tmp_path / "out" / "model.safetensors")
    with pytest.raises((BadInput, Damaged), match=message):
        spec, reader = import_hf(tmp_path / "out")
        for parameter in parameters(spec):
            reader.read(parameter)


def test_a_weight_that_config_json_lists_as_not_quantised_is_refused(tmp_path: Path) -> None:
    tensors = compressed_folder(tmp_path / "out")
    rewrite(tmp_path / "out", tensors, {**PACKED, "ignore": ["lm_head", "re:.*mlp.up_proj$"]})
    with pytest.raises(
        BadInput, match=r"re:\.\*mlp\.up_proj\$ is listed as not quantised, but model\.layers\.0\.mlp\.up"
    ):
        import_hf(tmp_path / "out")
    rewrite(tmp_path / "out", tensors, None)
    with pytest.raises(
        MeshwrightError, match=r"no tensor model\.layers\.0\.\w+\.\w+_proj\.weight, which config\.json calls for"
    ):
        import_hf(tmp_path / "out")


def test_declared_scales_of_the_cache_are_passed_over_and_said(tmp_path: Path) -> None:
    tensors = compressed_folder(tmp_path / "out")
    tensors["model.layers.0.self_attn.k_scale"] = torch.tensor(0.5)
    save_file(tensors, tmp_path / "out" / "model.safetensors")
    with pytest.raises(BadInput, match=r"self_attn\.k_scale has no place"):
        import_hf(tmp_path / "out")
    scheme = {"type": "float", "num_bits": 8, "symmetric": True, "strategy": "tensor", "dynamic": False}
    rewrite(tmp_path / "out", tensors, {**PACKED, "kv_cache_scheme": scheme})
    assert any("1 scales of cached keys" in remark for remark in import_hf(tmp_path / "out")[1].remarks())


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "gptq", "bits": 3, "group_size": 128}, r"quantization_config: bits: expected 4 or 8, got 3"),
    (
        {"quant_method": "gptqq"},
        r"quantization_config: quant_method: expected one of fp8, .* \(nearest: gptq\), or unqu",
    ),
    ({"quant_method": "awq", "bits": 4, "version": "gemv"}, r"quantization_config: version: expected gemm, got 'gemv'"),
    (
        {"quant_method": "fp8", "rounding": "up"},
        r"quantization_config: rounding: expected a key that this family reads",
    ),
    (
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        r"load_in_4bit: expected true: 8-bit folders of bitsandbytes",
    ),
    ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, r"quant_algo: expected FP8 or NVFP4, got 'W4A8_AWQ'"),
    (
        {**PACKED, "format": "marlin-24"},
        r"config_groups: group_0: format: expected one of float-quantized, .*, got 'marlin-24'",
    ),
    ({**PACKED, "sparsity_config": {"format": "24"}}, r"sparsity_config: expected none: sparse and rotated weights"),
    ({**DYNAMIC, "kv_cache_scheme": {"type": "int", "num_bits": 4}}, r"kv_cache_scheme: expected 8-bit floats, got"),
    (
        {"quant_method": "fp8", "weight_block_size": [128, -1]},
        r"weight_block_size: expected rows and columns of a block",
    ),
]


@pytest.mark.parametrize(("config", "message"), REFUSED)
def test_what_is_not_read_is_refused_with_what_is(config: dict[str, Any], message: str) -> None:
    with pytest.raises(
        BadInput, match=r"^config\.json: quantization_config: .*" + message.removeprefix("quantization_config: ")
    ):
        read_quantization({"quantization_config": config}, "config.json")


def test_gguf_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "model-q4.gguf").write_bytes(b"GGUF")
    for path in (tmp_path, tmp_path / "model-q4.gguf"):
        with pytest.raises(
            BadInput, match=r"model-q4\.gguf is GGUF, which is not read: take the folder from which it was made"
        ):
            import_hf(path)


def test_patterns_of_a_folder_take_no_long_time() -> None:
    """A pattern that would backtrack is not compared."""
    found = read_quantization(
        {"quantization_config": {**PACKED, "ignore": ["re:(a+)+$", "re:" + ".*a" * 9]}}, "config.json"
    )
    assert found is not None and found.ignores("a" * 60 + "b") is None


def mutate(draw: random.Random, header: dict[str, Any], data: bytearray, config: dict[str, Any]) -> None:
    """Change a dtype, shape, offset, name, an index or a value of the configuration."""
    name = draw.choice([key for key in header if key != "__metadata__"])
    entry = header[name]
    kind = draw.randrange(7)
    odd = draw.choice([-1, 0, 1, 3, 7, 31, 33, 127, 129, 2**31, 2**63, 2**70, None, "8", [], 1.5, True])
    if kind == 0:
        entry["dtype"] = draw.choice(["F32", "BF16", "I32", "I8", "U8", "F8_E4M3", "F8_E8M0", "I64", "F4", "BOOL"])
    elif kind == 1 and entry["shape"]:
        entry["shape"][draw.randrange(len(entry["shape"]))] = odd
    elif kind == 2:
        entry["data_offsets"][draw.randrange(2)] = odd
    elif kind == 3:
        header[name + draw.choice(["x", "_scale", ".absmax"])] = header.pop(name)
    elif kind == 4:
        start = draw.randrange(len(data))
        data[start : start + 64] = draw.randbytes(len(data[start : start + 64]))
    elif kind == 5:
        entry["shape"] = entry["shape"][::-1] if draw.random() < 0.5 else [*entry["shape"], 1]
    else:
        inner: Any = config["quantization_config"]
        while isinstance(inner, dict) and draw.random() < 0.8:
            key = draw.choice(list(inner))
            if not isinstance(inner[key], dict):
                inner[key] = odd
                return
            inner = inner[key]


@pytest.mark.parametrize("count", [150, pytest.param(10_000, marks=pytest.mark.slow)])
def test_changed_headers_shapes_and_indices_are_refused_or_read_inside(count: int, tmp_path: Path) -> None:
    """Every change ends in a named error or in weights of the right shape: nothing is read outside of a tensor."""
    draw = random.Random(0)
    cases = []
    for number, make in enumerate((compressed_folder, gptq_folder)):
        folder = tmp_path / str(number)
        make(folder)
        content = (folder / "model.safetensors").read_bytes()
        length = int.from_bytes(content[:8], "little")
        cases.append((folder, json.loads(content[8 : 8 + length]), content[8 + length :]))
    configs = [json.loads((folder / "config.json").read_text()) for folder, _, _ in cases]
    refused = 0
    for _ in range(count):
        number = draw.randrange(len(cases))
        folder, header, data = cases[number]
        header, config, values = copy.deepcopy(header), copy.deepcopy(configs[number]), bytearray(data)
        for _ in range(draw.choice((1, 1, 2, 3))):
            mutate(draw, header, values, config)
        text = json.dumps(header).encode()
        (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + values)
        (folder / "config.json").write_text(json.dumps(config))
        try:
            spec, reader = import_hf(folder)
            for parameter in parameters(spec):
                assert reader.read(parameter).shape == parameter.shape
        except MeshwrightError as error:
            refused += 1
            assert len(str(error)) < 2000
    assert count / 2 < refused < count
