"""The inference engine on expert ranks against the engine on one device, in fp32."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.parallel.expert_inference import pack_int8, unpack_int8
from meshwright.serve.batch_inputs import StepInputs
from meshwright.serve.micro_batches import Stream, run_in_turn, split_decodes
from meshwright.spec.engine import ExpertRanks
from meshwright.spec.errors import BadInput
from meshwright.spec.inference_layout import experts_error
from meshwright.spec.model import ModelSpec
from tests.distributed.cases_tensor_engine import (
    continue_some,
    continue_with_newer_weights,
    fail_on_expert_ranks,
    options_of,
    play_alone,
    play_on_expert_ranks,
    save_newer,
    score_prompts,
)
from tests.distributed.pool import CaseFailed, Pool
from tests.models.tiny import DEEPSEEK_V3, LLAMA, QWEN3_MOE, SHARED
from tests.slow import quick_first


@pytest.mark.parametrize("spec", quick_first(1, [QWEN3_MOE, DEEPSEEK_V3, SHARED]), ids=["qwen3", "deepseek", "shared"])
@pytest.mark.parametrize("micro_batches", quick_first(1, [2, 1, 3]))
def test_texts_are_those_of_one_device(pool: Pool, spec: ModelSpec, micro_batches: int) -> None:
    options = options_of(overlap=micro_batches == 2)
    expected = play_alone(spec, options, continue_some)
    results = pool.run(play_on_expert_ranks, 2, spec, options, None, micro_batches, continue_some)
    assert results[0][0] == expected
    requests = [count for _, count in results]
    assert sum(requests) == 12 and min(requests) >= 3, "each rank has requests of its own"


def test_prompts_have_the_log_probabilities_of_one_device(pool: Pool) -> None:
    expected = play_alone(QWEN3_MOE, options_of(), score_prompts)
    (found, _), _ = pool.run(play_on_expert_ranks, 2, QWEN3_MOE, options_of(), None, 1, score_prompts)
    for values, wanted in zip(found, expected, strict=True):
        assert values == pytest.approx(wanted, abs=1e-4)


@pytest.mark.slow
def test_rounded_tokens_change_few_choices(pool: Pool) -> None:
    """Greedy texts of int8 tokens begin as exact ones do, and are equal on any number of ranks."""
    two, four = (
        pool.run(play_on_expert_ranks, ranks, DEEPSEEK_V3, options_of(), "int8", 1, continue_some)[0][0]
        for ranks in (2, 4)
    )
    assert two == four


def test_a_micro_batch_is_computed_while_the_tokens_of_another_travel() -> None:
    """Each stops once for its tokens' way to the experts and once for that back, in the same order on all ranks."""
    events: list[str] = []

    def stream(name: str) -> Stream:
        for stage in ("sent", "returning"):
            events.append(f"{name} {stage}")
            yield
            events.append(f"{name} arrived")
        return torch.zeros(1), None

    run_in_turn([stream("a"), stream("b")])
    assert events == [
        "a sent",
        "b sent",
        "a arrived",
        "a returning",
        "b arrived",
        "b returning",
        "a arrived",
        "b arrived",
    ]


def test_decodes_are_divided_and_steps_with_prompts_are_not() -> None:
    def step(decodes: int, counts: list[int]) -> StepInputs:
        tokens, count = sum(counts), len(counts)
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        places = torch.arange(tokens, dtype=torch.int32)
        tables = (torch.arange(2 * count, dtype=torch.int32).view(count, 2),)
        return StepInputs(places, places + 10, places[None] + 20, tables, starts[1:], starts, decodes, (), None)

    first, second = split_decodes(step(5, [1] * 5), 2)
    assert (first.tokens.tolist(), second.tokens.tolist()) == ([0, 1], [2, 3, 4])
    assert second.slots.tolist() == [[22, 23, 24]] and second.block_tables[0].tolist() == [[4, 5], [6, 7], [8, 9]]
    assert second.query_starts.tolist() == [0, 1, 2, 3] and second.decodes == 3 and second.positions[0] == 12
    for whole in (step(1, [1]), step(1, [1, 4])):
        first, second = split_decodes(whole, 2)
        assert first is whole and not len(second.tokens)


def test_int8_tokens_are_within_half_a_step_of_their_scale() -> None:
    tokens = (
        torch.randn(5, 24, generator=torch.Generator().manual_seed(1))
        * torch.tensor([1e-3, 1.0, 7.0, 300.0, 0.0])[:, None]
    )
    packed = pack_int8(tokens)
    assert packed.shape == (5, 28) and packed.dtype == torch.uint8
    step = tokens.abs().amax(1, keepdim=True) / 127
    assert ((unpack_int8(packed, torch.float32) - tokens).abs() <= step / 2 * 1.0001).all()
    assert unpack_int8(pack_int8(tokens[:0]), torch.bfloat16).shape == (0, 24)


@pytest.mark.slow
def test_newer_weights_reach_all_ranks(pool: Pool, tmp_path: Path) -> None:
    folders = (
        save_newer(tmp_path / "newer", QWEN3_MOE),
        save_newer(tmp_path / "other", replace(QWEN3_MOE, rope_theta=500.0)),
    )
    before, _, after = play_alone(QWEN3_MOE, options_of(), continue_with_newer_weights, *folders)
    results = pool.run(play_on_expert_ranks, 2, QWEN3_MOE, options_of(), None, 1, continue_with_newer_weights, *folders)
    result, _ = results[0]
    assert (result[0], result[2]) == (before, after) and before != after and "rope_theta" in result[1]


@pytest.mark.slow
@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_on_one_rank_ends_all(pool: Pool, failing: int) -> None:
    with pytest.raises(CaseFailed) as failed:
        pool.run(fail_on_expert_ranks, 2, QWEN3_MOE, failing)
    answers = dict(zip((0, 1), str(failed.value).split("rank 1:\n"), strict=True))
    assert f"rank {failing} of 2, a step: internal error: ValueError: out of luck" in answers[failing]
    assert f"CommunicationFailure: rank {1 - failing} of 2, a step: communication failed" in answers[1 - failing]


@pytest.mark.parametrize("alone", [{"dispatch": "int8"}, {"micro_batches": 2}])
def test_one_rank_exchanges_nothing(alone: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match="tokens travel between several devices only"):
        ExpertRanks(**alone)


def test_models_that_ranks_cannot_share_are_refused() -> None:
    assert experts_error(LLAMA, 2) == "1, as the model has no experts"
    assert experts_error(QWEN3_MOE, 4) == "a divisor of model.experts = 6"
    assert experts_error(QWEN3_MOE, 3) is None
