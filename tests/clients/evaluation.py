"""Ten tasks of lm-eval through `local-completions`, with its own prompts and metrics, on a few documents made up here.

Each log-likelihood that lm-eval got from the server is compared with transformers in fp32, and so is whether each token is the likeliest.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.server.helpers import NAME

CONTEXT = 384
ROOM = CONTEXT - 1
"""Tokens of a text at most: lm-eval leaves room for a new one."""
MOST_DIFFERENCE = 1e-3
"""Nats per token."""
DOCUMENTS = 6
TASK = """\
include: {folder}/{file}
task: local_{name}
dataset_path: json
dataset_name: null
dataset_kwargs: {{data_files: {{train: {data}, validation: {data}, test: {data}}}}}
"""
GENERATION = "generation_kwargs: {until: ['\\n'], max_gen_toks: 8, temperature: 0}\n"


def _choices(texts: Sequence[str]) -> dict[str, Sequence[str]]:
    return {"text": texts, "label": [chr(ord("A") + index) for index in range(len(texts))]}


def _documents(number: int) -> dict[str, dict[str, Any]]:
    """A document of each task, by the name of lm-eval's file."""
    thing = ("river", "lamp", "stone", "garden")[number % 4]
    answer = "AB"[number % 2]
    question = {"question": f"What is a {thing}", "answer": f"It is {number}. #### {number + 1}"}
    return {
        "hellaswag/hellaswag.yaml": {
            "activity_label": f"Looking at a {thing}",
            "ctx_a": f"A man looks at the {thing}.",
            "ctx_b": "he",
            "endings": ["walks on.", f"[title] paints the {thing} in é.", "sings", "sleeps there for a long time."],
            "label": str(number % 4),
        },
        "piqa/piqa.yaml": {"goal": f"Clean a {thing}", "sol1": "use water", "sol2": f"use the {thing}", "label": number % 2},
        "arc/arc_easy.yaml": {**question, "choices": _choices(["wet", f"a {thing}"]), "answerKey": answer},
        "winogrande/default.yaml": {
            "sentence": f"The cat saw the {thing}, and _ was small.",
            "option1": "the cat",
            "option2": f"the {thing}",
            "answer": str(1 + number % 2),
        },
        "lambada/lambada_openai.yaml": {"text": f"He went to the {thing} and came back from the {thing}"},
        "wikitext/wikitext.yaml": {"page": f" = {thing} = \n A {thing} is an old word . " * (2 + 12 * number)},
        "sciq/sciq.yaml": {
            **question,
            "support": f"There is a {thing}.",
            **{f"distractor{index}": f"{thing} {index}" for index in (1, 2, 3)},
            "correct_answer": thing,
        },
        "openbookqa/openbookqa.yaml": {
            "question_stem": f"A {thing} can",
            "choices": _choices(["run", "fall"]),
            "answerKey": answer,
        },
        "gsm8k/gsm8k.yaml": question,
        "triviaqa/default.yaml": {"question": f"Who made the {thing}", "answer": {"aliases": [thing, "nobody"]}},
    }  # fmt: skip


def write_tasks(out: Path, tasks: Path) -> list[str]:
    """Files of tasks that take lm-eval's own ones, in its folder `tasks`, with documents from here; returns the names."""
    names = []
    for file in _documents(0):
        name = file.partition("/")[0]
        data = out / f"{name}.jsonl"
        data.write_text("".join(json.dumps(_documents(number)[file]) + "\n" for number in range(DOCUMENTS)))
        text = TASK.format(folder=tasks, file=file, name=name, data=data)
        (out / f"local_{name}.yaml").write_text(text + (GENERATION if name in ("gsm8k", "triviaqa") else ""))
        names.append(f"local_{name}")
    return names


class Scored(NamedTuple):
    """A text that lm-eval had scored."""

    task: str
    context: str
    continuation: str
    loglikelihood: float
    greedy: bool | None
    """None where lm-eval does not say."""


def scored_texts(results: Path) -> Iterator[Scored]:
    """The texts of all samples in a folder of results."""
    for file in results.rglob("samples_*.jsonl"):
        for sample in map(json.loads, file.read_text().splitlines()):
            for arguments, (answer,) in zip(sample["arguments"].values(), sample["resps"], strict=True):
                task = file.name
                if isinstance(answer, list):
                    yield Scored(task, arguments["arg_0"], arguments["arg_1"], float(answer[0]), answer[1] == "True")
                elif "arg_1" not in arguments:
                    yield Scored(task, "", arguments["arg_0"], float(answer), None)


class Oracle:
    """Log-likelihoods by transformers, in fp32 on one text at a time."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        loader: Any = AutoModelForCausalLM
        self._model, self._tokenizer = (
            loader.from_pretrained(folder).float().eval(),
            AutoTokenizer.from_pretrained(folder),
        )
        self._begin = self._tokenizer.eos_token_id

    def score(self, context: str, continuation: str) -> tuple[float, bool, int]:
        """Log-likelihood, whether each token is the likeliest, and the number of tokens.

        A whole text without a context is cut into windows, as lm-eval does.
        """
        ids = self._tokenizer(context + continuation)["input_ids"]
        count = len(ids) - len(self._tokenizer(context)["input_ids"])
        if context:
            return (*self._window(ids[-ROOM:], count), count)
        most = ROOM - 1
        total, end = self._window([self._begin, *ids[:most]], min(most, count))[0], most
        while end < count:
            new = min(most, count - end)
            end += new
            total += self._window(ids[end - ROOM : end], new)[0]
        return total, False, count

    def _window(self, ids: Sequence[int], count: int) -> tuple[float, bool]:
        import torch

        with torch.no_grad():
            rows = self._model(torch.tensor([ids])).logits[0, -count - 1 : -1].log_softmax(-1)
        wanted = torch.tensor(ids[-count:])
        return float(rows.gather(1, wanted[:, None]).double().sum()), bool((rows.argmax(-1) == wanted).all())


def compare(results: Path, model: Path) -> str:
    """Compare all scores with the oracle; returns a sentence about them. Ends this process if one differs."""
    oracle, texts, worst = Oracle(model), 0, 0.0
    for scored in scored_texts(results):
        expected, greedy, count = oracle.score(scored.context, scored.continuation)
        difference = abs(scored.loglikelihood - expected) / max(count, 1)
        if not difference < MOST_DIFFERENCE or scored.greedy not in (None, greedy):
            raise SystemExit(f"lm-eval: transformers says {expected}, likeliest {greedy}; got {scored}")
        worst, texts = max(worst, difference), texts + 1
    return f"{texts} log-likelihoods differ from transformers by {worst:.1e} nats per token at most"


def check_results(results: Path, names: Sequence[str]) -> Mapping[str, Any]:
    """The metrics of each task. Ends this process if a task has none, or scored fewer documents."""
    (file,) = results.rglob("results_*.json")
    found = json.loads(file.read_text())
    for name in names:
        metrics = {key: value for key, value in found["results"][name].items() if isinstance(value, float)}
        if (
            found["n-samples"][name]["effective"] != DOCUMENTS
            or not metrics
            or not all(map(math.isfinite, metrics.values()))
        ):
            raise SystemExit(
                f"lm-eval: {name}: expected {DOCUMENTS} scored documents, got {found['n-samples'][name]}, {metrics}"
            )
    return found["results"]


def arguments(url: str, model: Path, tokenizer: str) -> str:
    """`--model_args` of lm-eval, with the tokens of its own tokenizer or of the server's (`remote`)."""
    own = f"tokenizer={model}," if tokenizer == "huggingface" else ""
    return (
        f"model={NAME},base_url={url}/v1/completions,{own}tokenizer_backend={tokenizer},max_length={CONTEXT},"
        "num_concurrent=4"
    )
