import gzip
import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest

from meshwright.events.span import Span
from meshwright.schedules.expand import expand
from meshwright.schedules.registry import build
from meshwright.simulator.simulate import simulate
from meshwright.simulator.timing import Link, uniform_timing
from meshwright.simulator.trace import LANES, trace_events, write_trace
from tests.schedules.sizes import PIPELINES


@pytest.mark.parametrize("name", PIPELINES)
def test_a_trace_has_a_process_for_each_rank_and_lanes_without_overlap(name, tmp_path):
    schedule = expand(build(name, 3, 6), 2)
    halves = [[0.5, 0.5]] * schedule.stages
    timing = replace(
        uniform_timing(schedule.stages, 2),
        unshard=halves,
        reduce=halves,
        replicate=halves,
        optim_seconds=[1.0] * 3,
        boundary_bytes=[1.0] * (schedule.stages - 1),
        link=Link(0.125, 4.0),
    )
    write_trace(simulate(schedule, timing), tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    lanes = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            lanes[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert set(lanes) == set(names)
    assert {rank for rank, _ in lanes} == {0, 1, 2}
    for spans in lanes.values():
        spans.sort()
        assert all(first[1] <= second[0] + 1e-6 for first, second in pairwise(spans))


def test_a_compressed_trace_is_the_same_every_time(tmp_path):
    timeline = simulate(build("1f1b", 2, 2), uniform_timing(2))
    files = [tmp_path / name for name in ("one.json", "two.json.gz", "three.json.gz")]
    for file in files:
        write_trace(timeline, file)
    assert files[1].read_bytes() == files[2].read_bytes()
    assert gzip.decompress(files[1].read_bytes()) == files[0].read_bytes()


def test_a_span_is_called_by_its_kind_stage_and_micro_batch():
    schedule = build("zbv", 2, 4)
    spans = list(simulate(schedule, uniform_timing(4)).spans(step=7))
    assert {span.step for span in spans} == {7}
    names = [span.name for span in spans if (span.rank, span.lane) == (1, "compute")]
    assert names[:3] == ["forward 1.0", "forward 2.0", "forward 1.1"]
    assert "backward_input 2.0" in names and "backward_weight 2.0" in names
    assert names[-2:] == ["norm_barrier", "optim"]
    assert any(span.lane == "send 0" and span.name == "send 1.0" for span in spans)


def test_measured_spans_make_the_same_kind_of_trace():
    span = Span("forward 0.1", 0.5, 0.25, 3, rank=2, lane="compute")
    process, _, thread, place, event = trace_events([span])
    assert (process["args"], thread["args"]) == ({"name": "rank 2"}, {"name": "compute"})
    assert (thread["tid"], place["args"]) == (event["tid"], {"sort_index": LANES.index("compute")})
    assert trace_events([span], {2: "layers 8-15"})[0]["args"] == {"name": "layers 8-15"}
    assert (event["cat"], event["ts"], event["dur"], event["pid"]) == ("forward", 500_000.0, 250_000.0, 2)
