"""One validation loss for every batch, layout and order of the files, in training and in `meshwright eval` (float64)."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.data.prepare import prepare
from meshwright.data.source import open_data
from meshwright.models.decoder import Decoder
from meshwright.models.initial_values import initialise
from meshwright.parallel.world import World
from meshwright.spec.job import DataSpec
from meshwright.spec.plan import Plan
from meshwright.training.evaluate import Evaluation, HeldOut, evaluate, evaluate_plain
from tests.distributed.pool import Pool
from tests.distributed.test_equality import LLAMA
from tests.distributed.test_schedules import Case, named
from tests.training.tiny import WORDS

SPEC = replace(LLAMA, max_seq_len=32, vocab_size=300)
LAYOUTS = [Case("1f1b", shard=2, micro=3), Case("1f1b", pipeline=2)]
MICRO_BATCHES = (1, 3, 8)
TOKENS = 1500


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same documents prepared from files in two orders."""
    folder = tmp_path_factory.mktemp("corpora")
    for part in range(2):
        numbers = range(part, 60, 2)
        texts = [f"Story {n}. " + " ".join(WORDS[n * i % len(WORDS)] for i in range(20 + n % 31)) for n in numbers]
        (folder / f"{part}.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts) + "\n")
    for name in ("ab", "ba"):
        files = [str(folder / f"{'ab'.index(letter)}.jsonl") for letter in name]
        tokenizer = "train:300" if name == "ab" else str(folder / "ab")
        prepare(files, tokenizer, folder / name)
    return folder / "ab", folder / "ba"


def held_out(corpus: Path) -> HeldOut:
    source = open_data(
        DataSpec(validation=str(corpus)), seq_len=24, seed=0, vocab_size=SPEC.vocab_size, split="validation"
    )
    return HeldOut.of(source, TOKENS)


def on_ranks(world: World, plan: Plan, corpora: tuple[Path, ...]) -> list[Evaluation]:
    """As a run's validation, with each corpus and size of a micro-batch."""
    from meshwright.parallel.apply import build_engine
    from meshwright.parallel.mesh import build_mesh

    mesh = build_mesh(plan, world)
    engine = build_engine(SPEC, plan, mesh, loss_chunk=5, seed=0, reference=True)
    return [
        evaluate(engine, held_out(corpus), mesh=mesh, micro_batch=micro_batch, device=world.device, plan=plan)
        for corpus in corpora
        for micro_batch in MICRO_BATCHES
    ]


@pytest.fixture(scope="module")
def truth(corpora: tuple[Path, Path]) -> Evaluation:
    """As `meshwright eval` measures the first corpus."""
    model = Decoder(SPEC, reference=True).double()
    initialise(model, SPEC, seed=0)
    return evaluate_plain(model, held_out(corpora[0]), micro_batch=5, device=torch.device("cpu"))


@pytest.mark.parametrize("case", LAYOUTS, ids=named)
def test_the_loss_is_the_same_for_layouts_batches_and_orders_of_files(
    pool: Pool, corpora: tuple[Path, Path], truth: Evaluation, case: Any
) -> None:
    (source,) = held_out(corpora[0]).source.sources.values()
    assert source.layout.inputs > TOKENS and truth.tokens == TOKENS // 24 * 24
    results = [result for rank in pool.run(on_ranks, 2, case.plan, corpora) for result in rank]
    assert len(results) == 2 * len(corpora) * len(MICRO_BATCHES)
    for result in results:
        assert result.tokens == truth.tokens
        assert result.loss == pytest.approx(truth.loss, abs=1e-9)
        assert result.bits_per_byte == pytest.approx(truth.bits_per_byte, abs=1e-9)


def test_bits_per_byte_are_those_of_the_text_behind_the_targets(corpora: tuple[Path, Path], truth: Evaluation) -> None:
    from meshwright.data.tokenizer import load_tokenizer

    tokenizer, data = load_tokenizer(corpora[0]).tokenizer, held_out(corpora[0])
    (indices,) = data.samples.values()
    targets = data.source.samples(indices).targets
    text = sum(len(tokenizer.decode(row, skip_special_tokens=True).encode()) for row in targets.tolist())
    assert truth.bits_per_byte == pytest.approx(truth.loss * truth.tokens / math.log(2) / text)
