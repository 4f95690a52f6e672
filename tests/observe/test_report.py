import json
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest
import yaml

from meshwright.config.presets import MODEL_PRESETS
from meshwright.observe.chart_page import figures_json
from meshwright.observe.metrics import STEP_KEYS, MetricsWriter
from meshwright.observe.prediction_check import compare_with_prediction, typical_step
from meshwright.observe.report import render, write_report
from meshwright.observe.report_charts import Sheet
from meshwright.observe.report_parts import plan_section
from meshwright.observe.runfolder import read_run
from meshwright.observe.svg import Axis
from meshwright.observe.wall_time import WallTimeWriter
from meshwright.spec.fields import to_plain
from meshwright.spec.model import ModelSpec, parameter_count
from meshwright.spec.plan import BatchPlan, Breakdown, LayerStrategy, MeshAxis, Plan, Precision, Predicted
from meshwright.spec.plan_keys import plain_keys
from tests.browser import BROWSER, browser
from tests.cli.command import meshwright

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)> \" ' & {{}} https://evil.example/x.js"
VOID = {"meta", "input", "br", "img", "link"}


class Page(HTMLParser):
    """Checks that every element is closed in order, and gathers tags, attributes and visible text."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.attributes, self.text = [], [], [], ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data):
        if not self.open or self.open[-1] not in ("script", "style"):
            self.text += data

    def classes(self):
        return [name for _, key, value in self.attributes if key == "class" for name in value.split()]


def plan(**changes):
    base = Plan(
        mesh=(MeshAxis(axis="replicate", size=2, crosses="node"), MeshAxis(axis="shard", size=4)),
        batch=BatchPlan(global_batch=32, micro_batch=2, accumulate=2),
        layers=(
            LayerStrategy(range="0-3", recompute="full", linear="fp8_rowwise"),
            LayerStrategy(range="4-7", reshard=False),
        ),
        predicted=Predicted(memory_peak_bytes=9 << 30, memory_bytes={"weights": 4 << 30, "activations": 5 << 30}),
        why=("shard 4: fits one node",),
    )
    return {**plain_keys(base), **changes}


def config(**changes):
    model = {**MODEL_PRESETS["llama-nano"], "preset": "llama-nano", "init": "scratch", "vocab_size": 4096}
    cluster = {"gpu": "H200", "nodes": 2, "gpus_per_node": 4, "memory_gib": None}
    return {"name": "demo", "model": model, "train": {"steps": 40}, "cluster": cluster, **changes}


def write_metrics(folder, steps, **changes):
    with MetricsWriter(folder / "metrics.jsonl") as writer:
        for step in range(1, steps + 1):
            record = {
                **dict.fromkeys(STEP_KEYS, 1.0),
                "loss": 8.0 / step,
                "step": step,
                "tokens": 4096 * step,
                "mfu": 0.4,
            }
            record |= {"memory_peak_bytes": 8 << 30, "mfu_full": 0.45, "step_seconds": 0.5}
            record["phases"] = {"forward": 0.2, "backward": 0.25, "host": 0.05}
            writer.write_step({**record, **changes})
            if step % 10 == 0:
                writer.write_validation(step, 8.5 / step)
        if steps:
            writer.write_event(steps, "checkpoint written")
            writer.write_start(0, {"imports": 3.0, "first step": 5.0}, {"compiled": 0, "from_cache": 2, "seconds": 1.5})


@pytest.fixture
def folder(tmp_path):
    run = tmp_path / "demo"
    run.mkdir()
    write_metrics(run, 40)
    (run / "config.yaml").write_text(yaml.safe_dump(config()))
    (run / "plan.yaml").write_text(yaml.safe_dump(plan()))
    (run / "environment.json").write_text(
        json.dumps({"torch": "2.13.0", "memory_bytes": 1 << 34, "nested": {"a": [1, 2]}})
    )
    summary = {"steps": 40, "held_out_loss": 0.21, "unigram_entropy_nats": 5.5}
    (run / "summary.json").write_text(json.dumps(summary))
    (run / "samples.json").write_text(json.dumps([{"prompt": "def f(", "text": "x):\n    return x"}]))
    for name in ("step-00000020", "step-00000040", ".step-00000050.1.partial"):
        (run / "checkpoints" / name).mkdir(parents=True)
    (run / "checkpoints" / "step-00000020" / "COMMITTED").write_text("")
    return run


PREDICTED = Predicted(
    memory_peak_bytes=9 << 30,
    step_seconds=0.4,
    low_seconds=0.35,
    high_seconds=0.45,
    breakdown=Breakdown(compute=0.3, exposed={"shard": 0.06}, bubble=0.04),
)


def write_check(folder, predicted=PREDICTED, **changes):
    found = typical_step(read_run(folder).steps)
    with MetricsWriter(folder / "metrics.jsonl", resume_from=40) as writer:
        writer.write_check(40, {**to_plain(compare_with_prediction(predicted, found)), **changes})


def page_of(folder):
    return Page(write_report(folder).read_text(encoding="utf-8"))


def test_the_report_holds_everything_a_run_left(folder):
    page = page_of(folder)
    for text in (
        "demo",
        "finished",
        "3.80M",
        "Validation loss",
        "5.29 below unigram entropy",
        "20.0 s",
        "sum of all steps",
    ):
        assert text in page.text, text
    for title in (
        "Loss",
        "Throughput",
        "Model FLOPs utilisation",
        "Step time",
        "Memory",
        "Learning rate",
        "Gradient norm",
    ):
        assert title in page.text, title
    assert "of 989 TFLOP/s, H200 dense bf16" in page.text
    assert "unigram entropy of the held-out text 5.50" in page.text
    assert "8.59 GB (-11.1%)" in page.text and "activations 5.37 GB" in page.text
    assert "def f(" in page.text and "return x" in page.text
    assert "checkpoint written" in page.text and "2.13.0" in page.text and "17.2 GB" in page.text
    assert "8.0 s: imports 3.0, first step 5.0 (compiler 1.5: 0 graphs compiled, 2 from its cache)" in page.text
    assert "step-00000020" in page.text and "not committed" in page.text and "partial" not in page.text
    assert "Not in this report" not in page.text


def test_what_was_predicted_stands_beside_what_was_measured(folder):
    write_check(folder)
    page = page_of(folder)
    shown = page.text.partition("Predicted and measured")[2].partition("Why this plan")[0]
    for text in ("Step time400 ms350 ms to 450 ms500 ms+25.0%", "MFU, causal50.0%", "9.66 GB8.59 GB-11.1%"):
        assert text in shown, text
    for text in (
        "predicted 360 ms measured 450 ms",
        "predicted 40.0 ms measured 50.0 ms",
        "exposed shard",
        "--from-run",
    ):
        assert text in shown, text
    assert page.classes().count("slim") == 6 and "off" in page.classes()


def test_the_loss_of_each_source_of_a_moe_is_drawn(folder):
    with MetricsWriter(folder / "metrics.jsonl", resume_from=40) as writer:
        writer.write_validation(40, 2.5, by_source={"corpora/code": 2.0, HOSTILE: 3.0})
    page = page_of(folder)
    assert "validation, corpora/code" in page.text and f"validation, {HOSTILE}" in page.text


def test_without_figures_of_the_device_the_card_has_a_table_and_no_bars(folder):
    write_check(folder, Predicted(memory_peak_bytes=9 << 30))
    page = page_of(folder)
    assert (
        "without a profile; meshwright profile measures this machine" in page.text and "Step time–500 ms" in page.text
    )
    assert "slim" not in page.classes()


def test_a_run_that_was_not_held_to_account_has_no_card(folder):
    assert "Predicted and measured" not in page_of(folder).text


def test_an_account_that_cannot_be_read_is_named(folder):
    write_check(folder, mfu={"measured": HOSTILE})
    page = page_of(folder)
    assert (
        "the prediction check after step 40: not a prediction check" in page.text
        and "Predicted and measured" not in page.text
    )


def test_parts_with_hostile_names_are_only_shown(folder):
    write_check(folder, parts=[{"name": HOSTILE, "measured": {HOSTILE: 1.0}, "predicted": {}}])
    page = page_of(folder)
    assert page.text.count(HOSTILE) == 2 and page.tags.count("script") == 2 and "img" not in page.tags


def test_on_a_gpu_allocated_memory_is_compared_without_the_framework_s(folder):
    kinds = {"weights": 8 << 30, "framework": 1 << 30}
    output = {"memory_peak_bytes": 9 << 30, "memory_bytes": kinds}
    (folder / "plan.yaml").write_text(yaml.safe_dump(plan(predicted=output)))
    write_metrics(folder, 5, memory_allocated_peak_bytes=6 << 30)
    assert "6.44 GB (-25.0%), 8.59 GB reserved" in page_of(folder).text


def test_the_memory_picture_shows_the_fullest_rank(folder):
    write_check(folder, memory_bytes={"measured": 10 << 30, "predicted": 9 << 30})
    assert "10.7 GB (+11.1%)" in page_of(folder).text


def test_parameters_are_counted_from_the_configuration(folder):
    assert read_run(folder).parameters == parameter_count(
        ModelSpec(**{**MODEL_PRESETS["llama-nano"], "vocab_size": 4096})
    )
    assert "3.80M parameters" in page_of(folder).text
    for model in ({"preset": "llama-nano"}, {**MODEL_PRESETS["llama-nano"], "layers": "x", "vocab_size": 9}, [1], None):
        (folder / "config.yaml").write_text(yaml.safe_dump(config(model=model)))
        assert read_run(folder).parameters is None


def test_the_plan_is_drawn_by_node_and_coordinate(folder):
    page = page_of(folder)
    assert page.classes().count("rank") == 8 and page.classes().count("node") == 2
    assert "HSDP 2×4 (ZeRO-" in page.text
    assert "replicate 2 (DDP, between nodes) × shard 4 (FSDP) = 8 ranks" in page.text
    assert "32 sequences a step = 8 ranks × 2 at a time × 2 accumulated" in page.text
    assert re.search(r"6replicate 1shard 2", page.text)
    assert (
        "Layers 0-3" in page.text
        and "full recompute; linear layers in fp8_rowwise" in page.text
        and "ZeRO-2" in page.text
    )
    assert "shard 4: fits one node" in page.text


def test_it_is_one_file_that_loads_nothing(folder):
    write_metrics(folder, 5000)
    text = write_report(folder).read_text(encoding="utf-8")
    page = Page(text)
    assert len(text.encode()) < 1_000_000
    assert not re.search(r"https?://|//[a-z]+\.|url\(|@import", text)
    assert not [
        found for found in page.attributes if found[1] in ("src", "href", "action") or found[1].startswith("on")
    ]
    assert "link" not in page.tags and "img" not in page.tags and "iframe" not in page.tags
    policy = next(value for _, name, value in page.attributes if name == "content" and "default-src" in value)
    assert policy.startswith("default-src 'none'") and "script-src 'sha256-" in policy
    assert [file.name for file in folder.glob("*.tmp")] == []


def test_answers_of_a_run_that_samples_are_shown_with_their_rewards(folder):
    with MetricsWriter(folder / "metrics.jsonl", resume_from=40) as writer:
        for step in (1, 39, 40):
            best, worst = (
                {"answer": f"best {step}", "reward": 0.75},
                {"answer": "", "reward": None, "outcome": "timeout"},
            )
            writer.write_answers(step, {"question": f"question {step}", "answers": [best, worst]})
    text = page_of(folder).text.replace("\u00a0", " ")
    assert all(f"best {step}" in text and f"question {step}" in text for step in (1, 39, 40))
    assert "0.75" in text and "timeout" in text


def test_curves_are_thinned(folder):
    write_metrics(folder, 5000)
    figures = figures_of(folder)
    assert len(figures["tables"]["steps"]["step"]) <= 1500
    for chart in figures["charts"].values():
        for series in chart["series"]:
            points = len(figures["tables"][series["table"]]["step"])
            assert len(series["values"]) == points - (series["kind"] == "column")


def figures_of(folder):
    text = write_report(folder).read_text(encoding="utf-8")
    return json.loads(re.search(r'<script type="application/json" id="figures">(.*?)</script>', text, re.S)[1])


def test_the_numbers_behind_the_charts_are_the_run_s(folder):
    figures = figures_of(folder)
    assert figures["tables"]["steps"]["tokens"][:2] == [4096, 8192]
    assert figures["tables"]["steps"]["time"][-1] == 20.0
    assert figures["tables"]["validation"]["time"] == [5.0, 10.0, 15.0, 20.0]
    loss = figures["charts"]["loss"]["series"]
    assert loss[0]["values"][:3] == [8.0, 4.0, 2.6667]
    assert [round(value, 3) for value in loss[2]["values"]] == [0.85, 0.425, 0.283, 0.212]
    assert set(figures["axes"]) == {"step", "tokens", "time"}


def test_text_among_the_numbers_cannot_close_their_element():
    axis = Axis("step", "Steps", 0.0, 1.0, ((0.0, "</script><b>"),))
    assert "<" not in figures_json(Sheet((), {}, (axis,)))


def test_hostile_text_is_shown_and_never_acts(folder):
    hostile = folder.parent / "<b onclick=x>'&"
    folder.rename(hostile)
    (hostile / "config.yaml").write_text(
        yaml.safe_dump(config(name=HOSTILE, model={"preset": HOSTILE, "layers": HOSTILE}))
    )
    (hostile / "plan.yaml").write_text(
        yaml.safe_dump(
            plan(
                why=[HOSTILE],
                mesh=[{"axis": HOSTILE, "size": 2, "crosses": HOSTILE}],
                layers=[{"range": HOSTILE, "recompute": HOSTILE}],
                precision={"compute": HOSTILE, "reduce": HOSTILE},
                predicted={"memory_peak_bytes": 5, "memory_bytes": {HOSTILE: 5}},
            )
        )
    )
    (hostile / "environment.json").write_text(json.dumps({HOSTILE: {HOSTILE: HOSTILE}}))
    (hostile / "samples.json").write_text(json.dumps([{"prompt": HOSTILE, "text": HOSTILE}]))
    (hostile / "summary.json").write_text(json.dumps({"held_out_loss": HOSTILE, "wall_seconds": HOSTILE}))
    with MetricsWriter(hostile / "metrics.jsonl", resume_from=40) as writer:
        writer.write_event(40, HOSTILE)
        answer = {"answer": HOSTILE, "reward": HOSTILE, "outcome": HOSTILE}
        writer.write_answers(40, {"question": HOSTILE, "answers": [answer], "lengths": HOSTILE})
        writer._append({"kind": "answers", "step": 40, "answers": HOSTILE})
        writer._append({"kind": "start", "step": 40, "phases": {HOSTILE: 1.0, "b": HOSTILE}, "compiler": HOSTILE})
        writer._append({"kind": "step", "step": 41, "phases": {HOSTILE: 1.0, "forward": HOSTILE}, "loss": HOSTILE})
    text = write_report(hostile).read_text(encoding="utf-8")
    page = Page(text)
    assert page.tags.count("script") == 2 and "img" not in page.tags
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    assert HOSTILE in page.text and "<b onclick=x>'&" in page.text


@pytest.mark.parametrize("missing", ["config.yaml", "plan.yaml", "environment.json", "summary.json"])
def test_a_missing_file_is_named(folder, missing):
    (folder / missing).unlink()
    page = page_of(folder)
    assert f"{missing}: No such file" in page.text and "Loss" in page.text


def test_a_run_without_samples_lacks_nothing(folder):
    (folder / "samples.json").unlink()
    assert "Not in this report" not in page_of(folder).text


def test_an_empty_folder_still_gives_a_page(tmp_path):
    page = page_of(tmp_path)
    assert "no steps yet" in page.text and "metrics.jsonl: No such file" in page.text
    assert "figure" not in page.tags


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("plan.yaml", "mesh: 5"),
        ("plan.yaml", "- [\n"),
        ("plan.yaml", "{micro_batch: 1}"),
        ("config.yaml", "a: ["),
        ("plan.yaml", yaml.safe_dump(plan(global_batch="x"))),
        ("summary.json", "[1]"),
        ("environment.json", "{"),
        ("samples.json", "{}"),
        ("environment.json", "\x00\xff"),
    ],
)
def test_an_unreadable_file_is_named(folder, name, text):
    (folder / name).write_bytes(text.encode("latin-1"))
    assert f"{name}: " in page_of(folder).text.partition("Not in this report")[2]


def test_damaged_lines_are_left_out_and_counted(folder):
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('garbage\n{"kind": "step", "step": 41, "loss": 1.0}\n')
    assert "metrics.jsonl: 1 damaged lines" in page_of(folder).text


def test_a_run_of_one_step(folder):
    write_metrics(folder, 1)
    page = page_of(folder)
    assert "one step" in page.text and "Throughput" in page.text


def test_values_that_are_not_finite_leave_gaps(folder):
    with MetricsWriter(folder / "metrics.jsonl", resume_from=40) as writer:
        for step in (41, 42):
            writer.write_step({**dict.fromkeys(STEP_KEYS, float("nan")), "step": step, "grad_norm": float("inf")})
    text = write_report(folder).read_text(encoding="utf-8")
    Page(text)
    assert (
        "NaN" not in text
        and "Infinity" not in text
        and "nan" not in text.partition("<body>")[2].lower().replace("nano", "")
    )
    assert figures_of(folder)["charts"]["loss"]["series"][0]["values"][-2:] == [None, None]


def test_a_run_of_nothing_but_nan(folder):
    write_metrics(folder, 3, **{key: float("nan") for key in STEP_KEYS if key != "step"}, mfu_full=None)
    page = page_of(folder)
    assert "Throughput" not in page.text and "Step time" in page.text


def test_an_unknown_chip_shows_no_mfu(folder):
    write_metrics(folder, 20, mfu=None, mfu_full=None)
    assert "FLOP" not in page_of(folder).text and "MFU" not in page_of(folder).text


def test_an_unfinished_run_says_how_far_it_came(folder):
    (folder / "summary.json").unlink()
    (folder / "config.yaml").write_text(yaml.safe_dump(config(train={"steps": 900})))
    assert "40 of 900 steps" in page_of(folder).text


def test_ten_thousand_ranks_are_not_all_drawn(folder):
    many = plan(replicate=1250, shard=8, global_batch=10_000, micro_batch=1)
    (folder / "plan.yaml").write_text(yaml.safe_dump(many))
    page = page_of(folder)
    assert page.classes().count("rank") == 128 and "9,872 more ranks" in page.text


def test_one_rank_has_a_picture(folder):
    (folder / "plan.yaml").write_text(yaml.safe_dump(plan(order=[], replicate=1, shard=1)))
    page = page_of(folder)
    assert page.classes().count("rank") == 1 and "one rank = 1 rank" in page.text


def test_figures_are_the_same_for_the_same_run(folder):
    run = read_run(folder)
    without_time = [re.sub(r"written [\d: -]+ UTC", "", render(run)) for _ in range(2)]
    assert without_time[0] == without_time[1]


def test_reports_are_written_without_torch(folder):
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from pathlib import Path; from meshwright.observe.report import write_report\n"
        f"write_report(Path({str(folder)!r}))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert Precision().compute == "bf16"


def test_ranges_that_differ_in_what_waits_on_the_host_say_so_and_ranges_alike_share_a_row():
    layers = (
        LayerStrategy(range="0-1", offload="activations"),
        LayerStrategy(range="2-5"),
        LayerStrategy(range="6-7", offload="activations"),
    )
    axes = (MeshAxis(axis="shard", size=2), MeshAxis(axis="context_ulysses", size=2))
    batch = BatchPlan(global_batch=2, micro_batch=1, accumulate=1)
    section = plan_section(Plan(mesh=axes, batch=batch, layers=layers), 4)
    rows = dict(re.findall(r"<tr><th[^>]*>(Layers [^<]*)</th><td>([^<]*)</td>", section))
    assert list(rows) == ["Layers 0-1, 6-7", "Layers 2-5"]
    assert "activations in host memory" in rows["Layers 0-1, 6-7"] and "host" not in rows["Layers 2-5"]
    assert "<span>Ulysses 1</span>" in section


def test_the_goodput_card_has_every_category_and_a_bar_of_the_whole_wall_time(folder):
    writer = WallTimeWriter(folder / "wall_time.jsonl", iter([1030.0, 1040.0, 1042.0, 1047.0, 1049.0]).__next__)
    writer.start(0, 30.0, 2.0)
    for step in (1, 2):
        writer.step(step, 0.5, skipped=False)
    writer.pause("save", 2, 5.0)
    writer.step(3, 0.0, skipped=True)
    page = Page(write_report(folder).read_text(encoding="utf-8"))
    prediction_check = read_run(folder).goodput
    assert prediction_check.wall_seconds == pytest.approx(49.0)
    assert all(name.replace("_", " ") in page.text for name in prediction_check.seconds)
    card = render(read_run(folder)).split('id="goodput"')[1].split("</section>")[0]
    widths = [float(width) for width in re.findall(r"width:([\d.]+)%", card)]
    assert sum(widths) == pytest.approx(100.0, abs=0.01)
    assert f"{100 * prediction_check.goodput:.1f}% of 49.0 s wall time was productive" in page.text
    tile = f"49.0 sof all starts; {100 * prediction_check.goodput:.1f}% productive"
    assert tile in page.text.replace("\n", ""), "one wall time on the page"


def test_white_space_of_samples_fills_no_page(folder):
    texts = ["\n \n\n  x = 1\n\n\n\n", "\n\n \n"]
    (folder / "samples.json").write_text(json.dumps([{"prompt": "def f():", "text": text} for text in texts]))
    page = write_report(folder).read_text(encoding="utf-8")
    assert "<b>def f():</b>\n\n  x = 1</pre>" in page and "(white space only)</span></pre>" in page


NARROW = 390
"""Width of a telephone's screen in pixels."""
CUT_OFF = """JSON.stringify([...document.querySelectorAll('main *')].filter(each => {
  const box = each.getBoundingClientRect();
  return !each.closest('svg') && box.width && box.right > WIDTH + 1;
}).map(each => each.outerHTML.slice(0, 120)))"""


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
def test_pages_are_whole_on_a_telephone(folder, tmp_path):
    write_check(folder)
    writer = WallTimeWriter(folder / "wall_time.jsonl", iter([1030.0, 1040.0]).__next__)
    writer.start(0, 30.0, 2.0)
    writer.step(1, 0.5, skipped=False)
    pages = {"report": write_report(folder), "plan": tmp_path / "plan.html"}
    answer = meshwright(
        "plan",
        "model=llama3-70b",
        "cluster.gpu=H100",
        "cluster.nodes=4",
        "cluster.gpus_per_node=8",
        "--html",
        pages["plan"],
    )
    assert answer.code == 0
    for name, page in pages.items():
        with browser(tmp_path / name) as screen:
            screen.open(page.as_uri())
            screen.resize(NARROW)
            screen.wait("document.readyState === 'complete' && !!document.querySelector('footer')")
            assert json.loads(screen.value(CUT_OFF.replace("WIDTH", str(NARROW)))) == []
            assert screen.value("document.documentElement.scrollWidth") == NARROW
