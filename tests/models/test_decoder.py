"""The decoder against its parameter list, its plain kernels, separate documents, and naive implementations of variants."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from meshwright.config.presets import MODEL_PRESETS
from meshwright.models.decoder import Decoder
from meshwright.spec.errors import BadInput
from meshwright.spec.fields import from_plain
from meshwright.spec.model import ModelSpec, flops_per_token, parameter_count, parameters
from tests.models.tiny import ALL, DENSE, GPT2, LATENT, LLAMA, PARALLEL, SLIDING, built, some_tokens

TRAINABLE = {**ALL, **LATENT, **DENSE}
PUBLIC_COUNTS = {
    "gpt2-124m": 124_439_808,
    "llama3-1b": 1_235_814_400,
    "llama3-3b": 3_212_749_824,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_419_200,
}


def on_meta(spec):
    with torch.device("meta"):
        return Decoder(spec)


def preset(name):
    return from_plain(ModelSpec, {**MODEL_PRESETS[name], "vocab_size": MODEL_PRESETS[name]["vocab_size"] or 4096})


@pytest.mark.parametrize("name", list(MODEL_PRESETS))
def test_presets_have_exactly_the_parameters_of_the_spec(name):
    spec = preset(name)
    model = on_meta(spec)
    expected = [(parameter.name, parameter.shape) for parameter in parameters(spec)]
    assert [(key, tuple(value.shape)) for key, value in model.named_parameters()] == expected
    assert (
        sum(p.numel() for p in model.parameters())
        == parameter_count(spec)
        == PUBLIC_COUNTS.get(name, parameter_count(spec))
    )


@pytest.mark.parametrize("model_name", list(TRAINABLE))
def test_variants_have_exactly_the_parameters_of_the_spec(model_name):
    model = on_meta(TRAINABLE[model_name])
    expected = {parameter.name: parameter.shape for parameter in parameters(TRAINABLE[model_name])}
    assert {key: tuple(value.shape) for key, value in model.named_parameters()} == expected
    assert not list(model.buffers())


@pytest.mark.parametrize("model_name", list(TRAINABLE))
def test_fast_equals_plain(model_name):
    spec = TRAINABLE[model_name]
    tokens = some_tokens(spec)
    documents = (torch.arange(40) // 13).expand(2, -1)
    targets = tokens.roll(-1, 1).index_fill(1, torch.tensor([5, 39]), -100)
    results = []
    for reference in (False, True):
        model = built(spec, reference=reference)
        loss = model(tokens, targets=targets, documents=documents)
        gradients = torch.autograd.grad(loss, [weight for weight in model.parameters() if weight.requires_grad])
        results.append([model(tokens, documents=documents), loss, *gradients])
    for fast, reference in zip(*results, strict=True):
        assert torch.allclose(fast, reference, rtol=1e-10, atol=1e-12)


def test_loss_is_the_sum_over_counted_targets():
    model, tokens = built(LLAMA), some_tokens(LLAMA)
    targets = tokens.roll(-1, 1)
    targets[0, :30] = -100
    logits = model(tokens)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=-100)
    assert torch.allclose(model(tokens, targets=targets), expected, rtol=1e-12)


@pytest.mark.parametrize(
    "model_name",
    ["llama", "qwen3", "gpt2", "sliding", "gpt-oss", "gemma2", *(name for name in DENSE if name != "phi3")],
)
def test_masked_packed_logits_equal_separate_documents(model_name):
    """Without LongRoPE, which has other frequencies for the whole sequence than for short documents alone."""
    spec = TRAINABLE[model_name]
    model, tokens = built(spec), some_tokens(spec, batch=1, seq=60)
    lengths = [17, 1, 30, 12]
    documents = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))[None]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    packed = model(tokens, positions=positions, documents=documents)
    separate = torch.cat([model(part) for part in tokens.split(lengths, dim=1)], dim=1)
    assert torch.allclose(packed, separate, rtol=0, atol=1e-12)
    assert not torch.allclose(model(tokens), separate, rtol=0, atol=1e-3)


def naive_rms(x, norm):
    return x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight


def naive_attention(attention, spec, x):
    """One sequence, one head and one query at a time."""
    width, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    q, k, v = (x @ attention.qkv.weight.t()).split((width, kv, kv), dim=-1)
    half = spec.head_dim // 2
    angles = torch.arange(len(x))[:, None] * spec.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)

    def rotated(part, head):
        a, b = part[:, head * spec.head_dim :][:, :half], part[:, head * spec.head_dim + half :][:, :half]
        return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), dim=1)

    heads = []
    for head in range(spec.heads):
        group = head // (spec.heads // spec.kv_heads)
        query, key = rotated(q, head), rotated(k, group)
        value = v[:, group * spec.head_dim : (group + 1) * spec.head_dim]
        rows = []
        for i in range(len(x)):
            first = 0 if spec.sliding_window is None else max(0, i - spec.sliding_window + 1)
            weights = torch.softmax(key[first : i + 1] @ query[i] / spec.head_dim**0.5, dim=0)
            rows.append(weights @ value[first : i + 1])
        heads.append(torch.stack(rows))
    return torch.cat(heads, dim=-1) @ attention.out.weight.t()


def naive_logits(model, spec, tokens):
    x = model.embed.weight[tokens]
    for block in model.layers.values():
        normed = naive_rms(x, block.attention_norm)
        attended = naive_attention(block.attention, spec, normed)
        into_mlp = normed if spec.parallel_block else naive_rms(x + attended, block.mlp_norm)
        gate, up = (into_mlp @ block.mlp.gate_up.weight.t()).split(spec.ffn_hidden, dim=-1)
        x = x + attended + (gate * torch.sigmoid(gate) * up) @ block.mlp.down.weight.t()
    return naive_rms(x, model.norm) @ model.head.weight.t()


@pytest.mark.parametrize("spec", [LLAMA, PARALLEL, SLIDING], ids=["llama", "parallel", "sliding"])
def test_variants_equal_a_naive_implementation(spec):
    model, tokens = built(spec), some_tokens(spec, batch=1)
    with torch.no_grad():
        assert torch.allclose(model(tokens)[0], naive_logits(model, spec, tokens[0]), rtol=0, atol=1e-12)


@pytest.mark.parametrize("model_name", ["llama", "qwen3", "gpt2", "parallel"])
def test_flops_of_the_spec_equal_those_of_torch_s_counter(model_name):
    """The counter counts executed operations: plain attention computes all scores, which `causal=False` counts too."""
    spec, seq = TRAINABLE[model_name], 32
    model, tokens = built(spec, reference=True), some_tokens(spec, seq=seq)
    with FlopCounterMode(display=False) as counter:
        model(tokens, targets=tokens).backward()
    assert counter.get_total_flops() == flops_per_token(spec, seq, causal=False) * tokens.numel()


def test_the_chunked_loss_has_as_many_flops_as_the_plain_loss():
    """Counted in bf16, with a vocabulary that needs no padding.

    Wider dtypes accumulate with an in-place matmul that the counter does not count.
    """
    counts, spec = [], replace(LLAMA, vocab_size=136)
    for reference in (False, True):
        head = built(spec, reference=reference, dtype=torch.bfloat16).head
        hidden = torch.randn(2, 40, LLAMA.hidden, dtype=torch.bfloat16, requires_grad=True)
        with FlopCounterMode(display=False) as counter:
            head(hidden, torch.zeros(2, 40, dtype=torch.long)).loss.backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_low_precision_stays_near_float64(dtype):
    tokens = some_tokens(LLAMA)
    exact = built(LLAMA, reference=True)(tokens, targets=tokens)
    loss = built(LLAMA, dtype=dtype)(tokens, targets=tokens)
    assert loss.dtype == torch.float32
    assert abs(loss / exact - 1) < (1e-2 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler here")
def test_a_block_compiles_whole():
    model, tokens = built(LLAMA, dtype=torch.float32), some_tokens(LLAMA)
    expected = model(tokens)
    for block in model.layers.values():
        block.forward = torch.compile(block.forward, fullgraph=True, backend="aot_eager")
    assert torch.allclose(model(tokens), expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler here")
def test_a_block_compiles_with_inductor_masks_included():
    spec = replace(LLAMA, layers=1)
    model, tokens = built(spec, dtype=torch.float32), some_tokens(spec)
    documents = (torch.arange(40) // 13).expand(2, -1)
    expected = model(tokens, documents=documents)
    model.layers["0"].forward = torch.compile(model.layers["0"].forward, fullgraph=True)
    assert torch.allclose(model(tokens, documents=documents), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kv_heads": 3}, ["kv_heads", "3", "divisor of heads (4)", "nearest: 2"]),
        ({"head_dim": 15}, ["head_dim", "15", "even", "nearest: 16"]),
        ({"vocab_size": 0}, ["vocab_size", "tokenizer"]),
    ],
)
def test_inconsistent_dimensions_are_named(change, words):
    with pytest.raises(BadInput) as caught:
        on_meta(replace(LLAMA, **change))
    assert all(word in str(caught.value) for word in words)


def test_a_sequence_too_long_for_learned_positions_raises_bad_input():
    model = built(replace(GPT2, max_seq_len=16))
    with pytest.raises(BadInput, match=r"17 tokens.*max_seq_len = 16"):
        model(some_tokens(GPT2, seq=17))
