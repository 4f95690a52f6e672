from __future__ import annotations

import gc
import json
import subprocess
import sys
import weakref

import pytest

from meshwright.training.rank import uncollected

IMPORTS = """
import gc, json, sys
collections = []
gc.callbacks.append(lambda phase, info: collections.append(phase))
from meshwright.training.rank import import_all
before = len(collections)
import_all(cuda=False)
during, frozen = len(collections) - before, gc.get_freeze_count()

from meshwright.models.decoder import Decoder
from meshwright.parallel.apply import wrap_blocks
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import BatchPlan, LayerStrategy, MeshAxis, Plan, Precision

spec = ModelSpec(family="llama", layers=1, hidden=8, heads=2, head_dim=4, kv_heads=2, ffn_hidden=8, vocab_size=8, max_seq_len=8)
batch, layers = BatchPlan(global_batch=1, micro_batch=1, accumulate=1), (LayerStrategy(),)
plan = Plan(mesh=(MeshAxis(axis="shard", size=1),), batch=batch, layers=layers, precision=Precision(), compile=False)
wrap_blocks(Decoder(spec, loss_chunk=4), plan)
compiler = [name for name in ("torch._dynamo", "torch._inductor") if name in sys.modules]
print(json.dumps({"during": during, "frozen": frozen, "enabled": gc.isenabled(), "compiler": compiler}))
"""


class Node:
    def __init__(self) -> None:
        self.other: Node | None = None


def circle() -> weakref.ref[Node]:
    """Return a reference to a cycle, which only the garbage collector frees."""
    first, second = Node(), Node()
    first.other, second.other = second, first
    return weakref.ref(first)


@pytest.fixture
def thawed():
    yield
    gc.unfreeze()
    gc.freeze()  # as after the collection of tests
    gc.enable()


@pytest.mark.usefixtures("thawed")
def test_objects_created_without_collection_stay_and_later_garbage_is_collected() -> None:
    with pytest.raises(ZeroDivisionError), uncollected():
        assert not gc.isenabled()
        early = circle()
        raise ZeroDivisionError
    late = circle()
    gc.collect()
    assert gc.isenabled() and early() is not None and late() is None


def test_a_rank_imports_without_collections_and_one_that_compiles_nothing_without_the_compiler() -> None:
    answer = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=False, timeout=120)
    assert answer.returncode == 0, answer.stderr
    report = json.loads(answer.stdout)
    assert report["during"] == 0 and report["frozen"] > 100_000
    assert report["enabled"] and report["compiler"] == []
