"""Log probabilities and grammars of requests to the engine."""

from __future__ import annotations

import importlib.util
import re

import pytest
import torch
from tokenizers import Tokenizer, decoders, models

from meshwright.serve.generation import TokenLogprob
from meshwright.serve.grammar import Grammar
from meshwright.serve.sampling import SamplingOptions
from meshwright.spec.engine import Speculation
from meshwright.spec.errors import BadInput
from tests.models.tiny import LLAMA
from tests.serve.helpers import PROMPTS, engine_of, texts, tiny


@pytest.mark.parametrize("overlap", [False, True])
def test_log_probabilities_are_those_of_the_trainers_forward(overlap: bool) -> None:
    model = tiny(LLAMA)
    engine = engine_of(model, overlap=overlap)
    wanted = {0: 3, 1: 0, 2: None, 4: 5}
    """Number of top log probabilities by request; None for no log probabilities."""
    for number, top in wanted.items():
        options = SamplingOptions(seed=number, top_k=9, logprobs=top is not None, top_logprobs=top or 0)
        assert engine.submit(PROMPTS[number], new_tokens=5, sampling=options) == list(wanted).index(number)
    tokens: list[list[int]] = [[] for _ in wanted]
    logprobs: list[list[TokenLogprob]] = [[] for _ in wanted]
    for update in engine.run():
        tokens[update.number] += update.tokens
        logprobs[update.number] += update.logprobs
    for (number, top), new, ours in zip(wanted.items(), tokens, logprobs, strict=True):
        assert len(new) == 5 and len(ours) == (0 if top is None else 5)
        with torch.no_grad():
            whole = model(torch.tensor([[*PROMPTS[number], *new]]))[0, len(PROMPTS[number]) - 1 : -1].log_softmax(1)
        for token, logprob, row in zip(new, ours, whole, strict=bool(ours)):
            assert logprob.chosen == pytest.approx(float(row[token]), abs=1e-5)
            assert [other for other, _ in logprob.top] == row.argsort(descending=True)[:top].tolist()
            assert [p for _, p in logprob.top] == pytest.approx(
                row.sort(descending=True).values[:top].tolist(), abs=1e-5
            )


@pytest.mark.skipif(importlib.util.find_spec("llguidance") is None, reason="needs the extra grammar")
@pytest.mark.parametrize("speculation", [None, Speculation(tokens=3, shortest=1)], ids=str)
@pytest.mark.parametrize("overlap", [False, True])
def test_texts_follow_their_grammars_beside_free_ones(overlap: bool, speculation: Speculation | None) -> None:
    model = tiny(LLAMA)
    words = [*"abcdefghijklmnopqrstuvwxyz0123456789", "<end>"]
    tokenizer = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    end = words.index("<end>")
    free = texts(engine_of(model), PROMPTS[:1])[0]

    engine = engine_of(model, tokenizer=tokenizer, overlap=overlap, speculation=speculation)
    patterns = {1: "(ab|c)[0-9]{3}x*", 2: "[x-z]{2,4}7"}
    sampling = SamplingOptions(seed=3)
    engine.submit(PROMPTS[0], new_tokens=len(free))
    for number, pattern in patterns.items():
        grammar = Grammar("regex", pattern)
        engine.submit(PROMPTS[number], new_tokens=40, sampling=sampling, stop_ids=[end], grammar=grammar)
    tokens: dict[int, list[int]] = {number: [] for number in range(3)}
    ends = {}
    for update in engine.run():
        tokens[update.number] += update.tokens
        ends[update.number] = update.reason
    assert tokens[0] == free
    for number, pattern in patterns.items():
        assert ends[number] == "stop"
        assert re.fullmatch(pattern, "".join(words[token] for token in tokens[number]))
    assert engine._grammar_requests == 0


def test_a_grammar_needs_a_tokenizer() -> None:
    with pytest.raises(BadInput, match="a grammar needs an engine with a tokenizer"):
        engine_of(tiny(LLAMA)).submit(PROMPTS[0], new_tokens=3, stop_ids=[1], grammar=Grammar("regex", "a"))


def test_texts_of_the_engine_keep_the_space_after_the_prompt() -> None:
    vocabulary = {
        piece: index for index, piece in enumerate(["<s>", "▁the", "the", "▁fox", *"abcdefghijklmnopqrstuvwxyz"])
    }
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    strip = decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    tokenizer.add_special_tokens(["<s>"])
    engine = engine_of(tiny(LLAMA), tokenizer=tokenizer)
    sampling = SamplingOptions(logit_bias={vocabulary["▁the"]: 100.0})
    for prompt in ([0, 2], [0], [0, 2]):
        engine.submit(prompt, new_tokens=2, sampling=sampling)
    found = ["", "", ""]
    for update in engine.run():
        found[update.number] += update.text
    assert found == [" the the", "the the", " the the"]  # as tokenizer.decode makes of prompt and text
