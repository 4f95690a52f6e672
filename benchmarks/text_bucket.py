"""A bucket of the tests' S3 server with parquet files of text, behind a proxy that answers late and at times wrongly.

The server (`make test-storage` installs it) is a process of its own. The text is that of the Python files of this environment.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FILES, GROUP_BYTES = 8, 256 << 10
URL = "s3://runs/web/*.parquet"
TOKENIZER, VOCABULARY = "tokenizer.json", 4096
KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}


@contextmanager
def bucket(folder: Path, megabytes: int, *, delay: float = 0.0, faulty: float = 0.0) -> Iterator[dict[str, Any]]:
    """A bucket with so much text as `URL`, with its credentials in the environment, and a tokenizer of the text in `folder`.

    Each request is answered after `delay` seconds, and a share `faulty` of the reads wrongly. The dict that is yielded gets the counts of
    requests and faults at the end of the block.
    """
    options = ["--megabytes", str(megabytes), "--delay", str(delay), "--faulty", str(faulty)]
    command = [sys.executable, "-m", "benchmarks.text_bucket", str(folder.absolute()), *options]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert server.stdout is not None and server.stdin is not None
    counts: dict[str, Any] = {}
    try:
        os.environ |= KEYS | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{int(server.stdout.readline())}"}
        yield counts
    finally:
        server.stdin.close()
        counts.update(json.loads(server.stdout.read() or "{}"))
        server.wait()


def python_texts(megabytes: int) -> list[str]:
    """The Python files of this environment that have 1 to 100 kB, up to so many MiB together."""
    found, size = [], 0
    for path in sorted(Path(sysconfig.get_path("purelib")).rglob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        if 1000 < len(text) < 100_000:
            found.append(text)
            size += len(text)
        if size > megabytes << 20:
            break
    return found


def main() -> None:
    """Fill a bucket and answer until standard input ends. Writes the port, and at the end the counts of requests and faults."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--megabytes", type=int, required=True)
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--faulty", type=float, default=0.0)
    options = parser.parse_args()
    from tests.checkpoint.s3 import Server
    from tests.data.streams.answers import KINDS, AnswerProxy

    from meshwright.data.tokenizer import train_tokenizer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server, texts = Server(), python_texts(options.megabytes)
    (options.folder / TOKENIZER).write_bytes(train_tokenizer(texts[:: len(texts) // 100], VOCABULARY))
    rows = max(len(texts) * GROUP_BYTES // sum(map(len, texts)), 1)
    for number in range(FILES):
        _put(server.port, options.folder / f"part-{number}.parquet", texts[number::FILES], rows)
    proxy = AnswerProxy(server.port)
    proxy.delay, proxy.faulty, proxy.kinds = options.delay, options.faulty, KINDS
    print(proxy.port, flush=True)
    sys.stdin.read()
    print(json.dumps({"requests": proxy.requests, "faults": proxy.faults}), flush=True)


def _put(port: int, file: Path, texts: list[str], rows: int) -> None:
    """Write an object with row groups of so many texts."""
    from urllib.request import Request, urlopen

    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"text": texts})
    pyarrow.parquet.write_table(table, file, row_group_size=rows, compression="zstd", use_dictionary=False)
    url, headers = f"http://127.0.0.1:{port}/runs/web/{file.name}", {"Content-Type": "application/octet-stream"}
    with urlopen(Request(url, file.read_bytes(), headers, method="PUT"), timeout=60):
        file.unlink()


if __name__ == "__main__":
    main()
