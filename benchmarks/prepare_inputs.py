"""Seconds of `prepare` for many small files, one large file of records and one of chats, of this tree and of another one.

    git worktree add /tmp/before COMMIT
    python benchmarks/prepare_inputs.py --before /tmp/before/src --out build/prepare-inputs.json

Both trees prepare the same generated files in turn, each in a process of its own with one encoding thread. The tokenizer
is a table of words, so that reading counts. `ratio` compares medians; other processes of the host disturb the processor's
seconds less than wall time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers

SOURCE = Path(__file__).parents[1] / "src"
WORDS = [f"{first}{second}" for first in "bcdfghjklm" for second in ("ade", "ile", "one", "ust", "yre")]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
PREPARE = """
import json, resource, sys, time
from pathlib import Path
from meshwright.data.prepare import prepare
from meshwright.data.request import ChatRequest
source, tokenizer, out, kind = sys.argv[1:]
chat = ChatRequest() if kind == "chats" else None
def cpu():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
wall, processor = time.perf_counter(), cpu()
documents = prepare([source], tokenizer, Path(out), workers=1, chat=chat).manifests["train"].documents
print(json.dumps({"wall": time.perf_counter() - wall, "processor": cpu() - processor, "documents": documents}))
"""


def texts(seed: int, characters: int) -> Iterator[str]:
    """Endless texts of about so many characters."""
    generator = random.Random(seed)
    while True:
        count = max(1, int(generator.expovariate(1) * characters / 5))
        yield " ".join(generator.choices(WORDS, k=count)) + ".\n"


def write_small_files(folder: Path, count: int) -> None:
    made = texts(0, 600)
    for number in range(count):
        file = folder / f"{number // 1000:03d}" / f"{number:06d}.txt"
        file.parent.mkdir(exist_ok=True, parents=True)
        file.write_text(next(made))


def write_records(folder: Path, size: int) -> None:
    folder.mkdir(parents=True)
    made = texts(1, 2000)
    with (folder / "records.jsonl").open("w") as file:
        while file.tell() < size:
            file.writelines(json.dumps({"text": next(made), "source": "made"}) + "\n" for _ in range(1000))


def write_chats(folder: Path, size: int) -> None:
    """Chats of one to four turns."""
    folder.mkdir(parents=True)
    made, generator, roles = texts(2, 400), random.Random(3), ("user", "assistant")
    with (folder / "chats.jsonl").open("w") as file:
        while file.tell() < size:
            turns = [{"role": role, "content": next(made)} for _ in range(generator.randint(1, 4)) for role in roles]
            file.write(json.dumps({"messages": turns}) + "\n")


def write_tokenizer(file: Path) -> None:
    tokenizer: Any = Tokenizer(
        models.WordLevel({"<|endoftext|>": 0, "?": 1} | {w: i for i, w in enumerate(WORDS, 2)}, "?")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(file))
    file.with_name("chat_template.jinja").write_text(TEMPLATE)


def measure(source: Path, inputs: Path, tokenizer: Path) -> dict[str, float]:
    """One preparation by the code in `source`."""
    with tempfile.TemporaryDirectory(dir=tokenizer.parent) as folder:
        command = [sys.executable, "-c", PREPARE, str(inputs), str(tokenizer), f"{folder}/out", inputs.name]
        environment = {**os.environ, "PYTHONPATH": str(source)}
        answer = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return json.loads(answer.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="the other tree's src")
    parser.add_argument("--files", type=int, default=50_000)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results: dict[str, Any] = {"files": options.files, "megabytes": options.megabytes, "repeats": options.repeats}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_tokenizer(root / "tokenizer.json")
        write_small_files(root / "small", options.files)
        write_records(root / "large", options.megabytes * 10**6)
        write_chats(root / "chats", options.megabytes * 10**5)
        for name in ("small", "large", "chats"):
            measured: dict[str, list[dict[str, float]]] = {"before": [], "now": []}
            for repeat in range(options.repeats):
                sides = [("before", options.before), ("now", SOURCE)]
                for side, source in sides if repeat % 2 == 0 else reversed(sides):
                    measured[side].append(measure(source, root / name, root / "tokenizer.json"))
            medians = {
                side: {key: statistics.median(run[key] for run in runs) for key in ("wall", "processor")}
                for side, runs in measured.items()
            }
            ratios = {key: medians["now"][key] / medians["before"][key] for key in ("wall", "processor")}
            results[name] = {"medians": medians, "ratio": ratios, "runs": measured}
    text = json.dumps(results)
    if options.out is not None:
        options.out.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
