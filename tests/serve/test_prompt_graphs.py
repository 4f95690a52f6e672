"""Steps with prompts in pieces of graphs: the texts and logits are those of whole steps."""

from __future__ import annotations

from dataclasses import replace
from itertools import count, pairwise

import pytest
import torch

from meshwright.serve.batch_inputs import StepInputs
from meshwright.serve.engine import Engine
from meshwright.serve.prompt_graphs import PromptGraphs, prompt_graph_sizes
from meshwright.spec.engine import Speculation
from tests.models.tiny import DEEPSEEK_V3, GPT2, LLAMA, MIXTRAL, QWEN2, QWEN3, SLIDING
from tests.serve.helpers import engine_of, record_logits, texts, tiny
from tests.serve.recorded_graphs import RecordedGraphs

SPECS = {
    "llama": LLAMA,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "gpt2": GPT2,
    "sliding": SLIDING,
    "mixtral": MIXTRAL,
    "deepseek": DEEPSEEK_V3,
}
SIZES = (4, 8, 20)


def with_graphs(engine: Engine, sizes: tuple[int, ...] = SIZES) -> RecordedGraphs:
    """Let the engine compute its steps with prompts by graphs of these numbers of tokens."""
    runner, graphs = engine._runner, RecordedGraphs()
    runner._host_decode = None  # it is for engines without graphs
    normed = torch.full((1, sizes[-1], engine.spec.hidden), torch.nan)
    runner._prompt_graphs = PromptGraphs(runner._step, runner._compute_normed, sizes, 1, normed)
    with torch.inference_mode():
        runner._prompt_graphs.capture(graphs)
    return graphs


@pytest.mark.parametrize("prompt_unit", [1, 0, 8])
@pytest.mark.parametrize("name", SPECS)
def test_logits_are_those_without_graphs(name: str, prompt_unit: int) -> None:
    model = tiny(SPECS[name])
    engine, usual = engine_of(model), engine_of(model)
    graphs = with_graphs(engine)
    engine._inputs.prompt_unit = prompt_unit
    assert len(graphs.made) == len(SIZES) * (model.spec.layers + 1)
    ours, theirs = record_logits(engine), record_logits(usual)
    assert texts(engine) == texts(usual)
    for number in ours:
        torch.testing.assert_close(torch.stack(ours[number]), torch.stack(theirs[number]), atol=1e-5, rtol=1e-4)
    replays = {graph.replays for graph in graphs.made}
    assert max(replays) > 1, replays


def test_matmuls_in_8_bits_have_graphs() -> None:
    model = tiny(LLAMA)
    engine = engine_of(model, weights="int8")
    graphs = with_graphs(engine)
    assert texts(engine) == texts(engine_of(model, weights="int8"))
    assert any(graph.replays for graph in graphs.made)


def test_only_steps_with_prompts_that_fit_have_graphs() -> None:
    model = tiny(LLAMA)
    engine = engine_of(model)
    graphs = with_graphs(engine, (4, 8))
    pieces = model.spec.layers + 1
    assert texts(engine, [[5] * 12], new_tokens=6) == texts(engine_of(model), [[5] * 12], new_tokens=6)
    assert all(graph.replays == 0 for graph in graphs.made)  # a step of 12 tokens, then decodes
    texts(engine, [[6] * 3], new_tokens=6)
    largest, smallest = graphs.made[:pieces], graphs.made[pieces:]
    assert {graph.replays for graph in largest} == {0}
    assert {graph.replays for graph in smallest} == {1}


def test_an_engine_goes_on_without_graphs_of_prompts_that_fail_to_be_captured(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny(LLAMA)
    engine = engine_of(model)
    graphs = RecordedGraphs()
    with_graphs(engine)
    runner = engine._runner
    runner.prompt_sizes = SIZES
    forward, calls = runner._prompt_graphs._compute, count()

    def fail_later(inputs: StepInputs) -> torch.Tensor:
        if next(calls) == 3:
            raise RuntimeError("CUDA error: operation not permitted\nmore lines")
        return forward(inputs)

    with monkeypatch.context() as patch:
        patch.setattr(runner, "_graphs", graphs)
        patch.setattr(runner._prompt_graphs, "_compute", fail_later)
        runner.capture_graphs()
    assert runner.prompt_sizes == ()
    assert [record.getMessage() for record in caplog.records] == [
        "the host launches prompts without CUDA graphs: CUDA error: operation not permitted"
    ]
    assert texts(engine) == texts(engine_of(model))
    assert all(graph.replays == 0 for graph in graphs.made)


def test_padding_does_not_see_numbers_of_earlier_steps() -> None:
    """A NaN of one request must not come into the rows of padding, whose fp8 scales or router loads others could share."""
    engine = engine_of(tiny(LLAMA))
    with_graphs(engine)
    graphs = engine._runner._prompt_graphs
    with torch.inference_mode():
        graphs._attended.fill_(torch.nan)
    assert texts(engine, [[7] * 3], new_tokens=2) == texts(engine_of(tiny(LLAMA)), [[7] * 3], new_tokens=2)
    assert not graphs._normed[:, 3:4].isnan().any()


@pytest.mark.parametrize("mtp", [False, True], ids=["text", "modules"])
def test_steps_with_drafts_beside_prompts(mtp: bool) -> None:
    model = tiny(replace(LLAMA, prediction_depth=2 * mtp))
    speculation = Speculation(tokens=2, mtp=mtp, least=0.0)
    engine = engine_of(model, speculation=speculation)
    with_graphs(engine, (4, 8, 40))
    assert texts(engine) == texts(engine_of(model))
    assert engine.drafts[0]


@pytest.mark.parametrize(
    ("step_tokens", "sizes"),
    [(1, (64,)), (64, (64,)), (65, (64, 128)), (600, (64, 128, 192, 256, 320, 384, 512, 640))],
)
def test_sizes_reach_the_largest_step(step_tokens: int, sizes: tuple[int, ...]) -> None:
    assert prompt_graph_sizes(step_tokens) == sizes


def test_sizes_end_where_the_device_is_slower_than_the_host() -> None:
    sizes = prompt_graph_sizes(100_000)
    assert sizes[-1] == 2560
    assert len(sizes) == 23
    assert all(second - first <= 128 for first, second in pairwise(sizes))
