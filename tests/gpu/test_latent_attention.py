"""GPU: latent attention in the engine, and its compiled kernels against the plain references, with DeepSeek's sizes."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.models.tiny import DEEPSEEK_LITE, DEEPSEEK_V3, built
from tests.serve.helpers import PROMPTS, record_logits, texts
from torch import Tensor

from meshwright.kernels.latent_attention import latent_attention, rotate_and_write_latents
from meshwright.kernels.rope import rotary_tables
from meshwright.serve.engine import Engine
from meshwright.spec.engine import EngineOptions
from meshwright.spec.errors import BadInput

pytestmark = pytest.mark.gpu

E4M3 = torch.float8_e4m3fn
CASES = [
    (torch.bfloat16, 16, 512, 64, 64),
    (torch.bfloat16, 128, 512, 64, 64),
    (torch.bfloat16, 16, 512, 64, 16),
    (torch.bfloat16, 20, 96, 32, 32),
    (torch.float16, 16, 512, 64, 64),
    (torch.float32, 16, 512, 64, 16),
]
"""(dtype, heads, rank, rotated, tokens of a block): each compiles its own kernels."""
LENGTHS = [1000, 1, 64, 0, 129, 2048, 77]
SCALE = 0.1
WIDE = {"kv_rank": 32, "rope_head_dim": 16, "head_dim": 32, "value_head_dim": 16}
SPECS = {"v3": replace(DEEPSEEK_V3, **WIDE), "lite": replace(DEEPSEEK_LITE, **WIDE)}


class Step:
    """A layer's cache, NaN in all places that a sequence does not use, and the tensors of a step."""

    def __init__(
        self, lengths: list[int], counts: list[int], heads: int, rank: int, rotated: int, block: int, dtype: torch.dtype
    ) -> None:
        draw = torch.Generator("cuda").manual_seed(0)
        needed = [-(-length // block) for length in lengths]
        order = torch.randperm(sum(needed) + 1, generator=draw, device="cuda", dtype=torch.int32)
        self.tables = torch.full((len(lengths), max(needed)), -(2**30), dtype=torch.int32, device="cuda")
        width = rank + rotated
        self.layer = torch.full((len(order), 3, block, width), torch.nan, dtype=dtype, device="cuda")[:, 1]
        used = 0
        for sequence, length in enumerate(lengths):
            self.tables[sequence, : needed[sequence]] = order[used : used + needed[sequence]]
            used += needed[sequence]
            position = torch.arange(length, device="cuda")
            blocks = self.tables[sequence, position // block].long()
            rows = torch.randn(length, width, generator=draw, device="cuda").to(dtype)
            self.layer[blocks, position % block] = rows
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        self.starts = torch.tensor([0, *counts], device="cuda").cumsum(0).int()
        total = sum(counts)
        self.q = torch.randn(heads, total, rank, generator=draw, device="cuda").to(dtype).transpose(0, 1)
        self.rotary = torch.randn(total, heads, rotated, generator=draw, device="cuda").to(dtype)

    def attention(self, decodes: int = 0) -> Tensor:
        step = (self.layer, self.tables, self.lengths, self.starts)
        return latent_attention(self.q, self.rotary, *step, scale=SCALE, decodes=decodes)

    def agrees(self, out: Tensor) -> None:
        """`out` is the plain reference in fp64 on the same numbers, within the rounding of the weights and of the result."""
        layer = self.layer.float() if self.layer.dtype == E4M3 else self.layer
        step = (layer.double(), self.tables, self.lengths, self.starts)
        exact = latent_attention(self.q.double(), self.rotary.double(), *step, scale=SCALE, reference=True)
        bound = max(torch.finfo(out.dtype).eps, 1e-5) * float(exact.abs().max())
        torch.testing.assert_close(out.double(), exact, rtol=0, atol=bound)


@pytest.mark.parametrize(("dtype", "heads", "rank", "rotated", "block"), CASES)
def test_decode(dtype: torch.dtype, heads: int, rank: int, rotated: int, block: int) -> None:
    step = Step(LENGTHS, [1] * len(LENGTHS), heads, rank, rotated, block, dtype)
    step.agrees(step.attention(len(LENGTHS)))
    many = Step([300] * 80, [1] * 80, heads, rank, rotated, block, dtype)  # few splits
    many.agrees(many.attention(80))


@pytest.mark.parametrize(("dtype", "heads", "rank", "rotated", "block"), CASES)
def test_decodes_and_chunks(dtype: torch.dtype, heads: int, rank: int, rotated: int, block: int) -> None:
    """A step of two decodes and chunks at the begin, in the middle and at the end of prompts."""
    lengths, counts = [700, 65, 300, 1000, 3, 128, 77], [1, 1, 300, 121, 1, 64, 77]
    step = Step(lengths, counts, heads, rank, rotated, block, dtype)
    step.agrees(step.attention(2))
    step.agrees(step.attention())


def test_fp8_cache() -> None:
    step = Step([200, 250, 90], [1, 1, 60], 16, 512, 64, 64, torch.bfloat16)
    step.layer = step.layer.nan_to_num(0.0).to(E4M3)
    exact, out = (
        latent_attention(
            step.q.float(),
            step.rotary.float(),
            step.layer,
            step.tables,
            step.lengths,
            step.starts,
            scale=SCALE,
            reference=True,
        ),
        step.attention(2),
    )
    torch.testing.assert_close(out.float(), exact, rtol=0, atol=2**-7 * float(exact.abs().max()))


def test_one_graph_for_all_lengths() -> None:
    """A captured decode replays for other lengths, without a copy to the host."""
    step = Step(LENGTHS, [1] * len(LENGTHS), 16, 512, 64, 64, torch.bfloat16)
    step.attention(len(LENGTHS))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step.attention(len(LENGTHS))
    for lengths in (LENGTHS, [5, 1, 10, 0, 100, 1500, 64], [0] * len(LENGTHS)):
        step.lengths.copy_(torch.tensor(lengths))
        graph.replay()
        if any(lengths):
            step.agrees(out)
        else:
            assert not out.any(), "padding gives zeros"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, E4M3])
@pytest.mark.parametrize(("heads", "rank", "rotated"), [(16, 512, 64), (128, 512, 64), (20, 96, 32)])
def test_rotation_and_write(heads: int, rank: int, rotated: int, dtype: torch.dtype) -> None:
    """The bits of the plain reference, which rotates as the trainer does; an fp8 cache is written from bf16."""
    tokens, block, wide = 300, 64, torch.bfloat16 if dtype == E4M3 else dtype
    draw = torch.Generator("cuda").manual_seed(0)
    q = torch.randn(tokens, heads, 40 + rotated, generator=draw, device="cuda").to(wide)[..., 40:]
    down = (8 * torch.randn(tokens, rank + rotated, generator=draw, device="cuda")).to(wide)
    latent, key = down[:, :rank], down[:, rank:]
    positions = torch.randint(0, 8192, (tokens,), generator=draw, device="cuda", dtype=torch.int32)
    slots = torch.randperm(400, generator=draw, device="cuda")[:tokens]
    slots[::7] = -1
    cos, sin = rotary_tables(torch.arange(8192, device="cuda"), rotated, 5e5, None, wide)
    tables = cos[0, :, 0], sin[0, :, 0]
    caches = torch.zeros(2, 7, 2, block, rank + rotated, device="cuda").to(dtype)
    ours, expected = (
        rotate_and_write_latents(q, key, latent, tables, positions, caches[index, :, 1], slots, reference=index == 1)
        for index in (0, 1)
    )
    assert torch.equal(ours[0], expected[0]) and torch.equal(ours[1], expected[1])
    assert torch.equal(caches[0].view(torch.uint8), caches[1].view(torch.uint8)) and caches[0].float().any()


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("name", SPECS)
def test_logits_are_within_the_bf16_spread_of_the_trainer(name: str, graphs: bool) -> None:
    exact = built(SPECS[name], dtype=torch.float32)
    model = copy.deepcopy(exact).to("cuda", torch.bfloat16)
    sizes: dict[str, Any] = {
        "sequences": 4,
        "step_tokens": 16,
        "tokens_per_block": 16,
        "cache_blocks": 64,
        "context": 64,
    }
    engine = Engine(copy.deepcopy(model), options=EngineOptions(**sizes, graphs=graphs))
    seen = record_logits(engine)
    for number, (prompt, new) in enumerate(zip(PROMPTS, texts(engine), strict=True)):
        whole = torch.tensor([[*prompt, *new]])
        with torch.no_grad():
            truth = exact(whole)[0, len(prompt) - 1 : -1]
            trained = model(whole.cuda())[0, len(prompt) - 1 : -1].float().cpu()
        # Another choice of experts changes a token's logits altogether, in the trainer too; so the means are compared.
        error = (torch.stack(seen[number]).float().cpu() - truth).abs().mean()
        assert error < 2 * (trained - truth).abs().mean() + 0.02
    assert not engine.unfinished


def test_a_long_prompt_takes_the_training_form_and_the_absorbed_one() -> None:
    """In fp32: 1,024 tokens attend without the cache, the other ones and decodes with it."""
    model = built(replace(SPECS["v3"], max_seq_len=2048), dtype=torch.float32).cuda()
    options = EngineOptions(sequences=2, tokens_per_block=16, cache_blocks=256, context=2048)
    draws = random.Random(0)
    prompt = [draws.randrange(100) for _ in range(1300)]
    engine = Engine(copy.deepcopy(model), options=options)
    seen = record_logits(engine)
    [new] = texts(engine, [prompt])
    with torch.no_grad():
        whole = model(torch.tensor([[*prompt, *new]]).cuda())[0, len(prompt) - 1 : -1]
    assert (torch.stack(seen[0]) - whole).abs().max() < 2e-3


def test_no_kernel_is_compiled_after_the_engine_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compilation takes about a second, in which all requests wait."""
    from triton import knobs

    model = built(SPECS["v3"], dtype=torch.float32).to("cuda", torch.bfloat16)
    options = EngineOptions(sequences=12, step_tokens=64, tokens_per_block=16, cache_blocks=128, context=64)
    engine = Engine(model, options=options)
    compiled: list[str] = []
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **call: compiled.append(call["fn"].name))
    draws = random.Random(0)
    for _ in range(60):
        for _ in range(draws.randrange(3)):
            prompt = [draws.randrange(40) for _ in range(draws.randrange(1, 40))]
            engine.submit(prompt, new_tokens=draws.randrange(1, 12))
        engine.step()
    list(engine.run())
    assert not compiled


def test_invariant_results_are_refused() -> None:
    model = built(SPECS["v3"], dtype=torch.float32).to("cuda", torch.bfloat16)
    with pytest.raises(BadInput, match="invariant results with latent attention need a CPU"):
        Engine(model, options=EngineOptions(invariant=True))
