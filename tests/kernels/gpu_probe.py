import sys, time, torch
from meshwright.kernels.attention import make_mask
from meshwright.kernels.loss import linear_cross_entropy
from meshwright.kernels.rope import rotary_tables
from meshwright.models.decoder import Block
from meshwright.models.initial import initial_values
from meshwright.spec.fields import from_plain
from meshwright.spec.model import ModelSpec, ParameterSpec, layer_parameters
from meshwright.spec.presets import MODEL_PRESETS

D = torch.device("cuda")
print(torch.__version__, torch.backends.cudnn.version())

def timed(f, n=10):
    t = time.time(); f(); torch.cuda.synchronize(); first = time.time() - t
    f(); torch.cuda.reset_peak_memory_stats()
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    a.record()
    for _ in range(n): f()
    b.record(); torch.cuda.synchronize()
    return a.elapsed_time(b) / n, first, torch.cuda.max_memory_allocated() / 2**30

T, H, V = 16384, 4096, 128256
h = torch.randn(T, H, device=D, dtype=torch.bfloat16).requires_grad_()
w = (torch.randn(V, H, device=D, dtype=torch.bfloat16) / 64).requires_grad_()
t = torch.randint(0, V, (T,), device=D); t[::7] = -100
for chunk in (2048, 4096, 8192):
    def step():
        h.grad = w.grad = None
        (linear_cross_entropy(h, w, t, chunk) * (1 / 14000)).backward()
    ms, first, peak = timed(step, 6)
    print(f"loss chunk {chunk}: {ms:.1f} ms = {6*T*H*V/ms/1e9:.0f} TFLOP/s, first {first:.1f} s, peak {peak:.1f} GiB", flush=True)
with torch.no_grad():
    print("loss alone %.1f ms, first %.1f, peak %.1f" % timed(lambda: linear_cross_entropy(h, w, t, 4096), 4), flush=True)
    from meshwright.kernels import loss as L
    x = torch.randn(4096, V, device=D, dtype=torch.bfloat16)
    print("slope alone %.2f ms" % timed(lambda: L._compiled(L._slope_fused)(x, t[:4096]))[0], flush=True)
del h, w, x
spec = from_plain(ModelSpec, MODEL_PRESETS["llama3-8b"])
block = Block(spec, False).to(D, torch.bfloat16)
with torch.no_grad():
    for p in block.parameters():
        if p.dim() == 2: p.normal_(std=0.02)
x = torch.randn(2, 8192, 4096, device=D, dtype=torch.bfloat16).requires_grad_()
rope = rotary_tables(torch.arange(8192, device=D), 128, 5e5, spec.rope_scaling, torch.bfloat16)
docs = (torch.arange(8192, device=D) // 1000).expand(2, -1).contiguous()
compiled = torch.compile(block.forward, fullgraph=True, dynamic=False)
mm = sum(r.count for r in layer_parameters(spec, 0) if len(r.shape) == 2)
flops = (6 * mm + 12 * 4096 * 8192 / 2) * 2 * 8192
for name, f, docs_ in (("compiled", compiled, None), ("eager", block.forward, None), ("compiled documents", compiled, docs)):
    def step():
        m = make_mask(docs_, None, 8192, D)
        f(x, rope, m).backward(x.detach())
        block.zero_grad(); x.grad = None
    ms, first, peak = timed(step)
    print(f"block {name}: {ms:.2f} ms = {flops/ms/1e9:.0f} TFLOP/s (causal), first {first:.1f} s, peak {peak:.1f} GiB", flush=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof: step()
    for e in sorted(prof.key_averages(), key=lambda e: -e.self_device_time_total)[:16]:
        print(f"   {e.self_device_time_total/1e3:7.3f} ms x{e.count} {e.key[:90]}")
print("mask ms %.2f" % timed(lambda: make_mask(docs, None, 8192, D))[0])
import torch._dynamo
print("recompiles", dict(torch._dynamo.utils.counters["frames"]), torch._dynamo.utils.counters["recompile_limit"] if "recompile_limit" in torch._dynamo.utils.counters else "")
print("initial 2**30: %.0f ms" % timed(lambda: initial_values(0, ParameterSpec("x", (1 << 30,), "normal", 0.02), 0, 1 << 30, D), 1)[0])
