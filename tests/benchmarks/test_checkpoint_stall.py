"""Figures of runs that save: the stall of ours and of torchtitan by one definition, and predictions beside measurements."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from checkpoint_figures import MemoryWatch, our_save_figures, peer_save_figures, predictions

from meshwright.config.load import load_run, plan_yaml, resolved_yaml
from meshwright.launch.prepare import plan_for
from meshwright.planner.checkpoint_cost import SaveRates

TOKENS = 1000
PEER = "[rank0]:[titan] 2026-11-25 22:04:{seconds:06.3f} - root - INFO - {text}"
WRITER = "[rank0]:[0] 2026-11-25 22:04:{seconds:06.3f} - root - INFO - {text}"
STEP = "step: {step:2}  loss: {loss:8.5f}  grad_norm:  3.2000  memory: {memory:5.2f}GiB(50.00%)  tps: {rate:,}  tflops: 75.40  mfu: 7.62%"
"""Formats of torchtitan 0.2.2's lines and of those of its writer process (torch's), with torchrun's prefix."""


def logged(seconds: float, text: str, line: str = PEER) -> str:
    return line.format(seconds=seconds, text=text).replace(".", ",", 1)


def peer_log(save_steps: dict[int, float | None], durations: list[float]) -> str:
    """A log of steps of `durations` seconds; saves begin after `save_steps` and end after so many seconds, or never."""
    now, lines = 0.0, []
    for step, seconds in enumerate(durations, 1):
        now += seconds
        text = STEP.format(step=step, loss=10 - step / 10, memory=20 + step, rate=round(TOKENS / seconds))
        lines.append(logged(now, text))
        if step in save_steps:
            folder, end = f"/dev/shm/ck/step-{step}", save_steps[step]
            lines.append(logged(now, "Saving the checkpoint (or staging if async is enabled)."))
            lines.append(logged(now, "[GC] GC collection invoked by checkpointer. took 0.00 seconds"))
            lines.append(logged(now, "Finished saving the checkpoint (or staging if async is enabled)in 0.01 seconds."))
            lines.append(logged(now + 0.25, f"Received async checkpoint request with id={folder}", WRITER))
            if end is not None:
                request = f"_CheckpointRequestIdentifier(checkpoint_id='{folder}', uuid='5f2c91d0-4a1e')"
                text = f"Completed checkpoint save request for checkpoint_id={request}"
                lines.append(logged(now + end, text, WRITER))
    lines.append(logged(now, "Saving the checkpoint (or staging if async is enabled)."))
    lines.append(logged(now, f"Saving a model only checkpoint in torch.float32 at last step, step {len(durations)}."))
    return "\n".join(lines) + "\n"


def test_the_stall_of_torchtitan_is_the_longest_step_beside_a_save_minus_the_median_of_others() -> None:
    durations = [0.5] * 20
    durations[10], durations[12], durations[15] = 2.0, 0.625, 0.8  # steps 11, 13 and 16
    figures = peer_save_figures(peer_log({10: 2.75, 15: None}, durations), TOKENS)
    # The save after step 10 ends in step 13: step 11 takes 2.0 s, 12 ends after 2.5 s. The second ends after the run.
    assert figures["stall_seconds"] == pytest.approx([1.5, 0.3])
    assert figures["median_step_seconds"] == 0.5
    assert [save["steps"] for save in figures["saves"]] == [3, 5]
    assert figures["steps"] == 20 - 6 - 8
    first, second = figures["saves"]
    assert first["staging"] == pytest.approx(0.25) and first["writing"] == pytest.approx(2.5)
    assert second["committed"] is False
    beside = (2.0 + 0.5 + 0.625 + 0.8 + 4 * 0.5) / 8
    assert figures["beside_percent"] == pytest.approx(100 * (beside / 0.5 - 1), abs=0.01)
    assert (figures["loss_first"], figures["loss_last"]) == (9.9, 8.0)


def test_a_recorded_log_of_torchtitan_is_read() -> None:
    """Lines of torchtitan 0.2.2 with torch 2.13: its debug model on a CPU, 64 tokens per step, saves after steps 8 and 16.

    The first save has not ended when the second begins, which waits for it in step 17.
    """
    figures = peer_save_figures((Path(__file__).parent / "torchtitan-saves.log").read_text(encoding="utf-8"), 64)
    first, second = figures["saves"]
    assert (first["step"], first["call"], first["steps"]) == (8, 0.12, 8)
    assert (second["step"], second["call"], second["steps"]) == (16, 27.76, 2)
    assert first["staging"] == pytest.approx(44.958) and first["writing"] == pytest.approx(
        0.963
    )  # 22:17:13.555, 58.513, 59.476
    median = (64 / 25 + 64 / 59) / 2  # of steps 7, 8, 19, 20 with 23, 25, 59 and 59 tokens per second
    assert figures["steps"] == 4
    assert figures["stall_seconds"] == pytest.approx([64 / 22 - median, 64 / 2 - median], abs=1e-4)
    assert (figures["loss_first"], figures["loss_last"]) == (8.11869, 7.29209)


def test_a_log_without_enough_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="2 steps"):
        peer_save_figures(peer_log({}, [1.0, 0.5]), TOKENS)


def our_records(text: str) -> list[dict[str, Any]]:
    """Steps of 0.5 s, of 0.7 s for the first beside the save after step 8, which is committed in step 10."""
    records: list[dict[str, Any]] = []
    for step in range(1, 15):
        seconds = 0.7 if step == 9 else 0.5
        records.append({"kind": "step", "step": step, "step_seconds": seconds, "loss": 3.0 - step / 10})
        if step == 10:
            records.append({"kind": "event", "step": step, "text": text})
    return records


PHASES = "staging 0.20, writing 0.40, waiting 0.00, commit 0.01"
BESIDE = f"checkpoint step-00000008: 4 MB beside training (seconds: {PHASES}); cost training 0.20 s"


def test_our_stall_has_the_same_definition() -> None:
    figures = our_save_figures(our_records(BESIDE), 8, "async")
    assert figures["stall_seconds"] == pytest.approx([0.2])
    assert figures["steps"] == 2 + 4
    assert figures["beside_percent"] == pytest.approx(20.0) and figures["copy_step_percent"] == pytest.approx(40.0)
    assert figures["saves"][0] == {
        "step": 8,
        "megabytes": 4.0,
        "staging": 0.2,
        "writing": 0.4,
        "waiting": 0.0,
        "commit": 0.01,
        "longest": 0.7,
        "steps": 2,
    }
    waiting = our_save_figures(our_records("checkpoint step-00000008: 4 MB in 0.6 s"), 8, "sync")
    assert waiting["stall_seconds"] == [0.6]


def test_predictions_stand_beside_measurements(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "model: {preset: llama-nano}\ntrain: {steps: 10, global_batch: 2, seq_len: 64}\ncluster: {gpu: cpu}\n"
        "checkpoint: {every: 8, mode: async}\n"
    )
    run = load_run(file)
    (tmp_path / "config.yaml").write_text(resolved_yaml(run))
    (tmp_path / "plan.yaml").write_text(plan_yaml(plan_for(run)[0]))
    line = our_save_figures(our_records(BESIDE), 8, "async")
    unmeasured = predictions(tmp_path, line, SaveRates(write=1e9), None)
    assert unmeasured["copy_seconds"] == {"predicted": None, "measured": 0.2, "relative_error": None}
    size = unmeasured["host_bytes"]["predicted"]
    answer = predictions(tmp_path, line, SaveRates(write=size / 0.5, host_copy=size / 0.8), size)
    assert answer["copy_seconds"] == {
        "predicted": pytest.approx(0.8),
        "measured": 0.2,
        "relative_error": pytest.approx(3.0),
    }
    assert answer["writing_seconds"]["relative_error"] == pytest.approx(0.25)
    assert answer["host_bytes"]["relative_error"] == 0
    # A copy of 0.8 s beside a step of 0.5 s stalls 0.3 s; 0.2 s were measured, and the error is a share of the step.
    assert answer["stall_seconds"]["predicted"] == pytest.approx(0.3)
    assert answer["stall_seconds"]["relative_error"] == pytest.approx(0.2)


def test_memory_of_buffers_is_measured_from_their_pages() -> None:
    with MemoryWatch(("/memfd:watched",)) as memory:
        descriptor = os.memfd_create("watched")
        os.pwrite(descriptor, bytes(3 << 20), 0)
        deadline = time.monotonic() + 20
        while (memory.peak_bytes or 0) < 3 << 20 and time.monotonic() < deadline:
            time.sleep(0.05)
    os.close(descriptor)
    assert memory.peak_bytes == 3 << 20
