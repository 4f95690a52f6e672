"""The engine on a GPU: CUDA graphs, kernels and overlap against the trainer's forward in bf16."""

from __future__ import annotations

import copy
import gc
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.gpu.runs import LIMIT, needs
from tests.models.tiny import GPT2, LLAMA, MIXTRAL, QWEN3, QWEN3_MOE, SLIDING, built
from tests.serve.helpers import PROMPTS, continued_texts, newer, record_logits, save_run, texts, tiny

from meshwright.serve.batch_inputs import StepInputs
from meshwright.serve.engine import Engine
from meshwright.serve.graphs import Graphs
from meshwright.serve.model_runner import ModelRunner
from meshwright.serve.sampling import SamplingOptions
from meshwright.spec.engine import EngineOptions, Speculation

pytestmark = pytest.mark.gpu
SPECS = {"llama": LLAMA, "qwen3": QWEN3, "gpt2": GPT2, "sliding": SLIDING, "mixtral": MIXTRAL, "qwen3 moe": QWEN3_MOE}


@pytest.mark.parametrize("step_tokens", [16, 100])
@pytest.mark.parametrize("graphs", ["all", "decodes", "none"])
@pytest.mark.parametrize("name", SPECS)
def test_logits_are_within_the_bf16_spread_of_the_trainer(name: str, graphs: str, step_tokens: int) -> None:
    exact = built(SPECS[name], dtype=torch.float32)
    model = copy.deepcopy(exact).to("cuda", torch.bfloat16)
    sizes = {"sequences": 4, "step_tokens": step_tokens, "tokens_per_block": 16, "cache_blocks": 64, "context": 64}
    options = EngineOptions(**sizes, graphs=graphs != "none", prompt_graphs=graphs == "all")
    engine = Engine(copy.deepcopy(model), options=options)
    assert bool(engine._runner.prompt_sizes) == (graphs == "all")
    seen = record_logits(engine)
    for number, (prompt, new) in enumerate(zip(PROMPTS, texts(engine), strict=True)):
        whole = torch.tensor([[*prompt, *new]])
        with torch.no_grad():
            truth = exact(whole)[0, len(prompt) - 1 : -1]
            trained = model(whole.cuda())[0, len(prompt) - 1 : -1].float().cpu()
        error = (torch.stack(seen[number]).float().cpu() - truth).abs().max()
        assert error < 2 * (trained - truth).abs().max() + 0.02
    assert not engine.unfinished


@pytest.mark.parametrize("fault", ["error", "wait"])
def test_an_error_during_a_capture_leaves_the_device_usable(fault: str) -> None:
    """Also a call that no capture allows, after which it cannot end as usual."""
    graphs, calls = Graphs(), []

    def fail_in_the_capture() -> None:
        calls.append(torch.zeros(4, device="cuda") + 1)
        if len(calls) == 2 and fault == "wait":
            torch.cuda.synchronize()
        if len(calls) == 2:
            raise RuntimeError("as asked")

    with pytest.raises(RuntimeError, match="as asked" if fault == "error" else "capturing"):
        graphs.capture("failed", fail_in_the_capture)
    assert torch.ones(4, device="cuda").sum().item() == 4
    graphs.capture("works", lambda: calls.append(calls[0] * 2))
    assert graphs.replay("works") and calls[-1].tolist() == [2.0] * 4


def test_garbage_of_an_engine_does_not_disturb_the_captures_of_the_next() -> None:
    options = EngineOptions(sequences=4, tokens_per_block=16, cache_blocks=64, context=64)
    thresholds = gc.get_threshold()
    gc.set_threshold(1)  # it runs whenever it may
    try:
        for _ in range(3):
            engine = Engine(tiny(LLAMA).to("cuda", torch.bfloat16), options=options)
            assert engine._runner.prompt_sizes
            cycle = [engine, None]
            cycle[1] = cycle  # freed only by the garbage collector
            del engine, cycle
    finally:
        gc.set_threshold(*thresholds)


@pytest.mark.parametrize("name", ["llama", "sliding", "mixtral", "qwen3 moe"])
def test_no_kernel_is_compiled_after_the_engine_is_built(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compilation takes about a second, in which all requests wait."""
    from triton import knobs

    model = built(SPECS[name], dtype=torch.float32).to("cuda", torch.bfloat16)
    options = EngineOptions(sequences=12, step_tokens=64, tokens_per_block=16, cache_blocks=128, context=64)
    engine = Engine(model, options=options)
    compiled: list[str] = []
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **call: compiled.append(call["fn"].name))
    draws = random.Random(0)
    for _ in range(60):
        for _ in range(draws.randrange(3)):
            prompt = [draws.randrange(40) for _ in range(draws.randrange(1, 40))]
            sampling = SamplingOptions(temperature=draws.choice([0.0, 0.7]), top_k=draws.choice([0, 5]))
            engine.submit(prompt, new_tokens=draws.randrange(1, 12), sampling=sampling)
        engine.step()
    list(engine.run())
    assert not compiled


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("source", ["lookup", "layer", "model", "modules"])
def test_graphs_compute_drafts_and_their_check(
    source: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp32; only steps with chunks of prompts replay no graph."""
    options = EngineOptions(sequences=5, tokens_per_block=16, cache_blocks=64, context=64)
    modules = source == "modules"
    model = tiny(replace(LLAMA, prediction_depth=3 * modules)).cuda()
    sampling = SamplingOptions(temperature=temperature, top_k=20, seed=3)
    expected = texts(Engine(copy.deepcopy(model), options=options), sampling=sampling)
    drafts = {"lookup": None, "layer": tiny(replace(LLAMA, layers=1)).cuda(), "model": copy.deepcopy(model)}
    speculation = Speculation(tokens=3, shortest=1, least=0, mtp=modules)
    engine = Engine(model, options=replace(options, speculation=speculation), draft_model=drafts.get(source))
    forward, chunks = ModelRunner.forward, []

    def recorded(runner: ModelRunner, inputs: StepInputs) -> torch.Tensor:
        chunks.append(inputs.sampled is not None)
        return forward(runner, inputs)

    monkeypatch.setattr(ModelRunner, "forward", recorded)
    drafted = texts(engine, sampling=sampling)
    assert all(chunks)
    proposed, accepted = engine.drafts
    assert proposed > 0
    if temperature == 0 or source == "lookup":
        assert drafted == expected
    if source == "model":
        assert accepted == proposed


def test_graphs_of_modules_follow_a_longer_step_with_drafts() -> None:
    """Requests with a penalty get no drafts: three of them are padded to a shorter step than that of the requests before."""
    model = tiny(replace(LLAMA, prediction_depth=1)).cuda()
    options = EngineOptions(sequences=8, tokens_per_block=16, cache_blocks=64, context=64)
    speculation = Speculation(tokens=1, shortest=1, least=0, mtp=True)
    engine = Engine(copy.deepcopy(model), options=replace(options, speculation=speculation))
    texts(engine, [*PROMPTS, *PROMPTS][:8])
    penalised = SamplingOptions(temperature=0.0, presence_penalty=0.5)
    expected = texts(Engine(model, options=options), PROMPTS[:3], sampling=penalised)
    assert texts(engine, PROMPTS[:3], sampling=penalised) == expected


def test_graphs_go_on_after_another_engine_has_computed_the_prompts() -> None:
    """The first decode of a text is one of a graph, whose newest token came from the host."""
    options = EngineOptions(sequences=8, tokens_per_block=16, cache_blocks=64, context=64)
    model = tiny(LLAMA).cuda()
    sender, receiver, alone = (Engine(copy.deepcopy(model), options=options) for _ in range(3))
    assert continued_texts(sender, receiver) == texts(alone)


def test_graphs_compute_with_newer_weights(tmp_path: Path) -> None:
    """They read the parameters where they were when the graph was captured."""
    options = EngineOptions(sequences=4, tokens_per_block=16, cache_blocks=64, context=64)
    old, new = (make(LLAMA).to("cuda", torch.bfloat16) for make in (tiny, newer))
    before, after = (texts(Engine(copy.deepcopy(model), options=options)) for model in (old, new))
    engine = Engine(old, options=options)
    assert texts(engine) == before != after
    engine.load_weights(save_run(tmp_path / "run", newer(LLAMA)))
    assert texts(engine) == after


SHARED_EXPERTS = ("--model", "deepseek-v2-lite", "--share-experts", "--dispatch", "int8", "--micro-batches", "2")


@pytest.mark.parametrize("form", [(), SHARED_EXPERTS], ids=["tensor ranks with graphs", "expert ranks"])
def test_two_ranks_end_after_their_last_request(form: tuple[str, ...]) -> None:
    needs(2)
    script = Path(__file__).parents[2] / "benchmarks" / "serve_offline.py"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    options = ["--repeats", "0", "--decode", "1", "--decode-prompt", "64", "--context", "512"]
    subprocess.run([*launcher, str(script), *options, *form], check=True, timeout=LIMIT)
