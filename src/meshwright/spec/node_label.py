"""Labels of Kubernetes nodes, as run files and options name them."""

from __future__ import annotations

import re

LABEL_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
"""The form of a label's key."""
_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
EXPECTED = "KEY=VALUE of a label of Kubernetes, as in example.com/gpu-health=bad"
"""What messages expect."""


def node_label(text: str) -> tuple[str, str]:
    """Return key and value of a label that is written KEY=VALUE.

    Raises ValueError for a text that Kubernetes would refuse.
    """
    key, equals, value = text.partition("=")
    if not equals or not LABEL_KEY.fullmatch(key) or not _VALUE.fullmatch(value):
        raise ValueError(f"expected {EXPECTED}, got {text!r}")
    return key, value
