"""The last lines that a run prints: the path of its report, and the next command."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import yaml

from meshwright.spec.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_PREEMPTED


def closing_lines(folder: Path, code: int) -> list[str]:
    """Return lines about the run in `folder`, which has ended with exit code `code`.

    After a finished run, the next commands sample from it and evaluate it. After a stopped run, the command continues
    it. After a failed run, the line names its logs; the error message has already said what to change.

    The last line has the command that completes the report: the analysis of spans takes seconds, so ranks leave it out.
    """
    report = folder / "report.html"
    quoted_folder = shlex.quote(str(folder))
    lines = [f"report: {report}"] if report.exists() else []
    if code == EXIT_DONE:
        lines += [f"next: {command}" for command in _next_commands(folder, quoted_folder)]
    elif code in (EXIT_PREEMPTED, EXIT_INTERRUPTED):
        lines += [f"continue: {command_to_continue(folder)}"] * _has_checkpoint(folder)
    else:
        lines.append(f"logs: {folder / 'logs'}")
    if report.exists() and (folder / "spans").is_dir():
        lines.append(f"next: meshwright report {quoted_folder}  # adds heat map, stragglers and timeline")
    return lines


def command_to_continue(folder: Path) -> str:
    """Return the command that continues the run in `folder`, whichever command has started it."""
    runs = [] if folder.parent == Path("runs") else ["--runs", str(folder.parent)]
    return shlex.join(["meshwright", "train", str(folder / "config.yaml"), *runs])


def _next_commands(folder: Path, quoted_folder: str) -> list[str]:
    """Return commands that use the files of a finished run."""
    if not _has_checkpoint(folder):
        return []
    commands = [_command_to_use(folder, quoted_folder)] if (folder / "tokenizer.json").exists() else []
    return commands + [f"meshwright eval {quoted_folder}"] * _was_validated(folder)


def _command_to_use(folder: Path, quoted_folder: str) -> str:
    """A first question to the model: a chat where it was trained on chats."""
    if _is_reward_model(folder):
        return f"meshwright serve {quoted_folder}"
    return f"meshwright generate {quoted_folder} " + (
        "--chat --prompt 'Hello'" if _learned_chats(folder) else "--prompt 'The '"
    )


def _learned_chats(folder: Path) -> bool:
    """Whether the training data were chats: their answers' ends are in the record of the text format."""
    record = folder / "text_format.json"
    return record.exists() and bool(json.loads(record.read_text(encoding="utf-8")).get("answer_ends"))


def _has_checkpoint(folder: Path) -> bool:
    return any((folder / "checkpoints").glob("step-*"))


def _is_reward_model(folder: Path) -> bool:
    config = folder / "config.yaml"
    model = yaml.safe_load(config.read_text(encoding="utf-8")).get("model") if config.exists() else None
    return isinstance(model, dict) and model.get("head") == "score"


def _was_validated(folder: Path) -> bool:
    summary = folder / "summary.json"
    return summary.exists() and "held_out_loss" in json.loads(summary.read_text(encoding="utf-8"))
