"""Latent attention in the engine: its cache, and texts against the trainer's forward and transformers, on a CPU in fp32.

`test_engine` has the rest for other attention; here are the two forms and the layout of the cache.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.checkpoint.models.single_device import load_model
from meshwright.kernels.attention import attention
from meshwright.models.decoder import Decoder
from meshwright.serve.kv_cache import KVCache, bytes_per_block, layer_groups
from meshwright.serve.sampling import GREEDY
from meshwright.spec.engine import EngineOptions, Speculation
from meshwright.spec.errors import BadInput
from tests.models.test_deepseek import their_model
from tests.models.tiny import DEEPSEEK_LITE, DEEPSEEK_V2, DEEPSEEK_V3, LATENT, LLAMA
from tests.serve.helpers import PROMPTS, TOKENS, assert_all_free, engine_of, greedy, record_logits, texts, tiny
from tests.serve.test_formats import SAME, errors
from tests.slow import quick_first

OPTIONS: list[dict[str, Any]] = [
    {"cache_blocks": 16, "overlap": True, "step_tokens": 7},
    {"sequences": 1},
    {"step_tokens": 4},
    {"step_tokens": 512},
    {"tokens_per_block": 16, "prefix_cache": False},
    {"speculation": Speculation(tokens=2)},
]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return greedy(tiny(DEEPSEEK_V3))


def test_a_token_has_a_latent_and_a_rotated_key() -> None:
    """DeepSeek-V3: 576 numbers of a token in each of 61 layers (arXiv 2412.19437, §2.1.1)."""
    spec = replace(DEEPSEEK_V3, layers=61, heads=128, kv_heads=128, kv_rank=512, rope_head_dim=64)
    (group,) = layer_groups(spec)
    assert bytes_per_block(group, 64, torch.bfloat16) == 61 * 64 * 576 * 2
    cache = KVCache(DEEPSEEK_V3, [7], tokens_per_block=4, device=torch.device("cpu"), dtype=torch.float32)
    assert cache.tensors[0].nbytes == 7 * bytes_per_block(*cache.groups, 4, torch.float32)
    assert cache.layer(1)[1].shape == (7, 4, 26) and cache.tensors[0][3].is_contiguous()


@pytest.mark.parametrize("name", quick_first(1, reversed(LATENT)))
def test_logits_of_prefill_and_decode_are_those_of_the_trainer(name: str) -> None:
    """Whole prompts in the training form, and chunks and decodes in the absorbed form."""
    model = tiny(LATENT[name])
    for step_tokens in (512, 9):
        engine = engine_of(model, step_tokens=step_tokens)
        seen = record_logits(engine)
        with torch.no_grad():
            for number, (prompt, new) in enumerate(zip(PROMPTS, texts(engine), strict=True)):
                whole = model(torch.tensor([[*prompt, *new]]))[0, len(prompt) - 1 : -1]
                assert (torch.stack(seen[number]) - whole).abs().max() < 1e-5
                assert new == whole.argmax(1).tolist()


@pytest.mark.parametrize(
    ("options", "bound"), quick_first(1, [({}, 1e-5), ({"kv_cache": "fp8"}, 0.02)], unpack=True), ids=str
)
def test_decodes_that_attend_to_latents_give_the_logits_of_expanded_keys_and_values(
    options: dict[str, Any], bound: float
) -> None:
    """In an fp8 cache a number may round to its neighbour."""
    model, seen = tiny(DEEPSEEK_LITE), []
    for absorb in (True, False):
        engine = engine_of(model, absorb=absorb, **options)
        logits = record_logits(engine)
        texts(engine)
        seen.append([torch.stack(logits[number]) for number in sorted(logits)])
    for absorbed, expanded in zip(*seen, strict=True):
        torch.testing.assert_close(absorbed, expanded, rtol=0, atol=bound)
    assert not all(torch.equal(absorbed, expanded) for absorbed, expanded in zip(*seen, strict=True))


def test_only_decodes_of_latents_can_be_expanded() -> None:
    with pytest.raises(BadInput, match="absorb: only latent attention"):
        engine_of(tiny(LLAMA), absorb=False)
    with pytest.raises(BadInput, match="graphs: not without absorb"):
        EngineOptions(absorb=False, graphs=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["v2", "v2 lite", "v3", "v3 plain"])
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = their_model(name).eval()
    theirs.save_pretrained(tmp_path)
    engine = engine_of(load_model(tmp_path, torch.device("cpu"), torch.float32), step_tokens=30)
    prompts = PROMPTS[::3]
    seen = record_logits(engine)
    for number, (prompt, new) in enumerate(zip(prompts, texts(engine, prompts), strict=True)):
        with torch.no_grad():
            whole = theirs(torch.tensor([[*prompt, *new]])).logits[0, len(prompt) - 1 : -1]
        assert (torch.stack(seen[number]) - whole).abs().max() < 1e-4
        assert new == whole.argmax(1).tolist()


@pytest.mark.parametrize("options", quick_first(1, OPTIONS), ids=str)
def test_texts_do_not_depend_on_batches_chunks_blocks_and_preemption(
    options: dict[str, Any], expected: list[list[int]]
) -> None:
    engine = engine_of(tiny(DEEPSEEK_V3), **options)
    assert texts(engine) == expected
    assert (engine._policy.preemptions > 0) == (options.get("cache_blocks") == 16)
    assert_all_free(engine)


def test_prefix_hits_samples_and_priorities_do_not_change_texts(expected: list[list[int]]) -> None:
    engine = engine_of(tiny(DEEPSEEK_V3))
    assert texts(engine, priority=1) == expected
    assert texts(engine) == expected and engine._policy.cached_tokens > 32
    engine.submit_samples(PROMPTS[0], 2, sampling=GREEDY, new_tokens=TOKENS)
    tokens: dict[int, list[int]] = {}
    for update in engine.run():
        tokens.setdefault(update.number, []).extend(update.tokens)
    assert list(tokens.values()) == 2 * expected[:1]


@pytest.mark.slow
def test_a_draft_model_may_have_latents_or_not(expected: list[list[int]]) -> None:
    model, other = tiny(DEEPSEEK_V3), tiny(LLAMA)
    for target, draft, texts_of_target in ((model, other, expected), (other, model, greedy(other))):
        engine = engine_of(target, draft_model=draft)
        assert texts(engine) == texts_of_target and engine.drafts[0] > 0


@pytest.mark.slow
def test_bits_of_an_invariant_engine_do_not_depend_on_the_batch() -> None:
    runs = []
    for sizes in ({}, {"sequences": 2, "step_tokens": 9}):
        engine = engine_of(tiny(DEEPSEEK_LITE), invariant=True, **sizes)
        seen = record_logits(engine)
        texts(engine, PROMPTS[2:])
        runs.append([torch.stack(seen[number]) for number in sorted(seen)])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*runs, strict=True))


def round_latents(model: Decoder) -> Decoder:
    """The model with e4m3 latents and rotated keys; the keys and values of the heads come from these latents."""
    e4m3 = torch.float8_e4m3fn
    for block in model.layers.values():
        latent = block.attention

        def attend(q: Tensor, k: Tensor, v: Tensor, *masks: Any, latent: Any = latent, **options: Any) -> Tensor:
            unrotated = latent.head_dim - latent.rotated
            k = torch.cat((k[..., :unrotated], k[..., unrotated:].to(e4m3).to(k.dtype)), dim=-1)
            return attention(q, k, v, *masks, **options)

        latent.hooks.attend = attend
        latent.kv_norm.register_forward_hook(lambda module, inputs, output: output.to(e4m3).to(output.dtype))
    return model


@pytest.mark.slow
def test_fp8_cache() -> None:
    exact = tiny(replace(DEEPSEEK_V2, first_dense_layers=2))  # a choice of other experts would hide the rounding
    ours, spread = errors(engine_of(exact, kv_cache="fp8"), round_latents(copy.deepcopy(exact)), exact)
    assert spread > 1e-4 and ours < SAME * spread


def test_fp8_weights_leave_the_heads_matrices_exact() -> None:
    engine = engine_of(tiny(DEEPSEEK_V3), weights="fp8")
    attention_layer = engine._model.layers["0"].attention
    rounded = {name for name, _ in attention_layer.named_buffers(recurse=True)}
    assert rounded == {f"{name}.{part}" for name in ("down", "q", "out") for part in ("values", "scale")}
    assert [len(tokens) for tokens in texts(engine)] == [TOKENS] * len(PROMPTS)
