"""An error inside a collective of a save gets the error class of its cause."""

from __future__ import annotations

import pytest
import torch

from meshwright.checkpoint.ranks import RankGroup
from meshwright.spec.errors import CommunicationFailure, MeshwrightError, OutOfResources

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:1"


@pytest.mark.parametrize(
    ("error", "error_class", "text"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried"),
            OutOfResources,
            "saving: out of memory: CUDA out of memory",
        ),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: 8"),
            OutOfResources,
            "saving: out of memory: Default",
        ),
        (RuntimeError(GLOO), CommunicationFailure, "lost the others: saving: communication failed: Connection closed"),
        (RuntimeError("shapes differ"), MeshwrightError, "saving: internal error: RuntimeError: shapes differ"),
    ],
)
def test_a_failure_inside_a_collective_gets_the_class_of_its_cause(
    error: Exception, error_class: type[MeshwrightError], text: str
) -> None:
    def work() -> None:
        raise error

    with pytest.raises(MeshwrightError, match=text) as caught:
        RankGroup(None).run_communication("saving", work)
    assert type(caught.value) is error_class
