"""Heat map, stragglers and pipeline timeline of runs whose spans come from the simulator, in the report."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from meshwright.cli.span_findings import heat_map_figures, heat_map_of_run, span_findings
from meshwright.diagnosis.stragglers import diagnose_run
from meshwright.observe.report import write_report
from meshwright.observe.report_heat_map import MOST_COLUMNS, HeatMapFigures, heat_map_card
from tests.cli.command import meshwright
from tests.diagnosis.injected import slow
from tests.diagnosis.played import Faults, Job, play
from tests.observe.played_run import write_spans
from tests.observe.test_report import Page
from tests.training.tiny import make_tiny, prepared, ranks

JOB = Job("1f1b", pipeline=2, dp=2)
SLOW_RANK = JOB.rank(1, 0)
STEPS = 24


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rank 2 (stage 1) computes 40% longer in the second half; the second host's clock is an hour ahead."""
    folder = tmp_path_factory.mktemp("runs") / "played"
    folder.mkdir()
    (folder / "metrics.jsonl").touch()
    faults = slow(lambda stage, dp: JOB.rank(stage, dp) == SLOW_RANK, 1.4, lambda step: step > STEPS // 2)
    write_spans(folder, JOB, play(JOB, STEPS, faults), {"host-1": 3600 * 10**9})
    return folder


def test_the_heat_map_shows_the_slow_rank_where_it_is_slow(run: Path) -> None:
    figures = heat_map_of_run(run)
    assert figures is not None and [first for first, _ in figures.ranks] == [0, 1, 2, 3]
    ratio = np.array(figures.ratio, dtype=float)
    first_slow = [first for first, _ in figures.steps].index(STEPS // 2 + 1)
    assert ratio[SLOW_RANK, first_slow:] == pytest.approx(1.4, abs=0.06)
    assert np.delete(ratio, SLOW_RANK, axis=0) == pytest.approx(1.0, abs=0.06)
    assert ratio[SLOW_RANK, :first_slow] == pytest.approx(1.0, abs=0.06)
    assert max(figures.excess, key=lambda rank: figures.excess[rank]) == SLOW_RANK


def test_the_straggler_is_named_although_the_clocks_of_the_hosts_differ_by_an_hour(run: Path, tmp_path: Path) -> None:
    """Unaligned clocks would make a step an hour long; aligned, the result equals that of equal clocks."""
    faults = slow(lambda stage, dp: JOB.rank(stage, dp) == SLOW_RANK, 1.4, lambda step: step > STEPS // 2)
    write_spans(tmp_path, JOB, play(JOB, STEPS, faults))
    same, shifted = diagnose_run(tmp_path), diagnose_run(run)
    assert (
        (shifted.cause, shifted.rank, shifted.stage) == (same.cause, same.rank, same.stage) == ("compute", SLOW_RANK, 1)
    )
    assert shifted.step_seconds == pytest.approx(same.step_seconds, rel=0.02)
    assert shifted.slowdown == pytest.approx(same.slowdown, rel=0.02) and not shifted.notes


def test_a_host_without_common_events_is_noted(tmp_path: Path) -> None:
    job = Job(dp=2, ranks_per_host=1)
    ranks = play(job, 6, lambda step, random: Faults())
    for rank in ranks:
        rank.records["action"][rank.records["action"] < 0] = 0  # no collective over all ranks
    write_spans(tmp_path, job, ranks)
    notes = diagnose_run(tmp_path).notes
    assert any("rank 1: its host shares no message or collective with that of rank 0" in note for note in notes)


def test_the_report_has_all_parts_and_its_json_the_diagnosis(run: Path) -> None:
    answer = meshwright("report", run, "--json").json
    assert answer["stragglers"]["rank"] == SLOW_RANK and answer["stragglers"]["cause"] == "compute"
    page = Page((run / "report.html").read_text(encoding="utf-8"))
    assert f"Rank {SLOW_RANK} computes" in page.text and "Stragglers" in page.text
    assert f"compute of rank {SLOW_RANK}, stage 1" in page.text
    assert "Pipeline: measured over predicted" in page.text and "Not predicted" in page.text
    assert str(run.parent) not in page.text and "host-" not in page.text


def paths(card: str) -> dict[str, list[tuple[float, float, float]]]:
    """By colour class (left, right, top) of every block of the card's drawings."""
    found: dict[str, list[tuple[float, float, float]]] = {}
    for colour, outline in re.findall(r'<path class="column (\S+)" d="([^"]*)"', card):
        corners = re.findall(r"M([\d.]+),([\d.]+)H([\d.]+)", outline)
        found.setdefault(colour, []).extend((float(left), float(right), float(top)) for left, top, right in corners)
    return found


def test_the_timeline_has_a_row_for_each_stage_and_one_time_scale(run: Path) -> None:
    """Against the played step: 4 micro-batches, forward 0.1 s, backward 0.2 s, slow stage 1.4 times as long."""
    figure = span_findings(run).timeline
    assert re.findall(r">(stage \d)</li>", figure) == ["stage 0", "stage 1"]
    length = max(right for blocks in paths(figure).values() for _, right, _ in blocks)
    assert length == pytest.approx(1000, abs=1)
    measured = float(re.search(r"measured: step [\d,]+, ([\d.]+) s", figure)[1])
    by_stage = {
        top: sum(
            right - left
            for colour in ("k0", "k4")
            for left, right, block_top in paths(figure)[colour]
            if block_top == top
        )
        for top in {block[2] for block in paths(figure)["k0"]}
    }
    seconds = [by_stage[top] / 1000 * measured for top in sorted(by_stage)]
    assert seconds[0] == pytest.approx(4 * 0.3, rel=0.05)
    assert seconds[1] in (pytest.approx(4 * 0.3, rel=0.05), pytest.approx(1.4 * 4 * 0.3, rel=0.05))


def test_measured_and_predicted_step_share_their_scale(run: Path, tmp_path: Path) -> None:
    """A CPU's rates are guessed: the predicted order is drawn as long as the measured step."""
    tiny = make_tiny(tmp_path / "tiny")
    arguments = ("plan.pipeline=2", "plan.shard=2", "plan.schedule=1f1b", "plan.micro_batch=1", "train.global_batch=8")
    folder = Path(prepared(tiny, tmp_path, *ranks(4), *arguments).assignment.folder)
    (folder / "spans").symlink_to(run / "spans")
    figure = span_findings(folder).timeline
    assert figure.count("<svg") == 2 and figure.index("measured: step") < figure.index("predicted order")
    assert "rates of this device are guessed" in figure
    for drawing in figure.split("<svg")[1:]:
        assert max(right for blocks in paths(drawing).values() for _, right, _ in blocks) == pytest.approx(1000, abs=1)


def test_many_ranks_and_steps_become_a_limited_number_of_cells() -> None:
    """1,800 ranks and 1,200 steps: a cell of 12 ranks and 3 steps shows the slowest rank's mean over that of the median rank."""
    lines = 150
    seconds = np.full((12 * lines, 3 * MOST_COLUMNS), 0.2)
    seconds[75] *= 1.4
    seconds[31, 6] *= 1.6  # one step of three: 20% in its cell
    figures = heat_map_figures(np.arange(len(seconds)), np.arange(3, seconds.shape[1] + 3), seconds)
    assert figures is not None and figures.ranks[6] == (72, 83) and figures.steps[2] == (9, 11)
    ratio = np.array(figures.ratio, dtype=float)
    assert ratio.shape == (lines, MOST_COLUMNS)
    assert ratio[6] == pytest.approx(1.4) and ratio[2, 2] == pytest.approx(1.2) and ratio[2, 3] == pytest.approx(1.0)
    card = heat_map_card(figures)
    assert "Rank 75 computes 40.0% longer" in card
    assert [(left, right) for left, right, _ in paths(card)["h5"]] == [(0.0, 1000.0)]
    assert [(left, right) for left, right, _ in paths(card)["h4"]] == [(5.0, 7.5)]
    assert len(paths(card)["h2"]) == lines  # one block for each row of equal cells, two beside the slow cell


def test_equal_ranks_are_not_called_slow_and_one_rank_has_no_heat_map() -> None:
    figures = HeatMapFigures([(0, 0), (1, 1)], [(1, 1)], [[1.0], [1.001]], {0: 0.0, 1: 0.001})
    assert "No rank computes 2.0% longer" in heat_map_card(figures)
    assert heat_map_card(HeatMapFigures([(0, 0)], [(1, 1)], [[1.0]], {0: 0.0})) == ""


def test_a_run_without_spans_or_pipeline_has_no_such_parts(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    found = span_findings(tmp_path)
    assert found.heat_map is None and found.stragglers is None and not found.timeline and "no spans/" in found.notes[0]
    write_spans(tmp_path, Job(dp=2), play(Job(dp=2), 6, lambda step, random: Faults()))
    found = span_findings(tmp_path)
    assert found.heat_map is not None and found.stragglers is not None and not found.timeline
    assert "heat-map" in write_report(tmp_path, found).read_text(encoding="utf-8")
