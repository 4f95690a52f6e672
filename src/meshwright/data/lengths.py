"""Histogram of the lengths of documents in prepared data, computed from the index that the preparation wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from meshwright.data.manifest import open_directory
from meshwright.data.packing import TokenStream

SHORTEST_RANGE = 64
"""The first range of lengths ends at this many tokens. Each further range ends at twice as many."""


def length_histogram(directory: Path) -> dict[str, Any]:
    """Return `{documents, tokens, longest, ranges: [{first, last, documents, tokens}]}` of the data in `directory`.

    A range contains the documents whose length in tokens is at least `first` and at most `last`. The token that ends a
    document counts. Raises BadInput and Damaged as training does.
    """
    stream = TokenStream([shard.file for shard in open_directory(directory).shards])
    _, lengths = stream.document_ranges()
    lengths = lengths[lengths > 0]
    longest = int(lengths.max(initial=0))
    lasts = [SHORTEST_RANGE]
    while lasts[-1] < longest:
        lasts.append(2 * lasts[-1])
    range_of = np.searchsorted(lasts, lengths)
    documents = np.bincount(range_of, minlength=len(lasts))
    tokens = [int(lengths[range_of == number].sum()) for number in range(len(lasts))]
    ranges = [
        {
            "first": last // 2 + 1 if number else 1,
            "last": last,
            "documents": int(documents[number]),
            "tokens": tokens[number],
        }
        for number, last in enumerate(lasts)
    ]
    return {"documents": len(lengths), "tokens": sum(tokens), "longest": longest, "ranges": ranges}


def histogram_lines(histogram: dict[str, Any]) -> list[str]:
    """Return the histogram as a table for people.

    For each range it shows the fraction of documents and of tokens up to its end, and a bar for the fraction of tokens
    in the range.
    """
    documents = max(histogram["documents"], 1)
    tokens = max(histogram["tokens"], 1)
    lines = [
        f"{histogram['documents']:,} documents, {histogram['tokens']:,} tokens, the longest {histogram['longest']:,}"
    ]
    lines.append(f"{'tokens up to':>12}  {'documents':>12}  {'so far':>6}  {'of tokens':>9}")
    seen_documents = 0
    seen_tokens = 0
    for entry in histogram["ranges"]:
        seen_documents += entry["documents"]
        seen_tokens += entry["tokens"]
        shares = f"{seen_documents / documents:6.1%}  {seen_tokens / tokens:9.1%}"
        bar = "█" * round(40 * entry["tokens"] / tokens)
        lines.append(f"{entry['last']:12,}  {entry['documents']:12,}  {shares}  {bar}".rstrip())
    return lines
