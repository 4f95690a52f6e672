"""Lines for people: broken between words on a terminal, as they are in a file."""

import fcntl
import io
import os
import pty
import struct
import termios

import pytest

from meshwright.events.terminal import fitted, wrapped

NOTE = "  plan: FSDP 2, micro-batch 4 × 10; plans are compared with guessed rates of a CPU\nshort  line"


def test_a_long_line_is_broken_between_words_and_hangs():
    assert wrapped(NOTE, 40).split("\n") == [
        "  plan: FSDP 2, micro-batch 4 × 10;",
        "      plans are compared with guessed",
        "      rates of a CPU",
        "short  line",
    ]


def test_a_word_longer_than_the_terminal_stays_whole():
    assert wrapped("report /a/very-long/path.html", 12) == "report\n    /a/very-long/path.html"


@pytest.mark.parametrize("columns", [40, 100])
def test_the_width_is_that_of_the_stream(columns):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with os.fdopen(theirs, "w") as stream:
        assert fitted(NOTE, stream) == wrapped(NOTE, columns)
    os.close(ours)


def test_a_file_and_a_closed_stream_get_the_line_as_it_is():
    closed = io.StringIO()
    assert fitted(NOTE * 9, closed) == NOTE * 9
    closed.close()
    assert fitted(NOTE * 9, closed) == NOTE * 9
