from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pytest

from meshwright.config.load import load_run
from meshwright.planner import layout_search as searching
from meshwright.planner.candidate import peak_bytes
from meshwright.planner.fixes import MAX_FIXES, TRIES, fixes, search_or_suggest_fixes
from meshwright.planner.moves import relaxed_runs
from meshwright.planner.search import search
from meshwright.spec.errors import OutOfResources
from meshwright.spec.plan import Plan
from meshwright.spec.run import RunSpec

SMALL = "model=llama3-1b cluster.gpu=H100 cluster.gpus_per_node=2 cluster.memory_gib=24 train.seq_len=8192 train.global_batch=8"
PINNED = ["plan.recompute=none", "plan.micro_batch=4", "plan.offload=none"]


def test_a_fix_is_what_to_type_and_makes_the_run_fit() -> None:
    words = [*SMALL.split(), *PINNED]
    run = load_run(None, words)
    suggestions = fixes(run, trainable=True)
    assert 1 <= len(suggestions) <= MAX_FIXES
    assert suggestions[0].words.startswith("without plan.")
    for fix in suggestions:
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
    with pytest.raises(OutOfResources, match=r"needs [\d.]+ GB, [\d.]+ GB more ") as caught:
        search_or_suggest_fixes(run, trainable=True)
    first, largest, usable, head, *lines = str(caught.value).splitlines()
    assert first.startswith("no plan fits") and head == "Changes that make it fit, the smallest first:"
    assert largest.startswith("  its largest parts: activations ") and usable == "  usable is 91% of a device"
    assert [line.split(".")[0].strip() for line in lines] == [str(number) for number in range(1, len(lines) + 1)]


def test_what_fits_is_the_search_s_own_answer() -> None:
    run = load_run(None, SMALL.replace("memory_gib=24", "memory_gib=80").split())
    assert search_or_suggest_fixes(run, trainable=True).best.plan.mesh == search(run, trainable=True).best.plan.mesh


def pretended(patch: pytest.MonkeyPatch, fits: Callable[[RunSpec], bool]) -> list[RunSpec]:
    """Replaces the search by one that finds a plan where `fits`, a minute each; returns the list of searched runs."""
    searched_runs: list[RunSpec] = []
    plan = search(load_run(None, SMALL.split()), trainable=True).best.plan

    def plan_for(run: RunSpec, *_: object) -> Plan | None:
        searched_runs.append(run)
        return plan if fits(run) else None

    patch.setattr("meshwright.planner.fixes._plan_for", plan_for)
    patch.setattr("meshwright.planner.fixes.perf_counter", count(step=60.0).__next__, raising=False)
    return searched_runs


def test_fixes_do_not_depend_on_how_busy_the_machine_is(monkeypatch: pytest.MonkeyPatch) -> None:
    pretended(monkeypatch, lambda run: run.train.seq_len <= 4096 or run.cluster.gpu != "H100" or run.cluster.nodes >= 4)
    run = load_run(None, SMALL.replace("cluster.memory_gib=24 ", "").split())
    suggested = [fix.words for fix in fixes(run)]
    assert suggested == ["train.seq_len=4096 train.global_batch=16", "cluster.gpu=H100-96GB", "cluster.nodes=4"]


def test_a_fix_is_not_offered_again_with_more_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pretended(monkeypatch, lambda run: run.cluster.nodes >= 4 or (run.train.seq_len <= 1024 and run.cluster.nodes >= 2))
    suggested = [fix.words for fix in fixes(load_run(None, SMALL.split()))]
    assert suggested == ["cluster.nodes=4", "train.seq_len=1024 train.global_batch=64 cluster.nodes=2"]


def test_tries_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    searched_runs = pretended(monkeypatch, lambda run: False)
    run = load_run(None, [*SMALL.split(), *PINNED])
    assert fixes(run) == () and len(searched_runs) == TRIES


def test_where_nothing_can_fit_the_space_is_swept_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing fits, smaller memory limits are tried neither for the run nor with options that only save memory."""
    rooms: list[float] = []
    sweep = searching.sweep
    monkeypatch.setattr(searching, "sweep", lambda *given, **named: rooms.append(given[3]) or sweep(*given, **named))
    words = "model=llama3-70b cluster.gpu=H100 cluster.gpus_per_node=2 train.seq_len=4096 train.global_batch=8"
    run = load_run(None, words.split())
    with pytest.raises(OutOfResources):
        search(run)
    assert len(rooms) == 1 + len(list(relaxed_runs(run))) and len(set(rooms)) == 1
