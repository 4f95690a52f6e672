"""Tokens per second without drafts and with those of prediction modules, with random weights and a stated rate of accepted drafts.

    python benchmarks/serve_mtp.py [--model deepseek-v2-lite] [--modules 1] [--accepted 0.7] [--requests 1 8 64] [--out FILE]
    python benchmarks/serve_mtp.py --model tiny --prompt 24 --new 24     # seconds on a CPU

Drafts of random weights are wrong. So a step checks its drafts as always, then keeps each with the probability `--accepted`, as long as
those before it are kept; texts are then those of no model. `--accepted -1` keeps what the check accepts. Drafts never pause. Prints one
JSON object for each case, of the second of two equal runs.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from serve_offline import random_model
from serve_speculation import BLOCK, first_difference, measured
from torch import Tensor

from meshwright.models.decoder import Decoder
from meshwright.serve.batch_inputs import PackedStep
from meshwright.serve.drafts import Drafter
from meshwright.serve.engine import Engine
from meshwright.serve.packed_drafts import PackedDrafts
from meshwright.serve.speculation import Checked
from meshwright.spec.engine import EngineOptions, Speculation

MEASURED = -1.0
"""Keep the drafts that the check accepts."""


def main() -> None:
    options = _arguments()
    model = random_model(options.model, options.prompt + options.new, predictions=options.modules)
    lines, plain = [], {}
    for modules in (0, options.modules):
        engine = engine_for(model, modules, options)
        if modules and options.accepted != MEASURED:
            keep_drafts(engine._drafter, options.accepted)
        for requests in options.requests:
            result = measured(engine, requests, options)
            texts = result.pop("texts")
            plain.setdefault(requests, texts)
            line = {
                "benchmark": "serve_mtp",
                "model": options.model,
                "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
                "temperature": options.temperature,
                "modules": modules,
                "requests": requests,
                "accepted_asked": options.accepted if modules and options.accepted != MEASURED else None,
                **result,
                "first_difference": first_difference(texts, plain[requests]),
            }
            lines.append(line)
            print(json.dumps(line), flush=True)
        del engine
    if options.out:
        options.out.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def engine_for(model: Decoder, modules: int, options: argparse.Namespace) -> Engine:
    """An engine with room for the requests, with drafts by so many modules. It takes the model over from the engine before."""
    context, most = options.prompt + options.new, max(options.requests)
    sizes = EngineOptions(
        sequences=most,
        context=context,
        tokens_per_block=BLOCK,
        cache_blocks=1 + most * (2 + context // BLOCK),
        prefix_cache=False,
        speculation=Speculation(tokens=modules, mtp=True, least=0.0) if modules else None,
    )
    return Engine(model, options=sizes)


def keep_drafts(drafter: Drafter, share: float) -> None:
    """Let checks keep each draft with the probability `share`, after the work of a usual check."""
    check = drafter._accepted

    def kept(drafts: PackedDrafts, packed: PackedStep, logits: Tensor, drawn: Tensor) -> Checked:
        tokens = check(drafts, packed, logits, drawn).tokens.clone()
        longest = drafts.tokens.shape[1]
        tokens[:, :longest] = drafts.tokens
        within = torch.arange(longest, device=tokens.device) < drafts.lengths[:, None]
        keep = (torch.rand(drafts.tokens.shape, device=tokens.device) < share) & within
        accepted = keep.long().cumprod(1).sum(1)
        here = drawn[drafts.samples].long().gather(1, accepted[:, None])
        return Checked(tokens.scatter(1, accepted[:, None], here.to(tokens.dtype)), accepted)

    drafter.__dict__["_accepted"] = kept


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="deepseek-v2-lite", help='a preset, or "tiny"')
    parser.add_argument("--modules", type=int, default=1, help="prediction modules, with one draft each")
    parser.add_argument(
        "--accepted", type=float, default=0.7, help="probability that a draft is kept; -1: by the check"
    )
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
