import weakref

import pytest
import torch

from meshwright.observe.recorder import KEPT_STEPS, DetailRecorder, HostClock, StepRecorder


class DeviceClock:
    """A device that runs behind: a stamp can be read only once `passed` has reached its time."""

    def __init__(self):
        self.now = 0.0
        self.passed = -1.0
        self.free = []
        self.made = 0

    def stamp(self):
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


def recorder_with_clock():
    clock = DeviceClock()
    return StepRecorder(torch.device("cpu"), rank=5, clock=clock), clock


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
    recorder.begin_step(1)
    with recorder.span("validate"):
        with recorder.span("forward", lane="model"):
            clock.now += 1.0
        clock.now += 0.5
    recorder.end_step()
    recorder.wait()
    assert recorder.step_times() == {"validate": 1.5, "host": 0.0}
    assert [(s.name, s.lane, s.duration) for s in recorder.spans()] == [
        ("forward", "model", 1.0),
        ("validate", "step", 1.5),
    ]


def test_spans_stand_on_one_time_line_across_steps():
    recorder, clock = recorder_with_clock()
    play_step(recorder, clock, 1, [("forward", 1.0)])
    clock.now += 10.0
    recorder.mark("checkpoint committed")
    play_step(recorder, clock, 2, [("forward", 2.0)])
    recorder.wait()
    placed = [(s.name, s.start, s.duration, s.step, s.rank) for s in recorder.spans()]
    assert placed == [
        ("forward", 0.0, 1.0, 1, 5),
        ("checkpoint committed", 11.25, 0.0, 1, 5),
        ("forward", 11.25, 2.0, 2, 5),
    ]


def test_a_span_outside_of_steps_is_drawn_and_changes_no_step():
    recorder, clock = recorder_with_clock()
    play_step(recorder, clock, 4, [("forward", 1.0)])
    with recorder.span("checkpoint"):
        clock.now += 7.0
    recorder.wait()
    assert recorder.step_times() == {"forward": 1.0, "host": 0.25}
    assert recorder.spans()[-1].name == "checkpoint" and recorder.spans()[-1].step == 4


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


def test_neighbours_of_one_phase_share_a_span():
    recorder, clock = recorder_with_clock()
    recorder.begin_step(1)
    for name in (
        "forward 0.0/0",
        "forward 0.0/1",
        "forward_only 0.1/0",
        "backward_input 0.0/1",
        "backward_weight 0.0/1",
    ):
        with recorder.span(name, "compute"):
            clock.now += 1.0
        clock.now += 0.5
    recorder.gap()
    clock.now += 7.0
    with recorder.span("backward 0.1/0", "compute"):
        clock.now += 1.0
    recorder.end_step()
    recorder.wait()
    assert recorder.step_times() == {"forward": 4.5, "backward": 4.0, "host": 7.0}
    assert [(span.name, span.duration) for span in recorder.spans()] == [
        ("forward", 4.5),
        ("backward", 3.0),
        ("backward", 1.0),
    ]
    assert clock.made <= 8, "joined spans cost events"


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
    for name in ("forward 0.0/0", "forward 0.0/1"):
        with recorder.concurrent_span(f"unshard {name[-3:]}", "unshard"):
            clock.now += 0.25
        with recorder.span(name, "compute"):
            clock.now += 1.0
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
    with recorder.span("forward 0.0/0", "compute"):
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
    recorder = StepRecorder(torch.device("cuda"))
    cycles = 400_000_000  # about 0.2 s at 1.98 GHz
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
    starts = [span.start for span in recorder.spans()]
    assert starts == sorted(starts) and starts[2] > starts[1]


def test_a_recorder_of_details_stamps_nothing_else():
    clock = DeviceClock()
    recorder = DetailRecorder(torch.device("cpu"), clock=clock)
    play_step(recorder, clock, 1, [("data", 1.0), ("forward", 2.0)])
    with recorder.span("validate"):
        recorder.mark("here")
    recorder.wait()
    assert clock.made == 0 and recorder.step_times(1) == {} and recorder.spans() == ()
    recorder.detail = True
    play_step(recorder, clock, 2, [("data", 1.0), ("forward", 2.0)])
    recorder.detail = False
    recorder.wait()
    assert [span.name for step in recorder.take() for span in step.spans] == ["data", "forward"]
    assert recorder.step_times(2)["forward"] == 2.0
