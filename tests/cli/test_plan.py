"""`meshwright plan`: what it answers, in text, JSON and HTML, and which questions it refuses."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from meshwright.cli.plan_answer import PlanQuestion, answer_question
from meshwright.cli.plan_words import facts, layers_line, machines_line, two_digits
from meshwright.config.load import load_run
from meshwright.launch import machine, prepare
from meshwright.launch.prepare import prepare_run
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.plan import BatchPlan, LayerStrategy, MeshAxis, Plan
from meshwright.spec.plan_keys import plain_keys
from tests.cli.command import meshwright
from tests.training.tiny import cpu_profile

MODEL = ["model=llama3-1b", "cluster.gpu=H100", "train.seq_len=4096", "train.global_batch=16"]
ONE_RANK = [*MODEL, "cluster.gpus_per_node=2"]
TCP = [*MODEL, "cluster.gpus_per_node=4", "cluster.emulate_nodes=2"]
pytestmark = pytest.mark.usefixtures("repeated_searches")
KEYS = {
    "name",
    "plan",
    "checkpoint",
    "effective_time",
    "expense",
    "predicted",
    "alternatives",
    "search_seconds",
    "sources",
}


def test_json_has_exactly_the_answer() -> None:
    result = meshwright("plan", *ONE_RANK, "--json").json
    assert set(result) == KEYS
    assert result["predicted"] == result["plan"]["predicted"] and result["predicted"]["step_seconds"] > 0
    assert result["search_seconds"] > 0 and result["sources"]
    assert result["name"].endswith(f"micro-batch {result['plan']['micro_batch']}")
    seconds = [alternative["plan"]["predicted"]["step_seconds"] for alternative in result["alternatives"]]
    assert result["predicted"]["step_seconds"] <= 1.01 * min(seconds)  # of plans as fast, the simplest
    assert all(
        set(alternative) == {"name", "fits", "trainable", "why_not", "plan"} and alternative["why_not"]
        for alternative in result["alternatives"]
    )


def test_pins_are_overrides_and_the_answer_names_the_fixed_keys() -> None:
    pinned = meshwright("plan", *ONE_RANK, "--pin", "replicate=1", "--pin", "plan.reshard=true", "--json").json
    assert pinned["fixed"] == {"replicate": 1, "reshard": True} and pinned["plan"]["shard"] == 2
    text = meshwright("plan", *ONE_RANK, "plan.replicate=1").out
    assert re.search(r"fixed by you +replicate 1 ", text)
    refused = meshwright("plan", *ONE_RANK, "--pin", "replicate")
    assert refused.code == 2 and "--pin replicate: expected KEY=VALUE" in refused.err
    unknown = meshwright("plan", *ONE_RANK, "--pin", "replicas=1")
    assert unknown.code == 2 and "plan.replicas" in unknown.err


def test_explained_json_adds_limits_and_changes() -> None:
    result = meshwright("plan", *ONE_RANK, "--json", "--explain").json
    assert set(result) == KEYS | {"limits", "changes"}
    assert result["limits"][0]["seconds"] <= result["predicted"]["step_seconds"]
    assert {"name", "seconds", "tokens_per_second", "gain", "note"} == set(result["changes"][0])


@pytest.mark.parametrize("columns", [80, 120])
def test_the_text_answers_every_question_within_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    answer = meshwright("plan", *TCP, "plan.pipeline=2", "plan.schedule=zbv")
    assert answer.code == 0, answer.err
    assert max(map(len, answer.out.splitlines())) <= columns
    for heading in (
        "a step",
        "MFU",
        "plan",
        "mesh, outermost axis first",
        "memory of each pipeline rank",
        "where the step goes",
        "why this plan",
        "runner-ups, and why they were not chosen",
        "what limits the step",
        "what a change would gain",
        "where the numbers come from",
    ):
        assert heading in answer.out
    assert "pipeline 2" in answer.out and "zbv" in answer.out and "node 1" in answer.out
    assert re.search(r"rank 0: layers 0-\d, (\d+-)?15 ", answer.out)  # both arms of the V


def test_bars_are_the_memory_they_stand_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "104")
    out = meshwright("plan", *ONE_RANK, "plan.shard=2").out
    (bar, texts) = re.search(r"every rank +([A-Z·]+) +([\d.]+) GB", out).groups()  # type: ignore[union-attr]
    assert len(bar) == 60
    assert len(bar.rstrip("·")) == pytest.approx(60 * float(texts) / 85.9, abs=1)


def test_layers_with_a_number_format_of_their_own_say_so() -> None:
    plan = Plan(
        mesh=(MeshAxis(axis="shard", size=1),),
        batch=BatchPlan(global_batch=1, micro_batch=1, accumulate=1),
        layers=(LayerStrategy(range="0-1", linear="compute"), LayerStrategy(range="2-7")),
    )
    shared_text = "recompute none, reshard"
    assert layers_line(plan) == f"{shared_text}, linear compute (layers 0-1); {shared_text} (layers 2-7)"


def test_many_layer_ranges_are_a_row_for_each_strategy() -> None:
    kinds = [
        LayerStrategy(range=text, recompute=recompute)
        for text, recompute in (
            ("0", "full"),
            ("1-3", "none"),
            ("4", "full"),
            ("5", "full"),
            ("6", "none"),
            ("7", "full"),
        )
    ]
    plan = Plan(
        mesh=(MeshAxis(axis="shard", size=2),),
        batch=BatchPlan(global_batch=2, micro_batch=1, accumulate=1),
        layers=tuple(kinds),
    )
    texts = [text for key, text in facts(load_run(None, [*ONE_RANK, "model.layers=8"]), plan) if key == "layers"]
    assert texts == ["0, 4-5, 7: recompute full, reshard", "1-3, 6: recompute none, reshard"]
    alike = replace(plan, layers=(LayerStrategy(range="0-3"), LayerStrategy(range="4-7")))
    assert ("layers", "recompute none, reshard") in facts(load_run(None, [*ONE_RANK, "model.layers=8"]), alike)


@pytest.mark.slow
def test_what_cannot_be_trained_is_marked_and_left_out_for_train(tmp_path: Path) -> None:
    untrainable_pins = ["plan.offload=both", "plan.pipeline=2", "plan.schedule=zbv"]
    pinned = meshwright("plan", *ONE_RANK, *untrainable_pins, "--out", tmp_path / "host.yaml")
    assert pinned.code == 0 and "planned only: this release cannot train offload both under zbv" in " ".join(
        pinned.out.split()
    )
    refused = meshwright("plan", *ONE_RANK, f"plan={tmp_path / 'host.yaml'}", "--for", "train")
    assert refused.code == 2 and "cannot train offload both under zbv" in refused.err
    fp16_answer = meshwright("plan", *ONE_RANK, "cluster.gpu=V100", "plan.compute=fp16", "--for", "train")
    assert fp16_answer.code == 2 and "plan.compute=fp32" in fp16_answer.err
    answers = meshwright("plan", *TCP, "--json").json
    assert all(alternative["trainable"] for alternative in answers["alternatives"])


def test_for_train_is_what_train_takes(tiny: Path, tmp_path: Path) -> None:
    """The data's vocabulary counts, and not a guess of it: memory to the byte."""
    unrestricted = meshwright("plan", tiny, "--json").json["plan"]
    run = prepare_run(load_run(tiny), tmp_path, profile=None, note=print)
    assert run and unrestricted == plain_keys(run.assignment.plan)


@pytest.mark.parametrize(("gpu", "gib"), [("H100", 700), ("H200", None)])
def test_for_train_counts_on_this_host_where_the_cluster_is_this_machine(
    gpu: str, gib: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_query", lambda field: ["NVIDIA H100 80GB HBM3"] * 2)
    for module in (machine, prepare):
        monkeypatch.setattr(module, "host_memory_bytes", lambda: 700 << 30)
    run = load_run(None, [*ONE_RANK, f"cluster.gpu={gpu}"])
    assert answer_question(run, PlanQuestion(for_train=True)).run.cluster.host_memory_gib == gib
    assert answer_question(run, PlanQuestion()).run.cluster.host_memory_gib is None


def test_a_written_plan_is_read_back_and_priced(tmp_path: Path) -> None:
    written_answer = meshwright("plan", *ONE_RANK, "--for", "train", "--out", tmp_path / "plan.yaml", "--json").json
    priced_answer = meshwright("plan", *ONE_RANK, f"plan={tmp_path / 'plan.yaml'}", "--json").json
    edited = {"why": [f"as {os.path.relpath(tmp_path / 'plan.yaml')} says"]}  # it may have been
    assert priced_answer["plan"] == written_answer["plan"] | edited and priced_answer["alternatives"] == []
    slower = meshwright("plan", *ONE_RANK, "cluster.gpu=A100", f"plan={tmp_path / 'plan.yaml'}", "--json").json
    assert slower["predicted"]["step_seconds"] > written_answer["predicted"]["step_seconds"]
    text = meshwright("plan", *ONE_RANK, f"plan={tmp_path / 'plan.yaml'}").out
    assert f"the plan of {tmp_path / 'plan.yaml'}" in text.replace("\n", "") or "priced on this cluster" in text


@pytest.mark.parametrize(
    ("stages", "schedules"),
    [
        ("[[0-3,12-15],[4-7,8-11]]", {"zbv"}),
        ("[[0-8],[9-15]]", {"1f1b", "zb_h1", "breadth_first"}),
    ],
)
def test_pinned_stages_leave_the_schedule_to_the_planner(stages: str, schedules: set[str]) -> None:
    answer = meshwright("plan", *ONE_RANK, f"plan.stages={stages}", "--json")
    assert answer.code == 0, answer.err
    plans = [answer.json["plan"], *(alternative["plan"] for alternative in answer.json["alternatives"])]
    assert {plan["schedule"] for plan in plans} <= schedules
    assert all(json.dumps(plan["stages"]).translate(str.maketrans("", "", '" ')) == stages for plan in plans)


def test_a_plan_file_s_borders_are_those_of_the_cluster(tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text("order: [pipeline, shard]\npipeline: 2\nshard: 2\nglobal_batch: 16\nmicro_batch: 1\n")
    assert meshwright("plan", *TCP, f"plan={file}", "--json").json["plan"]["order"] == ["pipeline", "shard"]
    output = re.search(r"pipeline 2 .*", meshwright("plan", *TCP, f"plan={file}").out)
    assert output and "between nodes" in output[0]


def test_a_plan_file_that_does_not_fit_is_priced_and_said_not_to(tmp_path: Path) -> None:
    file, page = tmp_path / "plan.yaml", tmp_path / "plan.html"
    file.write_text("replicate: 2\nglobal_batch: 16\nmicro_batch: 8\n")
    arguments = [*ONE_RANK, f"plan={file}", "cluster.memory_gib=20"]
    message = r"does not fit: a rank needs [\d.]+ GB, [\d.]+ GB more than the usable 21.5 GB"
    text, json_answer = meshwright("plan", *arguments, "--html", page), meshwright("plan", *arguments, "--json")
    assert (text.code, json_answer.code) == (0, 0)
    assert (
        re.search(message, " ".join(text.out.split())) and '<span class="status part">does not fit' in page.read_text()
    )
    assert (
        re.search(message, f"does not fit: {json_answer.json['does_not_fit']}")
        and json_answer.json["predicted"]["step_seconds"] > 0
    )
    for command in (
        ["plan", *arguments, "--for", "train"],
        ["check", *arguments, "--runs", tmp_path, "checkpoint.at_end=false"],
    ):
        refused = meshwright(*command)
        assert refused.code == 3 and re.search(rf"{file}: {message}", refused.err)
    assert "does_not_fit" not in meshwright("plan", *ONE_RANK, f"plan={file}", "--json").json


def test_what_does_not_fit_ends_with_3_and_its_fixes() -> None:
    answer = meshwright(
        "plan",
        *ONE_RANK,
        "cluster.memory_gib=10",
        "train.seq_len=8192",
        "plan.micro_batch=8",
        "plan.recompute=none",
        "--json",
    )
    assert answer.code == 3 and answer.json["ok"] is False
    assert re.search(r"needs [\d.]+ GB, [\d.]+ GB more", answer.json["error"])
    assert "Changes that make it fit, the smallest first:\n  1. " in answer.json["error"]


class Page(HTMLParser):
    """Parser of a page: the resources and scripts that it would load, and its open elements."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "onclick", "onload")] + [
            "script"
        ] * (tag == "script")
        if tag not in ("meta", "path"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_stands_alone(tmp_path: Path) -> None:
    answer = meshwright("plan", *TCP, "plan.pipeline=2", "--html", tmp_path / "plan.html", "--json")
    assert answer.code == 0, answer.err
    text = (tmp_path / "plan.html").read_text()
    page = Page(text)
    assert page.open == [] and page.loads == []
    assert "url(" not in text and "default-src 'none'" in text
    for title in (
        "Where the step goes",
        "Memory",
        "One step, by pipeline rank",
        "What a change would gain",
        "Runner-ups",
    ):
        assert f"{title}" in text
    paths = re.findall(r'<path class="column k\d" d="([^"]*)"', text)
    assert len(paths) >= 4 and all(path.startswith("M") for path in paths)


@pytest.mark.slow
def test_scaling_by_doubling(tmp_path: Path) -> None:
    arguments = [*ONE_RANK, "train.steps=100", "--gpus", "1..4", "--objective", "cost", "--price", 2, "--tokens", "1e9"]
    result = meshwright("plan", *arguments, "--html", tmp_path / "scaling.html", "--json").json
    assert set(result) == KEYS | {"objective"}
    points = result["objective"]["points"]
    assert [point["gpus"] for point in points] == [1, 2, 4]
    estimated = [point for point in points if point["step_seconds"]]
    assert all(point["cost"] == pytest.approx(2 * point["gpu_hours"]) for point in estimated)
    assert all(
        point["gpu_hours"] * point["training_share"]
        == pytest.approx(point["gpus"] * 1e9 / point["tokens_per_second"] / 3600)
        for point in estimated
    )
    fewest_hours = min(point["gpu_hours"] for point in estimated)
    (chosen_point,) = (point for point in estimated if point["gpus"] == result["objective"]["gpus"])
    assert chosen_point["gpu_hours"] <= 1.001 * fewest_hours
    text = (tmp_path / "scaling.html").read_text()
    assert Page(text).open == [] and "Throughput" in text and "Efficiency" in text
    output = meshwright("plan", *ONE_RANK, "--gpus", "1..2", "plan.tensor=1", "plan.context_ring=1").out
    assert re.search(r"^ 2 +(FSDP|DDP) 2.* [\d.]+ m?s ", output, re.MULTILINE) and "◀" in output
    assert "GPU-hours need the tokens of the whole training" in " ".join(output.split())
    (single_point,) = meshwright("plan", *ONE_RANK, "--gpus", "2", "--tokens", "1e12", "--json").json["objective"][
        "points"
    ]
    output = meshwright("plan", *ONE_RANK, "--gpus", "2", "--tokens", "1e12").out
    assert two_digits(single_point["gpu_hours"]) in output and two_digits(single_point["days"]) in output


@pytest.mark.parametrize(("number", "text"), [(12345, "12,000"), (35.4, "35"), (4.26, "4.3"), (0.0421, "0.042")])
def test_a_prediction_has_two_digits(number: float, text: str) -> None:
    assert two_digits(number) == text


@pytest.mark.slow
def test_a_faster_plan_that_cannot_be_trained_is_a_note() -> None:
    pins = ["plan.pipeline=4", "plan.offload=activations"]
    arguments = [*MODEL, "cluster.gpus_per_node=4", "train.seq_len=8192", *pins, "--include-untrainable"]
    result = meshwright("plan", *arguments, "--json").json
    without_pin = meshwright("plan", *arguments[:-1], "--json").json
    assert result["plan"]["schedule"] == without_pin["plan"]["schedule"] and "untrainable" not in without_pin
    faster_plan = result["untrainable"]
    assert "cannot train" in faster_plan["cannot_train"]
    assert faster_plan["plan"]["predicted"]["step_seconds"] < result["predicted"]["step_seconds"]
    assert "cannot train" in " ".join(meshwright("plan", *arguments).out.split())


def test_chips_software_formats_and_features(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    options = [
        "--chips",
        "H100,L4",
        "--software",
        "torchtitan,nanotron",
        "--precision",
        "fp8-row",
        "--features",
        "--tokens",
        "1e9",
    ]
    answer = meshwright("plan", *ONE_RANK, *options, "--html", page, "--json").json
    assert set(answer) == KEYS | {"chips", "software", "formats", "features"}
    spent = answer["expense"]
    assert spent["tokens"] == 1e9 and spent["money"] == pytest.approx(
        spent["gpu_hours"] * spent["price_per_gpu_hour"]["value"]
    )
    priced, unpriced = answer["chips"]
    assert (priced["chip"], unpriced["chip"]) == ("H100", "L4") and unpriced["expense"]["money"] is None
    assert {entry["software"] for entry in answer["software"]} == {"torchtitan", "nanotron"}
    assert {entry["dense"] for entry in answer["formats"]} == {"bf16", "fp8-tensor", "fp8-row", "fp8-block"}
    assert answer["features"] == []
    text = " ".join(meshwright("plan", *ONE_RANK, *options).out.split())
    for words in (
        "a million tokens: US$",
        "the same job on other chips",
        "as other software would run it",
        "torchtitan: constants of",
        "this release has no matmuls in fp8-block",
        "the model has no experts",
    ):
        assert words in text
    assert "The same job on other chips" in page.read_text() and "Money and energy" in page.read_text()
    own = meshwright("plan", *ONE_RANK, "cluster.price_per_gpu_hour=4", "cluster.watts_per_gpu=500", "--json").json[
        "expense"
    ]
    assert (own["price_per_gpu_hour"]["value"], own["watts_per_gpu"]["value"]) == (4, 500)


def test_idle_devices_are_named() -> None:
    arguments = [*MODEL, "cluster.gpus_per_node=7", "train.global_batch=8", "--tokens", "1e9"]
    result, text = meshwright("plan", *arguments, "--json").json, " ".join(meshwright("plan", *arguments).out.split())
    assert set(result) == KEYS | {"idle"} and result["idle"]["used"] < result["idle"]["devices"] == 7
    used, spent = result["idle"]["used"], result["expense"]
    assert "on 1 × 7 H100" in text and f"uses {used} of 7 devices" in text
    assert spent["gpus"] == used and spent["gpu_hours"] == pytest.approx(24 * spent["days"] * used)
    assert f"for the {used} devices that train; the {7 - used} idle ones are not counted" in text


def test_chips_are_not_compared_for_a_plan_file(tmp_path: Path) -> None:
    meshwright("plan", *ONE_RANK, "--out", tmp_path / "plan.yaml", "--json")
    answer = meshwright("plan", *ONE_RANK, f"plan={tmp_path / 'plan.yaml'}", "--chips", "H100")
    assert answer.code == 2 and "--chips chooses one for each chip" in answer.err


def test_the_shortest_training() -> None:
    arguments = [
        *ONE_RANK,
        "cluster.gpus_per_node=1",
        "--objective",
        "training",
        "--critical-batch",
        "2e5",
        "--tokens",
        "1e9",
    ]
    answer = meshwright("plan", *arguments, "--json").json
    result, trainings = answer["objective"], answer["objective"]["trainings"]
    assert result["name"] == "training" and result["tokens"] == 1e9
    assert [training["seconds"] for training in trainings] == sorted(training["seconds"] for training in trainings)
    assert answer["plan"]["global_batch"] == trainings[0]["global_batch"]


@pytest.mark.parametrize(
    "options, output",
    [
        (["--for", "serve"], "expected train"),
        (["--objective", "tim"], "nearest: time"),
        (["--objective", "training"], "--critical-batch"),
        (["--critical-batch", "1e6"], "--objective training"),
        (["--chips", "H10O"], "nearest: H100"),
        (["--chips", "H100", "--gpus", "1..2"], "cannot be combined"),
        (["--software", "torchtitn"], "nearest: torchtitan"),
        (["--precision", "fp9"], "expected one of bf16"),
        (["--objective", "cost", "--price", "-2"], "above 0"),
        (["--gpus", "8..2"], "A..B"),
        (["--gpus", "many"], "A..B"),
        (["--gpus", "3"], "nearest whole number of nodes is 2 GPUs"),
        (["cluster.gpu=cpu", "--gpus", "2..4"], "CPU"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: list[str], output: str) -> None:
    answer = meshwright("plan", *ONE_RANK, *options)
    assert answer.code == 2 and output in answer.err


@pytest.mark.parametrize("option_and_message", [("plan", "--out"), ("plan", "--html"), ("simulate", "--trace")])
def test_a_place_that_cannot_be_written_is_refused_before_the_search(
    option_and_message: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command, option = option_and_message
    (tmp_path / "plans").mkdir()
    monkeypatch.setattr("meshwright.planner.fixes.search", pytest.fail)
    for file, output in (
        ("plan/x", f"there is no folder {tmp_path}/plan; nearest: {tmp_path}/plans"),
        ("plans", "a file"),
    ):
        answer = meshwright(command, *ONE_RANK, option, tmp_path / file, "--json")
        assert answer.code == 2 and f"{option} {tmp_path / file}: " in answer.err and output in answer.err
        assert "Traceback" not in answer.err and answer.json["ok"] is False


def test_one_plan_does_not_scale(tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    meshwright("plan", *ONE_RANK, "--out", file)
    answer = meshwright("plan", *ONE_RANK, f"plan={file}", "--gpus", "2..4")
    assert answer.code == 2 and "is a single plan" in answer.err


@pytest.mark.slow  # three short runs, half a minute
def test_probes_measure_the_leading_plans_here_and_take_the_fastest(tiny: Path, tmp_path: Path) -> None:
    """Two ranks of two plans, for real."""
    out = tmp_path / "plan.yaml"
    result = meshwright("plan", tiny, "--probe", 2, "--out", out, "--json").json
    assert set(result) == (KEYS - {"effective_time", "expense"}) | {"probes"}  # no step time is predicted for this CPU
    probe_by_seconds = {probe["measured_seconds"]: probe for probe in result["probes"]}
    assert len(probe_by_seconds) == 2 and all(seconds > 0 for seconds in probe_by_seconds)
    assert all(
        probe["predicted_seconds"] is None and probe["measured_bytes"] > 0 for probe in probe_by_seconds.values()
    )
    fastest = probe_by_seconds[min(probe_by_seconds)]["plan"]
    assert all(result["plan"][key] == fastest[key] for key in ("order", "shard", "micro_batch", "schedule"))
    assert result["plan"]["why"][0].startswith(f"measured on this machine: {min(probe_by_seconds):.3g} s a step")
    assert [
        alternative["why_not"] for alternative in result["alternatives"] if alternative["why_not"] != "not measured"
    ] == [f"measured: {max(probe_by_seconds):.3g} s a step"]
    assert "measured on this machine" in out.read_text()
    text = meshwright("plan", tiny, f"plan={out}", "--probe", 2)
    assert text.code == 2 and "is a single plan" in text.err


def test_seconds_of_a_cpu_are_predicted_with_a_profile_only(tiny: Path, tmp_path: Path) -> None:
    """Without it plans are compared by a guess, which is no prediction."""
    arguments = ["plan", tiny, "cluster.gpus_per_node=2", "--json", "--explain"]
    guessed = meshwright(*arguments).json
    for plan in (guessed["plan"], *(alternative["plan"] for alternative in guessed["alternatives"])):
        assert plan["predicted"]["memory_peak_bytes"] > 0
        assert all(plan["predicted"][key] is None for key in ("step_seconds", "tokens_per_second", "breakdown"))
    assert "needs a profile" in guessed["plan"]["why"][0]
    assert guessed["alternatives"] and all("+" not in alternative["why_not"] for alternative in guessed["alternatives"])
    assert guessed["limits"] == guessed["changes"] == [] and "80% band" not in guessed["sources"]
    output = " ".join(meshwright(*arguments[:3]).out.split())
    assert "CPU times are not predicted without a profile" in output and "a step" not in output

    measured = meshwright(*arguments, f"cluster.profile={cpu_profile(tmp_path / 'cpu.json')}").json
    assert measured["predicted"]["step_seconds"] > 0 and "needs a profile" not in measured["plan"]["why"][0]


def test_a_chip_of_which_only_the_memory_is_known_gets_memory_answers(tmp_path: Path) -> None:
    arguments = [*ONE_RANK, "cluster.gpu=X9000", "cluster.memory_gib=40"]
    answer = meshwright("plan", *arguments, "--html", tmp_path / "plan.html")
    output = " ".join(answer.out.split())
    assert (
        answer.code == 0
        and "no step time: rates of X9000 are not known" in output
        and "GB of 43 GB on the fullest" in output
    )
    assert " a step" not in output and "tokens/s" not in output and not re.search(r"\d m?s longer", output)
    result = meshwright("plan", *arguments, "--json", "--explain").json
    assert result["predicted"]["memory_peak_bytes"] > 0 and result["predicted"]["step_seconds"] is None
    assert result["sources"]["matmuls"].startswith("guess") and result["changes"] == []
    small = [
        "cluster.gpus_per_node=1",
        "cluster.gpu=X9000",
        "cluster.memory_gib=4",
        "plan.offload=none",
        "plan.recompute=full",
    ]
    too_small = meshwright("plan", *MODEL, *small)
    assert too_small.code == 3 and "no plan fits" in too_small.err


def test_a_chip_without_bf16_is_planned_in_fp32_and_in_fp16_only_planned() -> None:
    arguments = [*MODEL, "cluster.gpu=V100", "cluster.gpus_per_node=4"]
    usual = meshwright("plan", *arguments, "--json")
    assert usual.json["plan"]["compute"] == "fp32" and "V100 has no bf16, so plans compute in fp32" in usual.err
    pinned = meshwright("plan", *arguments, "plan.compute=fp16", "--json")
    assert "no bf16" not in pinned.err and pinned.json["plan"]["compute"] == "fp16"
    assert pinned.json["predicted"]["step_seconds"] < usual.json["predicted"]["step_seconds"] / 3
    assert "computation in fp16" in pinned.json["plan"]["why"][-2] + pinned.json["plan"]["why"][-1]
    assert "no run on volta devices" in pinned.json["sources"]["matmuls"]


@pytest.mark.parametrize("options", [["--gpus", "2..4"], ["--objective", "cost"]])
def test_probes_measure_seconds_of_one_step_only(options: list[str]) -> None:
    answer = meshwright("plan", *ONE_RANK, "--probe", 2, *options)
    assert answer.code == 2 and "--probe measures seconds of a step" in answer.err


def test_another_machine_is_not_probed() -> None:
    answer = meshwright("plan", *ONE_RANK, "--probe", 2)
    assert answer.code == 2 and "the cluster says 2 H100" in answer.err


@pytest.mark.parametrize(
    ("cluster", "expected"),
    [
        ("mixed-h100-a100", "8 × 8 H100 and 8 × 8 A100"),
        ("ib-roce-a100", "4 × 8 A100 on infiniband, 25 GB/s a port and 4 × 8 A100 on roce, 25 GB/s a port"),
        ("dgx-h100-16", "16 × 8 H100"),
        ("a100-tcp-4", "4 × 8 A100"),
    ],
)
def test_the_header_names_nodes_that_differ(cluster: str, expected: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"model: llama3-8b\ntrain: {{steps: 1, global_batch: 64, seq_len: 4096}}\ncluster: {cluster}\n")
    assert machines_line(load_run(file, []).cluster) == expected
    assert machines_line(ClusterSpec(gpu="H200", gpus_per_node=8, emulate_nodes=2)) == "1 × 8 H200, emulating 2 nodes"


def test_assumed_values_are_reported(tiny: Path) -> None:
    answer = meshwright("plan", "model=llama3-1b", "cluster.gpu=H100", "train.global_batch=16", "--json")
    assert answer.err == "no run file: train.seq_len=8192 cluster.gpus_per_node=8 assumed\n"
    assert meshwright("plan", tiny, "--json").err == ""


@pytest.mark.slow
@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_costs_that_are_not_estimated_are_named_beside_the_step_time(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # simulate leaves its timeline where it is called
    for value in ("true", "false"):
        output = meshwright(command, *ONE_RANK, f"data.document_mask={value}").out
        assert ("the prediction ignores data.document_mask" in output) is (value == "true")


def test_a_node_that_is_not_sold_is_remarked_upon() -> None:
    for overrides, output in (([], True), (["cluster.network.domain=8"], False)):
        answer = meshwright("plan", *MODEL, "cluster.gpus_per_node=16", *overrides, "--json")
        assert ("16 H100 per node: vendors build hosts with 8" in answer.err) is output


def test_tcp_without_a_rate_is_priced_by_a_guess() -> None:
    result = meshwright("plan", *ONE_RANK, "cluster.nodes=2", "cluster.network.fabric=tcp", "--json").json
    assert result["sources"]["network"].startswith("guess") and "port_gb_per_s" in result["sources"]["network"]


def test_small_memory_has_its_own_unit_and_every_letter_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    out = meshwright("plan", "cluster.gpu=cpu").out.replace("\u00a0", " ")
    assert re.search(r"llama-nano, \d\.\d+M parameters", out) and re.search(r"W weights [\d.]+ MB", out)
    bar = re.search(r"every rank +([A-Z]+) ", out)
    assert bar is not None and all(f"{letter} " in out.partition(bar[0])[2] for letter in set(bar[1]))


def test_layouts_of_unequal_samples_are_in_text_json_and_page(tmp_path: Path) -> None:
    file, page = tmp_path / "lengths.json", tmp_path / "plan.html"
    file.write_text(json.dumps({"ranges": [{"first": 64, "last": 4096, "documents": 9}]}))
    words = ["plan", *ONE_RANK, f"data.lengths={file}"]
    result = meshwright(*words, "--json", "--html", page).json
    assert set(result) == KEYS | {"samples"}
    layouts = result["samples"]["layouts"]
    assert {layout["hybrid"] for layout in layouts} == {None, 2}
    assert all(layout["seconds"]["p10"] <= layout["seconds"]["mean"] <= layout["seconds"]["p100"] for layout in layouts)
    assert "Samples of unequal lengths" in page.read_text() and "samples of unequal lengths" in meshwright(*words).out


@pytest.mark.slow
def test_the_largest_model_in_text_and_json() -> None:
    words = [
        "model=llama3-8b",
        "cluster.gpu=H100",
        "cluster.gpus_per_node=1",
        "train.global_batch=1",
        "train.seq_len=2048",
    ]
    pins = ["plan.offload=optimizer", "plan.moments=bf16"]
    answer = meshwright("plan", "--largest", *words, *pins, "--json").json
    assert set(answer) == {"family", "device_bytes_usable", "host_bytes_usable", "largest"}
    (entry,) = answer["largest"]
    assert set(entry) == {"offload", "moments", "parameters", "model", "plan", "host_bytes", "bytes"}
    assert entry["bytes"]["host"] == {"optimizer": entry["host_bytes"]} and entry["bytes"]["device"]["weights"] > 1e9
    assert (entry["offload"], entry["moments"], entry["plan"]["moments"]) == ("optimizer", "bf16", "bf16")
    text = meshwright("plan", "--largest", *words, *pins).out
    assert f"bf16 moments, which round: {entry['parameters'] / 1e9:.1f} B parameters" in text
    assert f"model.layers={entry['model']['layers']} model.hidden={entry['model']['hidden']} " in text
    assert f"host {entry['host_bytes'] / 1e9:.1f} GB" in text
    assert meshwright("plan", "--largest", "model=mixtral-8x7b", *words[1:]).code == 2
    refused = meshwright("plan", "--largest", *words, "--out", "plan.yaml", "--gpus", "1..2")
    assert refused.code == 2 and "--largest cannot be combined with --gpus and --out" in refused.err
