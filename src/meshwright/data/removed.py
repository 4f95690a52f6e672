"""What the cleaning of a corpus removed: counts and examples by reason."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.durable.writes import write_durable

REPORT = "removed.json"
EXAMPLES = 20
"""Removed documents of each reason that are shown."""
SHOWN = 300
"""Characters of an example that are shown."""


@dataclass
class Removed:
    """Documents that cleaning removed: `{reason: {documents, text_bytes, examples}}`."""

    reasons: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, reason: str, where: str, why: str, text: str, size: int) -> None:
        """Count a document of `size` bytes; `where` is its file and id, `why` what was found."""
        figures = self.reasons.setdefault(reason, {"documents": 0, "text_bytes": 0, "examples": []})
        figures["documents"] += 1
        figures["text_bytes"] += size
        if self.shows(reason):
            example = {"document": where, **({"why": why} if why else {}), "text": text[:SHOWN]}
            figures["examples"].append(example)

    def shows(self, reason: str) -> bool:
        """Whether the next document of a reason is an example."""
        return len(self.reasons.get(reason, {}).get("examples", ())) < EXAMPLES

    def merge(self, later: Removed) -> None:
        """Add what was removed from the text behind."""
        for reason, more in later.reasons.items():
            figures = self.reasons.setdefault(reason, {"documents": 0, "text_bytes": 0, "examples": []})
            figures["documents"] += more["documents"]
            figures["text_bytes"] += more["text_bytes"]
            figures["examples"] += more["examples"][: EXAMPLES - len(figures["examples"])]

    def counts(self) -> dict[str, dict[str, int]]:
        """Documents and bytes of text by reason."""
        return {
            reason: {"documents": figures["documents"], "text_bytes": figures["text_bytes"]}
            for reason, figures in sorted(self.reasons.items())
        }

    def write(self, folder: Path) -> None:
        """Write the report, `removed.json`."""
        content = json.dumps(dict(sorted(self.reasons.items())), indent=1, ensure_ascii=False)
        write_durable(folder / REPORT, content.encode("utf-8", "backslashreplace") + b"\n")


def removed_words(counts: Mapping[str, Mapping[str, int]]) -> str:
    """The counts in one line; empty if nothing was removed."""
    return "; ".join(
        f"{reason}: {figures['documents']:,} documents, {figures['text_bytes']:,} bytes"
        for reason, figures in sorted(counts.items())
    )
