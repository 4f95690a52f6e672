"""Run folders whose spans come from the simulator (`tests.diagnosis.played`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from meshwright.diagnosis.run_spans import RankRecords
from meshwright.events.span import SPAN_PHASES, SpanRecord
from meshwright.events.span_ring import SpanRing, ring_path
from tests.diagnosis.played import PHASES, Job


def write_spans(folder: Path, job: Job, ranks: list[RankRecords], clocks_ns: Mapping[str, int] | None = None) -> None:
    """Write the ring file of every rank; `clocks_ns` is by host how far its clock is ahead."""
    assert PHASES == SPAN_PHASES
    for rank in ranks:
        header = {
            "rank": rank.rank,
            "ranks": len(ranks),
            "host": rank.host,
            "phases": list(PHASES),
            "coordinates": {"pipeline": rank.stage, "shard": rank.dp},
        }
        ahead = (clocks_ns or {}).get(rank.host, 0)
        path = ring_path(folder, 1, 1, rank.rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        ring = SpanRing(path, header, len(rank.records) + 1)
        ring.append(_record(record, ahead) for record in rank.records.tolist())
        ring.close()


def _record(values: tuple, ahead: int) -> SpanRecord:
    start, *others, phase = values
    return SpanRecord(start + ahead, *others, phase=SPAN_PHASES[phase])
