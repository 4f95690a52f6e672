"""Failures of single requests, and the failure of a whole engine. This module does not import PyTorch."""

from __future__ import annotations

from typing import NamedTuple

from meshwright.serve.compiled_grammar import BadGrammar
from meshwright.spec.errors import EXIT_REPEATED, MeshwrightError

ENGINE_FAILED = "engine_failed"
"""Error code of the requests of a step that failed on the device."""


FAILED_STEPS = 3
"""After this many failed steps in a row, the engine's process ends."""
DEVICE_ERRORS = ("AcceleratorError", "CUDA error")
"""If an error message contains one of these texts, the process cannot use its device any more."""


class EngineLost(MeshwrightError):
    """Raised when the engine cannot compute further steps."""

    exit_code = EXIT_REPEATED


class RequestFailure(NamedTuple):
    """The reason why a request has failed."""

    message: str
    """Error message for the client."""
    code: str
    """Kind of the error; see `generation.Update.code`."""

    @classmethod
    def of(cls, error: Exception) -> RequestFailure:
        """Make the failure of a request from an error in the host's work for this request."""
        if isinstance(error, BadGrammar | NotFinite):
            return cls(str(error), error.code)
        return cls(f"{type(error).__name__}: {error}", "request_failed")

    @property
    def poisoned(self) -> bool:
        """Whether the keys and values of the request may be wrong, so that its cache blocks must not be used again."""
        return self.code == NotFinite.code


class NotFinite(ArithmeticError):
    """Raised if the model's logits for a request are NaN or infinite, so that no token can be drawn from them."""

    code = "not_finite"

    def __init__(self) -> None:
        super().__init__("the model gave logits that are not finite (NaN or infinite)")
