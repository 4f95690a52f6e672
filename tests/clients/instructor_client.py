"""instructor: objects by a tool that must be called and by a JSON schema, whole and as they grow."""

from __future__ import annotations

from typing import Any

import instructor
from checks import KEY, NAME, NO_SPACES, Report, expect, run_checks
from openai import OpenAI

QUESTION: Any = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "A report, as JSON."}]


def client_of(url: str, mode: instructor.Mode) -> Any:
    """The client of a server."""
    return instructor.from_openai(OpenAI(base_url=url, api_key=KEY, max_retries=0), mode=mode)


def whole(mode: instructor.Mode) -> Any:
    """The check of whole objects in a mode."""

    def check(url: str) -> None:
        client = client_of(url, mode)
        request: Any = {
            "model": NAME,
            "messages": QUESTION,
            "max_tokens": 400,
            "logit_bias": NO_SPACES,
            "max_retries": 0,
        }
        report, answer = client.chat.completions.create_with_completion(response_model=Report, **request)
        expect((isinstance(report, Report), answer.choices[0].finish_reason in ("stop", "tool_calls")), (True, True))

    return check


def growing(mode: instructor.Mode) -> Any:
    """The check of objects that arrive as a stream."""

    def check(url: str) -> None:
        client = client_of(url, mode)
        request: Any = {"model": NAME, "messages": QUESTION, "max_tokens": 400, "logit_bias": NO_SPACES}
        (*_, last) = client.chat.completions.create_partial(response_model=Report, **request)
        Report.model_validate(last.model_dump())

    return check


if __name__ == "__main__":
    modes = {"tools": instructor.Mode.TOOLS, "a schema": instructor.Mode.JSON_SCHEMA}
    run_checks(
        {},
        {f"objects by {name}": whole(mode) for name, mode in modes.items()}
        | {f"growing objects by {name}": growing(mode) for name, mode in modes.items()},
    )
