"""Every command: its help has an example, --json prints one object, and an unknown name brings the nearest."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import click
import pytest
import typer

from meshwright import __version__
from meshwright.cli import generate, main
from meshwright.cli.main import COMMANDS as COMMAND_MODULES
from meshwright.cli.main import app_for
from meshwright.config.load import load_run
from meshwright.data.source import open_data
from meshwright.data.text_format import read_text_format, recorded_text_format
from meshwright.launch.prepare import prepare_run
from meshwright.launch.run_figures import RunFigures
from meshwright.serve import text_losses
from meshwright.serve.engine import Engine
from tests.cli.command import meshwright
from tests.cli.conftest import ONE_RANK
from tests.training.tiny import WORDS


def commands() -> Iterator[tuple[str, click.Command]]:
    """Every command that does something, by the words that call it."""

    def below(command_path: tuple[str, ...], command: Any) -> Iterator[tuple[str, click.Command]]:
        inner = getattr(command, "commands", None)
        if inner is None:
            yield " ".join(command_path), command
        for name, subcommand in (inner or {}).items():
            yield from below((*command_path, name), subcommand)

    yield from below((), typer.main.get_command(app_for(())))


COMMANDS = dict(commands())
WITH_JSON = {
    name for name, command in COMMANDS.items() if any("--json" in getattr(p, "opts", ()) for p in command.params)
}
Arguments = Callable[[Path, Path, Path], list[object]]
JSON_COMMANDS: dict[str, tuple[Arguments, set[str]]] = {
    "plan": (
        lambda tiny, run, tmp: [tiny],
        {"name", "plan", "predicted", "alternatives", "search_seconds", "sources", "checkpoint"},
    ),
    "simulate": (
        lambda tiny, run, tmp: [tiny, "cluster.gpu=H100", "--trace", tmp / "trace.json"],
        {
            "plan",
            "chosen_by_planner",
            "step_seconds",
            "low_seconds",
            "high_seconds",
            "constants",
            "band",
            "tokens_per_second",
            "bubble",
        }
        | {"breakdown", "ranks", "trace", "checkpoint", "effective_time"},
    ),
    "check": (lambda tiny, run, tmp: [tiny, "--runs", tmp], {"ok", "errors", "support"}),
    "data prepare": (
        lambda tiny, run, tmp: [tiny.parent / "source", "--tokenizer", run / "tokenizer.json", "--out", tmp / "data"],
        {"out", "splits", "vocab_size", "bad", "not_read", "reused", "text_format"},
    ),
    "data import": (
        lambda tiny, run, tmp: [
            tiny.parent / "data" / "train",
            "--tokenizer",
            run / "tokenizer.json",
            "--out",
            tmp / "imported",
        ],
        {"out", "splits", "vocab_size", "bad", "not_read", "reused", "text_format"},
    ),
    "data lengths": (lambda tiny, run, tmp: [tiny.parent / "data"], {"documents", "tokens", "longest", "ranges"}),
    "data show": (lambda tiny, run, tmp: [run, "--step", 2], {"step", "samples"}),
    "tokenizer train": (
        lambda tiny, run, tmp: [tiny.parent / "source", "--size", 280, "--out", tmp / "tokenizer.json"],
        {"file", "vocab_size", "eos", "digest"},
    ),
    "checkpoint list": (lambda tiny, run, tmp: [run], {"checkpoints"}),
    "checkpoint verify": (lambda tiny, run, tmp: [run], {"checkpoints"}),
    "checkpoint diff": (lambda tiny, run, tmp: [run, run], {"equal", "tensors"}),
    "checkpoint show": (lambda tiny, run, tmp: [run, 3], {"step", "committed", "plan", "versions", "files", "seconds"}),
    "checkpoint prune": (lambda tiny, run, tmp: [run], {"deleted", "kept"}),
    "eval": (
        lambda tiny, run, tmp: [run, "--tokens", 128],
        {"loss", "perplexity", "bits_per_byte", "tokens", "checkpoint"},
    ),
    "generate": (lambda tiny, run, tmp: [run, "-p", "the quick", "--tokens", 3], {"samples", "checkpoint"}),
    "incidents": (lambda tiny, run, tmp: [run], {"incidents"}),
    "monitor": (
        lambda tiny, run, tmp: [run],
        {field.name for field in fields(RunFigures)}
        | {"ranks", "progress_seconds", "waiting", "heat_map", "expert_loads", "incident_records"},
    ),
    "stragglers": (
        lambda tiny, run, tmp: [run],
        {
            "slowdown",
            "cause",
            "rank",
            "stage",
            "by_type",
            "by_rank",
            "by_dp_rank",
            "by_stage",
            "contributions",
            "m_s",
            "m_w",
            "launch_slowdown",
            "step_seconds",
            "replayed_seconds",
            "ideal_seconds",
            "steps",
            "skipped_steps",
            "needed_steps",
            "notes",
        },
    ),
    "trace": (
        lambda tiny, run, tmp: [run, "--out", tmp / "trace.json"],
        {
            "trace",
            "start",
            "ranks",
            "steps",
            "spans",
            "missing",
            "origin_unix_ns",
            "clock_error_ns",
            "clock_offset_ns",
            "largest_clock_error_ns",
        },
    ),
    "report": (
        lambda tiny, run, tmp: [run],
        {"prediction_check", "report", "steps", "goodput", "stragglers", "missing"},
    ),
}
"""Words that make each command with --json succeed, and the keys of its answer."""
JSON_COMMANDS_ELSEWHERE = {
    "chaos",
    "data merge",
    "predict",
    "bench-serve",
    "profile",
    "runs list",
    "compare",
    "sweep",
    "bench",
}


def test_every_command_with_json_is_asked() -> None:
    assert set(JSON_COMMANDS) <= WITH_JSON <= set(JSON_COMMANDS) | JSON_COMMANDS_ELSEWHERE


@pytest.mark.parametrize("name", sorted(JSON_COMMANDS))
def test_json_is_one_object_on_stdout(name: str, tiny: Path, finished: Path, tmp_path: Path) -> None:
    arguments, keys = JSON_COMMANDS[name]
    answer = meshwright(*name.split(), *arguments(tiny, finished, tmp_path), "--json")
    assert answer.code == 0, answer.err
    assert set(answer.json) == keys


@pytest.mark.parametrize("name", sorted(set(JSON_COMMANDS) - {"data prepare", "data import", "tokenizer train"}))
def test_a_name_that_is_not_there_brings_the_nearest(name: str, finished: Path, tmp_path: Path, monkeypatch) -> None:
    shutil.copytree(finished, tmp_path / "runs" / "tiny")
    shutil.copy(finished.parent / "tiny" / "config.yaml", tmp_path / "runs" / "tiny.yaml")
    monkeypatch.chdir(tmp_path)
    wrong = "runs/tinny" if name not in ("plan", "check", "simulate") else "runs/tinny.yaml"
    options = {"data show": ["--step", 1], "generate": ["-p", "a"], "checkpoint diff": ["runs/tiny"]}.get(name, [])
    answer = meshwright(*name.split(), wrong, *options, "--json")
    assert answer.code == 2 and answer.json["ok"] is False
    assert "tinny" in answer.out and re.search(r"runs/tiny|tiny\.yaml", answer.out)


def test_parts_are_prepared_and_merged(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text(f"Text {number} of four.\n")
    inputs = [tmp_path / f"{number}.txt" for number in range(4)]
    for number in (1, 2):
        options = ["--tokenizer", "train:260", "--part", f"{number}/2", "--out", tmp_path / str(number), "--json"]
        answer = meshwright("data", "prepare", *inputs, *options)
        assert answer.code == 0 and (answer.json["part"], answer.json["documents"]) == (f"{number}/2", 2)
    answer = meshwright(
        "data", "merge", tmp_path / "1", tmp_path / "2", "--out", tmp_path / "whole", "--verify", "--json"
    )
    assert answer.code == 0 and answer.json["splits"]["train"]["documents"] == 4


def test_prepare_says_what_share_of_the_tokens_is_held_out(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(30):
        (texts / f"{number}.txt").write_text(f"Text {number:02d} of thirty.\n")

    def prepare(out: str) -> Any:
        options = ["--tokenizer", "train:260", "--held-out", "0.2", "--out", tmp_path / out]
        return meshwright("data", "prepare", texts, *options)

    equal = prepare("equal")
    held_out, total = [
        sum(json.loads((tmp_path / "equal" / split / "manifest.json").read_text())["tokens"] for split in splits)
        for splits in (["held_out"], ["held_out", "train"])
    ]
    assert f", {held_out / total:.1%} of all tokens\n" in equal.out and "--held-out" not in equal.err
    shown = meshwright(
        "data",
        "show",
        tmp_path / "equal" / "held_out",
        "--step",
        "1",
        "--seq-len",
        "8",
        "--global-batch",
        "99",
        "--json",
    )
    for document in [each for sample in shown.json["samples"] for each in sample["documents"]]:
        (texts / document["file"]).write_text("A long text. " * 40)
    unequal = prepare("unequal")
    assert "--held-out 0.2 counts documents: those that it chose have" in unequal.err


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_an_example(name: str) -> None:
    text = COMMANDS[name].help or ""
    assert "Example" in text and f"meshwright {name}" in text.partition("Example")[2]
    assert not re.search(r"^\s*#", text, re.MULTILINE), "Markdown takes the sign off and makes a heading of the line"
    answer = meshwright(*name.split(), "--help")
    assert answer.code == 0 and "Example" in answer.out


@pytest.mark.parametrize("name", COMMANDS)
def test_help_in_80_columns_cuts_no_option_and_no_choice(name: str) -> None:
    text = meshwright(*name.split(), "--help", env={"COLUMNS": "80"}).out
    names = {
        option for each in COMMANDS[name].params for option in (*each.opts, *each.secondary_opts) if "-" in option[:1]
    }
    choices = {str(choice) for each in COMMANDS[name].params for choice in getattr(each.type, "choices", ())}
    words = set(re.split(r"[\s,|/\[\].]+", text))
    assert names | choices <= words
    assert max(map(len, text.splitlines())) <= 80


def test_help_of_serve_shows_basics_before_expert_options() -> None:
    text = meshwright("serve", "--help", env={"COLUMNS": "80"}).out
    basics, _, expert = text.partition("Expert options:")
    assert "--port" in basics and "--api-key" in basics and "--help" in basics
    assert "--queue" not in basics and "--queue" in expert
    assert len(text.splitlines()) < 160


def test_version() -> None:
    assert meshwright("--version").out == f"meshwright {__version__}\n"


def test_check_lists_every_mistake(tiny: Path, tmp_path: Path) -> None:
    run_file = tmp_path / "broken.yaml"
    text = tiny.read_text().replace("hidden: 16", "hiden: 16").replace("steps: 6", "steps: six")
    run_file.write_text(text + "checkpoints: {every: 5}\n")
    answer = meshwright("check", run_file, "--json")
    assert answer.code == 2 and answer.json["ok"] is False
    errors = {error["key"]: error for error in answer.json["errors"]}
    assert {"model.hiden", "train.steps", "checkpoints"} <= set(errors)
    assert all(
        set(error) == {"file", "line", "column", "key", "expected", "got", "nearest"} for error in errors.values()
    )
    hiden = errors["model.hiden"]
    assert (hiden["file"], hiden["line"], hiden["column"]) == (
        str(run_file),
        2,
        text.splitlines()[1].index("hiden") + 1,
    )
    assert "hidden" in hiden["nearest"] and "checkpoint" in errors["checkpoints"]["nearest"]
    assert run_file.name in answer.err or answer.err == ""


def test_check_accepts_what_train_would_run(tiny: Path, finished: Path) -> None:
    for arguments in ([tiny], [tiny, ONE_RANK, "--runs", finished.parent]):
        answer = meshwright("check", *arguments, "--json")
        assert (answer.code, answer.json["ok"], answer.json["errors"]) == (0, True, [])


def test_check_finds_what_only_the_disk_knows(tiny: Path, finished: Path, tmp_path: Path) -> None:
    answer = meshwright("check", tiny, ONE_RANK, "train.seq_len=8", "--runs", finished.parent, "--json")
    assert answer.code == 2 and [error["key"] for error in answer.json["errors"]] == ["name"]
    assert "train.seq_len" in answer.json["errors"][0]["got"]
    answer = meshwright("check", tiny, ONE_RANK, f"data.mix={tmp_path}", "--runs", finished.parent, "--json")
    assert answer.code == 2 and [error["key"] for error in answer.json["errors"]] == ["data.mix"]
    damaged = tmp_path / "damaged"
    shutil.copytree(tiny.parent / "data", damaged)
    (shard,) = (damaged / "train").glob("*.bin")
    shard.write_bytes(shard.read_bytes()[:-2])
    answer = meshwright("check", tiny, ONE_RANK, f"data.mix={damaged}", "--runs", tmp_path, "--json")
    assert answer.code == 4 and [error["key"] for error in answer.json["errors"]] == ["data.mix"]
    assert shard.name in answer.json["errors"][0]["got"]


@pytest.mark.parametrize(("axis", "key"), [("shard", "gather_transport"), ("tensor", "tensor_transport")])
def test_a_plan_file_that_copies_across_nodes_is_refused_before_ranks_start(
    axis: str, key: str, tiny: Path, tmp_path: Path
) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text(f"{axis}: 2\nglobal_batch: 8\nmicro_batch: 1\n{key}: copy_engine\ncompile: false\ncompute: fp32\n")
    arguments = [tiny, f"plan={file}", "cluster.emulate_nodes=2", "--runs", tmp_path / "runs"]
    for command in ("check", "train"):
        answer = meshwright(command, *arguments)
        place = f"{file}:4:{len(key) + 3}: {key}"
        assert answer.code == 2 and f"{place}: copy engines need shared memory, and the 2" in answer.err
        assert "run " not in answer.err and not (tmp_path / "runs").exists()
    assert meshwright("check", tiny, f"plan={file}").code == 0


def test_what_this_release_only_plans_is_refused_at_its_key_before_ranks_start(tiny: Path, tmp_path: Path) -> None:
    """By `check` and `train`, of plan files and pins alike."""
    keys = ["pipeline: 2", "schedule: zbv", "offload: both", "compute: fp32", "compile: false"]
    file, run = tmp_path / "plan.yaml", tmp_path / "run.yaml"
    file.write_text("\n".join([*keys, 'stages: [["0", "3"], ["1", "2"]]', "global_batch: 8", "micro_batch: 1"]))
    run.write_text(f"extends: {tiny}\nmodel: {{layers: 4}}\nplan:\n  " + "\n  ".join(keys))
    runs = ["--runs", tmp_path / "runs"]
    for command in ("check", "train"):
        pinned = meshwright(command, run, *runs)
        assert pinned.code == 2 and f"{run}:5:13: plan.schedule: this release cannot train" in pinned.err
        planned = meshwright(command, tiny, "model.layers=4", f"plan={file}", *runs)
        assert planned.code == 2 and f"{file}:2:11: schedule: this release cannot" in planned.err
        assert not (tmp_path / "runs").exists()


def test_what_of_a_plan_gains_nothing_on_its_mesh_is_said_and_no_mistake(tiny: Path, tmp_path: Path) -> None:
    """By `check`, `plan` and `train`, of plan files and pins alike."""
    file, copies = tmp_path / "plan.yaml", "plan.reduce_replicas = fp32 has no effect: the mesh has one replica\n"
    file.write_text(
        "global_batch: 8\nmicro_batch: 1\ncompile: false\n"
        "schedule: gpipe\ngradients: whole\ncompute: fp32\nreduce_replicas: fp32\n"
        "gather_transport: copy_engine\ntensor_transport: copy_engine\n"
    )
    arguments = [tiny, "cluster.gpus_per_node=1", "--runs", tmp_path / "runs"]
    checked, planned = (
        meshwright(*command, f"plan={file}") for command in (("check", *arguments), ("plan", *arguments[:2]))
    )
    output = [line for line in planned.err.splitlines() if line.startswith("plan.")]
    idle = {
        "gradients = whole": "shard",
        "gather_transport = copy_engine": "shard",
        "reduce_replicas = fp32": "replica",
        "tensor_transport = copy_engine": "tensor rank",
    }
    assert output == [
        "plan.schedule = gpipe has no advantage over 1f1b: the mesh has one pipeline rank",
        *(f"plan.{key} has no effect: the mesh has one {axis}" for key, axis in idle.items()),
    ]
    assert (
        checked.code == 0
        and checked.out == "ok\n"
        and [line for line in checked.err.splitlines() if line.startswith("plan.")] == output
    )
    pinned = meshwright("check", tiny, "plan.shard=2", "plan.reduce_replicas=fp32", *arguments[2:])
    assert pinned.code == 0 and copies in pinned.err, "two shards, and one copy of them"
    notes: list[str] = []
    run = load_run(tiny, ["plan.shard=2", "plan.reduce_replicas=fp32"])
    assert prepare_run(run, tmp_path / "runs", profile=None, note=notes.append) and f"{notes[-1]}\n" == copies


def test_a_plan_file_that_does_not_fit_is_refused_before_ranks_start(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text("shard: 2\nglobal_batch: 8\nmicro_batch: 4\ncompile: false\ncompute: fp32\n")
    arguments = [tiny, f"plan={file}", "--runs", tmp_path / "runs"]
    for command in ("check", "train"):
        answer = meshwright(command, *arguments, "cluster.memory_gib=0.01")
        assert answer.code == 3 and f"{file}: does not fit: a rank needs" in answer.err
        assert not (tmp_path / "runs").exists()
    assert meshwright("check", *arguments).code == 0


def test_plan_says_mesh_batch_memory_and_why(tiny: Path, tmp_path: Path) -> None:
    answer = meshwright("plan", tiny, "--for", "train", "--out", tmp_path / "plan.yaml", "--json")
    plan = answer.json["plan"]
    assert {"order", "micro_batch", "recompute", "compute", "compile", "predicted", "why"} <= set(plan)
    assert math.prod(plan[axis] for axis in plan["order"]) == 2
    assert answer.json["predicted"] == plan["predicted"]
    assert sum(plan["predicted"]["memory_bytes"].values()) <= plan["predicted"]["memory_peak_bytes"] * 1.01
    assert meshwright("plan", tiny, f"plan={tmp_path / 'plan.yaml'}", "--json").json["plan"]["order"] == plan["order"]


def test_eval_is_the_runs_own_validation(finished: Path) -> None:
    """The run read 256 tokens, which its `config.yaml` says."""
    summary = json.loads((finished / "summary.json").read_text())
    for model in (finished, finished / "checkpoints" / "step-00000006"):
        answer = meshwright("eval", model, "--batch", 3, "--json").json
        assert answer["loss"] == pytest.approx(summary["held_out_loss"], rel=1e-5)
        assert answer["bits_per_byte"] == pytest.approx(summary["bits_per_byte"], rel=1e-5)
        assert answer["tokens"] == summary["held_out_tokens"]
    assert meshwright("eval", finished, "--tokens", 4096, "--json").json["tokens"] > summary["held_out_tokens"]


def test_an_exported_model_is_the_same_model(finished: Path, tiny: Path, tmp_path: Path) -> None:
    run, exported, reimported = tmp_path / "run", tmp_path / "hf", tmp_path / "back"
    shutil.copytree(finished, run)  # read without document masks, as a folder that knows of no run is
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("document_mask: true", "document_mask: false"))
    assert meshwright("checkpoint", "to-hf", run, exported, "--dtype", "fp32").code == 0
    assert meshwright("checkpoint", "from-hf", exported, reimported).code == 0
    options = ["--data", tiny.parent / "data", "--seq-len", 16, "--tokens", 4096, "--json"]
    answers = [meshwright("eval", model, *options) for model in (run, exported, reimported)]
    assert [answer.code for answer in answers] == [0] * 3, answers
    losses = [answer.json["loss"] for answer in answers]
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=1e-6)
    with (
        mock.patch.object(text_losses, "CHUNK_TOKENS", 6),
        mock.patch.object(
            text_losses.TextLosses, "sum", autospec=True, side_effect=text_losses.TextLosses.sum
        ) as summed,
    ):
        assert meshwright("eval", exported, *options).json["loss"] == pytest.approx(losses[0], rel=1e-6)
    assert summed.called
    assert (
        meshwright("eval", exported, *options[:2], "--json").json["loss"] == losses[1]
    )  # 2048, or what the model takes
    answer = meshwright("eval", exported)
    assert answer.code == 2 and answer.err.endswith("give --data DIR\n")
    for model in (run, exported):
        answer = meshwright("eval", model, *options, "--seq-len", 17)
        assert answer.code == 2 and f"--seq-len 17: expected at most 16, the context of {model}" in answer.err


def test_generate_depends_on_the_seed_alone(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["-p", "the quick", "-p", "seven", "--tokens", 12, "--temperature", 2, "--json"]
    first, repeated, other_seed = (
        meshwright("generate", finished, *arguments, "--seed", seed).json["samples"] for seed in (1, 1, 2)
    )
    assert first == repeated != other_seed
    assert [sample["prompt"] for sample in first] == ["the quick", "seven"]
    monkeypatch.chdir(tmp_path)
    Path("runs").symlink_to(finished.parent)
    assert meshwright("generate", "tiny", *arguments, "--seed", 1).json["samples"] == first


@pytest.mark.slow
def test_generate_on_tensor_ranks_is_that_of_one_device(finished: Path) -> None:
    arguments = ["generate", finished, "-p", "the quick", "-p", "seven", "--tokens", 12, "--temperature", 2, "--json"]
    alone, divided = (meshwright(*arguments, "--tensor", ranks) for ranks in (1, 2))
    assert divided.code == 0, divided.err
    assert divided.json == alone.json
    answer = meshwright(*arguments, "--tensor", 3)
    assert answer.code == 2 and "--tensor: expected a divisor of model.heads" in answer.err
    answer = meshwright(*arguments, "--tensor", 2, "--plan", finished / "plan.yaml")
    assert answer.code == 2 and "--plan and --tensor exclude each other" in answer.err
    greedy = [*arguments[:-3], "--temperature", 0, "--json", "--weights", "fp8", "--kv-cache", "fp8"]
    alone, divided = (meshwright(*greedy, "--tensor", ranks) for ranks in (1, 2))
    assert divided.code == 0 and divided.json == alone.json
    answer = meshwright(*greedy, "--invariant", "--tensor", 2)
    assert answer.code == 2 and "--invariant is for one device: leave out --tensor" in answer.json["error"]


def test_generate_with_drafts_gives_the_same_texts(finished: Path) -> None:
    arguments = ["-p", "the quick", "--tokens", 8, "--json"]
    plain = meshwright("generate", finished, *arguments)
    lookup = meshwright("generate", finished, *arguments, "--speculate", 2)
    assert lookup.json == plain.json and "draft tokens accepted" not in plain.err
    assert re.search(r"meshwright: \d+ of \d+ draft tokens accepted \(\d+%\)\n", lookup.err)
    greedy = [*arguments, "--temperature", 0]
    drafted = meshwright("generate", finished, *greedy, "--draft-model", finished)
    assert drafted.json == meshwright("generate", finished, *greedy).json
    assert "draft tokens accepted (100%)" in drafted.err
    refused = meshwright("generate", finished, *arguments, "--speculate", 2, "--plan", finished / "plan.yaml")
    assert refused.code == 2 and "for one device: leave out --plan" in refused.json["error"]


def test_generate_in_other_formats(finished: Path) -> None:
    arguments = ["-p", "the quick", "-p", "seven", "--tokens", 5, "--seed", 1, "--json"]
    formats = ["--weights", "int8", "--kv-cache", "fp8", "--invariant"]
    answer = meshwright("generate", finished, *arguments, *formats)
    alone = meshwright("generate", finished, *arguments[2:], *formats)
    assert len(answer.json["samples"]) == 2 and answer.json["samples"][1:] == alone.json["samples"]
    refused = meshwright("generate", finished, *arguments, *formats, "--plan", finished / "plan.yaml")
    assert refused.code == 2 and "for one device: leave out --plan" in refused.json["error"]


def test_a_text_is_shown_while_it_is_made(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[object] = []
    texts_shown: list[tuple[int, str]] = []
    step = Engine.step
    monkeypatch.setattr(Engine, "step", lambda engine: steps.append(engine) or step(engine))
    (continuation,) = generate.sample(
        finished,
        ["seven é"],
        tokens=12,
        temperature=2,
        top_k=0,
        seed=1,
        show=lambda piece: texts_shown.append((len(steps), piece)),
    )
    assert (
        texts_shown[0] == (0, "seven é")
        and "".join(piece for _, piece in texts_shown) == f"seven é{continuation['text']}\n"
    )
    assert len({count for count, _ in texts_shown}) > 4


def test_data_show_names_the_samples_of_a_step(finished: Path, tiny: Path) -> None:
    answer = meshwright("data", "show", finished, "--step", 2, "--json").json
    assert answer["step"] == 2 and [sample["global_index"] for sample in answer["samples"]] == list(range(8, 16))
    for sample in answer["samples"]:
        assert set(sample) == {"global_index", "source", "documents", "tokens"}
        assert sum(document["end"] - document["start"] for document in sample["documents"]) == sample["tokens"] == 16
        assert all(document["file"].endswith(".txt") for document in sample["documents"])
    assert meshwright("data", "show", tiny, "--step", 2, "--json").json == answer
    folder = ["--seq-len", 16, "--global-batch", 8]
    direct = meshwright("data", "show", tiny.parent / "data", "--step", 2, *folder, "--json").json
    assert [s["documents"] for s in direct["samples"]] == [s["documents"] for s in answer["samples"]]
    text = meshwright("data", "show", finished, "--step", 2, "--text").out
    assert any(f" {word} " in text for word in WORDS)


def test_damage_is_named_with_file_and_byte(finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    file = run / "checkpoints" / "step-00000006" / "tensors-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    listed, verified = (meshwright("checkpoint", verb, run, "--json") for verb in ("list", "verify"))
    assert (listed.code, verified.code) == (0, 4)
    assert [checkpoint["ok"] for checkpoint in listed.json["checkpoints"]] == [True, True]  # sizes agree
    good, bad = verified.json["checkpoints"]
    assert set(good) == {"path", "step", "committed", "ok", "damaged"} and good["ok"] and good["damaged"] == []
    assert (bad["step"], bad["committed"], bad["ok"]) == (6, True, False)
    assert bad["damaged"] == [{"file": file.name, "offset": 0, "kind": "digest"}]
    assert "1 of 2 checkpoints damaged: step-00000006" in verified.err
    for command in (["eval"], ["generate", "-p", "a"]):  # a run's newest good checkpoint: the older one
        assert meshwright(command[0], run, *command[1:], "--json").code == 0
    answer = meshwright("eval", file.parent, "--json")
    assert answer.code == 4 and answer.json["ok"] is False and "is damaged" in answer.json["error"]


@pytest.mark.parametrize(("tokens", "warned"), [(8, False), (20, True)])
def test_generate_says_that_it_passes_the_model_s_context(finished: Path, tokens: int, warned: bool) -> None:
    answer = meshwright("generate", finished, "-p", "the quick", "--tokens", tokens, "--json")
    assert answer.code == 0 and len(answer.json["samples"]) == 1
    assert ("pass the model's context of 16;" in answer.err) is warned and answer.err.count("\n") == warned


@pytest.mark.parametrize("arguments", [[], ["train"], ["checkpoint"], ["checkpoint", "verify"]], ids=" ".join)
def test_h_is_help(arguments: list[str]) -> None:
    short_option, long_option = meshwright(*arguments, "-h"), meshwright(*arguments, "--help")
    assert short_option.code == 0 and short_option.out == long_option.out and "Usage: meshwright" in short_option.out


@pytest.mark.parametrize(("name", "port"), [("serve", 8000), ("route", 8080)])
def test_help_shows_the_defaults_of_settings_as_an_option_takes_them(name: str, port: int) -> None:
    text = meshwright(name, "--help", env={"COLUMNS": "200"}).out
    assert f"[default: {port}]" in text and "[default: (" not in text


@pytest.mark.parametrize(
    ("line", "proposals", "loaded"),
    [
        ("meshwright tr", ["train", "trace"], set(COMMAND_MODULES)),
        ("meshwright train --fr", ["--fresh"], {"train"}),
        ("meshwright checkpoint ver", ["verify"], {"checkpoint"}),
    ],
)
def test_a_shell_completes_commands_and_options(
    monkeypatch: pytest.MonkeyPatch, line: str, proposals: list[str], loaded: set[str]
) -> None:
    """A line with a whole command loads only that command's module."""
    modules: list[str] = []
    monkeypatch.setattr(main, "import_module", lambda name: modules.append(name) or import_module(name))
    environment = {
        "_MESHWRIGHT_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split()) - 1),
    }
    answer = meshwright(env=environment)
    assert answer.code == 0 and answer.out.split() == proposals
    assert set(modules) == {f"meshwright.cli.{COMMAND_MODULES[name]}" for name in loaded}


def test_a_command_that_is_not_there_brings_the_nearest_once() -> None:
    answer = meshwright("trian")
    assert answer.code == 2 and answer.err.count("(Did you mean one of: 'trace', 'train'?)") == 1


def test_a_checkpoint_records_the_content_and_tokenizer_of_its_corpus(tiny: Path, finished: Path) -> None:
    """A resumed run is held to this record."""
    run = load_run(finished / "config.yaml")
    expected = open_data(run.data, seq_len=run.train.seq_len, seed=run.seed).record()
    state = json.loads((finished / "checkpoints" / "step-00000006" / "state.json").read_bytes())
    assert state["data"] == expected
    digests = expected[str(tiny.parent / "data")]
    assert set(digests) == {"content", "tokenizer", "tokenizer_identity", "order"} and all(digests.values())
    record = read_text_format(finished)
    assert record == recorded_text_format(finished) == recorded_text_format(finished / "checkpoints" / "step-00000006")
    assert record == read_text_format(tiny.parent / "data" / "train")


def test_check_says_what_the_model_of_a_run_can_have(tiny: Path, tmp_path: Path) -> None:
    answer = meshwright("check", tiny, "--runs", tmp_path)
    assert answer.out == "ok\n" and " with " not in answer.err
    plain = json.loads(meshwright("check", tiny, "model.sinks=true", "--runs", tmp_path, "--json").out)["support"]
    assert plain["train"]["tensor"] is True and plain["train"]["hybrid"].startswith("model.sinks = false")


def test_check_of_a_model_needs_its_config_alone(tmp_path: Path) -> None:
    """70B parameters fit neither on this machine nor, with another vocabulary, the built-in corpus; there are no weights."""
    config = {
        "model_type": "qwen2",
        "hidden_size": 8192,
        "intermediate_size": 29568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
    }
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    arguments = ("check", f"model.init=hf:{tmp_path}", "--runs", tmp_path / "runs")
    answer = meshwright(*arguments)
    assert answer.code == 0 and answer.out.splitlines()[-1] == "ok" and "only the model is checked" in answer.err
    assert (
        "qwen2 can be trained with pipeline, " in answer.out and "qwen2 can be served with tensor ranks, " in answer.out
    )
    assert meshwright(*arguments, "--json").json["support"]["train"]["tensor"] is True
    assert meshwright(*arguments, "train.steps=5").code != 0  # a question about a run: weights and memory count
    file.write_text(json.dumps({**config, "a_new_part": 3}))
    refused = meshwright(*arguments)
    assert refused.code == 2 and "a_new_part" in refused.err and not refused.out
