"""Collects what the cleaning of a corpus removes: counts and examples by reason."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.durable.writes import write_durable

REPORT = "removed.json"
"""Name of the report file."""
EXAMPLES = 20
"""Removed documents of each reason that the report shows."""
SHOWN = 300
"""Characters that are shown of each example."""


@dataclass
class Removed:
    """The documents that cleaning removed: `{reason: {documents, text_bytes, examples}}`."""

    reasons: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, reason: str, where: str, why: str, text: str, size: int) -> None:
        """Count a removed document. `where` is its file and id, `why` what was found, `size` the bytes of its text."""
        figures = self.reasons.setdefault(reason, {"documents": 0, "text_bytes": 0, "examples": []})
        figures["documents"] += 1
        figures["text_bytes"] += size
        if self.shows(reason):
            example = {"document": where, **({"why": why} if why else {}), "text": text[:SHOWN]}
            figures["examples"].append(example)

    def shows(self, reason: str) -> bool:
        """Return whether the next document that is removed for this reason will be shown as an example."""
        return len(self.reasons.get(reason, {}).get("examples", ())) < EXAMPLES

    def merge(self, later: Removed) -> None:
        """Add what `later` has removed, which comes after this in the order of inputs."""
        for reason, more in later.reasons.items():
            figures = self.reasons.setdefault(reason, {"documents": 0, "text_bytes": 0, "examples": []})
            figures["documents"] += more["documents"]
            figures["text_bytes"] += more["text_bytes"]
            figures["examples"] += more["examples"][: EXAMPLES - len(figures["examples"])]

    def counts(self) -> dict[str, dict[str, int]]:
        """Return the number of documents and bytes of text by reason."""
        return {
            reason: {"documents": figures["documents"], "text_bytes": figures["text_bytes"]}
            for reason, figures in sorted(self.reasons.items())
        }

    def write(self, folder: Path) -> None:
        """Write the report `removed.json` into `folder`."""
        content = json.dumps(dict(sorted(self.reasons.items())), indent=1, ensure_ascii=False)
        write_durable(folder / REPORT, content.encode("utf-8", "backslashreplace") + b"\n")


def removed_words(counts: Mapping[str, Mapping[str, int]]) -> str:
    """Return the counts in one line. Empty if nothing was removed."""
    return "; ".join(
        f"{reason}: {figures['documents']:,} documents, {figures['text_bytes']:,} bytes"
        for reason, figures in sorted(counts.items())
    )
