"""Tests of the documentation: commands run, links have targets, tables agree with the code.

The commands of a page run unchanged, in a folder of that page. Only the work is smaller: a small text replaces the standard
library's, and a `meshwright` in PATH limits `quickstart`, `train` and `check` to a few small steps.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
from benchmarks.dense_table import side_of
from tests.docs.pages import PAGES, ROOT, Block, anchors, blocks, codes, inline_code, links, table, text_of
from tests.house.test_architecture import LAYERS, TORCH_FREE
from tools.reference import GENERATED
from tools.reference import main as generate

from meshwright.cli.main import app_for
from meshwright.config.deployment_file import load_deployment_spec
from meshwright.config.load import load_plan, load_run
from meshwright.config.presets import MODEL_PRESETS, run_preset
from meshwright.config.schema import all_keys
from meshwright.data.stdlib import VOCABULARY, stdlib_folder
from meshwright.events.start import PHASES
from meshwright.launch.scheduler_job import REQUEUE_CODES, STOP_CODES
from meshwright.observe.metrics import OPTIONAL_STEP_KEYS, STEP_KEYS
from meshwright.spec import errors
from meshwright.spec.fields import docs_of, from_plain
from meshwright.spec.model import ModelSpec, flops_per_token, parameter_count
from meshwright.spec.run import RunSpec
from meshwright.spec.sweep import SweepSpec

TINY = "train.steps=6 train.global_batch=4 train.seq_len=32 train.warmup_steps=1 data.validation_tokens=128 checkpoint.every=3"
SHARED_COMMAND = "meshwright quickstart"
"""Runs once for all pages."""
NOT_RUN: dict[str, dict[str, tuple[str, ...]]] = {
    "a GPU, or a model that needs one": {
        "README.md": ("meshwright data prepare my-text --tokenizer tokenizer.json --out corpus",),
        "docs/getting-started.md": (
            "meshwright train run.yaml cluster=auto",
            "meshwright train benchmarks/llama3-8b.yaml",
        ),
        "docs/how-to/resume.md": (
            "CUDA_VISIBLE_DEVICES=0,1,2,3,4,5 meshwright train run.yaml cluster=auto",
            "meshwright train run.yaml",
            "meshwright train run.yaml cluster.gpus_per_node=4",
        ),
        "docs/how-to/measure-a-machine.md": (
            "meshwright profile cluster=auto cluster.emulate_nodes=2 --out two-nodes.json",
            "meshwright profile --serve serve.yaml --out h200.json    # or model=llama3-8b",
        ),
        "docs/how-to/reproduce.md": ("meshwright checkpoint diff runs/first runs/second",),
        "docs/results.md": (
            "python benchmarks/dense.py benchmarks/dense/one-gpu.yaml --budget 540 --out one-gpu.jsonl",
        ),
        "docs/tutorials/one-gpu.md": (
            "nvidia-smi",
            "meshwright data prepare FOLDER --tokenizer MODEL-FOLDER --held-out 0.001 --out corpus",
            "meshwright data prepare chats.jsonl --chat --tokenizer llama-3.1-8b --held-out 0.02 --out chats",
            "meshwright data prepare pairs.jsonl --preferences --tokenizer my-chat-model --held-out 0.05 --out pairs",
            "meshwright plan examples/serve-one.yaml --out deployment.yaml",
            "meshwright data prepare questions.jsonl --chat --tokenizer my-chat-model --held-out 0.05 --out questions",
        ),
    },
    "several hosts": {
        "docs/how-to/measure-a-machine.md": (
            "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\",
        ),
        "docs/how-to/several-hosts.md": (
            "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\",
        ),
        "docs/tutorials/cluster.md": (
            "meshwright host check",
            "sbatch run.sbatch",
            "meshwright monitor runs/several-hosts",
        ),
    },
    "the network, or a package that tests do not have": {
        "docs/getting-started.md": (
            "python3 -m venv --system-site-packages .venv",
            "pip wheel --no-deps --wheel-dir dist .",
        ),
        "docs/how-to/benchmarks.md": ("pip install 'meshwright[bench]'",),
        "docs/how-to/hugging-face.md": ("hf download HuggingFaceTB/SmolLM2-135M-Instruct --local-dir smollm2",),
        "docs/how-to/reproduce.md": ("pip install 'meshwright[deterministic]'",),
        "docs/how-to/storage.md": ("pip install 'meshwright[storage]'",),
    },
    "a server that keeps running, or its clients; tests of `serve` and `agents` start them": {
        "docs/how-to/agents.md": (
            "meshwright serve my-model --name my-model --context 131072",
            'MESHWRIGHT_API_KEY=any codex exec "Say what this folder is for."',
            "ANTHROPIC_BASE_URL=http://127.0.0.1:8000 ANTHROPIC_AUTH_TOKEN=any ANTHROPIC_MODEL=my-model \\",
            "from anthropic import Anthropic",
        ),
        "docs/how-to/benchmarks.md": ("meshwright serve runs/quickstart --name my-model",),
        "docs/how-to/deploy.md": (
            "meshwright plan serve.yaml --out deployment.yaml --html plan.html",
            "meshwright bench-serve serve.yaml --plan deployment.yaml --model MODEL --out report.html",
            "mkdir -m 700 sockets",
            'curl http://127.0.0.1:9001/role -H "Authorization: Bearer $MESHWRIGHT_ADMIN_KEY" \\',
        ),
        "docs/how-to/preferences.md": ("meshwright serve order-scores &",),
        "docs/reference/serve.md": (
            "export MESHWRIGHT_API_KEY=$(openssl rand -hex 32)",
            "meshwright serve runs/quickstart",
            'curl --json \'{"prompt": "def read_lines(path):", "max_tokens": 64}\' http://127.0.0.1:8000/v1/completions',
            "meshwright serve MODEL --role prefill --transfer-address unix:sockets/prefill --port 8001",
            "meshwright route http://127.0.0.1:8001 http://127.0.0.1:8002 --port 8000",
        ),
    },
    "a folder of a released model": {
        "docs/how-to/hugging-face.md": (
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            "meshwright train run.yaml model.init=hf:gemma-3-4b-it",
        ),
    },
    "minutes; tests of these commands are shorter": {
        "docs/how-to/choose-a-plan.md": ("meshwright plan run.yaml --probe 3 --out plan.yaml",),
        "docs/how-to/diagnose.md": ("meshwright chaos run.yaml plan.shard=2 --scenario slow-rank --steps 40",),
        "docs/how-to/measure-a-machine.md": ("meshwright profile --from-run runs/quickstart --out here.json",),
        "docs/how-to/add-a-schedule.md": ("$ python -m pytest tests/schedules tests/simulator",),
    },
    "a scheduler; tests/hosts/test_schedulers_page.py runs them there": {
        "docs/how-to/schedulers.md": (
            "source /shared/venv/bin/activate",
            "sbatch --wait --time=00:10:00 first.sbatch",
            "export RAY_AUTH_MODE=token",
            "RAY_AUTH_MODE=token python first_ray.py",
            "export MESHWRIGHT_TOKEN=$(openssl rand -hex 32)",
        ),
    },
    "an environment of its own; tests/release and the workflows of the forge run it": {
        "README.md": ("$ make quickstart",),
        "docs/getting-started.md": ("$ make quickstart",),
    },
}
"""Blocks of commands that do not run, by what they need, page and first line."""
LANGUAGES = {"", "bash", "console", "diff", "python", "text", "yaml"}
TEXT_FILES, MAX_FILE_BYTES = 24, 32_000
"""Enough text for the vocabulary, and little to evaluate where one file is held out."""


@dataclass(frozen=True)
class Sandbox:
    """The environment of the commands, and the template of each page's folder."""

    environment: dict[str, str]
    template: Path

    def fill(self, folder: Path, page: str) -> Path:
        """Fills the folder of a page with text and a finished quick start, or with the source if the page changes it."""
        if any(block.option("file") for block in blocks(page)):
            for name in ("src", "tests"):
                shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            shutil.copyfile(ROOT / "pyproject.toml", folder / "pyproject.toml")
        else:
            shutil.copytree(self.template, folder, dirs_exist_ok=True)
            for name in ("benchmarks", "examples"):
                (folder / name).symlink_to(ROOT / name)
        return folder

    def run(self, command: list[str], folder: Path, location: str) -> str:
        own_source = {"PYTHONPATH": str(folder / "src")} if (folder / "src").is_dir() else {}
        environment = self.environment | own_source
        completed = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
        )
        assert completed.returncode == 0, (
            f"{location}: code {completed.returncode}\n{completed.stdout}\n{completed.stderr}"
        )
        return completed.stdout + completed.stderr


@pytest.fixture(scope="session")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Sandbox:
    """Text, a small corpus in place of the standard library's, and a finished quick start, prepared once."""
    base = tmp_path_factory.mktemp("docs")
    python, tools, template = shlex.quote(sys.executable), base / "bin", base / "template"
    for folder in (tools, template / "text"):
        folder.mkdir(parents=True)
    command = tools / "meshwright"
    command.write_text(
        f'#!/bin/sh\nname=$1; shift\ncase "$name" in quickstart|train|check) set -- "$@" {TINY};; esac\n'
        f'exec {python} -m meshwright "$name" "$@"\n'
    )
    command.chmod(0o755)
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-f]*.py"))
    for file in [file for file in modules if 4_000 < file.stat().st_size < MAX_FILE_BYTES][:TEXT_FILES]:
        shutil.copy(file, template / "text")
    path = os.pathsep.join((str(tools), str(Path(sys.executable).parent), os.environ["PATH"]))
    environment = {
        **os.environ,
        "PATH": path,
        "XDG_CACHE_HOME": str(base / "cache"),
        "OMP_NUM_THREADS": "1",
        "TERM": "dumb",
    }
    environment |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    prepared = Sandbox(environment, template)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", environment["XDG_CACHE_HOME"])
        corpus = str(stdlib_folder())
    prepare = ["data", "prepare", "text", "--tokenizer", f"train:{VOCABULARY}", "--held-out", "0.1", "--out", corpus]
    prepared.run(["meshwright", *prepare], template, "the small corpus")
    prepared.run(SHARED_COMMAND.split(), template, "the quick start")
    return prepared


def runnable(page: str) -> list[Block]:
    """Returns the blocks that a reader would run or apply, in the order of the page."""
    runnable_blocks = [b for b in blocks(page) if b.language in ("bash", "diff", "python") and "norun" not in b.options]
    return [block for block in runnable_blocks if block.text.strip() != SHARED_COMMAND]


QUICK_PAGES = {"README.md"}
"""Pages whose commands run in `make test`; `make test-all` runs those of all pages."""


def _slow_unless_quick(page: str) -> Any:
    return page if page in QUICK_PAGES else pytest.param(page, marks=pytest.mark.slow)


@pytest.mark.parametrize("page", [_slow_unless_quick(page) for page in PAGES if runnable(page)])
def test_the_commands_of_a_page_run(page: str, sandbox: Sandbox, tmp_path: Path) -> None:
    folder = sandbox.fill(tmp_path, page)
    for block in runnable(page):
        if file := block.option("file"):
            assert not (folder / file).exists(), f"{block.location}: {file} exists"
            (folder / file).write_text(block.text, encoding="utf-8")
        elif block.language == "diff":
            (folder / "change.diff").write_text(block.text, encoding="utf-8")
            sandbox.run(["git", "apply", "-C1", "change.diff"], folder, block.location)
        elif block.language == "python":
            sandbox.run([sys.executable, "-c", block.text], folder, block.location)
        else:
            sandbox.run(["bash", "-euo", "pipefail", "-c", block.text], folder, block.location)


def test_blocks_that_do_not_run_are_listed_and_parse() -> None:
    """Blocks `console` of generated pages are examples of a command's help: their options are checked, no more."""
    generated = {file for file, _ in GENERATED.values()}
    everything = [block for page in PAGES for block in blocks(page)]
    marked = [block for block in everything if "norun" in block.options]
    typed = [b for b in everything if b.language == "console" and "output" not in b.options and b.page not in generated]
    listed = {(page, line) for pages in NOT_RUN.values() for page, lines in pages.items() for line in lines}
    assert {(block.page, block.first_line) for block in (*marked, *typed)} == listed
    for block in marked:
        if block.language == "python":
            compile(block.text, block.location, "exec")
            continue
        completed = subprocess.run(["bash", "-n", "-c", block.text], capture_output=True, text=True, check=False)
        assert not completed.stderr, f"{block.location}: {completed.stderr}"


def test_no_command_hides_in_a_block_that_is_no_command() -> None:
    """A block without a language, `text` or `yaml` shows files and output; a line that a reader would type belongs into `bash`."""
    other = [block for page in PAGES for block in blocks(page) if block.language in ("", "text")]
    assert not [
        block.location for block in other if re.match(r"(\$ |meshwright [a-z]|pip install|python )", block.text)
    ]


def test_every_block_has_a_known_language() -> None:
    wrong = [block.location for page in PAGES for block in blocks(page) if block.language not in LANGUAGES]
    assert not wrong


@pytest.mark.parametrize("page", PAGES)
def test_links_and_pictures_exist(page: str) -> None:
    for link in links(page):
        path, _, anchor = link.partition("#")
        if "://" in path:
            continue
        target = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        assert target.exists(), f"{page}: {link}"
        if anchor:
            assert anchor in anchors(str(target.relative_to(ROOT))), f"{page}: {link}"


def commands(page: str) -> Iterator[tuple[str, list[str]]]:
    """Yields (location, words behind `meshwright`) of every command on a page or in an example, in blocks, comments and the text."""
    lines = [
        (block.location, block.text.replace("\\\n", " "))
        for block in blocks(page)
        if block.language in ("bash", "console")
    ]
    if page.endswith(".yaml"):
        lines = [(page, re.sub(r"^#", "", text_of(page), flags=re.MULTILINE))]
    for location, text in [*lines, *((page, code) for code in inline_code(page))]:
        for line in text.splitlines():
            if match := re.match(r"(?:\$ |srun |torchrun .*-m )?meshwright (.*)", line.strip()):
                yield location, shlex.split(match[1].replace("…", "..."), comments=True)


@pytest.fixture(scope="module")
def keys() -> set[str]:
    """The keys of a run file."""
    return {".".join(map(str, key)) for key in all_keys(RunSpec)}


@pytest.fixture(scope="module")
def root_command() -> Any:
    """The root command."""
    return typer.main.get_command(app_for(()))


EXAMPLES = sorted(str(file.relative_to(ROOT)) for file in (ROOT / "examples").glob("*.yaml"))


@pytest.mark.parametrize("page", [*PAGES, *EXAMPLES])
def test_commands_options_and_overrides_exist(page: str, keys: set[str], root_command: Any) -> None:
    for location, words in commands(page):
        command = root_command
        while words and words[0] in getattr(command, "commands", {}):
            command = command.commands[words.pop(0)]  # type: ignore[attr-defined]
        at_end = not words or (hasattr(command, "params") and not hasattr(command, "commands"))
        assert at_end or words[0].startswith("-"), f"{location}: meshwright has no command {words[0]}"
        options = {name for parameter in command.params for name in parameter.opts} | {"--help"}
        for before, word in zip(("", *words), words, strict=False):
            if word in ("||", "|", "&&", ">"):
                break
            if word.startswith("--"):
                assert word.partition("=")[0] in options, f"{location}: {command.name} has no option {word}"
            elif re.match(r"[a-z]+(\.[a-z_]+)?=", word) and "stepz" not in word:
                key = word.partition("=")[0]
                known = f"plan.{key}" if before == "--pin" else key
                assert known in keys, f"{location}: no key {word}"


def leaf_commands(command: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """(name, command) of every command that is no group."""
    for word, child in getattr(command, "commands", {}).items():
        yield from leaf_commands(child, f"{name} {word}".strip())
    if not hasattr(command, "commands"):
        yield name, command


def test_the_page_of_commands_names_every_command_and_option(root_command: Any) -> None:
    """The options of `serve` are the keys of its own page."""
    keys_of_serve = inline_code("docs/reference/serve.md")
    shown = [*inline_code("docs/reference/cli.md"), *keys_of_serve]
    shown += [f"--{key.replace('_', '-')}" for key in keys_of_serve]
    for name, command in leaf_commands(root_command):
        assert any(re.match(rf"(meshwright )?{name}\b", code) for code in shown), f"no command {name}"
        options = [option for parameter in command.params for option in parameter.opts if option.startswith("--")]
        missing = [option for option in options if not any(re.match(rf"{option}\b", code) for code in shown)]
        assert not missing, f"no {', '.join(missing)} of {name}"


@pytest.mark.parametrize("page", PAGES)
def test_keys_and_files_named_in_the_text_exist(page: str, keys: set[str]) -> None:
    sections = "|".join(key for key in keys if "." not in key)
    folders = (ROOT, ROOT / "src" / "meshwright", ROOT / "tests")
    new = {block.option("file") for block in blocks(page)}
    for code in inline_code(page):
        if match := re.match(rf"((?:{sections})\.[a-z_.]+)(?=[=: ]|$)", code):
            assert match[1] in keys or match[1].endswith((".yaml", ".json", ".jsonl")), f"{page}: no key {match[1]}"
        if re.fullmatch(r"[\w/.]+/[\w.]+\.(py|js|yaml|json|toml)", code) and code not in new:
            exists = any((folder / code).exists() for folder in folders)
            assert exists or code.startswith(("runs/", "base/")), f"{page}: no file {code}"


@pytest.mark.parametrize(
    "block", [b for page in PAGES for b in blocks(page) if b.language == "yaml"], ids=lambda b: b.location
)
def test_run_files_and_plans_on_the_pages_load(block: Block, tmp_path: Path) -> None:
    file = tmp_path / "page.yaml"
    file.write_text(block.text, encoding="utf-8")
    if re.search(r"^micro_batch:", block.text, re.MULTILINE):
        load_plan(file)
    elif re.search(r"^gpus_per_node:", block.text, re.MULTILINE):
        load_run(None, [f"cluster={file}", "train.global_batch=128"])
    elif re.search(r"^serve:", block.text, re.MULTILINE):
        (tmp_path / "requests.csv").write_text("arrival_seconds,input_tokens,output_tokens\n0,8,2\n")
        load_deployment_spec(file, [])
    else:
        load_run(file)


@pytest.mark.parametrize("name", GENERATED)
def test_a_generated_file_is_what_the_code_makes(name: str) -> None:
    file, text = GENERATED[name]
    assert text_of(file) == text(), f"`make reference` updates {file}"


def test_a_name_that_is_no_generated_file_is_refused() -> None:
    with pytest.raises(errors.BadInput, match=r"^nosuch: no generated page; expected run-file, serve, "):
        generate(["nosuch"])


def test_keys_of_sweeps_are_those_of_the_code() -> None:
    rows = {codes(row["key"])[0]: row["meaning"] for row in table("docs/how-to/compare-runs.md", "key")}
    assert list(rows.items()) == list(docs_of(SweepSpec).items())


def test_exit_codes_are_those_of_the_code() -> None:
    shown = {int(row["code"]) for row in table("docs/reference/exit-codes.md", "code")}
    assert shown == {value for name, value in vars(errors).items() if name.startswith("EXIT_")}


def test_exit_codes_of_schedulers_are_those_of_the_code() -> None:
    again, never, *_ = (row["exit code"] for row in table("docs/how-to/schedulers.md", "exit code"))
    assert tuple(map(int, again.split(", "))) == REQUEUE_CODES
    assert sorted(map(int, never.split(", "))) == sorted(STOP_CODES)


def test_phases_of_a_start_are_those_of_the_code() -> None:
    rows = {codes(row["phase"])[0]: row["what it is"] for row in table("docs/design/start-up.md", "phase")}
    assert list(rows.items()) == list(PHASES.items())


def test_presets_are_those_of_the_code() -> None:
    rows = {codes(row["preset"])[0]: row for row in table("docs/reference/run-file.md", "preset")}
    assert set(rows) == set(MODEL_PRESETS)
    for name, row in rows.items():
        spec = from_plain(
            ModelSpec, {**MODEL_PRESETS[name], "vocab_size": MODEL_PRESETS[name]["vocab_size"] or VOCABULARY}
        )
        seq_len = run_preset(name)["train"]["seq_len"]
        flops = [f"{flops_per_token(spec, seq_len, causal=causal) / 1e9:,.4g}" for causal in (True, False)]
        assert row["parameters"] == f"{parameter_count(spec):,}", name
        assert [row["layers"], row["hidden"]] == [str(spec.layers), str(spec.hidden)], name
        assert [row["family"], row["train.seq_len"]] == [spec.family, str(seq_len)], name
        assert [row["GFLOP a token, causal"], row["full"]] == flops, name


def test_packages_and_layers_are_those_of_the_code() -> None:
    rows = {codes(row["package"])[0]: row for row in table("docs/design/architecture.md", "layer")}
    assert {name: int(row["layer"]) for name, row in rows.items()} == LAYERS
    for name, row in rows.items():
        exists = any((ROOT / "src" / "meshwright" / name).glob("*.py"))  # also in a copy that is no repository
        assert row["responsibility"].startswith("planned") != exists, (
            f"docs/design/architecture.md says of {name}: {row['responsibility']}"
        )
        assert ("*" in row["package"]) == (name in TORCH_FREE), name


def test_run_folder_and_metrics_are_those_of_the_page(sandbox: Sandbox) -> None:
    run = sandbox.template / "runs" / "quickstart"
    paths = {code.rstrip("/") for row in table("docs/reference/metrics.md", "path") for code in codes(row["path"])}
    existing = {path.name for path in run.iterdir() if not path.name.startswith(".")}
    assert existing <= paths
    assert paths - existing == {"traces", "timelines", "tensorboard", "incidents", "mirror.json", "coordinator"}
    shown = {code for row in table("docs/reference/metrics.md", "key") for code in codes(row["key"])}
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert set(steps[0]) - {"kind"} <= shown
    assert {*STEP_KEYS, *OPTIONAL_STEP_KEYS} <= shown


RESULT_PAGES = ("docs/results.md", "benchmarks/results/README.md")
"""The current results, and the index of all raw files."""


def test_every_kept_result_is_in_a_table() -> None:
    page = "".join(map(text_of, RESULT_PAGES))
    for file in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        result = json.loads(file.read_text())
        if result.get("benchmark") != "dense_8b":
            continue
        rates = [
            f"{result[side]['tokens_per_second_per_gpu']:,.0f}"
            for side in ("meshwright", "torchtitan")
            if side in result
        ]
        missing = [text for text in (file.name, *rates) if text not in page]
        assert not missing, (
            f"benchmarks/results/README.md: no row for {file.name} with {', '.join(rates)} tokens/s per GPU"
        )


def test_every_kept_table_is_on_a_page() -> None:
    page = "".join(map(text_of, RESULT_PAGES))
    for file in sorted((ROOT / "benchmarks" / "results").glob("*.jsonl")):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        sides = {(line["row"], line["side"]) for line in lines if line["kind"] == "run" and "error" not in line}
        rates = [f"{side_of(lines, row, side)['rate']:,.0f}" for row, side in sorted(sides)]
        missing = [text for text in (file.name, *rates) if text not in page]
        assert not missing, f"benchmarks/results/README.md: no {', '.join(missing)} of {file.name}"


def test_the_picture_of_the_readme_is_small() -> None:
    picture = ROOT / "docs" / "images" / "report.png"
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert picture.stat().st_size <= 300_000
