"""The last lines of a run, for each way that it can end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.observe.closing import closing_lines


def run_folder(folder: Path, *, checkpoint: bool = True, tokenizer: bool = True, validated: bool = True) -> Path:
    (folder / "checkpoints" / "step-00000006").mkdir(parents=True) if checkpoint else folder.mkdir(parents=True)
    (folder / "report.html").touch()
    if tokenizer:
        (folder / "tokenizer.json").touch()
    (folder / "summary.json").write_text(json.dumps({"held_out_loss": 1.0} if validated else {}))
    return folder


def test_a_finished_run_is_sampled_and_measured_next(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "my runs" / "tiny")
    assert closing_lines(folder, 0) == [
        f"report: {folder}/report.html",
        f"next: meshwright generate '{folder}' --prompt 'The '",
        f"next: meshwright eval '{folder}'",
    ]


@pytest.mark.parametrize(("ends", "question"), [([], "--prompt 'The '"), ([{"id": 5}], "--chat --prompt 'Hello'")])
def test_a_run_on_chats_is_asked_in_a_chat(tmp_path: Path, ends: list[dict[str, int]], question: str) -> None:
    folder = run_folder(tmp_path / "sft", validated=False)
    (folder / "text_format.json").write_text(json.dumps({"answer_ends": ends}))
    assert closing_lines(folder, 0)[1:] == [f"next: meshwright generate {folder} {question}"]


@pytest.mark.parametrize(
    ("missing", "commands"), [("checkpoint", []), ("tokenizer", ["eval"]), ("validated", ["generate"])]
)
def test_no_command_is_named_that_would_be_refused(tmp_path: Path, missing: str, commands: list[str]) -> None:
    folder = run_folder(tmp_path / "tiny", **{missing: False})
    assert [line.split()[2] for line in closing_lines(folder, 0)[1:]] == commands


@pytest.mark.parametrize("code", [0, 6, 75])
def test_the_last_line_completes_the_report_if_the_run_has_spans(tmp_path: Path, code: int) -> None:
    folder = run_folder(tmp_path / "my runs" / "tiny")
    without = closing_lines(folder, code)
    (folder / "spans").mkdir()
    line = f"next: meshwright report '{folder}'  # adds heat map, stragglers and timeline"
    assert closing_lines(folder, code) == [*without, line]
    (folder / "report.html").unlink()
    assert line not in closing_lines(folder, code)


@pytest.mark.parametrize("code", [75, 130])
def test_a_stopped_run_is_continued_by_its_own_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = run_folder(Path("runs/tiny-2"))
    assert closing_lines(folder, code) == [
        "report: runs/tiny-2/report.html",
        "continue: meshwright train runs/tiny-2/config.yaml",
    ]
    elsewhere = run_folder(Path("other/tiny"))
    assert closing_lines(elsewhere, code)[-1] == "continue: meshwright train other/tiny/config.yaml --runs other"


def test_a_stopped_run_without_a_checkpoint_cannot_be_continued(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "tiny", checkpoint=False)
    assert closing_lines(folder, 130) == [f"report: {folder}/report.html"]


def test_a_failed_run_names_its_logs(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    assert closing_lines(folder, 6) == [f"logs: {folder}/logs"], "it has no report yet"
    assert closing_lines(run_folder(folder), 6) == [f"report: {folder}/report.html", f"logs: {folder}/logs"]


def test_a_reward_model_is_served_next(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "tiny")
    (folder / "config.yaml").write_text("model: {head: score}\n")
    assert [line.split()[2] for line in closing_lines(folder, 0)[1:]] == ["serve", "eval"]
