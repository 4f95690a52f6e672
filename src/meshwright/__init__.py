"""Train large language models from one plan: model, cluster and job in, one explicit Plan out.

From Python, use `load_run`, `plan` and `train` (docs/how-to/python.md).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.api import StopTraining, TrainResult, load_run, plan, train
    from meshwright.spec.errors import (
        BadConfig,
        BadInput,
        CommunicationFailure,
        Damaged,
        Interrupted,
        MeshwrightError,
        NumericalFailure,
        OutOfResources,
        Preempted,
    )

__version__ = "0.1.0"
_API = ("StopTraining", "TrainResult", "load_run", "plan", "train")
__all__ = [
    "BadConfig",
    "BadInput",
    "CommunicationFailure",
    "Damaged",
    "Interrupted",
    "MeshwrightError",
    "NumericalFailure",
    "OutOfResources",
    "Preempted",
    "StopTraining",
    "TrainResult",
    "load_run",
    "plan",
    "train",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used. So ranks, and commands that do not need these names, start faster."""
    if name not in __all__:
        raise AttributeError(f"module 'meshwright' has no attribute {name!r}")
    return getattr(import_module("meshwright.api" if name in _API else "meshwright.spec.errors"), name)
