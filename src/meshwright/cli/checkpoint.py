"""`meshwright checkpoint`: what a run has saved, whether it is intact, and the way to and from Hugging Face folders."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from meshwright.cli.options import Json

app = typer.Typer(
    help="List, verify and convert checkpoints.\n\nA checkpoint is a folder `RUN/checkpoints/step-NNNNNNNN` of "
    "safetensors files and JSON. It counts only when `COMMITTED` vouches for `manifest.json`, and that for every byte.",
    no_args_is_help=True,
)

Place = Annotated[
    Path,
    typer.Argument(metavar="RUN_OR_DIR", help="A run folder, its `checkpoints` folder, or one checkpoint's folder."),
]


class Format(StrEnum):
    """Number formats a Hugging Face folder can be written in."""

    bf16 = "bf16"
    fp32 = "fp32"


@app.command("list")
def list_(place: Place, as_json: Json = False) -> None:
    """Show the checkpoints of a run: step, size, and whether each is complete.

    Names, sizes and the manifest are checked, which is quick; `verify` also reads the contents.

    Example:

        meshwright checkpoint list runs/quickstart
    """
    _print(_rows(place, contents=False), as_json)


@app.command()
def verify(place: Place, as_json: Json = False) -> None:
    """Read every byte of every checkpoint and compare it with its digest.

    Ends with code 4 when a committed one is damaged, naming each file and its first bad block of 16 MiB. A folder that
    was never committed is shown, but is no damage: nothing loads it.

    Examples:

        meshwright checkpoint verify runs/quickstart

        meshwright checkpoint verify runs/quickstart/checkpoints/step-00000100 --json
    """
    from meshwright.spec.errors import EXIT_DAMAGED

    rows = _rows(place, contents=True)
    _print(rows, as_json)
    bad = [row for row in rows if row["committed"] and not row["ok"]]
    if bad:
        names = ", ".join(Path(row["path"]).name for row in bad)
        print(f"meshwright: {len(bad)} of {len(rows)} checkpoints damaged: {names}", file=sys.stderr)
        sys.exit(EXIT_DAMAGED)


@app.command("to-hf")
def to_hf(
    checkpoint: Annotated[
        Path, typer.Argument(help="A checkpoint's folder, or a run folder: its newest good checkpoint is taken.")
    ],
    out: Annotated[Path, typer.Argument(help="The Hugging Face folder to write; it must not exist or be empty.")],
    dtype: Annotated[Format, typer.Option(help="Number format of the weights; training keeps fp32.")] = Format.bf16,
) -> None:
    """Write a checkpoint's weights as a Hugging Face folder: safetensors, config.json, tokenizer, model card.

    Example:

        meshwright checkpoint to-hf runs/quickstart my-model --dtype fp32
    """
    from meshwright.checkpoint.convert import export_checkpoint

    with _disk_errors("exporting"):
        source = export_checkpoint(checkpoint, out, dtype=dtype.value)
    print(f"{source} → {out}", file=sys.stderr)


@app.command("from-hf")
def from_hf(
    folder: Annotated[Path, typer.Argument(metavar="HF_DIR", help="A Hugging Face folder with safetensors weights.")],
    out: Annotated[
        Path, typer.Argument(metavar="RUN_OR_OUT", help="Folder that gets `checkpoints/step-00000000`, weights only.")
    ],
) -> None:
    """Write the weights of a Hugging Face folder as a checkpoint of step 0, to start runs from.

    Example:

        meshwright checkpoint from-hf ./Llama-3.2-1B base

        meshwright train run.yaml model.init=checkpoint:base/checkpoints/step-00000000
    """
    from meshwright.checkpoint.convert import import_checkpoint

    with _disk_errors("importing"):
        path = import_checkpoint(folder, out)
    print(f"{folder} → {path}", file=sys.stderr)


def _rows(place: Path, *, contents: bool) -> list[dict[str, Any]]:
    from meshwright.checkpoint.verify import list_checkpoints

    with _disk_errors("reading checkpoints"):
        return list_checkpoints(place, contents=contents)


def _print(rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print(json.dumps({"checkpoints": rows}))
        return
    from meshwright.checkpoint.manifest import Damage

    for row in rows:
        print(_line(row))
        for each in row["damaged"] if row["committed"] else ():
            print(f"    {Damage(**each)}")
    if not rows:
        print("no checkpoints", file=sys.stderr)


def _line(row: dict[str, Any]) -> str:
    path = Path(row["path"])
    size = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
    state = "ok" if row["ok"] else "DAMAGED" if row["committed"] else "never committed, not loaded"
    return f"{path}  {size / 1e6:12,.1f} MB  {state}"


@contextmanager
def _disk_errors(doing: str) -> Iterator[None]:
    """What the operating system refuses becomes an error with a sentence and an exit code."""
    from meshwright.spec.failures import as_meshwright_error

    try:
        yield
    except OSError as error:
        raise as_meshwright_error(error, doing) from error
