"""Drafts by prediction modules, on a CPU in fp32: texts beside the trainer's forward, drafts beside its modules."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.checkpoint.models.hf import export_hf
from meshwright.checkpoint.models.single_device import load_model
from meshwright.models.decoder import Decoder
from meshwright.models.moe import RoutedOutput
from meshwright.serve.batch_inputs import PackedStep
from meshwright.serve.drafts import CheckedStep
from meshwright.serve.engine import Engine
from meshwright.serve.prediction_drafts import PredictionDrafter, _module_inputs
from meshwright.serve.sampling import GREEDY, SamplingOptions
from meshwright.spec.engine import Speculation
from meshwright.spec.errors import BadInput
from tests.models.tiny import DEEPSEEK_V3, LLAMA, SLIDING
from tests.serve.helpers import PROMPTS, assert_all_free, engine_of, greedy, newer, save_run, texts, tiny
from tests.slow import quick_first

NEW = 14
MTP = Speculation(tokens=2, mtp=True, least=0.0)
SETTINGS: tuple[dict[str, Any], ...] = (
    {"step_tokens": 7, "overlap": True, "prefix_cache": False},
    {"sequences": 5, "step_tokens": 64},
    {"cache_blocks": 18},
)
"""Chunks beside drafts; large steps and prefix hits; preemptions."""


def of_depth(spec: Any, depth: int = 2) -> Decoder:
    return tiny(replace(spec, prediction_depth=depth))


@torch.no_grad()
def predicted(model: Decoder, tokens: list[int], depth: int) -> list[Tensor]:
    """Logits of each module behind a text of which all but the last token were computed, by the trainer's modules.

    A later module reads the draft of the module before it as the newest token.
    """
    text, found = list(tokens), []
    ids = torch.tensor([text[:-1]])
    shared = model.shared_inputs(ids, None, None, model.embed.weight.dtype)
    hidden = model.norm(model._run_blocks(ids, None, None)[0])
    for index in range(depth):
        module = model.predictions[index]
        further = torch.tensor([text[1 + index :][: ids.shape[1]]])
        out = module.block.forward(module.join(hidden, model.embed(further)), *shared.of(module.block.attention_kind))
        hidden = module.norm(out.x if isinstance(out, RoutedOutput) else out)
        found.append(model.head(hidden, None, model._tied_weight())[0, -1])
        text.append(int(found[-1].argmax()))
    return found


def watch_drafts(engine: Engine) -> dict[int, dict[int, list[int]]]:
    """The drafts behind each newest token, by request number and length of the text."""
    seen: dict[int, dict[int, list[int]]] = {}
    drafter = engine._drafter
    assert isinstance(drafter, PredictionDrafter)
    draw = drafter.draw_next

    def draw_next(packed: PackedStep, checked: CheckedStep) -> None:
        draw(packed, checked)
        numbers = {row: number for number, row in engine._table_rows.row_of.items()}
        _, _, rows, positions = _module_inputs(packed, checked)
        for row, position in zip(rows.tolist(), positions.tolist(), strict=True):
            seen.setdefault(numbers[row], {})[position] = drafter._tokens[row].tolist()

    drafter.draw_next = draw_next
    return seen


@pytest.mark.parametrize("options", quick_first(1, SETTINGS), ids=str)
@pytest.mark.parametrize("spec", quick_first(1, [LLAMA, DEEPSEEK_V3, SLIDING]), ids=["heads", "latents", "window"])
def test_texts_are_the_model_s_and_drafts_its_modules(spec: Any, options: dict[str, Any]) -> None:
    model = of_depth(spec)
    engine = engine_of(model, speculation=MTP, **options)
    drafts = watch_drafts(engine)
    expected = greedy(model, count=NEW)
    assert texts(engine, new_tokens=NEW) == expected
    assert engine.drafts[0] > 0 and (spec is SLIDING or (engine._policy.preemptions > 0) == ("cache_blocks" in options))
    assert_all_free(engine)
    if options.get("prefix_cache") is False:
        for number, (prompt, new) in enumerate(zip(PROMPTS, expected, strict=True)):
            text, begin = [*prompt, *new], len(prompt) + 1
            assert len(drafts[number]) > NEW / 2
            for length, tokens in drafts[number].items():
                logits = predicted(model, text[:length], 2)
                assert logits[0][tokens[0]] > logits[0].max() - 1e-4
                if length == begin:  # no draft was rejected before
                    assert logits[1][tokens[1]] > logits[1].max() - 1e-4


def sure_model(depth: int) -> Decoder:
    """A model whose next token follows from the newest alone, as do its modules': all their drafts are right."""
    model = tiny(replace(LLAMA, prediction_depth=depth, init_std=1.0))
    hidden = model.spec.hidden
    with torch.no_grad():
        for block in [*model.layers.values(), *(module.block for module in model.predictions)]:
            block.attention.out.weight.zero_()
            block.mlp.down.weight.zero_()
        for norm in (model.norm, *(m for p in model.predictions for m in (p.token_norm, p.hidden_norm, p.norm))):
            norm.weight.fill_(1.0)
        for module in model.predictions:
            module.project.weight.copy_(torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), 1))
    return model


@pytest.mark.parametrize("options", quick_first(1, SETTINGS), ids=str)
def test_right_drafts_are_accepted(options: dict[str, Any]) -> None:
    model = sure_model(2)
    for sampling in (GREEDY, SamplingOptions(temperature=0.8, top_k=20, seed=3)):
        engine = engine_of(model, speculation=MTP, **options)
        new = texts(engine, new_tokens=NEW, sampling=sampling)
        assert all(len(text) == NEW for text in new)
        if sampling is GREEDY:
            assert new == greedy(model, count=NEW)
        figures = engine.figures()
        assert figures.accepted_draft_tokens == figures.draft_tokens > NEW


def test_a_checkpoint_s_modules_propose_and_newer_weights_replace_them(tmp_path: Path) -> None:
    """Published folders have the modules as further layers; of two modules one is loaded."""
    old, new = of_depth(DEEPSEEK_V3), newer(replace(DEEPSEEK_V3, prediction_depth=2))
    export_hf(
        tmp_path / "old", old.spec, dict(old.named_parameters()).__getitem__, tokenizer=None, run_note="", dtype="fp32"
    )
    save_run(tmp_path / "new", new)
    cpu = torch.device("cpu"), torch.float32
    model = load_model(tmp_path / "old", *cpu, predictions=1)
    assert len(model.predictions) == 1 and not load_model(tmp_path / "new", *cpu).predictions
    engine = engine_of(model, speculation=replace(MTP, tokens=1), prefix_cache=False)
    assert texts(engine, PROMPTS[1:2]) == greedy(old, PROMPTS[1:2])
    engine.load_weights(tmp_path / "new")
    drafts, prompt = watch_drafts(engine), PROMPTS[2]
    (text,) = texts(engine, [prompt])
    assert text == greedy(new, [prompt])[0]
    for length, (token,) in drafts[1].items():
        (logits,) = predicted(new, [*prompt, *text][:length], 1)
        assert logits[token] > logits.max() - 1e-4


@pytest.mark.parametrize(
    ("depth", "options", "message"),
    [
        (0, {}, "needs a module for multi-token prediction, and the model has 0; expected at most that many .* got 2"),
        (1, {}, "and the model has 1"),
        (2, {"draft_model": True}, "mtp: the model's own modules propose the drafts; leave out draft_model"),
        (2, {"invariant": True}, "invariant results cannot have a draft model or mtp"),
    ],
)
def test_engines_without_enough_modules_and_other_drafts_are_refused(
    depth: int, options: dict[str, Any], message: str
) -> None:
    model = of_depth(LLAMA, depth)
    draft_model = model if options.pop("draft_model", False) else None
    with pytest.raises(BadInput, match=message):
        engine_of(model, speculation=MTP, draft_model=draft_model, **options)
