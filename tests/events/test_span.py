import subprocess
import sys

import pytest

from meshwright.events.span import PHASES, NullRecorder, PhaseTimes, Recorder, Span


def test_phases_are_the_vocabulary_of_a_step_in_order():
    assert PHASES == ("data", "rollout", "forward", "backward", "reduce", "optim", "checkpoint", "validate", "host")


def test_total_is_the_sum_of_its_phases():
    assert PhaseTimes(3, {"forward": 1.0, "backward": 2.0, "host": 0.5}).total == 3.5


def test_null_recorder_lets_exceptions_through():
    recorder: Recorder = NullRecorder()
    recorder.begin_step(1)
    recorder.mark("resumed")
    with pytest.raises(KeyError), recorder.span("forward"):
        raise KeyError
    recorder.end_step()


def test_spans_cannot_be_changed():
    span = Span("forward", 0.0, 1.0, 1)
    with pytest.raises(AttributeError):
        span.duration = 2.0  # type: ignore[misc]  # that it is refused is the point


def test_the_room_runs_without_torch():
    code = "import sys; sys.modules['torch'] = None; import meshwright.events.span, meshwright.events.span_ring"
    subprocess.run([sys.executable, "-c", code], check=True)
