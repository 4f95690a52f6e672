"""Time and memory of `data prepare` on generated text: MB per second of processor time, and the peak memory of all its processes together.

    python benchmarks/prepare.py --tokenizer DIR --files '/usr/share/doc/**/*.txt' [--megabytes 200 1000] [--cores 2]

Documents of some 3 kB are drawn from the lines of the files, with one in fifty words replaced by a random one, so that the encoder
meets new words throughout. A share `--repeated` of them (0) is an earlier document of its file with up to 5% of its words changed. The
text is written once into --folder. Other options, such as `--deduplicate near`, go to `data prepare`, which has the first `--cores` cores
of the host (all). With a PYTHONPATH another version is measured. Prints one JSON object per size. The peak is a sum of resident sizes, in
which memory that processes share counts once for each process.
"""

from __future__ import annotations

import argparse
import glob
import json
import multiprocessing
import os
import random
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

DOCUMENT_CHARACTERS = 3000
NEW_WORDS = 0.02
FILE_BYTES = 200_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--files", nargs="+", required=True, help="patterns of text files")
    parser.add_argument("--megabytes", type=int, nargs="+", default=[200])
    parser.add_argument("--repeated", type=float, default=0.0)
    parser.add_argument("--cores", type=int)
    parser.add_argument("--folder", type=Path, default=Path("build/prepare"))
    options, given = parser.parse_known_args()
    for megabytes in options.megabytes:
        name = f"{megabytes}-{options.repeated:g}"
        texts = options.folder / name
        if not texts.exists():
            write_texts(texts, sentences(options.files), megabytes, options.repeated)
        out = options.folder / f"{name}-out"
        shutil.rmtree(out, ignore_errors=True)
        command = [str(texts), "--tokenizer", str(options.tokenizer), "--out", str(out), "--json", *given]
        figures = prepared(command, options.cores)
        size = sum(file.stat().st_size for file in texts.iterdir())
        rate = {"MB": size / 1e6, "MB_per_cpu_second": round(size / 1e6 / figures["cpu_seconds"], 1)}
        print(json.dumps({"tokenizer": str(options.tokenizer), "options": given, **rate, **figures}), flush=True)
        shutil.rmtree(out)


def sentences(patterns: Sequence[str]) -> list[str]:
    """The lines of the files that have some words."""
    found = []
    for name in sorted(name for pattern in patterns for name in glob.glob(pattern, recursive=True)):
        try:
            found += [line for line in Path(name).read_text(encoding="utf-8").splitlines() if len(line) > 30]
        except (OSError, UnicodeDecodeError):
            continue
    return found


def write_texts(folder: Path, lines: Sequence[str], megabytes: int, repeated: float) -> None:
    """Files of JSON lines with so many megabytes together, each written by a process of its own."""
    folder.mkdir(parents=True)
    starts = range(0, megabytes * 1_000_000, FILE_BYTES)
    sizes = [min(FILE_BYTES, starts.stop - start) for start in starts]
    with multiprocessing.Pool(initializer=_begin, initargs=(lines,)) as pool:
        pool.starmap(partial(write_file, folder, repeated), enumerate(sizes), chunksize=1)


LINES: list[str] = []
"""What a process of the pool draws from."""


def _begin(lines: Sequence[str]) -> None:
    LINES[:] = lines


def write_file(folder: Path, repeated: float, number: int, least: int) -> None:
    """A file with at least so many characters."""
    draw, earlier, size, written = random.Random(number), list[str](), 0, 0
    with (folder / f"{number:03d}.jsonl").open("w", encoding="utf-8") as file:
        while size < least:
            record = {"id": f"{number}-{written}", "text": document(draw, LINES, earlier, repeated)}
            size += file.write(json.dumps(record, ensure_ascii=False) + "\n")
            written += 1


def document(draw: random.Random, lines: Sequence[str], earlier: list[str], repeated: float) -> str:
    """A new document, or one like an earlier one."""
    if earlier and draw.random() < repeated:
        words = draw.choice(earlier).split(" ")
        for _ in range(draw.randrange(len(words) // 20 + 1)):
            words[draw.randrange(len(words))] = new_word(draw)
        return " ".join(words)
    chosen, size = [], 0
    while size < DOCUMENT_CHARACTERS:
        start = draw.randrange(len(lines))
        chosen += lines[start : start + 4]
        size += sum(map(len, lines[start : start + 4]))
    words = "\n".join(chosen).split(" ")
    for _ in range(int(len(words) * NEW_WORDS)):
        words[draw.randrange(len(words))] = new_word(draw)
    text = " ".join(words)
    if repeated and len(earlier) < 10_000:
        earlier.append(text)
    return text


def new_word(draw: random.Random) -> str:
    return "".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randrange(3, 10)))


def prepared(arguments: Sequence[str], cores: int | None) -> dict[str, float]:
    """Run the command on so many cores; its processor time and wall time, and the peak memory of all its processes together, in MiB."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start, peak = time.perf_counter(), 0
    bound = [] if cores is None else ["taskset", "--cpu-list", f"0-{cores - 1}"]
    command = [*bound, sys.executable, "-m", "meshwright", "data", "prepare", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        peak = max(peak, sum(resident(number) for number in [process.pid, *children(process.pid)]))
        time.sleep(0.1)
    if process.returncode:
        sys.exit(f"data prepare ended with code {process.returncode}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    wall = time.perf_counter() - start
    return {"cpu_seconds": round(seconds, 1), "wall_seconds": round(wall, 1), "peak_MiB": peak >> 20}


def children(process: int) -> list[int]:
    """The processes that a process has started."""
    try:
        return [int(number) for number in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except OSError:
        return []


def resident(process: int) -> int:
    """Bytes of memory of a process."""
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


if __name__ == "__main__":
    main()
