"""Single decodes on a CPU agree with the trainer's forward, whichever models they support."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from meshwright.models.mlp import GatedMLP
from meshwright.serve import host_decode
from meshwright.serve.host_decode import HostDecode
from meshwright.serve.kv_cache import KVCache
from meshwright.spec.model import KindSpec
from meshwright.workload.cache_size import layer_groups
from tests.models.tiny import GEMMA, GPT2, LLAMA, MIXTRAL, PARALLEL, QWEN2, QWEN3, SCALED, SLIDING, SMOLLM3, built
from tests.serve.helpers import PROMPTS, continued_texts, engine_of, greedy, record_logits, texts, tiny


@pytest.mark.parametrize("spec", [LLAMA, QWEN2, QWEN3, SLIDING, replace(LLAMA, kv_heads=1, tied=True)], ids=str)
def test_logits_are_those_of_the_trainer(spec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_decode, "CAPACITY_STEP", 8)  # so that the copy of the text is made several times
    model = tiny(spec)
    engine = engine_of(model)
    assert engine._runner._host_decode is not None
    seen = record_logits(engine)
    (new,) = texts(engine, PROMPTS[:1])
    with torch.no_grad():
        whole = model(torch.tensor([[*PROMPTS[0], *new]]))[0, len(PROMPTS[0]) - 1 : -1]
    assert (torch.stack(seen[0]) - whole).abs().max() < 1e-5


def test_a_moved_prompt_may_have_the_blocks_of_the_text_before() -> None:
    model, prefix = tiny(LLAMA), (3, 1, 4, 1, 5, 9, 2, 6)
    prompts = (*prefix, 7), (*prefix, 20, 11, 13)  # the first text ends where the second begins
    sender, receiver = engine_of(model), engine_of(model)
    seen = record_logits(receiver)
    moved = [continued_texts(sender, receiver, [prompt], new_tokens=3)[0] for prompt in prompts]
    assert moved == greedy(model, prompts, 3)
    for number, (prompt, new) in enumerate(zip(prompts, moved, strict=True)):
        with torch.no_grad():
            whole = model(torch.tensor([[*prompt, *new]]))[0, len(prompt) : -1]
        assert (torch.stack(seen[number]) - whole).abs().max() < 1e-5


def supported(model, dtype=torch.float32) -> bool:
    cache = KVCache(
        model.spec, [4] * len(layer_groups(model.spec)), tokens_per_block=4, device=torch.device("cpu"), dtype=dtype
    )
    return HostDecode.supports(model, cache)


WIDTHS = replace(LLAMA, blocks={"narrow": KindSpec(ffn_hidden=48), "wide": KindSpec()}, pattern=("narrow", "wide"))


@pytest.mark.parametrize(
    "spec", [GPT2, MIXTRAL, PARALLEL, SCALED, replace(GEMMA, blocks={}, pattern=()), SMOLLM3, WIDTHS], ids=str
)
def test_other_models_take_the_general_path(spec) -> None:
    assert supported(tiny(LLAMA))
    assert not supported(tiny(spec))


def test_a_changed_model_takes_the_general_path(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not supported(built(LLAMA, dtype=torch.float32, reference=True))
    assert not supported(built(LLAMA, dtype=torch.bfloat16), torch.bfloat16)
    divided = tiny(LLAMA)
    divided.layers["1"].attention.heads //= 2
    assert not supported(divided)
    hooked = tiny(LLAMA)
    hooked.layers["0"].mlp.register_forward_hook(lambda module, inputs, output: output)
    assert not supported(hooked)
    replaced = tiny(LLAMA)
    mlp = replaced.layers["0"].mlp
    assert isinstance(mlp, GatedMLP)
    monkeypatch.setattr(mlp, "down", torch.nn.Linear(96, 64, bias=False))
    assert not supported(replaced)
