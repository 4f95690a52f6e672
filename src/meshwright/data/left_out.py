"""Collects what a preparation leaves out: bad documents, and files that are not read, by reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from meshwright.data.inputs import HARMLESS, NotRead
from meshwright.data.records import BadDocument

NAMED = 20
"""How many bad documents, and how many files of each reason, are named. Further ones are only counted."""


@dataclass
class BadDocuments:
    """The number of unusable documents, and descriptions of the first ones."""

    count: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, bad: BadDocument) -> None:
        self.count += 1
        if len(self.first) < NAMED:
            self.first.append(str(bad))

    def __str__(self) -> str:
        more = [f"... and {self.count - len(self.first)} more"] if self.count > len(self.first) else []
        return "\n".join([*self.first, *more])


@dataclass
class LeftOut:
    """What was left out."""

    bad: BadDocuments = field(default_factory=BadDocuments)
    """Unusable documents."""
    not_read: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Files that are not read, by reason: `{reason: {files, bytes, first}}`."""

    def add(self, item: BadDocument | NotRead) -> None:
        """Count a bad document, or a file that is not read."""
        if isinstance(item, BadDocument):
            self.bad.add(item)
            return
        figures = self.not_read.setdefault(item.reason, {"files": 0, "bytes": 0, "first": []})
        figures["files"] += 1
        figures["bytes"] += item.bytes
        if len(figures["first"]) < NAMED:
            figures["first"].append(f"{item.where}: {item.detail}" if item.detail else item.where)

    def merge(self, later: LeftOut) -> None:
        """Add what `later` has left out, which comes after this in the order of inputs."""
        self.bad.count += later.bad.count
        self.bad.first += later.bad.first[: NAMED - len(self.bad.first)]
        for reason, more in later.not_read.items():
            figures = self.not_read.setdefault(reason, {"files": 0, "bytes": 0, "first": []})
            figures["files"] += more["files"]
            figures["bytes"] += more["bytes"]
            figures["first"] += more["first"][: NAMED - len(figures["first"])]

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> LeftOut:
        """Make a LeftOut from the result of `dataclasses.asdict`."""
        return cls(BadDocuments(**plain["bad"]), plain["not_read"])

    @property
    def lost(self) -> dict[str, dict[str, Any]]:
        """The files that are not read although the user named them as inputs, by reason."""
        return {reason: figures for reason, figures in self.not_read.items() if reason not in HARMLESS}

    def lines(self) -> list[str]:
        """Return lines for people: the bad documents, and the files that are not read although the user named them."""
        lines = [f"{self.bad.count:,} bad documents:", *str(self.bad).splitlines()] if self.bad.count else []
        for reason, figures in self.lost.items():
            lines += [f"not read, {reason}: {_amount(figures)}", *figures["first"]]
            more = figures["files"] - len(figures["first"])
            lines += [f"... and {more} more"] if more else []
        return lines


def not_read_words(not_read: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the numbers of the files that are not read, in one line. Empty if there are none."""
    return "; ".join(f"{reason}: {_amount(figures)}" for reason, figures in sorted(not_read.items()))


def _amount(figures: Mapping[str, Any]) -> str:
    return f"{figures['files']:,} files" + (f", {figures['bytes']:,} bytes" if figures["bytes"] else "")
