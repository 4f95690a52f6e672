"""`meshwright checkpoint`: lists, verifies, compares, prunes and converts checkpoints."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from meshwright.cli.options import Json, say

app = typer.Typer(
    help="List, verify and convert checkpoints.\n\nA checkpoint is a folder `RUN/checkpoints/step-NNNNNNNN` of "
    "safetensors files and JSON. It counts only when `COMMITTED` vouches for `manifest.json`, and that for every byte.",
    no_args_is_help=True,
)

CheckpointFolder = Annotated[
    Path,
    typer.Argument(metavar="RUN_OR_DIR", help="A run folder, its `checkpoints` folder, or one checkpoint's folder."),
]


class Format(StrEnum):
    """Number formats in which a Hugging Face folder can be written."""

    bf16 = "bf16"
    fp32 = "fp32"


@app.command("list")
def list_(folder: CheckpointFolder, as_json: Json = False) -> None:
    """Show the checkpoints of a run: step, size, and whether each is complete.

    Names, sizes and the manifest are checked, which is quick; `verify` also reads the contents.

    Example:

        meshwright checkpoint list runs/quickstart
    """
    _print(_checkpoint_records(folder, contents=False), as_json)


@app.command()
def verify(folder: CheckpointFolder, as_json: Json = False) -> None:
    """Read every byte of every checkpoint and compare it with its digest.

    Ends with code 4 if a committed checkpoint is damaged, and names each damaged file and its first bad block of 16 MiB. A
    checkpoint that was never committed is listed, but it is no error, because no run loads it.

    Examples:

        meshwright checkpoint verify runs/quickstart

        meshwright checkpoint verify runs/quickstart/checkpoints/step-00000100 --json
    """
    from meshwright.spec.errors import EXIT_DAMAGED, BadInput

    records = _checkpoint_records(folder, contents=True)
    _print(records, as_json)
    newer = [record for record in records if _is_newer(record)]
    bad = [record for record in records if record["committed"] and not record["ok"] and record not in newer]
    if bad:
        names = ", ".join(Path(record["path"]).name for record in bad)
        print(f"meshwright: {len(bad)} of {len(records)} checkpoints damaged: {names}", file=sys.stderr)
        sys.exit(EXIT_DAMAGED)
    if newer:
        names = ", ".join(Path(record["path"]).name for record in newer)
        raise BadInput(f"not verified, as a later release wrote them in a newer format: {names}")


@app.command()
def diff(a: CheckpointFolder, b: CheckpointFolder, as_json: Json = False) -> None:
    """Compare the tensors of two checkpoints bit for bit; they may be sharded differently.

    A run folder stands for its newest undamaged checkpoint. Ends with code 0 also if they differ; --json has the result in `equal`.

    Example:

        meshwright checkpoint diff runs/quickstart runs/other/checkpoints/step-00000100
    """
    from meshwright.checkpoint.format.inventory import choose_newest
    from meshwright.checkpoint.read.diff import compare_checkpoints

    with _disk_errors("comparing checkpoints"):
        chosen = [choose_newest(folder, contents=False) for folder in (a, b)]
        paths = [each.path for each in chosen]
        for each in chosen:
            if each.warning is not None:
                print(f"meshwright: {each.warning}", file=sys.stderr)
        differences = [asdict(difference) for difference in compare_checkpoints(*paths)]
    different = [difference for difference in differences if difference["status"] != "equal"]
    if as_json:
        print(json.dumps({"equal": not different, "tensors": differences}))
        return
    for difference in different:
        largest = "" if difference["max_abs"] is None else f"  by at most {difference['max_abs']:.6g}"
        print(f"{difference['status']:8}  {difference['name']}{largest}")
    print(f"{paths[0]} and {paths[1]}: {len(different)} of {len(differences)} tensors differ")


@app.command()
def show(
    folder: CheckpointFolder,
    step: Annotated[
        int | None, typer.Argument(metavar="[STEP]", help="Step of the checkpoint; default: the newest committed.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show a checkpoint's files, the Plan and versions that wrote it, and how long the save took.

    Example:

        meshwright checkpoint show runs/quickstart 100 --json
    """
    from meshwright.checkpoint.inspect import choose_checkpoint, describe_checkpoint

    with _disk_errors("reading a checkpoint"):
        path = choose_checkpoint(folder, step)
        description = describe_checkpoint(path)
    if as_json:
        print(json.dumps(description))
        return
    print(
        f"{path}  step {description['step']}, {'committed' if description['committed'] else 'never committed, not loaded'}"
    )
    for phase, seconds in description["seconds"].items():
        if seconds is not None:
            print(f"  {phase} {seconds:.3f} s")
    for name, version in (description["versions"] or {}).items():
        print(f"  {name} {version}")
    for file in description["files"]:
        print(f"  {file['name']:32} {file['bytes']:16,} bytes")


@app.command()
def prune(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder or its `checkpoints` folder.")],
    keep: Annotated[int, typer.Option(min=1, help="Number of newest checkpoints to keep.")] = 3,
    as_json: Json = False,
) -> None:
    """Delete all but the newest committed checkpoints of a run, and files of interrupted saves. No job may use the run.

    The newest undamaged checkpoint is always kept, also if newer ones are damaged.

    Example:

        meshwright checkpoint prune runs/quickstart --keep 1
    """
    from meshwright.checkpoint.inspect import prune_checkpoints

    with _disk_errors("deleting checkpoints"):
        pruned = prune_checkpoints(folder, keep)
    if as_json:
        print(
            json.dumps({"deleted": [str(path) for path in pruned.deleted], "kept": [str(path) for path in pruned.kept]})
        )
        return
    for path in pruned.deleted:
        print(f"deleted {path}")
    print(f"{len(pruned.deleted)} deleted, {len(pruned.kept)} left", file=sys.stderr)


@app.command("to-hf")
def to_hf(
    checkpoint: Annotated[
        Path, typer.Argument(help="A checkpoint folder, or a run folder for its newest undamaged checkpoint.")
    ],
    out: Annotated[Path, typer.Argument(help="The Hugging Face folder to write; it must not exist or be empty.")],
    dtype: Annotated[Format, typer.Option(help="Number format of the weights; training keeps fp32.")] = Format.bf16,
    ema: Annotated[
        bool, typer.Option("--ema", help="Write the moving average of the weights (train.ema_decay).")
    ] = False,
    text_only: Annotated[
        bool,
        typer.Option("--text-only", help="Of a run that began with a larger model's text part, write the text model."),
    ] = False,
) -> None:
    """Write a checkpoint's weights as a Hugging Face folder: safetensors, config.json, tokenizer, model card.

    Example:

        meshwright checkpoint to-hf runs/quickstart my-model --dtype fp32
    """
    from meshwright.checkpoint.models.convert import export_checkpoint

    with _disk_errors("exporting"):
        source = export_checkpoint(checkpoint, out, dtype=dtype.value, average=ema, text_only=text_only, note=say)
    print(f"{source} → {out}", file=sys.stderr)


@app.command("to-peft")
def to_peft(
    checkpoint: Annotated[
        Path, typer.Argument(help="A run with adapters (`model.adapter`), or one of its checkpoints.")
    ],
    out: Annotated[Path, typer.Argument(help="The folder to write; it must not exist or be empty.")],
) -> None:
    """Write the adapters of a run as a folder that peft loads: adapter_config.json and adapter_model.safetensors.

    The base's weights are not in it.

    Example:

        meshwright checkpoint to-peft runs/tuned my-adapter
    """
    from meshwright.checkpoint.models.convert import export_adapter

    with _disk_errors("exporting"):
        source = export_adapter(checkpoint, out)
    print(f"{source} → {out}", file=sys.stderr)


@app.command()
def merge(
    base: Annotated[
        Path, typer.Argument(help="The model that the adapters belong to: a Hugging Face folder or a run.")
    ],
    adapter: Annotated[
        Path, typer.Argument(help="The adapters: a folder in peft's files, or a run with adapters (`model.adapter`).")
    ],
    out: Annotated[Path, typer.Argument(help="The Hugging Face folder to write; it must not exist or be empty.")],
    dtype: Annotated[Format, typer.Option(help="Number format of the weights.")] = Format.bf16,
) -> None:
    """Write a model with adapters merged into its weights as a Hugging Face folder.

    Sums are computed in fp32 and rounded once to the format of the weights: bf16 loses what is below 1/512 of a weight.

    Example:

        meshwright checkpoint merge ./Llama-3.2-1B my-adapter merged
    """
    from meshwright.checkpoint.models.convert import merge_adapter

    with _disk_errors("merging"):
        merge_adapter(base, adapter, out, dtype=dtype.value, note=say)
    print(f"{base} + {adapter} → {out}", file=sys.stderr)


@app.command("from-hf")
def from_hf(
    folder: Annotated[Path, typer.Argument(metavar="HF_DIR", help="A Hugging Face folder with safetensors weights.")],
    out: Annotated[
        Path,
        typer.Argument(metavar="RUN_OR_OUT", help="Folder to create, with `checkpoints/step-00000000`: weights only."),
    ],
    text_only: Annotated[
        bool, typer.Option("--text-only", help="Leave out what the folder has beside its text model.")
    ] = False,
) -> None:
    """Write the weights of a Hugging Face folder as a checkpoint of step 0, to start runs from.

    Example:

        meshwright checkpoint from-hf ./Llama-3.2-1B base

        meshwright train run.yaml model.init=checkpoint:base/checkpoints/step-00000000
    """
    from meshwright.checkpoint.models.convert import import_checkpoint

    with _disk_errors("importing"):
        path = import_checkpoint(folder, out, text_only=text_only, note=say)
    print(f"{folder} → {path}", file=sys.stderr)


def _checkpoint_records(folder: Path, *, contents: bool) -> list[dict[str, Any]]:
    from meshwright.checkpoint.format.verify import list_checkpoints

    with _disk_errors("reading checkpoints"):
        return list_checkpoints(folder, contents=contents)


def _print(records: list[dict[str, Any]], as_json: bool) -> None:
    """Print one line for each checkpoint, and below it one line for each damage of a committed checkpoint."""
    if as_json:
        print(json.dumps({"checkpoints": records}))
        return
    from meshwright.checkpoint.format.manifest import Damage

    for record in records:
        print(_line(record))
        for damage in record["damaged"] if record["committed"] else ():
            print(f"    {Damage(**damage)}")
    if not records:
        print("no checkpoints", file=sys.stderr)


def _line(record: dict[str, Any]) -> str:
    """Return one line about a checkpoint: path, size, and whether it is complete."""
    path = Path(record["path"])
    size = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
    bad = "DAMAGED" if record["committed"] else "never committed, not loaded"
    state = "newer format" if _is_newer(record) else bad
    state = "ok" if record["ok"] else state
    return f"{path}  {size / 1e6:12,.1f} MB  {state}"


def _is_newer(record: dict[str, Any]) -> bool:
    """Return whether a later release wrote this checkpoint, in a format that this release cannot read."""
    return any(damage["kind"] == "format" for damage in record["damaged"])


@contextmanager
def _disk_errors(doing: str) -> Iterator[None]:
    """A context that turns errors of the operating system into errors with a sentence and an exit code."""
    from meshwright.spec.failures import as_meshwright_error

    try:
        yield
    except OSError as error:
        raise as_meshwright_error(error, doing) from error
