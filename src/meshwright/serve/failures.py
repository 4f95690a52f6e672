"""Failures of single requests, by errors of their own work. Torch-free."""

from __future__ import annotations

from typing import NamedTuple

from meshwright.serve.compiled_grammar import BadGrammar
from meshwright.spec.errors import EXIT_REPEATED, MeshwrightError

ENGINE_FAILED = "engine_failed"
"""Code of requests whose step failed on the device."""


FAILED_STEPS = 3
"""Steps that fail one after the other before the engine is given up."""
DEVICE_ERRORS = ("AcceleratorError", "CUDA error")
"""Texts of errors after which a process cannot use its device any more."""


class EngineLost(MeshwrightError):
    """The engine cannot continue."""

    exit_code = EXIT_REPEATED


class RequestFailure(NamedTuple):
    """Why a request has failed."""

    message: str
    code: str

    @classmethod
    def of(cls, error: Exception) -> RequestFailure:
        """Failure of one request by an error of its own work on the host."""
        if isinstance(error, BadGrammar | NotFinite):
            return cls(str(error), error.code)
        return cls(f"{type(error).__name__}: {error}", "request_failed")

    @property
    def poisoned(self) -> bool:
        """Whether what the request has in the cache is not to be used again."""
        return self.code == NotFinite.code


class NotFinite(ArithmeticError):
    """The model gave a request logits from which no token can be drawn."""

    code = "not_finite"

    def __init__(self) -> None:
        super().__init__("the model gave logits that are not finite (NaN or infinite)")
