"""HTTP of two commits, run in turn on one machine: host time of each token, and throughput over HTTP beside the engine in process.

    python benchmarks/serve_http_compare.py --base main             # main against the working tree
    python benchmarks/serve_http_compare.py --base v1 --new HEAD    # two commits
    python benchmarks/serve_http_compare.py --base main --tiny      # seconds, to try the script

Each commit is checked out into a folder of its own, and runs its own `benchmarks/serve_http.py`, first completions and then chats; base and
new take turns. Prints a JSON line for each run, and last one with medians and the ratios new / base. `--overhead MODEL` also runs the new
commit's `benchmarks/serve_overhead.py` with that model: `throughput_ratio` is tokens per second over HTTP divided by those in process,
which means something where the engine computes on a GPU or has cores of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


@contextmanager
def source_tree(commit: str | None, folder: Path) -> Iterator[Path]:
    """The folder of a commit's files; the working tree itself without a commit."""
    if commit is None:
        yield ROOT
        return
    subprocess.run(["git", "worktree", "add", "--quiet", "--detach", folder, commit], cwd=ROOT, check=True)
    try:
        yield folder
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", folder], cwd=ROOT, check=True)


def run_script(tree: Path, name: str, options: Sequence[str]) -> dict[str, Any]:
    """The last line of JSON that a benchmark of a tree prints, run with the tree's own package."""
    environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
    where = "import meshwright, sys; sys.stdout.write(meshwright.__file__)"
    found = subprocess.run([sys.executable, "-c", where], env=environment, cwd=tree, stdout=subprocess.PIPE, check=True)
    if tree / "src" not in Path(os.fsdecode(found.stdout)).resolve().parents:
        raise SystemExit(f"{tree}: Python imports {os.fsdecode(found.stdout)} instead of this tree's package")
    command = [sys.executable, str(tree / "benchmarks" / name), *options]
    result = subprocess.run(command, env=environment, cwd=tree, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(result.stdout.splitlines()[-1])


def compare(base: Path, new: Path, runs: int, options: Sequence[str]) -> dict[str, Any]:
    """Medians of both trees, whose runs take turns, and their ratios."""
    figures: dict[str, list[dict[str, Any]]] = {"base": [], "new": []}
    run_script(base, "serve_http.py", [*options, "--tiny"])  # the first process finds nothing in the file cache
    for run in range(runs):
        sides = (("base", base), ("new", new))
        for side, tree in sides if run % 2 == 0 else sides[::-1]:
            figures[side].append(run_script(tree, "serve_http.py", options))
            print(json.dumps({"side": side, **figures[side][-1]}), flush=True)
    names = ("microseconds_per_token", "tokens_per_second")
    medians = {
        side: {name: statistics.median(run[name] for run in found) for name in names} for side, found in figures.items()
    }
    ratios = {f"{name}_ratio": round(medians["new"][name] / medians["base"][name], 4) for name in names}
    return {**medians, **ratios}


def overhead(tree: Path, model: str, runs: int) -> dict[str, Any]:
    """Median ratio of throughput over HTTP to throughput in process."""
    options = ["--tiny"] if model == "tiny" else ["--model", model]
    found = [run_script(tree, "serve_overhead.py", options)["throughput_ratio"] for _ in range(runs)]
    return {
        "model": model,
        "throughput_ratio": round(statistics.median(found), 4),
        "runs": [round(ratio, 4) for ratio in found],
    }


def main() -> None:
    """Parse the arguments and print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--base", required=True, metavar="COMMIT", help="the commit to compare with")
    parser.add_argument("--new", metavar="COMMIT", help="the commit to measure; the working tree if it is left out")
    parser.add_argument("--runs", type=int, default=7, help="runs of each side")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200, help="tokens of each stream")
    parser.add_argument("--steps-per-second", type=float, default=100.0, help="steps of the engine at most")
    parser.add_argument(
        "--overhead", metavar="MODEL", help='also run serve_overhead.py with this model, a preset or "tiny"'
    )
    parser.add_argument("--overhead-runs", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="32 streams of 40 tokens, two runs")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    given = [
        f"--{name}={getattr(options, name.replace('-', '_'))}" for name in ("streams", "tokens", "steps-per-second")
    ]
    if options.tiny:
        options.runs, given = 2, ["--tiny"]
    result: dict[str, Any] = {
        "base_commit": options.base,
        "new_commit": options.new or "working tree",
        "runs": options.runs,
    }
    with (
        tempfile.TemporaryDirectory() as folder,
        source_tree(options.base, Path(folder).resolve() / "base") as base,
        source_tree(options.new, Path(folder).resolve() / "new") as new,
    ):
        for kind, words in (("completions", []), ("chats", ["--chat"])):
            result[kind] = compare(base, new, options.runs, [*given, *words])
        if options.overhead:
            result["overhead"] = overhead(new, options.overhead, options.overhead_runs)
    text = json.dumps(result)
    print(text)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
