"""The inference engine on tensor ranks against the engine on one device, in fp32."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from meshwright.spec.inference_layout import rank_pieces, rank_shape, split_error
from meshwright.spec.layout import AxisPart
from meshwright.spec.model import ModelSpec, parameters
from tests.checkpoint.test_quantized import DYNAMIC, exported, in_fp8, rewrite
from tests.distributed.cases_tensor_engine import (
    compare_rounded_weights,
    continue_and_abort,
    continue_with_newer_weights,
    draw_differently,
    exchange_blocks,
    fail_on,
    first_logits,
    options_of,
    play_alone,
    play_on_ranks,
    save_newer,
    score_prompts,
    stored_rows,
)
from tests.distributed.pool import CaseFailed, Pool
from tests.models.tiny import ALL, DEEPSEEK_V2, LATENT, LLAMA
from tests.serve.helpers import PROMPTS
from tests.serve.test_formats import SAME
from tests.slow import quick_first

QUICK = ("llama", "gpt2", "mixtral")
ONE_KEY_HEAD = replace(LLAMA, kv_heads=1)
SPECS = [
    pytest.param(spec, id=name, marks=[] if name in QUICK else [pytest.mark.slow])
    for name, spec in {**ALL, **LATENT}.items()
]
ROUNDED = quick_first(
    1,
    [
        ("llama", "fp8"),
        ("gpt2", "fp8"),
        ("parallel", "fp8"),
        ("shared expert", "fp8"),
        ("deepseek v3", "fp8"),
        ("mixtral", "int8"),
        ("shared expert", "int8"),
        ("deepseek v3", "int8"),
    ],
    unpack=True,
)


@pytest.mark.parametrize("spec", [*SPECS, pytest.param(ONE_KEY_HEAD, id="one key head", marks=pytest.mark.slow)])
def test_texts_are_those_of_one_device(pool: Pool, spec: ModelSpec) -> None:
    options = options_of(overlap=spec == LLAMA)
    expected = play_alone(spec, options, continue_and_abort)
    assert expected[2] or spec.sliding_window, "no request was preempted"
    assert pool.run(play_on_ranks, 2, spec, options, continue_and_abort) == [expected, None]


def test_prompts_have_the_log_probabilities_of_one_device(pool: Pool) -> None:
    expected = play_alone(LLAMA, options_of(), score_prompts)
    found, _ = pool.run(play_on_ranks, 2, LLAMA, options_of(), score_prompts)
    assert [len(values) for values in found] == [3 * (len(prompt) - 1) for prompt in PROMPTS]
    for values, wanted in zip(found, expected, strict=True):
        assert values == pytest.approx(wanted, abs=1e-4)


@pytest.mark.slow
def test_four_ranks_share_two_key_heads(pool: Pool) -> None:
    expected = play_alone(LLAMA, options_of(), continue_and_abort)
    assert pool.run(play_on_ranks, 4, LLAMA, options_of(), continue_and_abort) == [expected, None, None, None]


@pytest.mark.parametrize("spec", quick_first(1, [LLAMA, ONE_KEY_HEAD, DEEPSEEK_V2]))
def test_blocks_move_between_ranks_and_one_device(pool: Pool, spec: ModelSpec) -> None:
    alone = play_alone(spec, options_of(), exchange_blocks, None)
    from_ranks, _ = pool.run(play_on_ranks, 2, spec, options_of(), exchange_blocks, None)
    to_ranks, _ = pool.run(play_on_ranks, 2, spec, options_of(), exchange_blocks, alone[1])
    to_one = play_alone(spec, options_of(), exchange_blocks, from_ranks[1])
    for identity, content, tokens, _ in (from_ranks, to_ranks, to_one):
        assert identity == alone[0] and tokens == alone[2]
        values, expected = (torch.frombuffer(bytearray(each), dtype=torch.float32) for each in (content, alone[1]))
        torch.testing.assert_close(values, expected, atol=1e-5, rtol=1e-5)
    assert to_ranks[1] == alone[1] and to_one[1] == from_ranks[1]
    assert (from_ranks[3], to_ranks[3], to_one[3]) == (0, 28, 28)


@pytest.mark.parametrize(("name", "weights"), ROUNDED)
def test_rounded_weights_have_the_scales_of_one_device(pool: Pool, name: str, weights: str, tmp_path: Path) -> None:
    """Also those of layers whose inputs are divided: each rank has a part of what an output's scale is computed from."""
    spec = {**ALL, **LATENT}[name]
    equal = pool.run(compare_rounded_weights, 2, spec, save_newer(tmp_path / "newer", spec), weights)
    assert equal[0] == equal[1] >= 2 * spec.layers


@pytest.mark.parametrize(("name", "weights"), ROUNDED)
def test_logits_of_rounded_weights_are_those_of_one_device(pool: Pool, name: str, weights: str) -> None:
    """In fp8 within a share of what the formats change: a few numbers are rounded to another one after other additions.

    In int8 other scales of the ranks' parts of tokens round all their numbers anew, so only the error is alike.
    """
    spec, formats = {**ALL, **LATENT}[name], options_of(weights=weights, kv_cache="fp8")
    exact, alone = (torch.tensor(play_alone(spec, each, first_logits)) for each in (options_of(), formats))
    ours = torch.tensor(pool.run(play_on_ranks, 2, spec, formats, first_logits)[0])
    spread = (alone - exact).abs().mean()
    assert spread > 1e-3
    if weights == "fp8":
        assert (ours - alone).abs().mean() < SAME * spread
    else:
        assert (ours - exact).abs().mean() < 1.2 * spread


def test_ranks_multiply_their_part_of_stored_weights(pool: Pool, tmp_path: Path) -> None:
    """A rank has its outputs of an input layer and its inputs of the layer behind, with the folder's scales of whole outputs."""
    tensors, _ = exported(tmp_path / "out")
    read = in_fp8(tensors, per_output=True)
    rewrite(tmp_path / "out", tensors, DYNAMIC)
    ranks = pool.run(stored_rows, 2, tmp_path / "out")
    gate, down = (read[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("gate", "down"))
    for rank, (first, second) in enumerate(ranks):
        half = slice(rank * len(gate) // 2, (rank + 1) * len(gate) // 2)
        assert torch.equal(torch.tensor(first), gate[half][:3])
        assert torch.equal(torch.tensor(second), down[:3, half])


def test_newer_weights_reach_all_ranks(pool: Pool, tmp_path: Path) -> None:
    folders = save_newer(tmp_path / "newer", LLAMA), save_newer(tmp_path / "other", replace(LLAMA, rope_theta=500.0))
    before, refused, after = play_alone(LLAMA, options_of(), continue_with_newer_weights, *folders)
    [result, _] = pool.run(play_on_ranks, 2, LLAMA, options_of(), continue_with_newer_weights, *folders)
    assert (result[0], result[2]) == (before, after) and before != after
    assert refused.startswith("BadInput: ") and refused.removeprefix("BadInput: ") in result[1]


@pytest.mark.parametrize("failing", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_an_error_on_one_rank_ends_all(pool: Pool, failing: int) -> None:
    with pytest.raises(CaseFailed) as failed:
        pool.run(fail_on, 2, LLAMA, failing)
    answers = dict(zip((0, 1), str(failed.value).split("rank 1:\n"), strict=True))
    assert f"rank {failing} of 2, a step: internal error: ValueError: out of luck" in answers[failing]
    other = 1 - failing
    assert f"CommunicationFailure: rank {other} of 2, a step: communication failed" in answers[other]


@pytest.mark.slow
def test_different_tokens_on_a_rank_are_noticed(pool: Pool) -> None:
    with pytest.raises(CaseFailed, match="rank 1 of 2, a step: drew other tokens than rank 0"):
        pool.run(draw_differently, 2, LLAMA)


@pytest.mark.parametrize("name", ALL)
def test_ranks_hold_every_element_once_and_norms_each(name: str) -> None:
    spec, ranks = ALL[name], 2
    for parameter in parameters(spec):
        held = [rank_shape(spec, parameter, AxisPart(index, ranks)) for index in range(ranks)]
        pieces = [piece for index in range(ranks) for piece in rank_pieces(spec, parameter, AxisPart(index, ranks))]
        elements = [element for piece in pieces for element in _elements(piece.offsets, piece.sizes)]
        whole = set(_elements((0,) * len(parameter.shape), parameter.shape))
        assert set(elements) == whole
        if held[1] == parameter.shape:
            assert held[0] == held[1] and len(elements) == 2 * len(whole)
        else:
            assert len(elements) == len(whole)


def _elements(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    elements: list[tuple[int, ...]] = [()]
    for offset, size in zip(offsets, sizes, strict=True):
        elements = [(*element, index) for element in elements for index in range(offset, offset + size)]
    return elements


@pytest.mark.parametrize(
    ("spec", "ranks", "message"),
    [
        (LLAMA, 3, "a divisor of model.heads = 4"),
        (replace(LLAMA, heads=6, kv_heads=2), 3, "a divisor or a multiple of model.kv_heads = 2"),
        (replace(ALL["qwen3 moe"], expert_hidden=25), 2, "a divisor of model.expert_hidden = 25"),
        (replace(ALL["shared expert"], shared_expert_hidden=15), 2, "a divisor of model.shared_expert_hidden = 15"),
    ],
)
def test_models_that_ranks_cannot_divide_are_refused(spec: ModelSpec, ranks: int, message: str) -> None:
    assert message in (split_error(spec, ranks) or "")
    assert split_error(spec, 1) is None
