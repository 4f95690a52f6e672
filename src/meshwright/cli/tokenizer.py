"""`meshwright tokenizer`: trains a tokenizer from text."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.options import Json

app = typer.Typer(help="Train a tokenizer.", no_args_is_help=True)


@app.callback()
def tokenizer_commands() -> None:
    """Train a tokenizer. The callback makes typer keep the subcommand `train` although it is the only one."""


@app.command("train")
def train_command(
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT...",
            help="Files, directories, or the word `stdlib`, as of `data prepare`. Of much text, a sample of 64 MiB spread over "
            "all files is used.",
        ),
    ],
    size: Annotated[
        int,
        typer.Option(help="Tokens in the vocabulary, at least 257. 4096 suits a toy, 32000 to 128000 a real model."),
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="File to write, for example tokenizer.json.")],
    text_key: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="Key (or column) that holds the text of a record, `text` by default."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Train a byte-level BPE tokenizer and write it as a Hugging Face tokenizer.json.

    Any text can be encoded and decoded exactly. `<|endoftext|>` (id 0) ends a document. The same text gives the same
    file.

    Example:

        meshwright tokenizer train corpus/ --size 32000 --out tokenizer.json
    """
    from meshwright.data.inputs import check_text_key, list_inputs
    from meshwright.data.tokenizer import check_size, parse_tokenizer, sample_texts, train_tokenizer
    from meshwright.durable.writes import write_durable
    from meshwright.spec.errors import BadInput

    check_size(size)
    if not out.parent.is_dir():
        raise BadInput(f"{out}: no directory {out.parent}")
    files, _ = list_inputs(inputs)
    check_text_key(text_key, files)
    texts = [text for _, text in sample_texts(files, text_key or "text")]
    if not texts:
        raise BadInput(
            f"{', '.join(inputs)}: no usable document; `meshwright data prepare` names what is wrong with each"
        )
    sys.stderr.write(f"training on {sum(map(len, texts)):,} characters\n")
    content = train_tokenizer(texts, size)
    write_durable(out, content)
    record = parse_tokenizer(content, str(out)).record
    summary = {"file": str(out), "vocab_size": record.vocab_size, "eos": record.eos, "digest": record.digest}
    print(json.dumps(summary) if as_json else f"wrote {out}: {record.vocab_size} tokens")
