"""Breakdown of a profiler's trace by kernel class, on traces small enough to count by hand."""

from __future__ import annotations

import gzip
import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from kernel_times import breakdown
from kernel_trace import KERNEL_CLASSES, classify_kernel, kernels_of, read_trace

from meshwright.spec.errors import BadInput

GEMM, ADAM, NCCL = (
    "nvjet_tst_128x256",
    "multi_tensor_apply_kernel<FusedAdamMathFunctor>",
    "ncclDevKernel_AllGather_RING_LL",
)
MM = {"Input Dims": [[8, 4], [4, 16]], "Input type": ["c10::BFloat16", "c10::BFloat16"]}
Event = dict[str, Any]


class Bench:
    """Events of a trace, in microseconds. A kernel is launched 3 µs before it starts by default."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._numbers = count(1)

    def kernel(
        self,
        name: str,
        start: float,
        duration: float,
        *,
        launched: float | None = None,
        cat: str = "kernel",
        ops: Any = (),
    ) -> None:
        number, launch_end = next(self._numbers), start - 3 if launched is None else launched
        for depth, (op, args) in enumerate(ops):
            self.host(op, launch_end - 1 + 0.1 * depth, 3 - 0.2 * depth, **args)
        launch = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "tid": 1, "ts": launch_end, "dur": 1.0}
        self.events.append({**launch, "args": {"correlation": number}})
        args = {"correlation": number, "stream": 7}
        self.events.append({"ph": "X", "cat": cat, "name": name, "tid": 7, "ts": start, "dur": duration, "args": args})

    def host(self, name: str, start: float, duration: float, cat: str = "cpu_op", **args: Any) -> None:
        self.events.append({"ph": "X", "cat": cat, "name": name, "tid": 1, "ts": start, "dur": duration, "args": args})


def two_steps() -> Bench:
    """A first step, and one from 110 to 210 µs: matmuls 40, gathers 20 (10 exposed), passes 20, update 10."""
    bench = Bench()
    bench.kernel(GEMM, 90, 10)
    bench.kernel(ADAM, 100, 10)
    bench.kernel(GEMM, 120, 20, ops=[("autograd::engine", {}), ("aten::mm", MM)])
    bench.kernel(NCCL, 130, 20)
    bench.kernel("triton_poi_fused_mul_silu", 150, 20)
    bench.kernel(GEMM, 180, 20, launched=175, ops=[("aten::mm", MM)])
    bench.kernel(ADAM, 200, 6)
    bench.kernel(ADAM, 206, 4)
    return bench


def test_kinds_and_idle_time_add_up_to_the_last_step() -> None:
    step = breakdown(kernels_of(two_steps().events))
    assert step.seconds == pytest.approx(100e-6)
    charged = {kernel_class: time.seconds * 1e6 for kernel_class, time in step.kinds.items()}
    assert charged == pytest.approx({"gemm": 40, "elementwise": 20, "optimizer": 10, "communication": 10})
    assert step.idle.seconds * 1e6 == pytest.approx(20)
    assert sum(charged.values()) + step.idle.seconds * 1e6 == pytest.approx(step.seconds * 1e6)


def test_communication_is_charged_with_what_stands_bare() -> None:
    step = breakdown(kernels_of(two_steps().events))
    assert step.kinds["communication"].busy_seconds * 1e6 == pytest.approx(20)
    assert step.hidden_communication_seconds * 1e6 == pytest.approx(10)


def test_a_gap_is_the_hosts_when_the_next_kernel_was_launched_after_the_last_one_ended() -> None:
    idle = breakdown(kernels_of(two_steps().events)).idle
    # 110 to 120: launched at 117 to 118; 170 to 180: launched at 175 to 176.
    assert (idle.gaps, idle.host_seconds * 1e6) == (2, pytest.approx(20))
    assert {gap.op for gap in idle.longest} == {"aten::mm"}
    launched_early = two_steps()
    for event in launched_early.events:
        if event["cat"] == "cuda_runtime" and event["ts"] == 175:
            event["ts"] = 160
    assert breakdown(kernels_of(launched_early.events)).idle.host_seconds * 1e6 == pytest.approx(10)


def test_matmuls_are_counted_by_shape() -> None:
    (matmul,) = breakdown(kernels_of(two_steps().events)).products
    assert (matmul.m, matmul.k, matmul.n, matmul.format, matmul.calls) == (8, 4, 16, "bf16", 2)
    assert matmul.seconds * 1e6 == pytest.approx(40)
    assert matmul.flops == 2 * 2 * 8 * 4 * 16


def test_a_matmul_of_two_kernels_is_one_call() -> None:
    bench = Bench()
    bench.kernel(ADAM, 0, 1)
    bench.kernel(GEMM, 10, 5)
    bench.host(
        "aten::_scaled_mm", 20, 30, **{"Input Dims": [[8, 4], [4, 16], []], "Input type": ["c10::Float8_e4m3fn"] * 2}
    )
    bench.kernel(GEMM, 30, 5, launched=21)
    bench.kernel("cublasLt::splitKreduce_kernel", 35, 5, launched=25)
    bench.kernel(ADAM, 60, 1)
    step = breakdown(kernels_of(bench.events))
    assert [(matmul.calls, matmul.format) for matmul in step.products] == [(1, "fp8")]
    assert step.products[0].flops == 2 * 8 * 4 * 16
    assert step.unknown_matmul_seconds * 1e6 == pytest.approx(5)


NAMES = {
    "nvjet_hsh_192x192_64x4_2x1_v_bz_coopB_NTN": "gemm",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n": "gemm",
    "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<cutlass::gemm::kernel::GemmUniversal<x>>>": "gemm",
    "triton_tem_fused_mm_3": "gemm",
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_8": "attention",
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, cutlass::bfloat16_t>>": "attention",
    "triton_poi_fused__scaled_dot_product_cudnn_attention_view_2": "elementwise",
    "triton_red_fused__to_copy_logsumexp_0": "loss",
    "_slope": "loss",
    "triton_red_fused_abs_amax_3": "quantise",
    "triton_red_fused__to_copy_abs_amax_mean_mul_pow_rsqrt_4": "elementwise",
    "void cudnn::fusion::compute_dot_do_o_specialized<true, 128, 6, true>": "attention",
    "void cudnn::fusion::convert_dq_to_16bits<__nv_bfloat16>": "attention",
    "void at::native::unrolled_elementwise_kernel<at::native::bfloat16_copy_kernel_cuda(at::TensorIteratorBase&)>": "copies",
    "_round": "quantise",
    "_round_flat": "quantise",
    "_forward": "elementwise",
    "_add_wide": "copies",
    "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "communication",
    "Memcpy PtoP (Device -> Device)": "communication",
    "Memcpy DtoD (Device -> Device)": "copies",
    "void at::native::split_with_sizes_copy_out_contiguous_no_cast_kernel<>": "copies",
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<LpNormFunctor<float>>": "optimizer",
    "void at::native::vectorized_elementwise_kernel<4, at::native::MulFunctor<float>>": "elementwise",
}


@pytest.mark.parametrize("name", NAMES)
def test_kernels_are_known_by_their_names(name: str) -> None:
    assert classify_kernel(name) == NAMES[name]


@pytest.mark.parametrize(
    ("inside", "kernel_class"),
    [
        (["aten::mul", "Optimizer.step#AdamW.step"], "optimizer"),
        (["aten::_foreach_mul_"], "optimizer"),
        (["aten::exp", "_LinearCrossEntropy"], "loss"),
        (["aten::mul", "MulBackward0"], "elementwise"),
        (["aten::copy_", "aten::_to_copy", "FSDP::all_gather"], "copies"),
    ],
)
def test_kernels_without_a_telling_name_are_known_by_where_they_were_launched(
    inside: list[str], kernel_class: str
) -> None:
    assert classify_kernel("void at::native::elementwise_kernel<128, 2>", inside) == kernel_class
    assert kernel_class in KERNEL_CLASSES


def test_traces_are_read_plain_and_compressed(tmp_path: Path) -> None:
    text = json.dumps({"traceEvents": [*two_steps().events, {"ph": "M", "name": "process_name"}]})
    (tmp_path / "a.json").write_text(text)
    (tmp_path / "b.json.gz").write_bytes(gzip.compress(text.encode()))
    uncompressed, compressed = (breakdown(read_trace(tmp_path / name)) for name in ("a.json", "b.json.gz"))
    assert uncompressed == compressed


def test_what_is_no_trace_of_a_step_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    for text, message in (
        ("{", "torch.profiler wrote"),
        ("[]", "torch.profiler wrote"),
        ('{"traceEvents": []}', "no device kernels"),
    ):
        file.write_text(text)
        with pytest.raises(BadInput, match=message):
            read_trace(file)
    bench = Bench()
    bench.kernel(GEMM, 0, 1)
    bench.kernel(ADAM, 2, 1)
    with pytest.raises(BadInput, match="end of 1 optimizer steps"):
        breakdown(kernels_of(bench.events))
