"""Errors of requests that the engine failed: which of them a client sends again."""

from __future__ import annotations

import pytest

from meshwright.server.errors import FAILURES, NO_RETRY, RequestError


@pytest.mark.parametrize("code", FAILURES)
def test_no_client_sends_a_request_again_that_the_engine_failed(code: str) -> None:
    error = RequestError.of_failure("a reason", code, "response_format")
    assert (NO_RETRY in error.headers) is (error.status >= 500) and "a reason" in error.message
    assert error.param == ("response_format" if code == "grammar" else None)
