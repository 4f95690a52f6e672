"""The same model trained on text that `data prepare` has prepared, and on the same text streamed from an S3 server.

    python benchmarks/stream_training.py --out stream-training.jsonl --steps 34 --skip 10 model=llama3-1b train.global_batch=4 …

Sides: `prepared`; `cold`, the first run that streams; `cached`, another one with its cache. With --passes 2 the sides run once more, with
a fresh cache for `cold` and `prepared` last. The server is that of the tests (`make test-storage` installs it), on this host. Arguments
with `=` are keys of the run. A line of JSON for each run, then one that compares the medians of tokens per second, and the whole time of
the counted steps, in which waits for data count too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sides import MESHWRIGHT, run_ours
from text_bucket import TOKENIZER, URL, bucket, python_texts

SIDES = ("prepared", "cold", "cached")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("keys", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--steps", type=int, default=34)
    parser.add_argument("--skip", type=int, default=10)
    parser.add_argument("--passes", type=int, default=1)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--delay", type=float, default=0.03)
    parser.add_argument("--faulty", type=float, default=0.01)
    parser.add_argument("--limit", type=float, default=170, help="seconds of a run")
    parser.add_argument("--out", type=Path, default=Path("build/stream-training.jsonl"))
    options = parser.parse_intermixed_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with bucket(folder, options.megabytes, delay=options.delay, faulty=options.faulty):
            prepare(folder, options.megabytes)
            figures = defaultdict[str, list[dict[str, Any]]](list)
            for number, side in runs(options.passes):
                line = {"side": side, **run(folder, number, side, options)}
                figures[side].append(line)
                write(options.out, line)
        write(options.out, compared(figures))


def runs(passes: int) -> Iterator[tuple[int, str]]:
    """The number of the pass, and the side, of each run."""
    for number in range(passes):
        yield from ((number, side) for side in (SIDES if number % 2 == 0 else (*SIDES[1:], SIDES[0])))


def prepare(folder: Path, megabytes: int) -> None:
    """Prepare the texts of the bucket as `folder`/prepared."""
    texts = folder / "texts.jsonl"
    with texts.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in python_texts(megabytes))
    command = [*MESHWRIGHT, "data", "prepare", str(texts), "--tokenizer", str(folder / TOKENIZER)]
    subprocess.run([*command, "--out", str(folder / "prepared")], check=True, stdout=subprocess.DEVNULL)
    texts.unlink()


def run(folder: Path, number: int, side: str, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of a run."""
    mix = f"{{web: {{files: '{URL}'}}}}"
    if side == "prepared":
        mix = str(folder / "prepared")
    name = f"{side}-{number}"
    keys = [
        f"name={name}",
        *(f"data.mix={mix}", f"data.tokenizer={folder / TOKENIZER}", f"data.cache={folder / f'cache-{number}'}"),
        *(f"train.steps={options.steps}", "checkpoint.every=0", "checkpoint.at_end=false", *options.keys),
    ]
    log = options.out.with_suffix(f".{name}.log")
    result = run_ours([*MESHWRIGHT, "train"], keys, name, folder / "runs", log, dict(os.environ), options.limit)
    if result.code:
        sys.exit(f"{side}: ended with code {result.code}; {log} has its output")
    counted = result.records[options.skip :]
    seconds = [record["step_seconds"] for record in counted]
    return {
        "keys": options.keys,
        "tokens_per_second_per_gpu": round(statistics.median(each["tokens_per_second_per_gpu"] for each in counted), 1),
        "counted_steps": len(counted),
        "counted_seconds": round(sum(seconds), 4),
        "longest_step_seconds": round(max(seconds), 4),
        "data_wait_share": round(sum(record["data_wait_seconds"] for record in counted) / sum(seconds), 5),
        "first_wait_seconds": round(result.records[0]["data_wait_seconds"], 2),
        "loss_last": result.records[-1]["loss"],
    }


def compared(figures: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Each streamed side over the prepared one: by the median step, and by the time of all counted steps."""

    def mean(side: str, key: str) -> float:
        return statistics.mean(line[key] for line in figures[side])

    return {
        "compared": {
            side: {
                "by_median": round(
                    mean(side, "tokens_per_second_per_gpu") / mean("prepared", "tokens_per_second_per_gpu"), 4
                ),
                "by_all": round(mean("prepared", "counted_seconds") / mean(side, "counted_seconds"), 4),
            }
            for side in SIDES[1:]
        }
    }


def write(path: Path, line: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
