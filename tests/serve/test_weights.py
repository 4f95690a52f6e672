"""Newer weights of the same model between the steps of an engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from meshwright.checkpoint.models.hf import export_hf
from meshwright.checkpoint.read.reader import CheckpointReader
from meshwright.spec.errors import BadInput, Damaged
from tests.models.tiny import ALL, LLAMA
from tests.serve.helpers import PROMPTS, TOKENS, engine_of, greedy, newer, record_logits, save_run, texts, tiny


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3 moe"])
def test_logits_after_the_swap_are_those_of_the_new_weights(name: str, tmp_path: Path) -> None:
    """Also of prompts whose blocks are in the prefix cache."""
    model = newer(ALL[name])
    engine = engine_of(tiny(ALL[name]))
    old = texts(engine)
    addresses = [parameter.data_ptr() for parameter in engine._model.parameters()]
    engine.load_weights(save_run(tmp_path, model))
    assert [parameter.data_ptr() for parameter in engine._model.parameters()] == addresses
    seen = record_logits(engine)
    new = texts(engine)
    assert all(left != right for left, right in zip(old, new, strict=True))
    with torch.no_grad():
        for number, (prompt, tokens) in enumerate(zip(PROMPTS, new, strict=True), len(PROMPTS)):
            whole = model(torch.tensor([[*prompt, *tokens]]))[0, len(prompt) - 1 : -1]
            assert (torch.stack(seen[number]) - whole).abs().max() < 1e-5


def test_fp8_weights_are_rounded_again(tmp_path: Path) -> None:
    engine, model = engine_of(tiny(LLAMA), weights="fp8"), newer(LLAMA)
    engine.load_weights(save_run(tmp_path, model))
    assert texts(engine) == texts(engine_of(model, weights="fp8"))


def test_a_hugging_face_folder_gives_the_same_texts(tmp_path: Path) -> None:
    model, folder = newer(LLAMA), tmp_path / "exported"
    weights = dict(model.named_parameters())
    export_hf(folder, LLAMA, lambda name: weights[name].detach(), tokenizer=None, run_note="", dtype="fp32")
    engine = engine_of(tiny(LLAMA))
    engine.load_weights(folder)
    assert texts(engine) == greedy(model)


@pytest.mark.parametrize("overlap", [False, True])
def test_running_requests_go_on_as_if_the_new_weights_had_read_their_text(overlap: bool, tmp_path: Path) -> None:
    """At the swap some decode, one is in its prompt and one waits. A token that was in flight is of the old weights."""
    old, new, folder = tiny(LLAMA), newer(LLAMA), save_run(tmp_path, newer(LLAMA))
    engine = engine_of(old, overlap=overlap, step_tokens=12)
    numbers = [engine.submit(prompt, new_tokens=TOKENS) for prompt in PROMPTS]
    tokens: dict[int, list[int]] = {number: [] for number in numbers}
    for _ in range(6):
        for update in engine.step():
            tokens[update.number] += update.tokens
    early = {number: len(new_tokens) for number, new_tokens in tokens.items()}
    for part in engine._in_flight.parts if engine._in_flight else ():
        early[part.request.number] += 1
    assert 0 in early.values() and max(early.values()) > 1
    engine.load_weights(folder)
    for update in engine.run():
        tokens[update.number] += update.tokens
    for number, prompt in enumerate(PROMPTS):
        first, rest = tokens[number][: early[number]], tokens[number][early[number] :]
        assert first == greedy(old, [prompt], len(first))[0]
        assert rest == greedy(new, [(*prompt, *first)], TOKENS - len(first))[0]


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    engine = engine_of(tiny(LLAMA))
    folder = save_run(tmp_path, tiny(replace(LLAMA, rope_theta=500.0)))
    with pytest.raises(BadInput, match=r"another model: model.rope_theta is 500.0, expected 10000.0"):
        engine.load_weights(folder)
    assert texts(engine) == greedy(tiny(LLAMA))


def test_damaged_weights_change_nothing(tmp_path: Path) -> None:
    engine, folder = engine_of(tiny(LLAMA)), save_run(tmp_path, newer(LLAMA))
    [shard] = folder.glob("checkpoints/*/tensors-00000.safetensors")
    with CheckpointReader(shard.parent) as reader:
        last = max(reader._entry(record, chunk).end for record in reader.tensors.values() for chunk in record.chunks)
    data = bytearray(shard.read_bytes())
    data[last - 1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(Damaged, match=r"tensors-00000.safetensors"):
        engine.load_weights(folder)
    assert texts(engine) == greedy(tiny(LLAMA))


def test_no_step_follows_when_reading_fails_in_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, model = engine_of(tiny(LLAMA)), newer(LLAMA)
    folder = save_run(tmp_path, model)
    read_rows, reads = CheckpointReader.read_rows, []

    def fails_at_the_fifth(reader: CheckpointReader, name: str, start: int, stop: int) -> torch.Tensor:
        reads.append(name)
        if len(reads) == 5:
            raise OSError("gone")
        return read_rows(reader, name, start, stop)

    monkeypatch.setattr(CheckpointReader, "read_rows", fails_at_the_fifth)
    with pytest.raises(OSError, match="gone"):
        engine.load_weights(folder)
    engine.submit(PROMPTS[0], new_tokens=3)
    with pytest.raises(RuntimeError, match="load weights again"):
        engine.step()
    engine.load_weights(folder)
    assert [token for update in engine.run() for token in update.tokens] == greedy(model, PROMPTS[:1], 3)[0]
