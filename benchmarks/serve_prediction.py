"""Attainment, TTFT and TPOT of the engine at several rates, beside what the simulator of deployments predicts for the same requests.

    python benchmarks/serve_prediction.py --model llama3-8b --trace TRACE.csv.gz --ttft 0.2 --tpot 0.02 [--out FILE]
    python benchmarks/serve_prediction.py --tiny --processor-time --seconds 10 --ttft 0.05 --tpot 0.005

First it measures the engine's steps on this machine, as `meshwright profile --serve` does. The capacity is the highest rate at which the
simulator predicts an attainment of 90%. At each rate the engine then serves requests for `--seconds`, in one process with random weights,
and the simulator is given their sizes and times of arrival. Sizes are those of the trace in order, or random around `--prompt` and `--new`.
With `--processor-time`, on a CPU that others use too, all times are those of this process on one thread, and waiting is skipped.
Prints one JSON object, and rewrites FILE after each rate. A rate that cannot end within `--budget` seconds is left out.
With `--steps` a second file has all steps of the engine with the cost model's seconds for each, and the times of all requests, measured and
predicted; the result then has the errors of the model by type of step.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from meshwright.checkpoint.models.single_device import device_and_dtype
from meshwright.config.presets import MODEL_PRESETS
from meshwright.config.trace_file import read_trace
from meshwright.costs.serve_costs import ServeCosts
from meshwright.costs.step_times import InstanceStepTimes
from meshwright.launch.machine import found_cluster
from meshwright.serve.engine import Engine
from meshwright.serve.engine_profile import measure_engine, random_model
from meshwright.serve.sampling import SamplingOptions
from meshwright.serve.timed_engine import TimedEngine, TimedStep
from meshwright.simulator.serve_simulation import simulate
from meshwright.simulator.serve_types import RequestTimes, ServedDeployment
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.deployment import Deployment, InstanceSpec, ServeLimits, TimedRequest
from meshwright.spec.engine import EngineOptions
from meshwright.spec.fields import from_plain, to_plain
from meshwright.spec.model import ModelSpec

SHARES = (0.4, 0.55, 0.7, 0.8, 0.9, 1.0, 1.1)
"""Rates over the capacity."""
CAPACITY_REQUESTS = 2000
TINY = {
    "family": "llama",
    "layers": 2,
    "hidden": 64,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "ffn_hidden": 128,
    "vocab_size": 96,
    "max_seq_len": 512,
}


def main() -> None:
    begin, options = time.perf_counter(), _arguments()
    values = TINY if options.tiny else MODEL_PRESETS[options.model]
    spec = from_plain(ModelSpec, {**values, "vocab_size": values["vocab_size"] or 4096})
    sizes = EngineOptions(
        sequences=options.sequences,
        step_tokens=options.step_tokens,
        context=min(options.context, spec.max_seq_len),
        prefix_cache=False,
        texts=False,
    )
    cluster = from_plain(ClusterSpec, {**found_cluster(), "gpus_per_node": 1})
    clock = ProcessorClock() if options.processor_time else WallClock()
    profile = measure_engine(spec, sizes, cluster, options.profile_seconds, timer=clock.now)
    gc.collect()
    model = random_model(spec, *device_and_dtype())
    engine = TimedEngine(model, sizes, clock.now) if options.steps else Engine(model, options=sizes)
    costs = ServeCosts(spec, cluster, settings=sizes, profile=profile)
    deployment = Deployment(instances=(InstanceSpec(token_budget=options.step_tokens),))
    limits = ServeLimits(ttft_seconds=options.ttft, tpot_seconds=options.tpot)
    lengths = request_sizes(options, engine.context)
    capacity = highest_rate(deployment, costs, limits, lengths)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    result: dict[str, Any] = {
        "benchmark": "serve_prediction",
        "model": "tiny" if options.tiny else options.model,
        "device": device,
        "torch": torch.__version__,
        "limits": to_plain(limits),
        "capacity": capacity,
        "rates": [],
        "left_out": [],
        "blocks": [engine._policy.cache.pools[0].blocks, costs.of(deployment.instances[0]).blocks - 1],
        "profile": to_plain(profile),
    }
    serve(engine, arriving(lengths, capacity, options.seconds / 10, seed=0), clock)  # kernels and caches
    times, details = costs.of(deployment.instances[0]).times, []
    for number, share in enumerate(SHARES, 1):
        if time.perf_counter() - begin + 1.3 * options.seconds > options.budget:
            result["left_out"].append(share)
            continue
        requests = arriving(lengths, share * capacity, options.seconds, seed=number)
        if isinstance(engine, TimedEngine):
            engine.forget_steps()
        measured = ServedDeployment(
            limits=limits, devices=1, requests=serve(engine, requests, clock), instances=[], seconds=options.seconds
        )
        predicted = simulate(deployment, requests, costs, limits)
        figures = {"share": share, "rate": share * capacity, "requests": len(requests)}
        result["rates"].append(figures | {"measured": summary(measured), "predicted": summary(predicted)})
        if isinstance(engine, TimedEngine):
            steps = [step_figures(step, times) for step in engine.steps]
            requests_of = {"measured": request_figures(measured), "predicted": request_figures(predicted)}
            details.append({"share": share, "steps": steps, "requests": requests_of})
            options.steps.write_text(json.dumps(details) + "\n", encoding="utf-8")
            result["step_errors"] = step_errors([step for each in details for step in each["steps"]])
        if options.out:
            options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    result["largest_errors"] = largest_errors(result["rates"])
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({key: value for key, value in result.items() if key != "profile"}))


class WallClock:
    """Time as a client sees it."""

    def now(self) -> float:
        """Seconds from any moment on."""
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)


class ProcessorClock(WallClock):
    """Time in which this process computes, and in which it would have waited."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._waited = 0.0

    def now(self) -> float:
        """Seconds from any moment on."""
        return time.process_time() + self._waited

    def sleep(self, seconds: float) -> None:
        """Skip so many seconds."""
        self._waited += seconds


def request_sizes(options: argparse.Namespace, context: int) -> list[tuple[int, int]]:
    """Prompt and new tokens of requests, cut to the context."""
    if options.trace:
        sizes = [(request.input_tokens, request.output_tokens) for request in read_trace(options.trace)]
    else:
        draw = random.Random(1)
        means = options.prompt, options.new
        sizes = [tuple(draw.randint(1 + mean // 2, 3 * mean // 2) for mean in means) for _ in range(CAPACITY_REQUESTS)]
    return [(min(prompt, context - 2), max(1, min(new, context - prompt - 1))) for prompt, new in sizes]


def arriving(lengths: Sequence[tuple[int, int]], rate: float, seconds: float, seed: int) -> list[TimedRequest]:
    """Poisson arrivals within so many seconds; sizes in turn."""
    draw, now, requests = random.Random(seed), 0.0, []
    while True:
        now += draw.expovariate(rate)
        if now > seconds and len(requests) > 1:
            return requests
        requests.append(TimedRequest(now, *lengths[(len(requests) + 977 * seed) % len(lengths)]))


def highest_rate(
    deployment: Deployment, costs: ServeCosts, limits: ServeLimits, lengths: Sequence[tuple[int, int]]
) -> float:
    """The highest rate with the attainment of `limits`, within 2%."""

    def meets(rate: float) -> bool:
        requests = arriving(lengths, rate, CAPACITY_REQUESTS / rate, seed=99)
        return simulate(deployment, requests, costs, limits).attainment >= limits.attainment

    low, high = 0.01, 0.02
    while meets(high):
        low, high = high, 2 * high
    while high > 1.02 * low:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if meets(middle) else (low, middle)
    return low


def serve(engine: Engine, requests: Sequence[TimedRequest], clock: WallClock) -> list[RequestTimes]:
    """Submit each request when it is due and compute steps in between; the times of all. Raises RuntimeError if one fails."""
    draw = random.Random(7)
    prompts = [[draw.randrange(engine.spec.vocab_size) for _ in range(request.input_tokens)] for request in requests]
    times, index_of, sent = [RequestTimes(request) for request in requests], {}, 0
    gc.collect()
    gc.freeze()
    start = clock.now()
    while sent < len(times) or engine.unfinished:
        now = clock.now() - start
        while sent < len(times) and requests[sent].arrival_seconds <= now:
            sampling = SamplingOptions(temperature=0.6, seed=sent)
            number = engine.submit(prompts[sent], new_tokens=requests[sent].output_tokens, sampling=sampling)
            index_of[number], sent = sent, sent + 1
        if not engine.unfinished:
            clock.sleep(max(0.0, requests[sent].arrival_seconds - now))
            continue
        updates = engine.step()
        now = clock.now() - start
        for update in updates:
            if update.error is not None:
                raise RuntimeError(update.error)
            if update.tokens:
                each = times[index_of[update.number]]
                each.first_token, each.end = min(each.first_token, now), now
    return times


def summary(served: ServedDeployment) -> dict[str, float]:
    """Attainment, and percentiles in milliseconds."""
    values = {"attainment": served.attainment}
    for name, seconds in (("ttft", served.ttft), ("tpot", served.tpot)):
        values |= {f"{name}_p{round(100 * q)}": 1000 * float(np.quantile(seconds, q)) for q in (0.5, 0.9, 0.99)}
    return values


def step_figures(step: TimedStep, times: InstanceStepTimes) -> dict[str, Any]:
    """A step with the seconds that it took on the device and those of the cost model."""
    seconds = step.device_end - step.device_begin
    modelled = times.seconds(step.decodes, step.positions, step.chunks, step.longest)
    return to_plain(step) | {"seconds": seconds, "modelled": modelled}


def request_figures(served: ServedDeployment) -> list[tuple[float, int, int, float, float]]:
    """Of each request its arrival, prompt and new tokens, and when it got the first and the last of these."""
    return [
        (
            each.request.arrival_seconds,
            each.request.input_tokens,
            each.request.output_tokens,
            each.first_token,
            each.end,
        )
        for each in served.requests
    ]


def step_errors(steps: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By type of step: how many there are, their measured and modelled seconds in all, and the step with the largest error."""
    by_type: dict[str, list[dict[str, Any]]] = {}
    for step in steps:
        tokens = sum(chunk["count"] for chunk in step["chunks"])
        chunks = f"{len(step['chunks'])} chunks of {1 << (tokens - 1).bit_length()} tokens at most" if tokens else ""
        decodes = f"{1 << (step['decodes'] - 1).bit_length()} decodes at most" if step["decodes"] else ""
        by_type.setdefault(", ".join(filter(None, (decodes, chunks))), []).append(step)
    return {
        name: {
            "steps": len(alike),
            "seconds": sum(step["seconds"] for step in alike),
            "launch_seconds": sum(step["launch_end"] - step["launch_begin"] for step in alike),
            "modelled": sum(step["modelled"] for step in alike),
            "largest_error": max(alike, key=lambda step: abs(step["seconds"] - step["modelled"])),
        }
        for name, alike in sorted(by_type.items())
    }


def largest_errors(rates: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The largest difference of attainment in points, and the largest relative errors of the 90th percentiles, in percent."""
    pairs = [(each["measured"], each["predicted"]) for each in rates]
    errors = {"attainment_points": max((100 * abs(m["attainment"] - p["attainment"]) for m, p in pairs), default=0.0)}
    for name in ("ttft_p90", "tpot_p90"):
        errors[f"{name}_percent"] = max((100 * abs(p[name] / m[name] - 1) for m, p in pairs), default=0.0)
    return errors


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=list(MODEL_PRESETS), default="llama3-8b")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the command")
    parser.add_argument("--trace", type=Path, help="CSV file with sizes of requests")
    parser.add_argument("--prompt", type=int, default=64, help="mean tokens of a prompt without a trace")
    parser.add_argument("--new", type=int, default=32, help="mean new tokens without a trace")
    parser.add_argument("--ttft", type=float, required=True, help="limit in seconds")
    parser.add_argument("--tpot", type=float, required=True, help="limit in seconds")
    parser.add_argument("--seconds", type=float, default=40.0, help="of arrivals at each rate")
    parser.add_argument("--profile-seconds", type=float, default=60.0)
    parser.add_argument("--processor-time", action="store_true", help="count this process's time only; for a busy CPU")
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--step-tokens", type=int, default=2048)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds")
    parser.add_argument("--steps", type=Path, help="file for all steps and requests")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
