"""A profiler's trace read into device kernels: what kind each is, which host operation launched it when, and the shape of a product.

Takes the Chrome trace that `torch.profiler` writes (`meshwright train --profile-steps`; torchtitan's are the same). The kind follows from
the kernel's name; where names are made by a compiler, from the operations it says it fused, or from what the host was inside of when it
launched the kernel.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from meshwright.spec.errors import BadInput

Kind = Literal["gemm", "attention", "elementwise", "quantise", "loss", "optimizer", "copies", "communication"]
KINDS: dict[Kind, str] = {
    "gemm": "matrix products",
    "attention": "scores, softmax and values, forward and backward",
    "elementwise": "norms, rotary embedding, activation, residual sums, casts that a compiler fused with them",
    "quantise": "rounding to a low format, and the largest magnitudes it needs, in kernels of their own",
    "loss": "softmax and cross-entropy, without the head's products",
    "optimizer": "gradient norm, clipping, update",
    "copies": "weights and gradients in and out of buffers, casts, fills",
    "communication": "collectives, messages, copies between devices",
}
"""What each kind holds, in the order in which a moment with several kinds at work is charged."""
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCH = ("cuda_runtime", "cuda_driver")
HOST = ("cpu_op", "user_annotation")

_MADE_BY_COMPILER = re.compile(r"triton_(poi|red|per|for)_")
_BY_NAME: tuple[tuple[Kind, re.Pattern[str]], ...] = tuple(
    (kind, re.compile(text, re.IGNORECASE))
    for kind, text in (
        ("communication", r"nccl|symm_mem|multimem|one_shot_all|two_shot_all|PtoP|Peer"),
        ("attention", r"sdpa|flash|fmha|attn|attention|cudnn|compute_dot_do_o|convert_dq"),
        ("optimizer", r"adam|LpNorm|lp_norm"),
        ("quantise", r"^_?round|quantiz|float8|amax"),
        ("gemm", r"gemm|nvjet|cublas|cutlass|xmma|splitk|gemv|^triton_(tem_)?.*mm"),
        ("loss", r"^_slope|softmax|nll_loss|cross_entropy|logsumexp"),
        ("copies", r"^_add_wide|memcpy|memset|catarray|split_with_sizes|chunk_cat|copy_kernel|copyfunctor|fillfunctor"),
    )
)
_OF_COMPILED: tuple[tuple[Kind, re.Pattern[str]], ...] = (
    ("loss", re.compile(r"logsumexp|log_softmax|nll_loss|cross_entropy")),
    ("quantise", re.compile(r"^(?!.*(rsqrt|rms_norm|sigmoid|silu|_add)).*(amax|abs_max|float8|scaled_mm)")),
)
_BY_PLACE: tuple[tuple[Kind, re.Pattern[str]], ...] = (
    ("optimizer", re.compile(r"Optimizer\.step|clip_grad|linalg_vector_norm|_foreach_norm|_foreach_mul_")),
    ("loss", re.compile(r"CrossEntropy|cross_entropy|LogSoftmax|NllLoss")),
    (
        "copies",
        re.compile(
            r"FSDP::(all_gather_copy|post_backward|all_gather|foreach)|fsdp::|_foreach_copy_|^aten::copy_$|^aten::fill_$"
        ),
    ),
)
_PRODUCTS = {"aten::mm": 0, "aten::bmm": 0, "aten::_scaled_mm": 0, "aten::addmm": 1, "aten::baddbmm": 1}
"""Host operations that multiply two matrices → the place of the first among their inputs."""
_FORMATS = {"BFloat16": "bf16", "Half": "fp16", "float": "fp32", "double": "fp64"}


@dataclass(frozen=True, slots=True)
class Shape:
    """`batch` products (m, k) times (k, n), with inputs in `format`."""

    m: int
    k: int
    n: int
    batch: int
    format: str

    @property
    def flops(self) -> float:
        return 2.0 * self.batch * self.m * self.k * self.n


@dataclass(frozen=True, slots=True)
class Kernel:
    """One stretch of work on the device, in seconds from the trace's first."""

    name: str
    kind: Kind
    start: float
    end: float
    launched: float | None
    """When the host had handed it to the device; None where the trace does not say."""
    op: str
    """The host operation that launched it, the innermost one; empty where the trace does not say."""
    product: Shape | None = None
    call: int = 0
    """Number of the host operation: kernels of one product share it."""


def read_trace(path: Path) -> tuple[Kernel, ...]:
    """All kernels of the trace at `path` (`.json` or `.json.gz`) by start. Raises BadInput for a file that is no trace, or one of a CPU."""
    try:
        raw = path.read_bytes()
        data: Any = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
        events = [event for event in data["traceEvents"] if event.get("ph") == "X"]
        found = kernels_of(events)
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(
            f"{path}: expected a trace that torch.profiler wrote: {type(error).__name__}: {error}"
        ) from error
    if not found:
        raise BadInput(
            f"{path}: the trace holds no device kernels; expected a run on a GPU (`meshwright train --profile-steps A:B`)"
        )
    return found


def kernels_of(events: Sequence[dict[str, Any]]) -> tuple[Kernel, ...]:
    """The device kernels among complete trace events."""
    device = [event for event in events if event.get("cat") in DEVICE]
    if not device:
        return ()
    zero = min(event["ts"] for event in device)
    launches = {event["args"]["correlation"]: event for event in events if _launches(event)}
    places = _places(events, launches.values())
    found = []
    for event in device:
        launch = launches.get(event["args"].get("correlation"))
        inside = places.get(id(launch), ())
        op = next((place for place in inside if place["cat"] == "cpu_op"), None)
        found.append(
            Kernel(
                name=event["name"],
                kind=kind_of(event["name"], [place["name"] for place in inside]),
                start=(event["ts"] - zero) * 1e-6,
                end=(event["ts"] + event["dur"] - zero) * 1e-6,
                launched=(launch["ts"] + launch["dur"] - zero) * 1e-6 if launch else None,
                op=op["name"] if op else "",
                product=_product(op) if op else None,
                call=id(op) if op else 0,
            )
        )
    return tuple(sorted(found, key=lambda kernel: kernel.start))


def kind_of(name: str, inside: Iterable[str] = ()) -> Kind:
    """The kind of the kernel called `name`, launched inside of these host operations."""
    rules = _OF_COMPILED if _MADE_BY_COMPILER.match(name) else _BY_NAME
    by_name = next((kind for kind, pattern in rules if pattern.search(name)), None)
    if by_name is not None:
        return by_name
    inside = list(inside)
    return next((kind for kind, pattern in _BY_PLACE if any(pattern.search(place) for place in inside)), "elementwise")


def _launches(event: dict[str, Any]) -> bool:
    return event.get("cat") in LAUNCH and "correlation" in event.get("args", {})


def _places(
    events: Iterable[dict[str, Any]], launches: Iterable[dict[str, Any]]
) -> dict[int, tuple[dict[str, Any], ...]]:
    """By launch (its id), the host operations around it on its thread, the innermost first."""
    threads: dict[Any, list[tuple[float, int, dict[str, Any]]]] = defaultdict(list)
    for event in events:
        if event.get("cat") in HOST:
            threads[event["tid"]].append((event["ts"], 0, event))
    for event in launches:
        threads[event["tid"]].append((event["ts"], 1, event))
    return {key: place for rows in threads.values() for key, place in _of_thread(rows)}


def _of_thread(rows: list[tuple[float, int, dict[str, Any]]]) -> Iterator[tuple[int, tuple[dict[str, Any], ...]]]:
    """What is open at each launch; of operations that begin together the longer one is outside."""
    open_now: list[dict[str, Any]] = []
    for begin, launches, event in sorted(rows, key=lambda row: (row[0], row[1], -row[2]["dur"])):
        while open_now and open_now[-1]["ts"] + open_now[-1]["dur"] < begin:
            open_now.pop()
        if launches:
            yield id(event), tuple(reversed(open_now))
        else:
            open_now.append(event)


def _product(op: dict[str, Any]) -> Shape | None:
    """The matrix product that a host operation is, where the trace has the shapes of its inputs."""
    first, args = _PRODUCTS.get(op["name"]), op.get("args", {})
    sizes = args.get("Input Dims")
    if first is None or not sizes or len(sizes) < first + 2:
        return None
    a, b = sizes[first], sizes[first + 1]
    if len(a) not in (2, 3) or len(b) != len(a):
        return None
    types = args.get("Input type", [])
    return Shape(a[-2], a[-1], b[-1], a[0] if len(a) == 3 else 1, _format(types[first] if len(types) > first else ""))


def _format(text: str) -> str:
    kind = text.rpartition("::")[2]
    return "fp8" if kind.startswith("Float8") else _FORMATS.get(kind, kind or "unknown")
