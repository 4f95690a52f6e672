"""The page on chats with a model of another origin: continue, train, export and serve with one template."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.data.chats import CHATML, byte_level, plain, write_tokenizer
from tests.docs.pages import blocks
from tests.models.tiny import LLAMA, built
from tests.server.test_process import served

from meshwright.checkpoint.models.hf import export_hf
from meshwright.data.source import open_data
from meshwright.spec.job import DataSpec

PAGE = "docs/how-to/chat.md"
MODEL, SERVED = "my-model", "my-chat-model"


def foreign_model(folder: Path) -> None:
    """A small model with random weights, and a template of which answers must be found by prefixes."""
    files = write_tokenizer(folder / "files", plain(CHATML))
    spec = replace(LLAMA, vocab_size=byte_level().get_vocab_size())
    weights = dict(built(spec, vary=False).named_parameters())
    export_hf(folder / MODEL, spec, weights.__getitem__, tokenizer=files / "tokenizer.json", run_note="", dtype="fp32")
    assert (folder / MODEL / "chat_template.jinja").read_text() == plain(CHATML)


def post(url: str, **body: Any) -> Any:
    content = json.dumps(body).encode()
    request = urllib.request.Request(url, content, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


@pytest.mark.slow
def test_the_page_from_a_foreign_model_to_its_server(tmp_path: Path) -> None:
    foreign_model(tmp_path)
    script = tmp_path / "bin" / "meshwright"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m meshwright "$@"\n')
    script.chmod(0o755)
    path = os.pathsep.join((str(script.parent), os.environ["PATH"]))
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "TERM": "dumb"}
    _, *steps = [block.text for block in blocks(PAGE) if block.language == "bash" and "norun" not in block.options]
    for text in steps:
        command = ["bash", "-euo", "pipefail", "-c", text]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
    card = (tmp_path / SERVED / "README.md").read_text()
    for words in (
        "Began with | the weights of `my-model`",
        "Data | `chats`",
        "the answers of chats with their end, `<|im_end|>`",
        "Chat template | `chat_template.jinja`",
        "steps 100, global_batch 16",
        "Tuned on chats",
    ):
        assert words in card
    source = open_data(DataSpec(mix={str(tmp_path / "chats"): 1.0}), seq_len=32, seed=0)
    stored = source.sources[str(tmp_path / "chats")].stream
    mask = stored.read_weights(0, 100)
    start = int(mask.argmax())
    stop = start + int((~mask[start:]).argmax())
    messages = [{"role": "user", "content": "Hi"}]
    with served(tmp_path / SERVED) as (_, url):
        prompt = post(f"{url}/tokenize", messages=messages)["tokens"]
        answer = post(f"{url}/v1/chat/completions", messages=messages, temperature=0, max_tokens=20)
    assert prompt == stored.read(0, start).tolist(), "training and serving give the model the same tokens"
    assert answer["choices"][0]["message"]["content"] == "Hello!"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == stop - start - 1, "the end token is not counted"
