"""Programs and libraries of clients against the server, unchanged: `make test-clients`.

    python -m tests.clients.check BIN      # BIN: the folder with `python`, `guidellm` and `lm_eval`

GuideLLM sends a fixed number of requests at some concurrency; none may fail. lm-eval runs ten tasks, and its scores are those of
transformers. openai, LangChain, LlamaIndex, litellm, instructor and anthropic hold chats with chat templates in the
forms of Qwen3, Llama 3 and Mistral: calls of tools come from an engine that says what is written in a script, all else from a tiny model.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from tests.clients import evaluation
from tests.models.tiny import LLAMA
from tests.server.chat_templates import SPECIAL_TOKENS, TEMPLATES
from tests.server.helpers import NAME, running_server, write_folder
from tests.server.scripted_engine import scripted_server
from tests.server.test_process import served

LIBRARIES = ("openai", "langchain", "litellm", "instructor", "anthropic", "llamaindex")
APART = ("llamaindex",)
"""Libraries in an environment of their own, in a folder of their name beside `BIN`: they need an older client of OpenAI."""
CONTEXT = 3072
"""The tools of a chat are long in a tokenizer of bytes."""
REQUESTS, STREAMS = 40, 8


def run_load(programs: Path, url: str, model: Path, out: Path) -> None:
    """A load run of GuideLLM; ends this process if a request failed."""
    result = out / "load.json"
    call(
        programs / "guidellm",
        "run",
        "--disable-console",
        "--backend",
        f"kind=openai_http,target={url},model={NAME},request_format=/v1/completions",
        "--profile",
        f"kind=concurrent,streams={STREAMS}",
        "--constraint",
        f"kind=max_requests,count={REQUESTS}",
        "--data",
        "kind=synthetic_text,prompt_tokens=20,output_tokens=12",
        "--tokenizer",
        f"kind=huggingface_auto,model={model}",
        "--output",
        f"kind=json,path={result}",
    )
    (benchmark,) = json.loads(result.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    if (totals["successful"], totals["errored"]) != (REQUESTS, 0):
        raise SystemExit(f"guidellm: expected {REQUESTS} successful requests, got {totals}")
    print(f"guidellm: {totals}")


def run_evaluation(programs: Path, url: str, model: Path, out: Path) -> None:
    """Ten tasks of lm-eval, with its own tokenizer and with the server's; ends this process if a score is missing or wrong."""
    where = "import lm_eval.tasks as tasks; print(tasks.__path__[0])"
    names = evaluation.write_tasks(out, Path(call(programs / "python", "-c", where).splitlines()[-1]))
    for tokenizer in ("huggingface", "remote"):
        results = out / tokenizer
        call(
            programs / "lm_eval",
            "--model",
            "local-completions",
            "--model_args",
            evaluation.arguments(url, model, tokenizer),
            "--batch_size",
            "3",
            "--tasks",
            ",".join(names),
            "--include_path",
            out,
            "--output_path",
            results,
            "--log_samples",
        )
        evaluation.check_results(results, names)
        print(f"lm-eval, {len(names)} tasks, tokenizer {tokenizer}: {evaluation.compare(results, model)}")


def run_libraries(programs: Path, folder: Path) -> list[str]:
    """The checks of the libraries that failed, one line each; prints a line for each library and template."""
    failed: list[str] = []
    with ExitStack() as stack:
        urls = {}
        for form in TEMPLATES:
            homes = [folder / f"{form}-{kind}" for kind in ("scripted", "real")]
            homes[0].mkdir()
            real = stack.enter_context(
                running_server(model_of(homes[1], form), context=CONTEXT, cache_blocks=8 * CONTEXT // 4)
            )
            urls[form] = {"scripted": stack.enter_context(scripted_server(homes[0], form)), "real": real.url}
        for library in LIBRARIES:
            script = Path(__file__).with_name(f"{library}_client.py")
            environment = programs.parent / library / "bin" if library in APART else programs
            for line in call(environment / "python", script, json.dumps(urls)).splitlines():
                found = json.loads(line)
                name, count = f"{library} with the template of {found['form']}", found["checks"]
                print(f"{name}: {count - len(found['failed'])} of {count} checks passed")
                failed += [f"{name}: {check}: {error}" for check, error in found["failed"].items()]
    return failed


def model_of(folder: Path, form: str) -> Path:
    """The folder of a tiny model with a chat template of this form."""
    write_folder(folder, replace(LLAMA, max_seq_len=CONTEXT))
    config = folder / "tokenizer_config.json"
    values = {**json.loads(config.read_text()), "chat_template": TEMPLATES[form]}
    config.write_text(json.dumps({**SPECIAL_TOKENS[form], **values}))
    return folder


def call(*command: object) -> str:
    """Output of a program without access to the hub; all of it is shown if it fails."""
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LANGSMITH_TRACING": "false",
    }
    result = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(f"{command[0]}: code {result.returncode}\n{result.stdout[-4000:]}\n{result.stderr[-4000:]}")
    return result.stdout


def main() -> None:
    """Serve tiny models and run all clients."""
    programs = Path(sys.argv[1]).absolute()
    with tempfile.TemporaryDirectory() as folder:
        failed = run_libraries(programs, Path(folder))
        model = write_folder(Path(folder) / NAME)
        with served(model, "--context", str(evaluation.CONTEXT)) as (_, url):
            for run in (run_load, run_evaluation):
                out = Path(folder) / run.__name__
                out.mkdir()
                run(programs, url, model, out)
    if failed:
        raise SystemExit("\n".join(failed))


if __name__ == "__main__":
    main()
