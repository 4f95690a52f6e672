"""Validation over whole documents (`data.packing: none`): equal to one device that sees each document alone, float64."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from meshwright.data.manifest import open_directory
from meshwright.data.packing import TokenStream
from meshwright.models.decoder import Decoder
from meshwright.models.initial_values import initialise
from meshwright.parallel.world import World
from meshwright.spec.job import DataSpec
from meshwright.spec.plan import Plan, SamplePlan
from meshwright.training.evaluate import Evaluation, HeldOut, evaluate, evaluate_plain
from tests.distributed.pool import Pool
from tests.distributed.test_equality import LLAMA
from tests.distributed.test_hybrid import LONGEST
from tests.distributed.test_hybrid import Case as HybridCase
from tests.distributed.test_schedules import Case, named
from tests.slow import quick_first
from tests.training.tiny import make_tiny

SPEC = replace(LLAMA, max_seq_len=LONGEST, vocab_size=512)
PASS_TOKENS = 200
CASES = [
    (HybridCase(3), 22),
    (HybridCase(2, schedule="breadth_first", tensor=2), 40),
    (Case("1f1b", shard=2), LONGEST),
    (Case("1f1b", pipeline=2), LONGEST),
]
"""Plans and tokens of a slot; documents are cut at `LONGEST`."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("documents")
    make_tiny(folder)
    return folder / "data"


def held_out(corpus: Path) -> HeldOut:
    from meshwright.data.loader import open_data

    spec = DataSpec(mix={str(corpus): 1.0}, packing="none")
    source = open_data(spec, seq_len=LONGEST, seed=0, vocab_size=SPEC.vocab_size, split="validation")
    return HeldOut.of(source, None, PASS_TOKENS)


def decoder() -> Decoder:
    model = Decoder(SPEC, reference=True).double()
    initialise(model, SPEC, seed=0)
    return model


@cache
def each_alone(corpus: Path) -> tuple[float, int]:
    """Mean loss of a decoder that sees each held-out document alone, cut at `LONGEST` inputs, and the number of targets."""
    stream = TokenStream([shard.file for shard in open_directory(corpus / "held_out").shards])
    model, loss, count = decoder(), 0.0, 0
    for start, length in zip(*stream.document_ranges(), strict=True):
        tokens = torch.from_numpy(stream.read(int(start), int(start + length)).astype(np.int64))
        for first in range(0, int(length) - 1, LONGEST):
            text = tokens[None, first : first + LONGEST + 1]
            loss += model(text[:, :-1], targets=text[:, 1:]).item()
            count += text.shape[1] - 1
    return loss / count, count


def on_ranks(world: World, plan: Plan, corpus: Path) -> Evaluation:
    from meshwright.parallel.apply import build_engine
    from meshwright.parallel.mesh import build_mesh

    mesh = build_mesh(plan, world)
    engine = build_engine(SPEC, plan, mesh, loss_chunk=5, seed=0, reference=True)
    return evaluate(engine, held_out(corpus), mesh=mesh, micro_batch=1, device=world.device, plan=plan)


@pytest.mark.parametrize(("case", "capacity"), quick_first(1, CASES, unpack=True), ids=named)
def test_ranks_read_every_held_out_document_alone(pool: Pool, corpus: Path, case: Any, capacity: int) -> None:
    plan = replace(case.plan, samples=SamplePlan(capacity=capacity, alpha=1e-3, beta=1.0))
    loss, tokens = each_alone(corpus)
    for result in pool.run(on_ranks, plan.ranks, plan, corpus):
        assert result.tokens == tokens and result.loss == pytest.approx(loss, rel=1e-9)


def test_one_device_does_too(corpus: Path) -> None:
    loss, tokens = each_alone(corpus)
    result = evaluate_plain(decoder(), held_out(corpus), micro_batch=1, device=torch.device("cpu"))
    assert result.tokens == tokens and result.loss == pytest.approx(loss, rel=1e-9)
