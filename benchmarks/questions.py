"""Asks the planner random questions over all chips and checks its answers: `make bench-questions` (500 questions, half an hour of a core).

    python benchmarks/questions.py --first 500 --questions 20
    python benchmarks/questions.py --log questions.jsonl        # continues an earlier run

A question is a random run of benchmarks/random_pins.py with random pins and options of `meshwright plan`: matmuls in
fp8, adapters, other software, other chips, formats, the features of other systems. An answer is at fault if

* it cannot be printed, written as JSON and drawn, or ends in anything but a plan or a reason;
* the sizes, bytes and seconds of the plan do not belong together;
* a step uses more than `MOST_UTILISED` of the peaks of the formats that it multiplies in;
* a sentence of `why`, a limit, a runner-up or a change says what a new computation denies: memory and steps are computed again for the
  plan without the setting, and a search with the other value pinned, or on the changed cluster, checks `SEARCHED` claims of each answer.

Torch is not needed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from math import inf, isclose, prod
from pathlib import Path
from random import Random
from typing import Any

from random_pins import ALL, CHOICES, LIMITS, PINS, random_run

from meshwright.cli.options import load
from meshwright.cli.plan_answer import PlanAnswer, PlanQuestion, answer_question
from meshwright.cli.plan_html import page
from meshwright.cli.plan_json import as_plain
from meshwright.cli.plan_text import show
from meshwright.cli.plan_words import expense_sentences
from meshwright.costs.software import SOFTWARE
from meshwright.families.registry import MODEL_PRESETS
from meshwright.launch.prepare import with_vocabulary
from meshwright.planner.candidate import compared_seconds, fits, memory_budget, untrainable
from meshwright.planner.explain import limits
from meshwright.planner.precision_choice import MATMUL_FORMATS, format_named
from meshwright.planner.reprice import reprice
from meshwright.planner.search import search
from meshwright.simulator.step_simulation import host_bytes
from meshwright.spec.chips import CHIPS
from meshwright.spec.errors import BadInput, MeshwrightError, OutOfResources
from meshwright.spec.model import flops_per_token, sequence
from meshwright.spec.plan import Plan
from meshwright.spec.plan_keys import PlanKeys
from meshwright.spec.run import RunSpec

MOST_UTILISED = 0.75
"""Largest share of the peaks of its formats that a step may use."""
SEARCHED = 2
"""Claims of an answer that a search checks."""
SAME = LIMITS["pins"]
"""Relative difference of two steps that the search does not tell apart with certainty."""
CHANGED = 0.05
"""Share by which a search's step on a changed cluster may be longer than the claimed one: the search has a regret on that cluster too."""
ROUNDED = 0.06
"""Relative difference between a number in a sentence, which has two or three digits, and the exact number."""
CHOICE_PINS = {"pipeline", "tensor", "replicate", "expert ranks", "schedule", "micro-batch", "context"}


@dataclass(frozen=True)
class Asked:
    """A question: the words of the run and the options of `meshwright plan`."""

    words: tuple[str, ...]
    options: dict[str, str | bool]

    @property
    def text(self) -> str:
        flags = [f"--{key}" if value is True else f"--{key} {value}" for key, value in self.options.items()]
        return " ".join(["meshwright plan", *self.words, *flags])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--questions", type=int, default=500)
    parser.add_argument("--workers", type=int, default=1, help="processes that ask")
    parser.add_argument("--minutes", type=float, default=inf, help="start no further question after this time")
    parser.add_argument("--log", type=Path, help="file of JSON lines; seeds that it has are not asked again")
    options = parser.parse_args()
    start, found = time.monotonic(), read_log(options.log)
    seeds = [seed for seed in range(options.first, options.first + options.questions) if seed not in found]
    with ProcessPoolExecutor(options.workers) as pool:
        answers = {pool.submit(outcome_of, seed): seed for seed in seeds}
        for answer in as_completed(answers):
            if answer.cancelled():
                continue
            seed = answers[answer]
            found[seed] = answer.result()
            for fault in found[seed]["faults"]:
                print(f"{seed}: {fault}\n    {found[seed]['question']}", flush=True)
            if options.log:
                with options.log.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"seed": seed, **found[seed]}) + "\n")
            if time.monotonic() - start > 60 * options.minutes:
                for other in answers:
                    other.cancel()
    faulty = sum(bool(entry["faults"]) for entry in found.values())
    utilised = max((entry["utilised"] for entry in found.values()), default=0.0)
    ends = {end: sum(entry["end"] == end for entry in found.values()) for end in ("plan", "refused", "does not fit")}
    overstated = sorted(share for entry in found.values() for share in entry["overstated"])
    if overstated:
        median, ninth = (overstated[int(share * (len(overstated) - 1))] for share in (0.5, 0.9))
        print(
            f"{len(overstated)} values of options, by their search: the plan is by {median:.1%} (median) and {ninth:.1%} (90%) "
            "of its step less ahead than `why` says"
        )
    print(
        f"{len(found)} questions: {', '.join(f'{count} {end}' for end, count in ends.items())}; "
        f"{sum(entry['claims'] for entry in found.values())} claims checked; at most {utilised:.2f} of the peaks; {faulty} answers at fault"
    )
    sys.exit(faulty > 0)


def read_log(log: Path | None) -> dict[int, dict]:
    lines = log.read_text(encoding="utf-8").splitlines() if log and log.exists() else []
    return {line.pop("seed"): line for line in map(json.loads, lines)}


def outcome_of(seed: int) -> dict:
    """The question of a seed, how its answer ends, its faults, the claims checked, and the largest utilisation."""
    asked, generator = question_of(seed), Random(f"claims {seed}")
    outcome = {"question": asked.text, "end": "plan", "faults": [], "claims": 0, "utilised": 0.0, "overstated": []}
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            answer = answered(asked)
            checks = [
                *plan_checks(answer),
                *use_checks(answer),
                *why_checks(answer, generator, outcome["overstated"]),
                *limit_checks(answer),
            ]
            checks += change_checks(answer, generator)
    except OutOfResources as refusal:
        return {
            **outcome,
            "end": "does not fit",
            "reason": str(refusal),
            "faults": [] if str(refusal) else ["no reason"],
        }
    except MeshwrightError as refusal:
        return {**outcome, "end": "refused", "reason": str(refusal), "faults": [] if str(refusal) else ["no reason"]}
    except Exception:  # a crash is what this script looks for
        return {**outcome, "end": "crash", "faults": [traceback.format_exc(limit=-4)]}
    utilised = max((share for _, share in uses(answer)), default=0.0)
    return {**outcome, "faults": [fault for fault in checks if fault], "claims": len(checks), "utilised": utilised}


def question_of(seed: int) -> Asked:
    """The random question of a seed."""
    generator = Random(f"question {seed}")
    words = random_run(generator, {**CHOICES, **ALL})
    chip = CHIPS[words[1].removeprefix("cluster.gpu=")]
    length = next(int(word.removeprefix("train.seq_len=")) for word in words if word.startswith("train.seq_len="))
    if MODEL_PRESETS[words[0].removeprefix("model=")].get("max_seq_len", 0) < length:
        words.append(f"model.max_seq_len={length}")
    words += [
        f"plan.{key}={generator.choice(PINS[key])}"
        for key in generator.sample(list(PINS), generator.choice((0, 0, 0, 1)))
    ]
    if "fp8" in chip.peak_flops and generator.random() < 0.25:
        words.append(f"plan.linear={generator.choice(('fp8_tensorwise', 'fp8_rowwise'))}")
    if generator.random() < 0.15:
        words += [f"model.adapter.rank={generator.choice((8, 64))}", "model.adapter.targets=[all-linear]"]
    if generator.random() < 0.2:
        words.append(f"train.optimizer.name={generator.choice(('lamb', 'muon', 'sgd'))}")
    options: dict[str, str | bool] = {}
    if generator.random() < 0.25:
        names = [software.name for software in SOFTWARE if software.name != "meshwright"]
        options["software"] = ",".join(generator.sample(names, 2))
    if generator.random() < 0.25:
        options["precision"] = generator.choice(MATMUL_FORMATS).name
    if generator.random() < 0.1:
        options["chips"] = ",".join(generator.sample(ALL["cluster.gpu"], 2))
    if MODEL_PRESETS[words[0].removeprefix("model=")].get("experts") and generator.random() < 0.3:
        options["features"] = True
    if generator.random() < 0.3:
        options["tokens"] = generator.choice(("1e9", "1e12", "15e12"))
    return Asked(tuple(words), options)


def answered(asked: Asked) -> PlanAnswer:
    """The answer, after it was printed, drawn and written as JSON. Raises what these and the planner raise."""
    options = dict(asked.options)
    tokens = options.pop("tokens", None)
    question = PlanQuestion.of(
        None, None, "time", None, None if tokens is None else float(tokens), None, steps_assumed=True, **options
    )
    answer = answer_question(with_vocabulary(load(list(asked.words))), question)
    with contextlib.redirect_stdout(io.StringIO()):
        show(answer)
    page(answer)
    json.dumps(as_plain(answer, explain=True))
    return answer


def plan_checks(answer: PlanAnswer) -> Iterator[str]:
    """Whether the sizes, bytes and seconds of the plan belong together."""
    run, plan, predicted = answer.run, answer.plan, answer.plan.predicted
    batch = plan.batch
    yield _unless(
        prod(axis.size for axis in plan.mesh) == run.cluster.ranks, "the mesh has other ranks than the cluster"
    )
    yield _unless(
        batch.micro_batch * batch.accumulate * plan.data_ranks == run.train.global_batch,
        "the micro-batches are not the batch",
    )
    if predicted is None:
        return
    yield _unless(
        sum(predicted.memory_bytes.values()) == predicted.memory_peak_bytes, "memory is not the sum of its parts"
    )
    yield _unless(fits(run, plan, memory_budget(run)), "the chosen plan does not fit")
    if predicted.step_seconds is None or predicted.breakdown is None:
        return
    parts = predicted.breakdown
    total = parts.compute + sum(parts.exposed.values()) + parts.bubble + parts.host
    yield _unless(isclose(total, predicted.step_seconds, rel_tol=1e-6), "the step is not the sum of its parts")
    yield _unless(
        min(parts.compute, parts.bubble, parts.host, *parts.exposed.values(), 0.0) > -1e-9,
        "a part of the step is negative",
    )
    yield _unless(
        (predicted.low_seconds or 0) <= predicted.step_seconds <= (predicted.high_seconds or 0),
        "the step is outside its band",
    )
    again = reprice(run, replace(plan, predicted=None)).predicted
    yield _unless(
        again is not None and isclose(again.step_seconds or 0, predicted.step_seconds, rel_tol=1e-6),
        "the step is another when priced again",
    )
    spent = answer.expense
    if spent is not None and spent.days is not None and spent.gpu_hours is not None:
        yield _unless(
            isclose(spent.gpu_hours, 24 * spent.days * plan.ranks, rel_tol=1e-3), "GPU-hours are not days × GPUs"
        )
        yield _unless(
            answer.idle is None or any("idle" in sentence for sentence in expense_sentences(spent, answer.idle)),
            "GPU-hours leave out idle devices and do not say so",
        )


def use_checks(answer: PlanAnswer) -> Iterator[str]:
    """Whether each priced step stays below `MOST_UTILISED` of the peaks of its formats."""
    for name, share in uses(answer):
        yield _unless(share <= MOST_UTILISED, f"{name} uses {share:.0%} of the peak")


def uses(answer: PlanAnswer) -> Iterator[tuple[str, float]]:
    """Every priced step of the answer, with its share of the peaks of the formats used."""
    run, plan = answer.run, answer.plan
    if plan.predicted is None or not plan.predicted.step_seconds:
        return
    peaks = CHIPS[run.cluster.gpu].peak_flops
    wide = plan.precision.compute
    linear = matmuls_of(plan)
    yield "the plan", seconds_at_peak(run, wide, linear) / plan.predicted.step_seconds
    for entry in answer.formats:
        narrowest = max(
            (format_named(name).number_format for name in (entry.dense, entry.experts)), key=lambda name: peaks[name]
        )
        yield f"{entry.dense} with experts in {entry.experts}", seconds_at_peak(run, "bf16", narrowest) / entry.seconds
    for entry in answer.software:
        if entry.seconds:
            matmuls = format_named(entry.precision).number_format
            yield entry.software, seconds_at_peak(answer.asked_run, "bf16", matmuls) / entry.seconds
    for entry in answer.features:
        yield entry.feature, seconds_at_peak(run, wide, entry.alone_matmuls or linear) / entry.alone
        yield entry.feature, seconds_at_peak(run, wide, entry.together_matmuls or linear) / entry.together
    for point in answer.chips:
        if point.point.answer is not None and point.point.seconds:
            chosen = point.point.answer.best.plan
            peak_seconds = seconds_at_peak(point.point.run, chosen.precision.compute, matmuls_of(chosen))
            yield point.chip, peak_seconds / point.point.seconds


def matmuls_of(plan: Plan) -> str:
    """The format with the highest peak that a plan's linear layers multiply in."""
    low = any((layer.linear or plan.precision.linear) != "compute" for layer in plan.layers)
    return "fp8" if low else plan.precision.compute


def seconds_at_peak(run: RunSpec, wide: str, linear: str) -> float:
    """Seconds of a step's model FLOPs at the peaks of two formats: `linear` for linear layers in blocks, `wide` for all else."""
    peaks = CHIPS[run.cluster.gpu].peak_flops
    blocks = sum(
        entry.count * (4.0 if (table := entry.block.table()).frozen else 6.0) * table.multiplications
        for entry in sequence(run.model)
    )
    total = flops_per_token(run.model, run.train.seq_len, causal=True)
    tokens = run.train.global_batch * run.train.seq_len / run.cluster.ranks
    return tokens * (blocks / peaks[linear] + (total - blocks) / peaks[wide])


def why_checks(answer: PlanAnswer, generator: Random, overstated: list[float]) -> list[str]:
    """Faults of the sentences of `why`; claims that need a search are drawn. `overstated`: see `compared`."""
    run, plan = answer.run, answer.plan
    checks: list[str] = []
    searches: list[Callable[[], str]] = []
    for sentence in plan.why:
        checks += [check(run, plan, sentence) for check in (check_recompute, check_reshard, check_host_bytes)]
        searches += [*compared(run, answer, sentence, overstated), *without_offload(run, answer, sentence)]
    checks += list(runner_up_checks(answer))
    drawn = generator.sample(searches, min(SEARCHED, len(searches)))
    return [*(check for check in checks if check is not None), *(search_claim() for search_claim in drawn)]


def check_recompute(run: RunSpec, plan: Plan, sentence: str) -> str | None:
    """`recompute MODE on LAYERS: without it …`."""
    if not re.match(r"recompute .*: without it ", sentence):
        return None
    kept = replace(plan, layers=tuple(replace(layer, recompute="none") for layer in plan.layers))
    return _check_without(run, plan, kept, sentence, "do not fit into memory", "a step is no faster")


def check_reshard(run: RunSpec, plan: Plan, sentence: str) -> str | None:
    """`weights freed after the forward and gathered again …`."""
    if not sentence.startswith("weights freed after the forward"):
        return None
    kept = replace(plan, layers=tuple(replace(layer, reshard=False) for layer in plan.layers))
    return _check_without(run, plan, kept, sentence, "would not fit into memory", "keeping them gathered is no faster")


def _check_without(run: RunSpec, plan: Plan, other: Plan, sentence: str, too_large: str, no_faster: str) -> str:
    fitting = fits(run, other, memory_budget(run))
    if too_large in sentence:
        return _unless(not fitting, f"it fits: {sentence}")
    if no_faster in sentence:
        seconds = step_of(reprice(run, other))
        return _unless(
            fitting and seconds >= step_of(plan) * (1 - SAME),
            f"without it {seconds:.4g} s, {step_of(plan):.4g} s with: {sentence}",
        )
    return f"not understood: {sentence}"


def check_host_bytes(run: RunSpec, plan: Plan, sentence: str) -> str | None:
    """`activations take N GB of each host's memory`."""
    found = re.match(
        r"(activations take|the optimizer takes|sums of gradients take) ([\d.]+) GB of each host's", sentence
    )
    if not found:
        return None
    labels = ("activations take", "the optimizer takes", "sums of gradients take")
    size = dict(zip(labels, host_bytes(run.model, run.train, plan, run.cluster.nodes), strict=True))[found[1]]
    return _unless(abs(size / 1e9 - float(found[2])) <= 0.051, f"{size / 1e9:.1f} GB: {sentence}")


def compared(run: RunSpec, answer: PlanAnswer, sentence: str, overstated: list[float]) -> Iterator[Callable[[], str]]:
    """Checks of `OPTION VALUE: the best plan found with OTHER takes X longer` by a search with the other value pinned.

    Appends to `overstated` how much of X that search saves, relative to the step.
    """
    head, _, claims = sentence.partition(": the best plan found ")
    option = next((name for name in CHOICE_PINS if claims and name_of(head) == name), None)
    if option is None or step_of(answer.plan) == inf:
        return
    for value, number, unit in re.findall(r"(with \S+|without) (?:takes )?([\d.]+) (s|ms) longer", claims):
        seconds = float(number) * (1e-3 if unit == "ms" else 1.0)
        other = 1 if value == "without" else value.removeprefix("with ")

        def check(other: object = other, seconds: float = seconds) -> str:
            found = min((seconds_with(run, pins) for pins in pins_for(option, other)), default=inf)
            best = compared_seconds(run, answer.best)
            overstated.append((best + seconds - min(found, best + seconds)) / best)
            return _unless(
                found >= best * (1 - SAME), f"{option} {other} takes {found:.4g} s, the plan {best:.4g} s: {sentence}"
            )

        yield check


def name_of(head: str) -> str:
    """The option that the beginning of a sentence names: "tensor 4" or "no tensor ranks"."""
    singles = {
        "no pipeline": "pipeline",
        "no tensor ranks": "tensor",
        "no context ranks": "context",
        "no replicas": "replicate",
        "all experts on each rank": "expert ranks",
    }
    return singles.get(head) or head.rpartition(" ")[0]


def pins_for(option: str, value: object) -> Iterator[dict[str, Any]]:
    """The pins under which a search has only plans with this value of an option."""
    number = int(str(value)) if str(value).isdigit() else value
    if option == "context":
        sizes = [ring for ring in range(1, int(str(value)) + 1) if int(str(value)) % ring == 0]
        yield from ({"context_ring": ring, "context_ulysses": int(str(value)) // ring} for ring in sizes)
    else:
        yield {{"expert ranks": "expert", "micro-batch": "micro_batch"}.get(option, option): number}


def seconds_with(run: RunSpec, pins: dict[str, Any], *, penalised: bool = True) -> float:
    """Seconds of the best trainable plan with further pins, times offload's factor if `penalised`; infinite where there is none."""
    keys = run.plan if isinstance(run.plan, PlanKeys) else PlanKeys()
    try:
        best = search(replace(run, plan=replace(keys, **pins))).best
    except (BadInput, OutOfResources):
        return inf
    if untrainable(best.plan):
        return inf
    return compared_seconds(run, best) if penalised else best.seconds


def without_offload(run: RunSpec, answer: PlanAnswer, sentence: str) -> Iterator[Callable[[], str]]:
    """A check of `offload PART on LAYERS: without it only a slower plan fits`."""
    if re.match(r"offload .*: without it only a slower plan fits", sentence) and step_of(answer.plan) < inf:
        best = compared_seconds(run, answer.best)

        def check() -> str:
            found = seconds_with(run, {"offload": "none"})
            return _unless(found >= best * (1 - SAME), f"{found:.4g} s without, {best:.4g} s with: {sentence}")

        yield check


def runner_up_checks(answer: PlanAnswer) -> Iterator[str]:
    """Whether the difference that is named for a runner-up is that of the two steps."""
    for other in answer.others:
        found = re.match(r"\+([\d.]+) (s|ms)", answer.why_not(other))
        if found and other.simulated and answer.best.simulated:
            seconds = float(found[1]) * (1e-3 if found[2] == "ms" else 1.0)
            difference = step_of(other.plan) - step_of(answer.plan)
            yield _unless(
                abs(difference - seconds) <= 0.0051 + ROUNDED * abs(difference),
                f"a runner-up is {difference:.4g} s slower, not {seconds:g}",
            )


def limit_checks(answer: PlanAnswer) -> Iterator[str]:
    """Whether what limits the step adds up."""
    step = step_of(answer.plan)
    for limit in limits(answer.run, answer.plan):
        yield _unless(0 < limit.seconds <= step * (1 + 1e-9), f"a limit is longer than the step: {limit.text}")
        found = re.search(r"needs ([\d.]+) GB, ([\d.]+) GB more than the usable ([\d.]+) GB", limit.text)
        if found:
            need, over, usable = map(float, found.groups())
            yield _unless(abs(need - over - usable) <= 0.16, f"does not add up: {limit.text}")


def change_checks(answer: PlanAnswer, generator: Random) -> list[str]:
    """Whether more of the cluster harms nobody, and a search on one changed cluster is not slower than was claimed."""
    helpful = [change for change in answer.changes if re.match(r"twice the (network|links|memory)", change.name)]
    checks = [_unless(change.gain >= -1e-6, f"{change.name}: {change.gain:+.1%}") for change in helpful]
    memory = answer.run.cluster.memory_bytes()
    roomy = [change for change in helpful if change.name.startswith("twice the memory") and memory]
    if roomy and memory and generator.random() < 0.5:
        cluster = replace(answer.run.cluster, memory_gib=2 * memory / 2**30)
        found = seconds_with(replace(answer.run, cluster=cluster), {}, penalised=False)
        checks.append(
            _unless(
                found <= roomy[0].seconds * (1 + CHANGED),
                f"{roomy[0].name}: {roomy[0].seconds:.4g} s claimed, a search finds {found:.4g}",
            )
        )
    return checks


def step_of(plan: Plan) -> float:
    """Predicted seconds of the plan's step; infinite where they are not known."""
    return inf if plan.predicted is None or plan.predicted.step_seconds is None else plan.predicted.step_seconds


def _unless(holds: bool, fault: str) -> str:
    return "" if holds else fault


if __name__ == "__main__":
    main()
