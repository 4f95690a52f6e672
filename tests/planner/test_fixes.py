from __future__ import annotations

import pytest

from meshwright.planner.candidate import peak_bytes
from meshwright.planner.fixes import WANTED, fixes, search_or_fixes
from meshwright.planner.search import search
from meshwright.spec.errors import OutOfResources
from meshwright.spec.load import load_run

SMALL = "model=llama3-1b cluster.gpu=H100 cluster.gpus_per_node=2 cluster.memory_gib=24 train.seq_len=8192 train.global_batch=8"
PINNED = ["plan.recompute=none", "plan.micro_batch=4", "plan.offload=none"]


def test_a_fix_is_what_to_type_and_makes_the_run_fit() -> None:
    words = [*SMALL.split(), *PINNED]
    run = load_run(None, words)
    found = fixes(run, trainable=True)
    assert 1 <= len(found) <= WANTED
    assert found[0].words.startswith("without plan.")
    for fix in found:
        dropped, changed = [], []
        for part in fix.words.replace(" and ", " ").replace(",", "").split():
            if part.startswith("plan."):
                dropped.append(part)
            elif "=" in part:
                changed.append(part)
        replaced = [*dropped, *(word.partition("=")[0] for word in changed)]
        kept = [word for word in words if word.partition("=")[0] not in replaced]
        best = search(load_run(None, [*kept, *changed]), trainable=True).best.plan
        assert peak_bytes(best) == peak_bytes(fix.plan)
        assert fix.words in fix.text and f"{peak_bytes(best) / 1e9:.1f} GB" in fix.text


def test_an_infeasible_run_says_kind_rank_amount_and_fixes() -> None:
    run = load_run(None, [*SMALL.split(), *PINNED])
    with pytest.raises(OutOfResources, match=r"needs [\d.]+ GB, [\d.]+ GB over .*activations") as caught:
        search_or_fixes(run, trainable=True)
    first, head, *rows = str(caught.value).splitlines()
    assert first.startswith("no plan fits") and head == "What makes it fit, cheapest first:"
    assert [row.split(".")[0].strip() for row in rows] == [str(number) for number in range(1, len(rows) + 1)]


def test_what_fits_is_the_search_s_own_answer() -> None:
    run = load_run(None, SMALL.replace("memory_gib=24", "memory_gib=80").split())
    assert search_or_fixes(run, trainable=True).best.plan.mesh == search(run, trainable=True).best.plan.mesh
