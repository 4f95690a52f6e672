"""A model sharded over ranks generates the same tokens as one device."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from meshwright.kernels.token_draw import draw_tokens
from meshwright.models.decoder import Decoder
from meshwright.models.initial_values import initial_values
from meshwright.parallel.world import World
from meshwright.spec.model import ModelSpec, parameters
from meshwright.spec.plan import Plan
from meshwright.training.generate import GenerationSampling
from tests.distributed.pool import Pool
from tests.distributed.test_schedules import DEEP, DEEP_TIED, Case
from tests.slow import quick_first

LLAMA, GPT = replace(DEEP, init_std=0.6), replace(DEEP_TIED, init_std=0.6)
PROMPTS = ((3, 1, 4, 1, 5, 9, 2, 6), (20,), (7, 7, 7), (11, 2))
"""The first outgrows the model's positions on its way; lengths differ, and there are more than pipeline ranks."""
GREEDY = GenerationSampling(tokens=9, temperature=0, top_k=0, seed=0, stops=())
DRAWN = GenerationSampling(tokens=9, temperature=1.5, top_k=20, seed=5, stops=())
CASES = [
    Case("1f1b", shard=2),
    Case("zbv", pipeline=2),
    Case("1f1b", pipeline=2, shard=2, reshard=False),
    Case("interleaved", pipeline=2, replicate=2),
    Case("breadth_first", pipeline=4),
    Case("1f1b", pipeline=2, stages=(("0-4",), ("5-7",))),
]
TENSOR = [Case("1f1b", tensor=2), Case("zbv", pipeline=2, tensor=2, reshard=False)]
"""Texts are padded to a multiple of the tensor ranks; the positions of their tokens are those on one device."""
CONTEXT = [Case("1f1b", ring=2, pipeline=2), Case("1f1b", ulysses=2, shard=2)]
"""The same, and a text's last token is on one of the context ranks."""


@cache
def generated_alone(
    spec: ModelSpec, sampling: GenerationSampling, dtype: torch.dtype = torch.float64
) -> list[list[int]]:
    """By the plain decoder with the initial weights of seed 0."""
    model = Decoder(spec, reference=dtype == torch.float64).double()
    parameters_by_name = {parameter.name: parameter for parameter in parameters(spec)}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            parameter = parameters_by_name[name]
            fills = {"ones": torch.ones(parameter.count), "zeros": torch.zeros(parameter.count)}
            values = (
                fills[parameter.fill]
                if parameter.fill in fills
                else initial_values(0, parameter, 0, parameter.count, torch.device("cpu"))
            )
            weight.copy_(values.view(parameter.shape))
    model = model.to(dtype)
    return [continued(model, prompt, sampling) for prompt in PROMPTS]


@torch.no_grad()
def continued(model: Decoder, prompt: tuple[int, ...], how: GenerationSampling) -> list[int]:
    """The new tokens, each from the logits of all tokens that fit the model's positions."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + how.tokens:
        logits = model(torch.tensor([tokens[-model.spec.max_seq_len :]]))[0, -1:]
        values = (torch.tensor([value]) for value in (how.temperature, how.top_k, how.seed, len(tokens)))
        tokens.append(int(draw_tokens(logits, *values)))
    return tokens[len(prompt) :]


def generated_by_plan(
    world: World, spec: ModelSpec, plan: Plan, *samplings: GenerationSampling
) -> list[list[list[int]]]:
    """The new tokens of each prompt, by sampling."""
    from meshwright.parallel.apply import build_engine
    from meshwright.parallel.mesh import build_mesh
    from meshwright.training.generate import generate_under_plan

    mesh = build_mesh(plan, world)
    engine = build_engine(spec, plan, mesh, loss_chunk=5, seed=0, reference=plan.precision.compute == "fp64")
    answers = []
    for sampling in samplings:
        progress: list[int] = []
        answers.append(generate_under_plan(engine, mesh, PROMPTS, sampling, progress=progress.append))
        assert set(progress) == set(range(1, max(map(len, answers[-1])) + 1))
    return answers


@pytest.mark.parametrize("spec", [LLAMA, pytest.param(GPT, marks=pytest.mark.slow)], ids=["llama", "gpt2-tied"])
@pytest.mark.parametrize("case", quick_first(0, CASES) + quick_first(1, TENSOR) + quick_first(0, CONTEXT), ids=str)
def test_tokens_are_those_of_one_device(pool: Pool, spec: ModelSpec, case: Case) -> None:
    truth = [generated_alone(spec, sampling) for sampling in (GREEDY, DRAWN)]
    assert [[len(tokens) for tokens in answers] for answers in truth] == [[GREEDY.tokens] * len(PROMPTS)] * 2
    assert pool.run(generated_by_plan, case.plan.ranks, spec, case.plan, GREEDY, DRAWN) == [truth] * case.plan.ranks
    assert truth[0] != truth[1]


def test_each_text_ends_at_its_own_end_token(pool: Pool) -> None:
    """The pipeline goes on with those that have not ended."""
    without_stop = generated_alone(LLAMA, DRAWN)
    stop = without_stop[1][3]
    with_stop = replace(DRAWN, stops=(stop,))
    truth = [tokens[: tokens.index(stop)] if stop in tokens else tokens for tokens in without_stop]
    assert len({len(tokens) for tokens in truth}) > 1
    case = Case("zbv", pipeline=2)
    assert pool.run(generated_by_plan, 2, LLAMA, case.plan, with_stop) == [[truth]] * 2


@pytest.mark.slow
def test_bf16_is_that_of_one_bf16_device(pool: Pool) -> None:
    plan = Case("zbv", pipeline=2, shard=2).plan
    plan = replace(plan, precision=replace(plan.precision, compute="bf16", reduce="fp32"))
    truth = generated_alone(LLAMA, GREEDY, torch.bfloat16)
    assert pool.run(generated_by_plan, 4, LLAMA, plan, GREEDY) == [[truth]] * 4
