"""GPU: weights in 8 bits, an fp8 cache, and results that do not depend on the batch, of kernels and of the engine."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.kernels.test_row_quantize import assert_same, draws
from tests.models.tiny import GPT2, LLAMA, QWEN3, QWEN3_MOE, SLIDING, built
from tests.serve.helpers import PROMPTS, record_logits, texts
from torch import Tensor

from meshwright.kernels import row_quantize
from meshwright.kernels.add_norm import add_rms_norm
from meshwright.kernels.fixed_matmul import FEW_ROWS, FEW_TOKENS, fixed_linear, fp8_linear, inner_splits, is_few
from meshwright.kernels.fp8_matmuls import Fp8Matrix, quantize
from meshwright.kernels.int8_matmuls import Int8Matrix, grouped_int8, int8_linear
from meshwright.kernels.linear import Linear
from meshwright.kernels.swiglu import gated_activation
from meshwright.models.decoder import Decoder
from meshwright.serve.engine import Engine
from meshwright.spec.engine import EngineOptions
from meshwright.spec.errors import BadInput

pytestmark = pytest.mark.gpu

SHAPES = [(4096, 6144), (14336, 4096), (4096, 4096), (512, 1000), (1024, 128256)]
"""(inputs, outputs) of matmuls: with and without parts, outputs that do not fill the last tile."""
WIDE = {
    name: replace(spec, hidden=256, heads=8, kv_heads=spec.kv_heads * 2, head_dim=32, ffn_hidden=512, vocab_size=512)
    for name, spec in {"llama": LLAMA, "qwen3": QWEN3, "gpt2": GPT2, "sliding": SLIDING, "qwen3 moe": QWEN3_MOE}.items()
}
WIDE["qwen3 moe"] = replace(WIDE["qwen3 moe"], expert_hidden=96)
"""Families with widths that fp8 matmuls take."""
FORMATS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8 weights": {"weights": "fp8"},
    "fp8 cache": {"kv_cache": "fp8"},
    "fp8": {"weights": "fp8", "kv_cache": "fp8"},
    "int8 weights": {"weights": "int8"},
}


@pytest.fixture(autouse=True)
def multiplies_fp8() -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs Ada, Hopper or later")


def operands(tokens: int, inner: int, outer: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator("cuda").manual_seed(0)
    x, weight, bias = (
        torch.randn(size, generator=draw, device="cuda") for size in ((tokens, inner), (outer, inner), (outer,))
    )
    return x.to(dtype), weight.to(dtype), bias.to(dtype)


def rounded(x: Tensor) -> Fp8Matrix:
    return quantize(x, "rowwise")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("inner", "outer"), SHAPES[2:4])
def test_fixed_matmul(inner: int, outer: int, dtype: torch.dtype) -> None:
    for tokens in (1, 20, 300):
        x, weight, bias = operands(tokens, inner, outer, dtype)
        exact = x.double() @ weight.double().t() + bias.double()
        bound = torch.finfo(dtype).eps * float(exact.abs().max()) + 1e-3
        torch.testing.assert_close(fixed_linear(x, weight, bias).double(), exact, rtol=0, atol=bound)


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize(("inner", "outer"), SHAPES)
def test_bits_of_a_matmul_do_not_depend_on_the_number_of_tokens(inner: int, outer: int, fp8: bool) -> None:
    """Numbers of tokens that take each of the tiles, with a program for each part and with one for all."""
    x, weight, bias = operands(600, inner, outer)
    weight_fp8 = rounded(weight)

    def matmul(x: Tensor) -> Tensor:
        if fp8:
            return fp8_linear(rounded(x), weight_fp8, bias, torch.bfloat16, invariant=True)
        return fixed_linear(x, weight, bias)

    whole = matmul(x)
    for begin, count in ((0, 1), (7, 1), (500, 2), (3, 17), (100, 64), (0, 65), (1, 129), (299, 257)):
        assert torch.equal(matmul(x[begin : begin + count]), whole[begin : begin + count]), (begin, count)


@pytest.mark.parametrize("tokens", [1, 5, 33, FEW_TOKENS, FEW_TOKENS + 1, 300])
@pytest.mark.parametrize(("inner", "outer"), SHAPES[:3])
def test_fp8_matmul(inner: int, outer: int, tokens: int) -> None:
    x, weight, bias = operands(tokens, inner, outer)
    a, b = rounded(x), rounded(weight)
    exact = (a.values.double() * a.scale) @ (b.values.double() * b.scale).t() + bias.double()
    out = fp8_linear(a, b, bias, torch.bfloat16)
    assert out.dtype == torch.bfloat16
    assert (out.double() - exact).norm() < 5e-3 * exact.norm() + 1e-3


@pytest.mark.parametrize("tokens", [1, 5, 33, 100, 300])
@pytest.mark.parametrize(("inner", "outer"), [*SHAPES[:4], (1000, 70)])
def test_int8_matmul_is_that_of_a_cpu(inner: int, outer: int, tokens: int) -> None:
    """Of the same integers; scales and bias may be applied in one rounding more or less."""
    x, weight, bias = operands(tokens, inner, outer)
    a, b = (row_quantize.quantize_rows(matrix, "int8") for matrix in (x, weight))
    assert isinstance(a, Int8Matrix) and isinstance(b, Int8Matrix)
    on_host = [Int8Matrix(matrix.values.cpu(), matrix.scale.cpu()) for matrix in (a, b)]
    expected = int8_linear(*on_host, bias.cpu(), torch.float32)
    bound = 1e-6 * float(expected.abs().max())
    torch.testing.assert_close(int8_linear(a, b, bias, torch.float32).cpu(), expected, rtol=1e-5, atol=bound)


@pytest.mark.parametrize("tokens", [0, 6, 192, 3000])
@pytest.mark.parametrize("experts", [8, 64])
def test_grouped_int8_matmul_is_the_plain_one(experts: int, tokens: int) -> None:
    draw = torch.Generator().manual_seed(tokens)
    sizes = torch.bincount(torch.randint(experts, (tokens,), generator=draw) ** 2 // experts, minlength=experts)
    x, _, _ = operands(max(tokens, 1), 512, 16)
    a = row_quantize.quantize_rows(x[:tokens], "int8")
    matrices = row_quantize.quantize_rows(torch.randn(experts, 352, 512, device="cuda", dtype=torch.bfloat16), "int8")
    assert isinstance(a, Int8Matrix) and isinstance(matrices, Int8Matrix)
    offsets = sizes.cumsum(0).to("cuda", torch.int32)
    ours, reference = (
        grouped_int8(a, matrices, offsets, torch.float32, reference=reference) for reference in (False, True)
    )
    assert torch.equal(ours, reference)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1, 4096), (7, 1000), (3, 28672)])
def test_rounding_to_int8_is_that_of_a_cpu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = draws(*shape, dtype=dtype)
    ours, theirs = row_quantize.quantize_rows(x.cuda(), "int8"), row_quantize.quantize_rows(x, "int8")
    assert torch.equal(ours.values.cpu(), theirs.values) and torch.equal(ours.scale.cpu(), theirs.scale)


@pytest.mark.parametrize("tokens", [1, 4, 5, 16, 17])
def test_linear_layers_of_few_tokens_are_those_of_torch(tokens: int) -> None:
    layer = Linear(4096, 2048).to("cuda", torch.bfloat16)
    x, _, _ = operands(tokens, 4096, 16)
    with torch.no_grad():
        assert is_few(x, layer.weight) == (tokens <= FEW_ROWS)
        ours = layer(x)
    assert not is_few(x, layer.weight), "with gradients torch multiplies"
    torch.testing.assert_close(ours, layer(x).detach(), rtol=2**-7, atol=2**-7)


def test_parts_leave_no_arrivals() -> None:
    from meshwright.kernels.dependent_launch_triton import arrivals

    x, weight, _ = operands(3, 14336, 4096)
    assert inner_splits(4096, 14336, 2) > 1
    first = fixed_linear(x, weight)
    for _ in range(20):
        assert torch.equal(fixed_linear(x, weight), first)
    assert not arrivals(x.device).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1, 4096), (300, 4096), (7, 1000), (2, 14336), (3, 28672)])
def test_rounding_by_rows_is_that_of_a_cpu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Alone to the same bits; fused, the bits of the separate kernels' results."""
    x, delta, weight = (draws(*size, dtype=dtype) for size in (shape, shape, shape[-1:]))
    ours = row_quantize.quantize_rows(x.cuda())
    theirs = row_quantize.quantize_rows(x)
    assert_same(Fp8Matrix(ours.values.cpu(), ours.scale.cpu()), theirs)
    x, delta, weight = x.cuda(), delta.cuda(), weight.cuda() + 1
    total, normed = row_quantize.quantize_add_rms_norm(x, delta, weight, 1e-5)
    expected_total, expected = add_rms_norm(x, delta, weight, 1e-5)
    assert torch.equal(total, expected_total)
    near(normed, expected)
    gate_up = draws(*shape[:-1], 2 * shape[-1], dtype=dtype).cuda().clamp(-50, 50)
    near(row_quantize.quantize_gated(gate_up), gated_activation(gate_up))


def near(ours: Fp8Matrix, exact: Tensor) -> None:
    """e4m3 of numbers that differ from `exact` by the order of a sum at most."""
    error = (ours.values.float() * ours.scale - exact.float()).abs()
    assert (error <= exact.float().abs() * (2**-4 + 2**-6) + ours.scale * 2.0**-9).all()


def engine_of(model: Decoder, **options: Any) -> Engine:
    sizes = {"sequences": 4, "step_tokens": 16, "tokens_per_block": 16, "cache_blocks": 64, "context": 64}
    return Engine(copy.deepcopy(model), options=EngineOptions(**{**sizes, **options}))


def logits_of(engine: Engine) -> dict[int, Tensor]:
    seen = record_logits(engine)
    texts(engine)
    return {number: torch.stack(rows).float().cpu() for number, rows in seen.items()}


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("formats", list(FORMATS)[1:])
@pytest.mark.parametrize("name", ["llama", "gpt2", "sliding", "qwen3 moe"])
def test_logits_are_those_of_a_cpu_with_the_same_formats(name: str, formats: str, graphs: bool) -> None:
    """Not farther from the exact model than these formats on a CPU and bf16 without them, together."""
    exact = built(WIDE[name], dtype=torch.float32)
    model = copy.deepcopy(exact).to("cuda", torch.bfloat16)
    ours = error(engine_of(model, graphs=graphs, **FORMATS[formats]), exact)
    bound = error(engine_of(exact, **FORMATS[formats]), exact) + error(engine_of(model, graphs=graphs), exact)
    assert ours < 1.5 * bound


def error(engine: Engine, exact: Decoder) -> float:
    """Mean difference of the engine's logits from the exact model's."""
    seen, differences = record_logits(engine), []
    for number, (prompt, new) in enumerate(zip(PROMPTS, texts(engine), strict=True)):
        with torch.no_grad():
            truth = exact(torch.tensor([[*prompt, *new]]))[0, len(prompt) - 1 : -1]
        differences.append((torch.stack(seen[number]).float().cpu() - truth).abs().mean())
    return float(torch.stack(differences).mean())


@pytest.mark.parametrize("formats", ["bf16", "fp8"])
@pytest.mark.parametrize("name", WIDE)
def test_bits_do_not_depend_on_batches_chunks_and_preemption(name: str, formats: str) -> None:
    model = built(WIDE[name], dtype=torch.float32).to("cuda", torch.bfloat16)
    options = {**FORMATS[formats], "invariant": True}
    expected = logits_of(engine_of(model, **options))
    for sizes in (
        {"sequences": 1},
        {"step_tokens": 4, "graphs": False},
        {"step_tokens": 512, "overlap": False},
        {"cache_blocks": 6, "step_tokens": 7},
    ):
        engine = engine_of(model, **options, **sizes)
        ours = logits_of(engine)
        # Blocks that have left the window are free again, so six are enough for all texts.
        assert (engine._policy.preemptions > 0) == ("cache_blocks" in sizes and name != "sliding")
        assert all(torch.equal(ours[number], expected[number]) for number in range(len(PROMPTS))), sizes


def test_memory_of_rounded_weights_is_freed() -> None:
    spec = replace(WIDE["llama"], hidden=1024, ffn_hidden=4096, layers=4, head_dim=128)
    model = built(spec, dtype=torch.float32).to("cuda", torch.bfloat16)
    linear = sum(parameter.nbytes for name, parameter in model.named_parameters() if "layers" in name)
    before = torch.cuda.memory_allocated()
    engine = Engine(model, options=EngineOptions(sequences=1, cache_blocks=8, context=64, graphs=False, weights="fp8"))
    assert torch.cuda.memory_allocated() - before < -0.4 * linear
    assert engine.unfinished == 0


def test_sizes_that_fp8_does_not_multiply_are_refused() -> None:
    model = built(replace(LLAMA, ffn_hidden=100), dtype=torch.float32).to("cuda", torch.bfloat16)
    with pytest.raises(BadInput, match=r"multiples of 16, got gate_up of 200 × 64"):
        engine_of(model, weights="fp8")
