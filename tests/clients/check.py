"""A load generator and an evaluation against the server, unchanged: `make test-clients`.

    python -m tests.clients.check BIN      # BIN: the folder with `guidellm` and `lm_eval`

GuideLLM sends a fixed number of requests at some concurrency; none may fail. lm-eval runs a task of its own file through
`local-completions`; it must score all its documents.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.server.helpers import NAME, write_folder
from tests.server.test_process import served

REQUESTS, STREAMS, DOCUMENTS = 40, 8, 6
TASK = """\
task: arithmetic
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 8, temperature: 0}
metric_list: [{metric: exact_match}]
"""


def run_load(programs: Path, url: str, model: Path, out: Path) -> None:
    """A load run of GuideLLM; ends this process if a request failed."""
    result = out / "load.json"
    call(
        programs / "guidellm", "run", "--disable-console",
        "--backend", f"kind=openai_http,target={url},model={NAME},request_format=/v1/completions",
        "--profile", f"kind=concurrent,streams={STREAMS}",
        "--constraint", f"kind=max_requests,count={REQUESTS}",
        "--data", "kind=synthetic_text,prompt_tokens=20,output_tokens=12",
        "--tokenizer", f"kind=huggingface_auto,model={model}",
        "--output", f"kind=json,path={result}",
    )  # fmt: skip
    (benchmark,) = json.loads(result.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    if (totals["successful"], totals["errored"]) != (REQUESTS, 0):
        raise SystemExit(f"guidellm: expected {REQUESTS} successful requests, got {totals}")
    print(f"guidellm: {totals}")


def run_evaluation(programs: Path, url: str, model: Path, out: Path) -> None:
    """A task of lm-eval; ends this process if a document has no score."""
    documents = [{"question": f"{n} + 1 =", "answer": f" {n + 1}"} for n in range(DOCUMENTS)]
    data = out / "data.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in documents))
    (out / "arithmetic.yaml").write_text(TASK.replace("DATA", str(data)))
    arguments = (
        f"model={NAME},base_url={url}/v1/completions,tokenizer={model},tokenizer_backend=huggingface,max_length=192"
    )
    call(
        programs / "lm_eval", "--model", "local-completions", "--model_args", arguments,
        "--tasks", "arithmetic", "--include_path", out, "--output_path", out / "results", "--log_samples",
    )  # fmt: skip
    (result,) = (out / "results").rglob("results_*.json")
    scores = json.loads(result.read_text())
    metrics, samples = scores["results"]["arithmetic"], scores["n-samples"]["arithmetic"]
    if "exact_match,none" not in metrics or samples["effective"] != DOCUMENTS:
        raise SystemExit(f"lm-eval: expected {DOCUMENTS} scored documents, got {samples} with {metrics}")
    print(f"lm-eval: {metrics}")


def call(*command: object) -> None:
    """Run a program without access to the hub; its output is shown if it fails."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    result = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(f"{command[0]}: code {result.returncode}\n{result.stdout[-4000:]}\n{result.stderr[-4000:]}")


def main() -> None:
    """Serve a tiny model and run both programs."""
    programs = Path(sys.argv[1]).absolute()
    with tempfile.TemporaryDirectory() as folder:
        model = write_folder(Path(folder) / NAME)
        with served(model) as (_, url):
            for run in (run_load, run_evaluation):
                out = Path(folder) / run.__name__
                out.mkdir()
                run(programs, url, model, out)


if __name__ == "__main__":
    main()
