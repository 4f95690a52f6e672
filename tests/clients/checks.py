"""Runs the checks of one client against several servers, inside the environment of the clients."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field
from tokenizers.pre_tokenizers import ByteLevel

Check = Callable[[str], None]
NAME = "tiny"
KEY = "any"
ARGUMENTS = {"city": "Paris"}
RESULT, REPLY = "22 degrees", "It is 22 degrees in Paris, and no rain is near."
"""Answer of the tool, and the text of the scripted engine after it."""


NO_SPACES = {str(1 + sorted(ByteLevel.alphabet()).index(char)): -100 for char in "ĠĊĉč"}
"""A bias against white space, of which a model without training would write much between the parts of JSON."""


class Report(BaseModel):
    """A short report about a town."""

    model_config = ConfigDict(extra="forbid")  # keys at will have no end in a model without training
    sunny: bool
    digit: Literal[1, 2, 3]
    colour: Literal["red", "green", "blue"] = Field(description="Colour of the sky")


def weather(city: str) -> str:
    """The weather of a city."""
    return RESULT


def run_checks(scripted: Mapping[str, Check], real: Mapping[str, Check]) -> None:
    """Print a line of JSON for each form of template: the checks that failed, and why.

    The argument of the process is JSON: by form the URL of a server whose engine is scripted, and of one with a real engine.
    """
    for form, urls in json.loads(sys.argv[1]).items():
        failed = {}
        for checks, url in ((scripted, urls["scripted"]), (real, urls["real"])):
            for name, check in checks.items():
                try:
                    with redirect_stdout(sys.stderr):  # some clients print hints
                        check(f"{url}/v1")
                except Exception as error:  # any error of a client is a finding
                    where = traceback.extract_tb(error.__traceback__)
                    line = next((frame.lineno for frame in reversed(where) if frame.filename == sys.argv[0]), 0)
                    failed[name] = f"line {line}: {type(error).__name__}: {error}"[:400]
        print(json.dumps({"form": form, "checks": len(scripted) + len(real), "failed": failed}), flush=True)


def expect(got: object, expected: object) -> None:
    """Raise AssertionError if two values differ."""
    if got != expected:
        raise AssertionError(f"expected {expected!r}, got {got!r}")
