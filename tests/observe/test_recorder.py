import gc
import time
import weakref

import pytest
import torch

from meshwright.observe.device_clock import ClockReference, HostClock
from meshwright.observe.recorder import KEPT_STEPS, SAMPLED_WAITS, DetailRecorder, StepRecorder
from meshwright.schedules.action import parse


class DeviceClock:
    """A device that runs behind: a stamp can be read only once `passed` has reached its time."""

    blocks_host = False

    def __init__(self):
        self.now = 0.0
        self.passed = -1.0
        self.free = []
        self.made = 0
        self.stamps = 0

    def stamp(self):
        self.stamps += 1
        stamp = self.free.pop() if self.free else [0.0]
        self.made += stamp == [0.0] and not self.free
        stamp[0] = self.now
        return stamp

    def ready(self, stamp):
        return stamp[0] <= self.passed

    def wait(self, stamp):
        self.passed = max(self.passed, stamp[0])

    def seconds(self, first, second):
        assert self.ready(first) and self.ready(second), "an event was read before the device passed it"
        return second[0] - first[0]

    def recycle(self, stamp):
        assert all(stamp is not other for other in self.free), "an event was given back twice"
        self.free.append(stamp)

    def reference(self):
        now = round(self.now * 1e9)
        return ClockReference([self.now], now - 1000, now + 1000)


def recorder_with_clock():
    clock = DeviceClock()
    return StepRecorder(torch.device("cpu"), rank=5, clock=clock), clock


def recorder_of_spans():
    clock, records = DeviceClock(), []
    return StepRecorder(torch.device("cpu"), rank=5, clock=clock, sink=records.extend), clock, records


def act(recorder, clock, text, seconds=1.0):
    with recorder.action(0, parse(text)):
        clock.now += seconds


def short(records):
    """(phase, start, duration) in seconds."""
    return [
        (record.phase, record.start_ns / 1e9, record.duration_ns / 1e9) for record in records if record.phase != "clock"
    ]


def play_step(recorder, clock, step, parts, gap=0.25):
    recorder.begin_step(step)
    for name, seconds in parts:
        with recorder.span(name):
            clock.now += seconds
    clock.now += gap
    recorder.end_step()


def test_phases_of_a_step_add_up_with_host_as_the_rest():
    recorder, clock = recorder_with_clock()
    play_step(
        recorder, clock, 1, [("data", 0.5), ("forward", 1.0), ("backward", 2.0), ("forward", 1.0), ("backward", 2.0)]
    )
    clock.passed = clock.now
    assert recorder.step_times() == {"data": 0.5, "forward": 2.0, "backward": 4.0, "host": 0.25}


def test_nothing_is_read_before_the_device_got_there():
    recorder, clock = recorder_with_clock()
    play_step(recorder, clock, 1, [("forward", 1.0)])
    end_of_first = clock.now
    play_step(recorder, clock, 2, [("forward", 3.0)])
    assert recorder.step_times() == {}
    clock.passed = end_of_first
    assert recorder.step_times()["forward"] == 1.0
    assert recorder.step_times(2) == {}
    recorder.wait()
    assert recorder.step_times(2)["forward"] == 3.0
    assert recorder.step_times(1)["forward"] == 1.0


def test_inner_spans_are_drawn_but_not_counted_twice():
    recorder, clock = recorder_with_clock()
    recorder.detail = True
    recorder.begin_step(1)
    with recorder.span("validate"):
        with recorder.span("forward", lane="model"):
            clock.now += 1.0
        clock.now += 0.5
    recorder.end_step()
    recorder.wait()
    assert recorder.step_times() == {"validate": 1.5, "host": 0.0}
    assert [(s.name, s.lane, s.duration) for s in recorder.take()[0].spans] == [
        ("forward", "model", 1.0),
        ("validate", "step", 1.5),
    ]


def test_spans_stand_on_one_time_line_across_steps():
    recorder, clock = recorder_with_clock()
    recorder.detail = True
    play_step(recorder, clock, 1, [("forward", 1.0)])
    clock.now += 10.0
    recorder.mark("checkpoint committed")
    play_step(recorder, clock, 2, [("forward", 2.0)])
    recorder.wait()
    placed = [(s.name, s.start, s.duration, s.step, s.rank) for t in recorder.take() for s in t.spans]
    assert placed == [
        ("forward", 0.0, 1.0, 1, 5),
        ("checkpoint committed", 11.25, 0.0, 1, 5),
        ("forward", 11.25, 2.0, 2, 5),
    ]


def test_a_span_outside_of_steps_is_drawn_and_changes_no_step():
    recorder, clock, records = recorder_of_spans()
    play_step(recorder, clock, 4, [("forward", 1.0)])
    with recorder.span("checkpoint"):
        clock.now += 7.0
    recorder.wait()
    assert recorder.step_times() == {"forward": 1.0, "host": 0.25}
    assert short(records) == [("forward", 0.0, 1.0), ("step", 0.0, 1.25), ("checkpoint", 1.25, 7.0)]
    assert records[-1].step == 4


def test_events_are_used_again():
    recorder, clock = recorder_with_clock()
    for step in range(1, 50):
        play_step(recorder, clock, step, [("forward", 1.0), ("backward", 2.0)])
        clock.passed = clock.now
        assert recorder.step_times(step)
    assert clock.made <= 10


def test_old_steps_are_forgotten():
    recorder, clock = recorder_with_clock()
    for step in range(1, KEPT_STEPS + 10):
        play_step(recorder, clock, step, [("forward", 1.0)])
    recorder.wait()
    assert recorder.step_times(1) == {}
    assert recorder.step_times(KEPT_STEPS + 9) == recorder.step_times()


def test_an_exception_inside_a_span_closes_it():
    recorder, _ = recorder_with_clock()
    recorder.begin_step(1)
    with pytest.raises(ZeroDivisionError), recorder.span("forward"):
        raise ZeroDivisionError
    recorder.end_step()


def test_misuse_is_named():
    recorder, _ = recorder_with_clock()
    with pytest.raises(RuntimeError, match="no span open"):
        recorder.end()
    recorder.begin_step(1)
    with pytest.raises(RuntimeError, match="step 2 begins inside step 1"):
        recorder.begin_step(2)
    recorder.begin("forward")
    with pytest.raises(RuntimeError, match="forward"):
        recorder.end_step()


def test_cpu_steps_are_known_at_once():
    recorder = StepRecorder(torch.device("cpu"))
    recorder.begin_step(1)
    with recorder.span("forward"):
        torch.ones(8).sum()
    recorder.end_step()
    times = recorder.step_times(1)
    assert set(times) == {"forward", "host"} and all(seconds >= 0 for seconds in times.values())


def test_host_clock_measures_differences():
    clock = HostClock()
    assert clock.seconds(1.5, 4.0) == 2.5 and clock.seconds(clock.stamp(), clock.stamp()) >= 0


def test_neighbouring_units_of_an_action_share_a_span():
    recorder, clock, records = recorder_of_spans()
    recorder.begin_step(1)
    for text in ("F0.0/0", "F0.0/1", "E0.1/0", "I0.0/1", "W0.0/1"):
        act(recorder, clock, text)
        clock.now += 0.5
    recorder.gap()
    clock.now += 7.0
    act(recorder, clock, "B0.1/0")
    recorder.end_step()
    recorder.wait()
    assert recorder.step_times() == {"forward": 4.5, "backward": 4.0, "host": 7.0}
    assert short(records) == [
        ("forward", 0.0, 3.0),
        ("forward", 3.0, 1.5),
        ("backward", 4.5, 1.5),
        ("weight_gradient", 6.0, 1.5),
        ("backward", 14.5, 1.0),
        ("step", 0.0, 15.5),
    ]
    assert [(r.stage, r.micro_batch, r.unit) for r in records[:3]] == [(0, 0, -1), (0, 1, 0), (0, 0, 1)]
    assert clock.made <= 9, "a span that follows another costs one event"


def test_layered_order_joins_the_micro_batches_of_a_unit():
    recorder, clock, records = recorder_of_spans()
    recorder.begin_step(1)
    for unit in range(3):
        for micro_batch in range(4):
            with recorder.action(unit * 4 + micro_batch, parse(f"F0.{micro_batch}/{unit}"), 10):
                clock.now += 1.0
    recorder.end_step()
    recorder.wait()
    spans = [(r.action, r.micro_batch, r.unit, r.amount, r.duration_ns) for r in records if r.phase == "forward"]
    assert spans == [(0, -1, 0, 40, 4 * 10**9), (4, -1, 1, 40, 4 * 10**9), (8, -1, 2, 40, 4 * 10**9)]


def test_a_wait_between_units_is_inside_the_span_and_the_wait_before_an_action_outside():
    recorder, clock, records = recorder_of_spans()
    recorder.begin_step(7, tokens=99)
    for index, text in enumerate(("F0.0/0", "F0.0/1", "F0.1/0")):
        with recorder.waiting("collective_wait", index, parse(text), 64):
            clock.now += 0.25
        act(recorder, clock, text)
    with recorder.waiting("receive", 8, parse("RG0.1<1"), 32):
        clock.now += 2.0
    act(recorder, clock, "B0.1/0")
    recorder.posted(9, parse("SG1.1>0"), 16)
    recorder.end_step()
    recorder.wait()
    assert short(records) == [
        ("collective_wait", 0.0, 0.25),
        ("collective_wait", 1.25, 0.25),
        ("forward", 0.25, 2.25),
        ("collective_wait", 2.5, 0.25),
        ("forward", 2.75, 1.0),
        ("receive", 3.75, 2.0),
        ("backward", 5.75, 1.0),
        ("send", 6.75, 0.0),
        ("step", 0.0, 6.75),
    ]
    assert recorder.step_times(7) == {"forward": 3.75, "backward": 1.0, "host": 2.0}
    assert [r.amount for r in records if r.phase in ("collective_wait", "receive", "send", "step")] == [64] * 3 + [
        32,
        16,
        99,
    ]
    assert [(r.action, r.stage, r.peer) for r in records if r.phase in ("receive", "send")] == [(8, 0, 1), (9, 1, 0)]


def test_events_per_step_are_bounded_for_many_units():
    """34 units that are gathered for each of 8 micro-batches: the sampled waits stand for all of them."""
    recorder, clock, records = recorder_of_spans()
    units, accumulate = 34, 8
    for step in range(1, 4):
        records.clear()
        recorder.begin_step(step)
        before = clock.stamps
        for letter in "FB":
            for micro_batch in range(accumulate):
                for unit in range(units):
                    action = parse(f"{letter}0.{micro_batch}/{unit if letter == 'F' else units - 1 - unit}")
                    with recorder.waiting("collective_wait", 0, action):
                        clock.now += 0.125
                    with recorder.action(0, action):
                        clock.now += 1.0
        recorder.end_step()
        recorder.wait()
    assert clock.stamps - before <= 200
    waits = [record for record in records if record.phase == "collective_wait"]
    assert len(waits) <= SAMPLED_WAITS + 2 * accumulate
    total = sum(record.duration_ns * record.count for record in waits) / 1e9
    assert total == pytest.approx(0.125 * 2 * accumulate * units, rel=0.03)
    assert [record.phase for record in records].count("forward") == accumulate


def test_attention_work_is_recorded_by_micro_batch_inside_its_step_and_costs_no_event():
    recorder, clock, records = recorder_of_spans()
    for work in ([25, None, 16], []):
        recorder.begin_step(1 + len(records))
        before = clock.stamps
        recorder.attention_work(work)
        assert clock.stamps == before
        recorder.end_step()
    recorder.attention_work([1])  # outside of a step
    recorder.wait()
    found = [(r.step, r.micro_batch, r.amount, r.duration_ns) for r in records if r.phase == "attention_work"]
    assert found == [(1, 0, 25, 0), (1, 2, 16, 0)]


def test_garbage_collections_are_recorded():
    records = []
    recorder = StepRecorder(torch.device("cpu"), sink=records.extend)
    garbage = [[] for _ in range(300_000)]
    for item in garbage:
        item.append(item)
    with recorder.garbage_collections():
        recorder.begin_step(3)
        gc.collect()
        recorder.end_step()
    count = len(gc.callbacks)
    collection = next(record for record in records if record.phase == "garbage_collection")
    step = next(record for record in records if record.phase == "step")
    assert collection.step == 3 and collection.amount == 2 and collection.duration_ns >= 1_000_000
    assert step.start_ns <= collection.start_ns + 10**6
    assert collection.start_ns + collection.duration_ns <= step.start_ns + step.duration_ns + 10**6
    with recorder.garbage_collections():
        assert len(gc.callbacks) == count + 1
    assert len(gc.callbacks) == count


def test_the_error_of_the_clock_shrinks_to_that_of_the_best_reference():
    recorder, clock, records = recorder_of_spans()
    errors = [5_000_000, 20_000, 900_000]

    def reference(self=clock):
        now, error = round(clock.now * 1e9), errors[len(bounds)]
        bounds.append(error)
        return ClockReference([clock.now], now - error, now + error)

    bounds: list[int] = []
    clock.reference = reference
    for step in range(1, 4):
        play_step(recorder, clock, step, [("forward", 1.0)])
    recorder.wait()
    clocks = [record for record in records if record.phase == "clock"]
    assert [record.duration_ns for record in clocks][:2] == [5_000_000, 20_000]
    assert 20_000 < clocks[2].duration_ns < 100_000, "the bound grows only by the drift of the clocks"
    assert all(abs(record.start_ns - (record.step - 1) * 1_250_000_000) <= record.duration_ns for record in clocks)


class Parcel:
    """A message that its channel moves as soon as it is free."""

    def __init__(self, clock, through, took, timed_from_posting=False):
        self.clock, self.through, self.took, self.timed_from_posting = clock, through, took, timed_from_posting

    def seconds(self):
        return self.took if self.clock.passed >= self.through else None


def test_with_detail_every_action_and_all_communication_is_there():
    recorder, clock = recorder_with_clock()
    play_step(recorder, clock, 1, [("forward", 1.0)])
    recorder.detail = True
    recorder.begin_step(2)
    start = clock.now
    for unit in range(2):
        with recorder.concurrent_span(f"unshard 0/{unit}", "unshard"):
            clock.now += 0.25
        act(recorder, clock, f"F0.0/{unit}")
    recorder.message("send 0.0", "send 1", Parcel(clock, start + 20.0, 4.0))
    recorder.message("send 0.1", "send 1", Parcel(clock, start + 20.0, 3.0))
    recorder.message("recv 0.0", "recv 1", Parcel(clock, start + 20.0, 1.5, timed_from_posting=True))
    clock.now += 1.0
    recorder.message("recv 0.1", "recv 1", Parcel(clock, start + 20.0, 0.25, timed_from_posting=True))
    recorder.end_step()
    with pytest.raises(RuntimeError, match="inside step 3"):
        recorder.begin_step(3)
        recorder.detail = False
    recorder.end_step()
    clock.passed = clock.now
    assert recorder.take() == [], "a message under way was read"
    clock.passed = start + 20.0
    second, third = recorder.take()
    assert (second.step, second.start, second.seconds) == (2, start, 3.5) and third.spans == ()
    assert [(s.name, s.lane, s.start - start, s.duration) for s in second.spans] == [
        ("unshard 0/0", "unshard", 0.0, 0.25),
        ("forward 0.0/0", "compute", 0.25, 1.0),
        ("unshard 0/1", "unshard", 1.25, 0.25),
        ("forward 0.0/1", "compute", 1.5, 1.0),
        ("send 0.0", "send 1", 2.5, 4.0),
        ("send 0.1", "send 1", 6.5, 3.0),  # its channel was busy until then
        ("recv 0.0", "recv 1", 2.5, 1.5),
        ("recv 0.1", "recv 1", 3.5, 0.25),
    ]
    assert recorder.step_times(2) == {"forward": 2.0, "host": 1.5}
    assert recorder.take() == []


def test_a_message_that_is_through_is_let_go():
    recorder, clock = recorder_with_clock()
    recorder.detail = True
    recorder.begin_step(1)
    first = Parcel(clock, 1.0, 1.0)
    kept = weakref.ref(first)
    recorder.message("send 0.0", "send 1", first)
    del first
    assert kept() is not None
    clock.now = clock.passed = 2.0
    recorder.message("send 0.1", "send 1", Parcel(clock, 2.0, 1.0))
    assert kept() is None
    recorder.end_step()
    clock.passed = clock.now
    assert [span.duration for span in recorder.take()[0].spans] == [1.0, 1.0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_span_aside_is_stamped_on_the_stream_it_is_opened_on():
    recorder, side, cycles = StepRecorder(torch.device("cuda")), torch.cuda.Stream(), 200_000_000
    recorder.detail = True
    recorder.begin_step(1)
    with recorder.action(0, parse("F0.0/0")):
        torch.cuda._sleep(cycles)
    with torch.cuda.stream(side), recorder.concurrent_span("unshard 0/1", "unshard"):
        torch.cuda._sleep(cycles)
    recorder.end_step()
    recorder.wait()
    compute, concurrent_span = recorder.take()[0].spans
    assert concurrent_span.duration == pytest.approx(compute.duration, rel=0.2)
    assert concurrent_span.start < compute.start + 0.5 * compute.duration, "they ran at the same time"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_events_measure_the_device_and_never_wait_for_it():
    records = []
    recorder = StepRecorder(torch.device("cuda"), sink=records.extend)
    cycles = 400_000_000  # about 0.2 s at 1.98 GHz
    now = time.time_ns()
    for step in (1, 2):
        recorder.begin_step(step)
        with recorder.span("forward"):
            torch.cuda._sleep(cycles)
        with recorder.span("backward"):
            torch.cuda._sleep(2 * cycles)
        recorder.end_step()
    assert recorder.step_times() == {}, "the host was held up until the device had finished"
    recorder.wait()
    for step in (1, 2):
        times = recorder.step_times(step)
        assert times["backward"] == pytest.approx(2 * times["forward"], rel=0.1)
        assert times["host"] < 0.1 * times["forward"]
    starts = [span.start_ns for span in records if span.phase in ("forward", "backward")]
    assert starts == sorted(starts) and starts[2] > starts[1]
    host = [record for record in records if record.phase == "clock"]
    assert [record.step for record in host] == [1, 2]
    assert all(abs(record.start_ns - now) < 1e9 and record.duration_ns < 5e6 for record in host)


def test_a_recorder_of_details_stamps_nothing_else():
    clock = DeviceClock()
    recorder = DetailRecorder(torch.device("cpu"), clock=clock)
    play_step(recorder, clock, 1, [("data", 1.0), ("forward", 2.0)])
    with recorder.span("validate"):
        recorder.mark("here")
    recorder.wait()
    assert clock.made == 0 and recorder.step_times(1) == {} and recorder.take() == []
    recorder.detail = True
    play_step(recorder, clock, 2, [("data", 1.0), ("forward", 2.0)])
    recorder.detail = False
    recorder.wait()
    assert [span.name for step in recorder.take() for span in step.spans] == ["data", "forward"]
    assert recorder.step_times(2)["forward"] == 2.0
