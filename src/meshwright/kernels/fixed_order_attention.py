"""Causal attention on CUDA whose gradients have the same bits at every call. cuDNN computes it.

cuDNN's usual backward adds the parts of q's gradient in the order in which its blocks happen to finish. Its deterministic
mode writes the gradients of all scores to memory and multiplies them by k. torch does not offer this mode, but cuDNN's
Python package (`nvidia-cudnn-frontend`) does. The gradients of the scores take 2 bytes per (query, key, head), so
the heads are computed in groups.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from meshwright.spec.score_memory import SCORE_BYTES, score_bytes

INSTALLED = importlib.util.find_spec("cudnn") is not None
"""Whether cuDNN's Python package is installed."""
_DTYPES = (torch.bfloat16, torch.float16)
_aten = torch.ops.aten


def supports(q: Tensor, v: Tensor) -> bool:
    """Return whether this module can compute the attention of q and v `(batch, heads, seq, head_dim)`."""
    widths = q.shape[-1], v.shape[-1]
    return q.is_cuda and INSTALLED and q.dtype in _DTYPES and max(widths) <= 128 and not any(w % 8 for w in widths)


@torch.library.custom_op("meshwright::fixed_order_attention", mutates_args=())
def fixed_order_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Return the attention of q over k and v, and the logsumexp of its scores.

    q is `(batch, heads, queries, head_dim)`, k and v `(batch, kv_heads, keys, head_dim)`; v may have another head_dim.
    The result is `(batch, heads, queries, head_dim of v)`. Scores are scaled by 1/√head_dim. The logsumexp is
    `(batch, heads, queries, 1)` in fp32.
    """
    out, logsumexp, *_ = _aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal)
    return out, logsumexp.reshape(*q.shape[:3], 1)


@fixed_order_attention.register_fake
def _fake(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    # Like torch's own operator, the result has the memory order of q: (batch, queries, heads, head_dim).
    out = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)
    return out, q.new_empty(*q.shape[:3], 1, dtype=torch.float32)


@torch.library.custom_op("meshwright::fixed_order_attention_backward", mutates_args=())
def fixed_order_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v. `grad` is the gradient of `out`; `out` and `logsumexp` are the forward's results."""
    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    for queries, keys in _groups(q, k):
        # cuDNN takes any strides, except that the logsumexp must be packed, also in dimensions of size 1.
        packed = logsumexp[queries].clone(memory_format=torch.contiguous_format)
        inputs = q[queries], k[keys], v[keys], out[queries], grad[queries], packed
        _run_backward(*inputs, grads[0][queries], grads[1][keys], grads[2][keys], causal=causal)
    return grads


@fixed_order_gradients.register_fake
def _fake_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, bool], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, causal = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.causal = causal


def _autograd_backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
    q, k, v, out, logsumexp = ctx.saved_tensors
    return (*fixed_order_gradients(grad, q, k, v, out, logsumexp, ctx.causal), None)


fixed_order_attention.register_autograd(_autograd_backward, setup_context=_setup_context)


def _groups(q: Tensor, k: Tensor) -> Iterator[tuple[tuple[slice, slice], tuple[slice, slice]]]:
    """Yield the index of q and the index of k for each group of samples and heads that is computed at a time.

    The score gradients of a group fit into `SCORE_BYTES`. A group has at least one key/value head.
    """
    samples, heads, queries, _ = q.shape
    _, kv_heads, keys, _ = k.shape
    shared = heads // kv_heads
    at_once = max(1, int(SCORE_BYTES // score_bytes(max(queries, keys), shared)))
    samples_at_once = max(1, at_once // kv_heads)
    kv_at_once = kv_heads if at_once >= kv_heads else at_once
    for sample in range(0, samples, samples_at_once):
        rows = slice(sample, sample + samples_at_once)
        for head in range(0, kv_heads, kv_at_once):
            stop = min(head + kv_at_once, kv_heads)
            yield (rows, slice(head * shared, stop * shared)), (rows, slice(head, stop))


def _run_backward(*tensors: Tensor, causal: bool) -> None:
    """Compute the gradients of q, k and v.

    `tensors` are nine: q, k, v, out, grad, logsumexp, and the gradients of q, k and v, which are overwritten.
    """
    kinds = tuple((tuple(tensor.shape), tensor.stride()) for tensor in tensors)
    device = tensors[0].device
    graph, names, size = _backward_graph(threading.get_ident(), device, tensors[0].dtype, kinds, causal)
    workspace = torch.empty(size, dtype=torch.uint8, device=device)
    handle = _handle(threading.get_ident(), device)
    import cudnn

    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(device).cuda_stream)
    graph.execute(dict(zip(names, tensors, strict=True)), workspace, handle=handle)


@cache
def _handle(thread: int, device: torch.device) -> Any:
    """Return cuDNN's handle of a thread. Each thread has its own, because two threads may not use one at the same time."""
    import cudnn

    with torch.cuda.device(device):
        return cudnn.create_handle()


@cache
def _backward_graph(
    thread: int,
    device: torch.device,
    dtype: torch.dtype,
    kinds: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...],
    causal: bool,
) -> tuple[Any, tuple[Any, ...], int]:
    """Build cuDNN's graph for one thread, dtype and list of nine tensors (see `_run_backward`).

    `kinds` has the shape and the strides of each tensor. Returns the graph, its tensors in the order of the arguments of
    `_run_backward`, and the bytes of its workspace.
    """
    import cudnn

    types = cudnn.data_type
    narrow = types.BFLOAT16 if dtype == torch.bfloat16 else types.HALF
    graph = cudnn.pygraph(
        io_data_type=narrow,
        intermediate_data_type=types.FLOAT,
        compute_data_type=types.FLOAT,
        handle=_handle(thread, device),
    )
    *inputs, logsumexp = [
        graph.tensor(dim=list(shape), stride=list(stride), data_type=types.FLOAT if number == 5 else narrow)
        for number, (shape, stride) in enumerate(kinds[:6])
    ]
    q, k, v, out, grad = inputs
    results = graph.sdpa_backward(
        name="gradients",
        q=q,
        k=k,
        v=v,
        o=out,
        dO=grad,
        stats=logsumexp,
        attn_scale=kinds[0][0][-1] ** -0.5,
        use_causal_mask=causal,
        use_deterministic_algorithm=True,
    )
    for result, (shape, stride) in zip(results, kinds[6:], strict=True):
        result.set_output(True).set_dim(list(shape)).set_stride(list(stride)).set_data_type(narrow)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A])
    graph.check_support()
    graph.build_plans()
    return graph, (*inputs, logsumexp, *results), graph.get_workspace_size()
