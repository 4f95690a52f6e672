"""Messages between launcher and ranks: what is sent arrives, and a launcher that does not read holds nothing up."""

from __future__ import annotations

import json
import os

import pytest

from meshwright.events.messages import (
    LINE_BYTES,
    BeginMessage,
    Checkpoint,
    CollectivesRequest,
    Corruption,
    EndMessage,
    FailureMessage,
    Message,
    MessageChannel,
    ProgressMessage,
    RankMessageReader,
    SkippedSamplesMessage,
    StepMessage,
    Validation,
    decode,
    encode,
    pipe_line,
)


@pytest.mark.parametrize(
    "message",
    [
        BeginMessage("/runs/a b/assignment.json"),
        BeginMessage("/runs/a/assignment.json", {"RANK": "3", "MASTER_ADDR": "10.0.0.1"}),
        ProgressMessage("save", 12),
        EndMessage("rank 2 failed: torn"),
        StepMessage(3),
        StepMessage(3, {"loss": 1.5, "mfu": None}),
        Validation(3, 1.25),
        SkippedSamplesMessage(16, 24),
        Corruption(1, 11, "silent corruption: on rank 1"),
        CollectivesRequest("/proc/7/fd/9"),
        Checkpoint(3, "/runs/ü/checkpoints/step-00000003"),
        FailureMessage(4, "two\nlines", "/log"),
    ],
)
def test_a_message_survives_the_line(message: Message) -> None:
    line = encode(message)
    assert line.endswith(b"\n") and line.count(b"\n") == 1 and decode(line) == message


@pytest.mark.parametrize("line", [b"[1]", b"{}", b'{"kind": "step"}', b'{"kind": "other"}', b"text"])
def test_another_line_is_no_message(line: bytes) -> None:
    with pytest.raises(ValueError):
        decode(line)


def test_a_long_text_is_cut_to_what_a_pipe_takes_in_one_piece() -> None:
    reading, writing = os.pipe()
    MessageChannel(writing).send(FailureMessage(1, "ü" * 10_000, "/log"))
    line = os.read(reading, 1 << 16)
    message = decode(line)
    assert len(line) <= LINE_BYTES and isinstance(message, FailureMessage)
    assert message.message.startswith("üü") and message.message.endswith("…") and message.log == "/log"


def test_a_long_message_of_the_launcher_stays_whole() -> None:
    message = BeginMessage("/runs/" + "ü" * 1000, {f"VARIABLE_{number}": "x" * 50 for number in range(100)})
    assert len(encode(message)) > LINE_BYTES and decode(encode(message)) == message


def test_a_line_without_long_texts_is_not_shortened() -> None:
    for fields in (
        {"numbers": [1] * 5000},
        {"text": "", "numbers": [1] * 5000},
        {"text": "abc", "numbers": [1] * 5000},
    ):
        line = json.loads(pipe_line(fields))
        assert line["numbers"] == fields["numbers"]


def test_messages_arrive_in_order_and_steps_are_dropped_while_nobody_reads() -> None:
    reading, writing = os.pipe()
    channel, reader = MessageChannel(writing), RankMessageReader(reading)
    assert list(reader.read()) == []
    for step in range(5000):
        channel.send(StepMessage(step))
    steps = [message.step for message in reader.read() if isinstance(message, StepMessage)]
    assert steps == list(range(len(steps))) and 100 < len(steps) < 5000
    channel.send(FailureMessage(3, "full"))
    assert list(reader.read()) == [FailureMessage(3, "full")]
    os.close(writing)
    assert list(reader.read()) == [] and not reader.open
    reader.close()


def test_a_rank_without_a_launcher_of_ours_sends_nothing() -> None:
    channel = MessageChannel.from_environment({})
    channel.send(StepMessage(1))
    assert not channel.connected
