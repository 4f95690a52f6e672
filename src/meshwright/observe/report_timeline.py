"""The report's picture of a pipeline: a measured step above the predicted one, one row for each stage, on one time scale."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.events.clock_alignment import ClockAlignment
from meshwright.events.span_ring import RankSpans
from meshwright.observe import number_text
from meshwright.observe.measured_step import MeasuredStep, typical_step
from meshwright.observe.timeline_svg import NAMES, TimelineBlock, draw_panels, timeline_blocks
from meshwright.simulator.timeline import Timeline

LEGEND = {**NAMES, "k3": "gathers; measured: waits for collectives", "k7": "messages; measured: waits for them"}
"""Texts of the legend by colour class."""


def pipeline_timeline(
    ranks: Sequence[RankSpans],
    alignment: ClockAlignment,
    predicted: Timeline | None,
    remark: str | None,
    *,
    guessed: bool,
) -> str:
    """Return the figure; empty if the run has no pipeline, or no step that all its ranks have recorded.

    `ranks` are recordings with times on one clock, and `alignment` says how well the clocks agree. `predicted` is the
    simulated step. If its rates are only `guessed`, it is drawn as long as the measured step. `remark` says why there
    is no prediction.
    """
    measured = typical_step(ranks)
    if measured is None or len(measured.ranks) < 2:
        return ""
    end = max(block.end for block in measured.blocks)
    panels: list[tuple[str, Sequence[TimelineBlock]]] = [
        (f"measured: step {measured.step:,}, {number_text.duration(end)}", measured.blocks)
    ]
    sentences = [_measured_sentence(measured, alignment)]
    if predicted is not None:
        blocks = timeline_blocks(predicted)
        length = max(block.end for block in blocks)
        label = "predicted order" if guessed else f"predicted: {number_text.duration(length)}"
        panels.append((label, _scaled(blocks, end / length) if guessed else blocks))
        if guessed:
            sentences.append(
                "The rates of this device are guessed: the predicted step is drawn as long as the measured one."
            )
        else:
            comparison = "longer" if end > length else "shorter"
            sentences.append(f"The measured step is {abs(end / length - 1):.1%} {comparison} than the predicted one.")
    elif remark:
        sentences.append(f"Not predicted: {remark}.")
    return draw_panels("Pipeline: measured over predicted", panels, len(measured.ranks), " ".join(sentences), LEGEND)


def _measured_sentence(measured: MeasuredStep, alignment: ClockAlignment) -> str:
    ranks = ", ".join(map(str, measured.ranks[:8])) + (", …" if len(measured.ranks) > 8 else "")
    error = alignment.largest_error_ns
    if error is None:
        clocks = "the clocks of some hosts are not aligned"
    else:
        clocks = f"clocks agree to {number_text.duration(error / 1e9)}" if error else "all on one clock"
    return f"The step of median length on ranks {ranks}, from its first operation; thin rows are waits; {clocks}."


def _scaled(blocks: Sequence[TimelineBlock], factor: float) -> list[TimelineBlock]:
    return [block._replace(start=block.start * factor, end=block.end * factor) for block in blocks]
