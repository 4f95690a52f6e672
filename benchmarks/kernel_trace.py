"""Reads device kernels from a profiler's trace: kernel class, launching host operation, and the shape of a matmul.

Reads the Chrome trace that `torch.profiler` writes (`meshwright train --profile-steps`, or torchtitan). The class follows from the kernel's
name; for kernels that a compiler generated, from the fused operations in the name, or from the host operations around the launch.
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

KernelClass = Literal["gemm", "attention", "elementwise", "quantise", "loss", "optimizer", "copies", "communication"]
KERNEL_CLASSES: dict[KernelClass, str] = {
    "gemm": "matmuls",
    "attention": "scores, softmax and values, forward and backward",
    "elementwise": "norms, rotary embedding, activation, residual sums, casts that a compiler fused with them",
    "quantise": "rounding to a low format, and the largest magnitudes it needs, in kernels of their own",
    "loss": "softmax and cross-entropy, without the head's matmuls",
    "optimizer": "gradient norm, clipping, update",
    "copies": "weights and gradients in and out of buffers, casts, fills",
    "communication": "collectives, messages, copies between devices",
}
"""Kernel classes with their contents, in the order in which overlapping time is attributed."""
DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCH_CATEGORIES = ("cuda_runtime", "cuda_driver")
HOST_CATEGORIES = ("cpu_op", "user_annotation")

_COMPILED_KERNEL = re.compile(r"triton_(poi|red|per|for)_")
_RULES_BY_NAME: tuple[tuple[KernelClass, re.Pattern[str]], ...] = tuple(
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
_RULES_FOR_COMPILED: tuple[tuple[KernelClass, re.Pattern[str]], ...] = (
    ("loss", re.compile(r"logsumexp|log_softmax|nll_loss|cross_entropy")),
    ("quantise", re.compile(r"^(?!.*(rsqrt|rms_norm|sigmoid|silu|_add)).*(amax|abs_max|float8|scaled_mm)")),
)
_RULES_BY_HOST_OPERATION: tuple[tuple[KernelClass, re.Pattern[str]], ...] = (
    ("optimizer", re.compile(r"Optimizer\.step|clip_grad|linalg_vector_norm|_foreach_norm|_foreach_mul_")),
    ("loss", re.compile(r"CrossEntropy|cross_entropy|LogSoftmax|NllLoss")),
    (
        "copies",
        re.compile(
            r"FSDP::(all_gather_copy|post_backward|all_gather|foreach)|fsdp::|_foreach_copy_|^aten::copy_$|^aten::fill_$"
        ),
    ),
)
_MATMULS = {"aten::mm": 0, "aten::bmm": 0, "aten::_scaled_mm": 0, "aten::addmm": 1, "aten::baddbmm": 1}
"""Host operations that multiply two matrices → index of the first matrix among their inputs."""
_FORMATS = {"BFloat16": "bf16", "Half": "fp16", "float": "fp32", "double": "fp64"}


@dataclass(frozen=True, slots=True)
class Shape:
    """`batch` matmuls (m, k) times (k, n), with inputs in `format`."""

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
    """A kernel on the device; times in seconds from the start of the trace's first kernel."""

    name: str
    kernel_class: KernelClass
    start: float
    end: float
    launched: float | None
    """End of the launch on the host; None where the trace does not have it."""
    op: str
    """The innermost host operation that launched it; empty where the trace does not have it."""
    matmul: Shape | None = None
    call: int = 0
    """Id of the host operation; kernels of the same matmul share it."""


def read_trace(path: Path) -> tuple[Kernel, ...]:
    """All kernels of the trace at `path` (`.json` or `.json.gz`), by start.

    Raises BadInput for a file that is no trace, or a trace without device kernels.
    """
    try:
        raw = path.read_bytes()
        data: Any = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
        events = [event for event in data["traceEvents"] if event.get("ph") == "X"]
        kernels = kernels_of(events)
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(
            f"{path}: expected a trace that torch.profiler wrote: {type(error).__name__}: {error}"
        ) from error
    if not kernels:
        raise BadInput(
            f"{path}: the trace holds no device kernels; expected a run on a GPU (`meshwright train --profile-steps A:B`)"
        )
    return kernels


def kernels_of(events: Sequence[dict[str, Any]]) -> tuple[Kernel, ...]:
    """The device kernels among complete trace events."""
    device = [event for event in events if event.get("cat") in DEVICE_CATEGORIES]
    if not device:
        return ()
    first_start = min(event["ts"] for event in device)
    launches = {event["args"]["correlation"]: event for event in events if _is_launch(event)}
    ancestors_of_launch = _host_ancestors(events, launches.values())
    kernels = []
    for event in device:
        launch = launches.get(event["args"].get("correlation"))
        ancestors = ancestors_of_launch.get(id(launch), ())
        op = next((ancestor for ancestor in ancestors if ancestor["cat"] == "cpu_op"), None)
        kernels.append(
            Kernel(
                name=event["name"],
                kernel_class=classify_kernel(event["name"], [ancestor["name"] for ancestor in ancestors]),
                start=(event["ts"] - first_start) * 1e-6,
                end=(event["ts"] + event["dur"] - first_start) * 1e-6,
                launched=(launch["ts"] + launch["dur"] - first_start) * 1e-6 if launch else None,
                op=op["name"] if op else "",
                matmul=_matmul(op) if op else None,
                call=id(op) if op else 0,
            )
        )
    return tuple(sorted(kernels, key=lambda kernel: kernel.start))


def classify_kernel(name: str, ancestors: Iterable[str] = ()) -> KernelClass:
    """The class of the kernel `name`, launched inside these host operations."""
    rules = _RULES_FOR_COMPILED if _COMPILED_KERNEL.match(name) else _RULES_BY_NAME
    by_name = next((kernel_class for kernel_class, pattern in rules if pattern.search(name)), None)
    if by_name is not None:
        return by_name
    ancestors = list(ancestors)
    return next(
        (
            kernel_class
            for kernel_class, pattern in _RULES_BY_HOST_OPERATION
            if any(pattern.search(ancestor) for ancestor in ancestors)
        ),
        "elementwise",
    )


def _is_launch(event: dict[str, Any]) -> bool:
    return event.get("cat") in LAUNCH_CATEGORIES and "correlation" in event.get("args", {})


def _host_ancestors(
    events: Iterable[dict[str, Any]], launches: Iterable[dict[str, Any]]
) -> dict[int, tuple[dict[str, Any], ...]]:
    """By id of the launch event, the host operations around it on its thread, the innermost first."""
    threads: dict[Any, list[tuple[float, int, dict[str, Any]]]] = defaultdict(list)
    for event in events:
        if event.get("cat") in HOST_CATEGORIES:
            threads[event["tid"]].append((event["ts"], 0, event))
    for event in launches:
        threads[event["tid"]].append((event["ts"], 1, event))
    return {key: ancestors for spans in threads.values() for key, ancestors in _open_operations_at_launches(spans)}


def _open_operations_at_launches(
    spans: list[tuple[float, int, dict[str, Any]]],
) -> Iterator[tuple[int, tuple[dict[str, Any], ...]]]:
    """The open host operations at each launch; of operations with the same start the longer one is outside."""
    open_operations: list[dict[str, Any]] = []
    for start, launches, event in sorted(spans, key=lambda span: (span[0], span[1], -span[2]["dur"])):
        while open_operations and open_operations[-1]["ts"] + open_operations[-1]["dur"] < start:
            open_operations.pop()
        if launches:
            yield id(event), tuple(reversed(open_operations))
        else:
            open_operations.append(event)


def _matmul(op: dict[str, Any]) -> Shape | None:
    """The matmul of a host operation, where the trace has the shapes of its inputs."""
    left_index, args = _MATMULS.get(op["name"]), op.get("args", {})
    sizes = args.get("Input Dims")
    if left_index is None or not sizes or len(sizes) < left_index + 2:
        return None
    left, right = sizes[left_index], sizes[left_index + 1]
    if len(left) not in (2, 3) or len(right) != len(left):
        return None
    types = args.get("Input type", [])
    return Shape(
        left[-2],
        left[-1],
        right[-1],
        left[0] if len(left) == 3 else 1,
        _format(types[left_index] if len(types) > left_index else ""),
    )


def _format(text: str) -> str:
    name = text.rpartition("::")[2]
    return "fp8" if name.startswith("Float8") else _FORMATS.get(name, name or "unknown")
