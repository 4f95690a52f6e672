"""The table from exceptions to exit codes."""

from __future__ import annotations

import errno
import os

import pytest

from meshwright.spec.errors import (
    BadInput,
    CommunicationFailure,
    Damaged,
    Interrupted,
    MeshwrightError,
    OutOfResources,
)
from meshwright.spec.failures import COMMAND_MEMORY_HINT, as_meshwright_error


@pytest.mark.parametrize(
    ("number", "error_class"),
    [
        (errno.ENOSPC, OutOfResources),
        (errno.EDQUOT, OutOfResources),
        (errno.EMFILE, OutOfResources),
        (errno.EROFS, BadInput),
        (errno.EIO, Damaged),
        (errno.ECONNREFUSED, CommunicationFailure),
        (errno.EDOM, MeshwrightError),
    ],
)
def test_system_errors_get_the_class_of_their_cause(number: int, error_class: type[MeshwrightError]) -> None:
    error = as_meshwright_error(OSError(number, os.strerror(number), "/disk/file"), "saving step 7")
    assert type(error) is error_class
    assert "saving step 7: " in str(error) and ("/disk/file" in str(error) or error_class is MeshwrightError)


def test_torch_errors_are_known_by_class() -> None:
    import torch
    import torch.distributed as dist

    assert type(as_meshwright_error(torch.OutOfMemoryError("CUDA out of memory. Tried"))) is OutOfResources
    for error_class in (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError):
        error = as_meshwright_error(error_class("no answer\nException raised from here\nframe #0: f"))
        assert type(error) is CommunicationFailure and str(error) == "communication failed: no answer"


def test_a_gloo_error_is_known_by_its_origin_and_not_by_the_word() -> None:
    lost = RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:1")
    assert str(as_meshwright_error(lost)) == "communication failed: Connection closed by peer [::1]:1"
    assert type(as_meshwright_error(RuntimeError("the gloo backend cannot split"))) is MeshwrightError


def test_our_own_errors_keep_class_and_text() -> None:
    assert str(as_meshwright_error(Damaged("torn"))) == "torn"
    assert str(as_meshwright_error(Damaged("torn"), "loading x")) == "loading x: torn"
    assert type(as_meshwright_error(KeyboardInterrupt())) is Interrupted
    assert str(as_meshwright_error(ValueError("shapes differ"))) == "internal error: ValueError: shapes differ"


@pytest.mark.parametrize("error_class", [RuntimeError, ImportError])
@pytest.mark.parametrize(
    "text",
    [
        "std::bad_alloc",
        "libtorch_cpu.so: failed to map segment from shared object",
        "libgomp.so.1: cannot allocate memory in static TLS block",
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 8 bytes.",
        "CUDA error: out of memory",
        "can't start new thread",
    ],
)
def test_plain_errors_about_host_memory_are_known_by_their_words(text: str, error_class: type[Exception]) -> None:
    assert type(as_meshwright_error(error_class(text))) is OutOfResources


@pytest.mark.parametrize(
    "error", [MemoryError(), OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), ImportError("std::bad_alloc")]
)
def test_out_of_memory_says_what_helps_where_it_happened(error: Exception) -> None:
    assert "plan.micro_batch" in str(as_meshwright_error(error))
    answer = str(as_meshwright_error(error, memory_hint=COMMAND_MEMORY_HINT))
    assert "out of memory" in answer and answer.endswith(COMMAND_MEMORY_HINT) and "--runs" not in answer
