"""Results of an engine for some requests, on one device and on a group of tensor ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint.models.stored_model import StoredModel
from meshwright.parallel.world import World
from meshwright.serve.engine import Engine
from meshwright.serve.expert_group import ExpertEngine
from meshwright.serve.quantized_layers import QuantizedWeight
from meshwright.serve.rank_group import RankEngine, RankModel
from meshwright.serve.sampling import SamplingOptions
from meshwright.serve.tensor_group import TensorEngine
from meshwright.spec.engine import Dispatch, EngineOptions, ExpertRanks
from meshwright.spec.inference_layout import piece_dimension, rank_pieces
from meshwright.spec.layout import AxisPart
from meshwright.spec.model import ModelSpec, parameters
from tests.serve.helpers import PROMPTS, TOKENS, newer, record_logits, save_run, texts, tiny

DRAWN = SamplingOptions(temperature=1.5, top_k=40, seed=7, repetition_penalty=1.2, logit_bias={5: 2.0})
Play = Callable[[Engine], Any]


def continue_and_abort(engine: Engine) -> Any:
    """Greedy and drawn texts with preemptions; one request is aborted on its way, and one ends by its deadline."""
    engine.submit(PROMPTS[0], new_tokens=TOKENS, seconds=0.0)
    numbers = [engine.submit(prompt, new_tokens=TOKENS) for prompt in PROMPTS]
    numbers += [engine.submit(prompt, new_tokens=TOKENS, sampling=DRAWN, stop_ids=[1]) for prompt in PROMPTS]
    tokens: dict[int, list[int]] = {number: [] for number in (0, *numbers)}
    ends: dict[int, str | None] = {}
    while engine.unfinished:
        for update in engine.step():
            tokens[update.number] += update.tokens
            ends[update.number] = update.reason
        if len(tokens[2]) == 3:
            engine.abort(2)
    assert ends[0] == "deadline" and ends[2] == "abort"
    return tokens, ends, engine._policy.preemptions > 0


def continue_with_newer_weights(engine: Engine, folder: str, other: str) -> Any:
    """Texts before and after the swap; weights of another model are refused in between."""
    before = texts(engine)
    refused = ""
    try:
        engine.load_weights(Path(other))
    except Exception as error:
        refused = f"{type(error).__name__}: {error}"
    engine.load_weights(Path(folder))
    return before, refused, texts(engine)


def exchange_blocks(engine: Engine, content: bytes | None) -> Any:
    """Identity, bytes of a prompt's blocks, text, and cached blocks; with `content` the blocks come from there."""
    prompt, blocks = [7 * index % 90 for index in range(30)], engine.prefix_blocks()
    digests = blocks.digests(prompt, "")
    if content is not None:
        reserved = blocks.reserve(digests, 0)
        assert reserved is not None and len(reserved) == len(digests) == blocks.missing(digests)
        for index in range(len(digests)):
            table = reserved.blocks(index)
            assert table is not None
            start = index * blocks.block_bytes
            blocks.write([table], memoryview(bytearray(content[start : start + blocks.block_bytes])))
            reserved.enter(index)
        reserved.release()
    number, tokens = engine.submit(prompt, new_tokens=TOKENS), []
    unsent = blocks.unsent(digests, 0)
    while engine.unfinished:
        tokens += [token for update in engine.step() for token in update.tokens if update.number == number]
        unsent.extend()
    out = memoryview(bytearray(len(unsent) * blocks.block_bytes))
    blocks.read(unsent.take(len(unsent)), out)
    unsent.release()
    return blocks.identity(), bytes(out), tokens, engine.figures().cached_tokens


def first_logits(engine: Engine) -> list[list[float]]:
    """The logits after each prompt."""
    seen = record_logits(engine)
    texts(engine, new_tokens=1)
    return [seen[number][0].tolist() for number in sorted(seen)]


def compare_rounded_weights(world: World, spec: ModelSpec, folder: str, weights: str) -> int:
    """The number of rounded weights that are this rank's part of one device's, scales too, before and after a swap."""
    options = options_of(weights=weights)
    engine = tensor_engine(world, spec, options)
    equal = _equal_parts(engine, Engine(tiny(spec), options=options), world)
    engine._load(Path(folder))
    assert _equal_parts(engine, Engine(newer(spec), options=options), world) == equal
    return equal


def _equal_parts(divided: Engine, alone: Engine, world: World) -> int:
    part, equal = AxisPart(world.rank, world.ranks), 0
    for parameter in parameters(alone.spec):
        ours, whole = (_rounded_weight(engine, parameter.name) for engine in (divided, alone))
        if ours is None or whole is None:
            continue
        slices = [
            tuple(slice(first, first + size) for first, size in zip(piece.offsets, piece.sizes, strict=True))
            for piece in rank_pieces(alone.spec, parameter, part)
        ]
        dimension = piece_dimension(parameter)
        values = torch.cat([whole.values.view(torch.uint8)[piece] for piece in slices], dim=dimension)
        assert torch.equal(ours.values.view(torch.uint8), values), parameter.name
        scale = torch.cat([whole.scale[piece[:-1]] for piece in slices], dim=dimension)
        assert torch.equal(ours.scale, scale), parameter.name
        equal += 1
    return equal


def _rounded_weight(engine: Engine, name: str) -> QuantizedWeight | None:
    owner, _, leaf = name.rpartition(".")
    module = engine._model.get_submodule(owner)
    found = module if leaf == "weight" else getattr(module, leaf, None)
    return found if isinstance(found, QuantizedWeight) else None


def options_of(**options: Any) -> EngineOptions:
    sizes = {"sequences": 4, "step_tokens": 16, "tokens_per_block": 4, "cache_blocks": 24, "context": 64}
    return EngineOptions(**{**sizes, **options})


def tensor_engine(world: World, spec: ModelSpec, options: EngineOptions) -> TensorEngine:
    """This rank's engine of the model `tiny(spec)`."""
    weights = dict(tiny(spec).named_parameters())
    stored = StoredModel(spec, lambda parameter, start, stop: weights[parameter.name][start:stop], lambda: None)
    part = RankModel.empty(spec, world, torch.float32)
    stored.copy_to(part.model, AxisPart(world.rank, world.ranks))
    return TensorEngine(part, world, options=options)


def stored_rows(world: World, folder: Path) -> list[list[list[float]]]:
    """The rank's engine of a folder in fp8, in which it plays a step; a row of each of two layers, as it multiplies it."""
    part = RankModel.load(folder, world, torch.float32, weights="fp8")
    engine = TensorEngine(part, world, options=options_of(weights="fp8"))
    rows = []
    for name in ("layers.0.mlp.gate_up", "layers.0.mlp.down"):
        layer = part.model.get_submodule(name)
        assert isinstance(layer, QuantizedWeight)
        rows.append((layer.values.float() * layer.scale)[:3].tolist())
    if world.leads:
        first_logits(engine)
        engine.close()
    else:
        engine.follow()
    return rows


def play_on_ranks(world: World, spec: ModelSpec, options: EngineOptions, play: Play, *arguments: Any) -> Any:
    """The result of `play(engine, *arguments)` on rank 0; None on the others. All blocks are free on all at the end."""
    engine = tensor_engine(world, spec, options)
    result = None
    if world.leads:
        result = play(engine, *arguments)
        engine.close()
    else:
        engine.follow()
    assert all(pool.free == pool.blocks for pool in engine._policy.cache.pools)
    return result


def play_alone(spec: ModelSpec, options: EngineOptions, play: Play, *arguments: Any) -> Any:
    return play(Engine(tiny(spec), options=options), *arguments)


def fail_on(world: World, spec: ModelSpec, failing: int) -> None:
    """The fourth step of tensor ranks raises on one of them."""
    _fail_at_fourth_step(tensor_engine(world, spec, options_of()), world, failing)


def fail_on_expert_ranks(world: World, spec: ModelSpec, failing: int) -> None:
    """The fourth step of expert ranks raises on one of them."""
    _fail_at_fourth_step(expert_engine(world, spec, options_of()), world, failing)


def _fail_at_fourth_step(engine: RankEngine, world: World, failing: int) -> None:
    compute, calls = engine._runner.logits, []

    def raises_at_the_fourth(packed: Any) -> torch.Tensor:
        calls.append(packed)
        if len(calls) == 4 and world.rank == failing:
            raise ValueError("out of luck")
        return compute(packed)

    engine._runner.logits = raises_at_the_fourth
    if world.leads:
        texts(engine)
    else:
        engine.follow()


def draw_differently(world: World, spec: ModelSpec) -> None:
    """Rank 1 takes another token than rank 0 once."""
    engine = tensor_engine(world, spec, options_of())
    if world.leads:
        texts(engine)
        return
    sample, calls = engine._sampler.sample, []

    def differs_once(*inputs: Any) -> torch.Tensor:
        calls.append(inputs)
        tokens = sample(*inputs)
        return tokens + 1 if len(calls) == 3 else tokens

    engine._sampler.sample = differs_once
    engine.follow()


def save_newer(folder: Path, spec: ModelSpec) -> str:
    """A run folder with weights `newer(spec)`."""
    return str(save_run(folder, newer(spec)))


def expert_engine(
    world: World, spec: ModelSpec, options: EngineOptions, dispatch: Dispatch | None = None, micro_batches: int = 1
) -> ExpertEngine:
    """This expert rank's engine of the model `tiny(spec)`."""
    weights = dict(tiny(spec).named_parameters())
    part = RankModel.empty(spec, world, torch.float32, ExpertRanks(count=world.ranks, dispatch=dispatch))
    part.copy_from(StoredModel(spec, lambda parameter, start, stop: weights[parameter.name][start:stop], lambda: None))
    return ExpertEngine(part, world, options=options, micro_batches=micro_batches)


def play_on_expert_ranks(
    world: World,
    spec: ModelSpec,
    options: EngineOptions,
    dispatch: Dispatch | None,
    micro_batches: int,
    play: Play,
    *arguments: Any,
) -> tuple[Any, int]:
    """The result of `play(engine, *arguments)` on rank 0, and this rank's requests. All blocks are free at the end."""
    engine = expert_engine(world, spec, options, dispatch, micro_batches)
    add, requests, result = engine._policy.add, [], None

    def counted(*given: Any) -> None:
        requests.append(given)
        add(*given)

    engine._policy.add = counted
    if world.leads:
        result = play(engine, *arguments)
        engine.close()
    else:
        engine.follow()
    assert all(pool.free == pool.blocks for pool in engine._policy.cache.pools)
    return result, len(requests)


def score_prompts(engine: Engine) -> list[list[float]]:
    """Log probabilities of the prompts' tokens, beside texts."""
    engine.submit(PROMPTS[1], new_tokens=TOKENS)
    sampling = SamplingOptions(temperature=0.0, prompt_logprobs=2)
    found = {engine.submit(prompt, new_tokens=3, sampling=sampling): list[float]() for prompt in PROMPTS}
    for update in engine.run():
        if update.prompt_logprobs is not None:
            for token in update.prompt_logprobs.each():
                found[update.number] += [token.chosen, *(value for _, value in token.top)]
    return [*found.values()]


def continue_some(engine: Engine) -> Any:
    """Greedy and drawn texts; one is aborted, one ends by its deadline; a second round has fewer requests than ranks."""
    numbers = [engine.submit(prompt, new_tokens=TOKENS) for prompt in PROMPTS]
    numbers += [engine.submit(prompt, new_tokens=TOKENS, sampling=DRAWN) for prompt in PROMPTS[:3]]
    numbers += engine.submit_samples(PROMPTS[1], 2, sampling=DRAWN, new_tokens=TOKENS)
    engine.abort(numbers[2])
    numbers.append(engine.submit(PROMPTS[0], new_tokens=TOKENS, seconds=1e-9))
    tokens: dict[int, list[int]] = {number: [] for number in numbers}
    ends: dict[int, str | None] = {}
    for update in engine.run():
        tokens[update.number] += update.tokens
        ends[update.number] = update.reason
    assert (ends.pop(numbers[2]), ends[numbers[-1]]) == ("abort", "deadline")
    return tokens, ends, texts(engine, PROMPTS[:1])
