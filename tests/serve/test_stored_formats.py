"""The engine on folders with quantised weights: computed as stored or expanded, beside the expanded model of the trainer."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from meshwright.checkpoint.models.single_device import load_model
from meshwright.checkpoint.models.stored_model import open_model
from meshwright.kernels.block_matmuls import Fp8Blocks, block_values, group_values, quantize_groups
from meshwright.kernels.fp8_matmuls import quantize
from meshwright.kernels.linear import Linear
from meshwright.models.decoder import Decoder
from meshwright.parallel.tensor_inference import divide_for_inference
from meshwright.serve.formats import rounded_parameters, use_formats, use_stored_formats
from meshwright.serve.load import fill, load_for_engine, loading_sentence, planned_model, weight_bytes
from meshwright.serve.quantized_layers import QuantizedLinear
from meshwright.serve.weight_sums import weight_sums
from meshwright.spec.engine import EngineOptions
from meshwright.spec.errors import OutOfResources
from meshwright.spec.layout import WHOLE, AxisPart
from meshwright.spec.model import ModelSpec
from tests.checkpoint.test_quantized import (
    BLOCKS_WIDE,
    DYNAMIC,
    IN_BLOCKS,
    PACKED,
    WIDE,
    exported,
    in_blocks,
    in_fp8,
    packed_in_4_bits,
    rewrite,
)
from tests.serve.helpers import engine_of
from tests.serve.test_formats import SAME, errors

CPU = torch.device("cpu")


def fp8_folder(folder: Path, *, per_output: bool, quantization: dict[str, Any] = DYNAMIC) -> dict[str, Tensor]:
    tensors, _ = exported(folder)
    read = in_fp8(tensors, per_output=per_output)
    rewrite(folder, tensors, quantization)
    return read


@pytest.mark.parametrize("per_output", [True, False])
def test_layers_multiply_the_stored_numbers(
    per_output: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not rounded again: fp8 folders have scales that are no powers of two."""
    read = fp8_folder(tmp_path / "out", per_output=per_output)
    options = EngineOptions(weights="fp8")
    model = load_for_engine(tmp_path / "out", CPU, torch.float32, options)
    layer = model.get_submodule("layers.0.mlp.gate_up")
    assert isinstance(layer, QuantizedLinear)
    whole = torch.cat([read[f"model.layers.0.mlp.{part}_proj.weight"] for part in ("gate", "up")])
    assert torch.equal(layer.values.float() * layer.scale, whole)
    said = capsys.readouterr().err
    assert (
        "weights: 14 weights in fp8 with a scale per" in said and "8 layers multiply them as stored, in 8 bits" in said
    )
    exact = load_model(tmp_path / "out", CPU, torch.float32)
    ours, spread = errors(engine_of(model, weights="fp8"), rounded_inputs(copy.deepcopy(exact)), exact)
    assert spread > 1e-3 and ours < SAME * spread


def block_folder(folder: Path, spec: ModelSpec = BLOCKS_WIDE) -> dict[str, Tensor]:
    tensors, _ = exported(folder, spec)
    read = in_blocks(tensors)
    rewrite(folder, tensors, IN_BLOCKS)
    return read


def test_layers_multiply_stored_blocks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    read = block_folder(tmp_path / "out")
    model = load_for_engine(tmp_path / "out", CPU, torch.float32, EngineOptions(weights="fp8"))
    layer = model.get_submodule("layers.0.attention.qkv")
    assert isinstance(layer, QuantizedLinear)
    whole = torch.cat([read[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv"])
    assert torch.equal(block_values(Fp8Blocks(layer.values, layer.scale)), whole)
    assert "8 layers multiply them as stored, in 8 bits" in capsys.readouterr().err
    exact = load_model(tmp_path / "out", CPU, torch.float32)
    ours, spread = errors(engine_of(model, weights="fp8"), rounded_inputs(copy.deepcopy(exact), blocks=True), exact)
    assert spread > 1e-3 and ours < SAME * spread


def test_a_fused_weight_whose_blocks_are_cut_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys begin within a block of the fused weight; the feed-forward networks multiply blocks."""
    block_folder(tmp_path / "out", WIDE)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("meshwright.serve.load._fits", lambda model, device: True)
    with open_model(tmp_path / "out") as stored:
        model = planned_model(stored, torch.device("cuda"), torch.bfloat16, EngineOptions())
        said = loading_sentence(stored, model, CPU, torch.bfloat16)
    assert set(rounded_parameters(model).values()) == {"fp8 blocks"}
    assert sorted(rounded_parameters(model)) == [
        f"layers.{layer}.mlp.{name}.weight" for layer in (0, 1) for name in ("down", "gate_up")
    ]
    assert (
        "4 layers are expanded to bf16 (ranks or fused weights cut the blocks of 2, such as layers.0.attention.qkv"
        in said
    )


def test_tensor_ranks_read_whole_blocks(tmp_path: Path) -> None:
    """Two ranks have whole blocks of a width of 512, four have parts of the one head's keys."""
    block_folder(tmp_path / "out")
    whole = load_for_engine(tmp_path / "out", CPU, torch.float32, EngineOptions(weights="fp8"))
    formats = rounded_parameters(whole)
    with open_model(tmp_path / "out") as stored:
        assert stored.format_of("layers.0.mlp.gate_up.weight", 4) == "fp8 blocks"
        assert stored.format_of("layers.0.mlp.gate_up.weight", 8) is None
        assert stored.cuts_blocks("layers.0.mlp.down.weight", 8) and not stored.cuts_blocks(
            "layers.0.mlp.down.weight", 4
        )
        parts = [dict(stored.tensors(AxisPart(index, 2), formats=formats)) for index in range(2)]
    for name, dim in (("gate_up", 0), ("down", 1)):
        halves = [part[f"layers.0.mlp.{name}.weight"] for part in parts]
        assert all(isinstance(half, Fp8Blocks) for half in halves)
        values = [block_values(Fp8Blocks(*half)) for half in halves]
        layer = whole.get_submodule(f"layers.0.mlp.{name}")
        assert isinstance(layer, QuantizedLinear)
        expected = block_values(Fp8Blocks(layer.values, layer.scale))
        if name == "gate_up":  # a rank has a part of the gates and one of the ups
            values = [torch.cat(pair) for pair in zip(*(half.split(256) for half in values), strict=True)]
        assert torch.equal(torch.cat(values, dim), expected)


def test_sums_of_weights_in_blocks_do_not_depend_on_the_ranks(tmp_path: Path) -> None:
    """Both ranks have the keys of the one head; each has a part of the scales of `down`."""
    block_folder(tmp_path / "out")
    whole = load_for_engine(tmp_path / "out", CPU, torch.float32, EngineOptions(weights="fp8"))
    total = 0
    with open_model(tmp_path / "out") as stored:
        for rank in range(2):
            with torch.device("meta"):
                model = Decoder(stored.spec)
            divide_for_inference(model, AxisPart(rank, 2), cast(dist.ProcessGroup, None))
            model.to(torch.float32)
            use_stored_formats(model, partial(stored.format_of, ranks=2), CPU, weights="fp8")
            model = model.to_empty(device="cpu")
            fill(model, stored, AxisPart(rank, 2))
            total = total + weight_sums(model, stored.spec, AxisPart(rank, 2))
        sums = weight_sums(whole, stored.spec, WHOLE)
    assert torch.equal(total, sums) and (sums[:, 1] != 0).sum() == 8


def rounded_inputs(model: Decoder, *, blocks: bool = False) -> Decoder:
    """The expanded model with activations rounded to fp8 with a scale for each token, in the layers of the blocks.

    With `blocks` each 128 numbers of a token have a scale.
    """

    def multiply(x: Tensor, layer: Linear) -> Tensor:
        if blocks:
            return F.linear(group_values(quantize_groups(x)), layer.weight, layer.bias)
        values, scale = quantize(x.flatten(0, -2), "rowwise")
        return F.linear((values.float() * scale).view(x.shape), layer.weight, layer.bias)

    for module in model.layers.modules():
        if isinstance(module, Linear):
            module.forward = partial(multiply, layer=module)
    return model


def test_without_a_gpu_stored_weights_are_expanded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fp8_folder(tmp_path / "out", per_output=True)
    model = load_for_engine(tmp_path / "out", CPU, torch.float32, EngineOptions())
    assert not rounded_parameters(model)
    assert "8 layers are expanded to fp32" in capsys.readouterr().err


@pytest.mark.parametrize(("capability", "layers"), [((9, 0), 8), ((8, 0), 0)])
def test_a_gpu_that_multiplies_fp8_takes_stored_weights(
    capability: tuple[int, int], layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fp8_folder(tmp_path / "out", per_output=True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr("meshwright.serve.load._fits", lambda model, device: True)
    with open_model(tmp_path / "out") as stored:
        model = planned_model(stored, torch.device("cuda"), torch.bfloat16, EngineOptions())
    assert len(rounded_parameters(model)) == layers


def test_weights_beside_activations_in_bf16_are_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding their activations would change the model."""
    group = {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
    }
    only = {"quant_method": "compressed-tensors", "format": "naive-quantized", "config_groups": {"group_0": group}}
    fp8_folder(tmp_path / "out", per_output=True, quantization=only)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("meshwright.serve.load._fits", lambda model, device: True)
    with open_model(tmp_path / "out") as stored:
        assert not rounded_parameters(planned_model(stored, torch.device("cuda"), torch.bfloat16, EngineOptions()))


def test_four_bits_are_expanded_or_rounded_to_8_with_the_loss_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors, _ = exported(tmp_path / "out")
    read = {**tensors, **packed_in_4_bits(tensors)}
    rewrite(tmp_path / "out", tensors, PACKED)
    model = load_for_engine(tmp_path / "out", CPU, torch.float32, EngineOptions())
    down = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(model.get_parameter("layers.1.mlp.down.weight"), read[down])
    said = capsys.readouterr().err
    assert "weights: 14 weights in int4 in groups of 32" in said and "8 layers are expanded to fp32" in said
    rounded = load_for_engine(tmp_path / "out", CPU, torch.float32, EngineOptions(weights="int8"))
    use_formats(model, weights="int8")
    ours, theirs = (each.get_submodule("layers.1.mlp.down") for each in (rounded, model))
    assert isinstance(ours, QuantizedLinear) and isinstance(theirs, QuantizedLinear)
    assert torch.equal(ours.values, theirs.values) and torch.equal(ours.scale, theirs.scale)
    assert "8 layers are rounded to int8, which adds 0.8% error" in capsys.readouterr().err


@pytest.mark.parametrize("number_format", ["fp8", "int8"])
def test_rounding_while_loading_has_the_bits_of_rounding_afterwards(number_format: Any, tmp_path: Path) -> None:
    exported(tmp_path / "out")
    options = EngineOptions(weights=number_format)
    at_once = load_for_engine(tmp_path / "out", CPU, torch.bfloat16, options)
    later = load_model(tmp_path / "out", CPU, torch.bfloat16)
    use_formats(later, weights=number_format)
    ours, theirs = at_once.state_dict(), later.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name].view(torch.uint8), theirs[name].view(torch.uint8)) for name in ours)


def test_newer_weights_of_a_folder_are_taken_as_stored(tmp_path: Path) -> None:
    fp8_folder(tmp_path / "old", per_output=True)
    read = fp8_folder(tmp_path / "new", per_output=False)
    options = EngineOptions(weights="fp8")
    engine = engine_of(load_for_engine(tmp_path / "old", CPU, torch.float32, options), weights="fp8")
    engine.load_weights(tmp_path / "new")
    down = engine._model.get_submodule("layers.0.mlp.down")
    assert isinstance(down, QuantizedLinear)
    assert torch.equal(down.values.float() * down.scale, read["model.layers.0.mlp.down_proj.weight"])


def test_newer_weights_of_layers_in_blocks_are_taken_as_stored_or_rounded_to_blocks(tmp_path: Path) -> None:
    block_folder(tmp_path / "old")
    read = block_folder(tmp_path / "new")
    plain, _ = exported(tmp_path / "plain", BLOCKS_WIDE)
    engine = engine_of(
        load_for_engine(tmp_path / "old", CPU, torch.float32, EngineOptions(weights="fp8")), weights="fp8"
    )
    down = engine._model.get_submodule("layers.0.mlp.down")
    assert isinstance(down, QuantizedLinear) and down.number_format == "fp8 blocks"
    engine.load_weights(tmp_path / "new")
    name = "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(block_values(Fp8Blocks(down.values, down.scale)), read[name])
    engine.load_weights(tmp_path / "plain")
    rounded = block_values(Fp8Blocks(down.values, down.scale))
    assert 0.01 < (rounded - plain[name]).norm() / plain[name].norm() < 0.04


def test_a_model_that_does_not_fit_in_bf16_is_rounded_to_8_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors, _ = exported(tmp_path / "out")
    packed_in_4_bits(tensors)
    rewrite(tmp_path / "out", tensors, PACKED)
    with open_model(tmp_path / "out") as stored:
        options = EngineOptions()
        monkeypatch.setattr("meshwright.serve.load._formats_of", lambda device: ["int8", "fp8"])
        whole = weight_bytes(planned_model(stored, CPU, torch.bfloat16, options))
        monkeypatch.setattr("meshwright.serve.load._fits", lambda model, device: weight_bytes(model) < whole)
        assert set(rounded_parameters(planned_model(stored, CPU, torch.bfloat16, options)).values()) == {"int8"}
        assert "8 layers are rounded to int8, which adds 0.8% error" in capsys.readouterr().err
        monkeypatch.setattr("meshwright.serve.load._fits", lambda model, device: False)
        monkeypatch.setattr("meshwright.serve.load._free", lambda device: 1000)
        with pytest.raises(OutOfResources, match=r"weights of .* GB in bf16, .* GB in 8 bits do not fit cpu"):
            planned_model(stored, CPU, torch.bfloat16, options)
