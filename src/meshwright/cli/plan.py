"""`meshwright plan`: chooses the parallel layout of a run, and shows its memory, its time and the reasons.

Needs neither torch nor a GPU.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.cli.options import Arguments, Json, check_writable, load, say, split_arguments
from meshwright.durable.writes import write_durable
from meshwright.events.waiting import FIRST_SECONDS, telling
from meshwright.spec.errors import BadInput

if TYPE_CHECKING:
    from meshwright.cli.plan_answer import PlanAnswer

For = Annotated[
    str | None,
    typer.Option(
        "--for",
        metavar="train",
        help="Answer as `train` would on this machine: with its host memory, refusing a plan file that it refuses.",
    ),
]
IncludeUntrainable = Annotated[
    bool,
    typer.Option(
        "--include-untrainable",
        help="Name the best plan that this release can plan but not train, where it is faster.",
    ),
]
Objective = Annotated[
    str,
    typer.Option(
        metavar="time|cost|training",
        help="What is best: the shortest step, the fewest GPU-hours, or the batch and layout that reach one loss soonest (training).",
    ),
]
CriticalBatch = Annotated[
    float | None,
    typer.Option("--critical-batch", metavar="TOKENS", help="Critical batch size, which --objective training needs."),
]
Tokens = Annotated[
    float | None,
    typer.Option(
        "--tokens",
        metavar="N",
        help="Tokens of the whole training, for days and GPU-hours; default: those of train.steps, if set.",
    ),
]
Price = Annotated[
    float | None,
    typer.Option(
        "--price",
        metavar="MONEY",
        help="Price of one GPU for one hour; without it cluster.price_per_gpu_hour, or the table's price in US dollars.",
    ),
]
Chips = Annotated[
    str | None,
    typer.Option(
        "--chips",
        metavar="CHIP,CHIP,…",
        help="The same job on each chip, on as many devices as the cluster has, the cheapest first; one search for each.",
    ),
]
SoftwareNames = Annotated[
    str | None,
    typer.Option(
        "--software",
        metavar="NAME,NAME,…",
        help="The best layout of the job with other training software, by constants fitted to its published runs, in bf16 or "
        "in a format of these runs that --precision or an fp8 plan.linear allows; `all` for each.",
    ),
]
Precision = Annotated[
    str | None,
    typer.Option(
        "--precision",
        metavar="FORMAT",
        help="The step with matmuls in every format down to this one (bf16, fp8-tensor, fp8-row, fp8-block, mxfp8, nvfp4), for dense "
        "layers and experts; which of them this release can train.",
    ),
]
Features = Annotated[
    bool,
    typer.Option(
        "--features",
        help="What features of other systems' expert parallelism would change in the step, one by one and together.",
    ),
]
Probe = Annotated[
    int | None,
    typer.Option(
        "--probe",
        metavar="N",
        min=1,
        help="Run the N best plans for a few steps each on this machine, and take the fastest measured (3 is a good number).",
    ),
]
Pin = Annotated[
    list[str] | None,
    typer.Option(
        "--pin",
        metavar="KEY=VALUE",
        help="Fix a key of the plan, as plan.KEY=VALUE does, and leave the others to the planner; for several keys, several times.",
    ),
]
Largest = Annotated[
    bool,
    typer.Option(
        "--largest",
        help="The largest model that fits, by more layers and width in the proportions of `model`, for each form of the optimizer's state.",
    ),
]


def plan(
    arguments: Arguments = None,
    pin: Pin = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write the chosen plan as YAML, to edit and pass back.")
    ] = None,
    for_: For = None,
    include_untrainable: IncludeUntrainable = False,
    gpus: Annotated[
        str | None,
        typer.Option("--gpus", metavar="A..B", help="The same job on A GPUs, 2·A, and so on up to B: how it scales."),
    ] = None,
    objective: Objective = "time",
    critical_batch: CriticalBatch = None,
    tokens: Tokens = None,
    price: Price = None,
    chips: Chips = None,
    software: SoftwareNames = None,
    features: Features = False,
    precision: Precision = None,
    probe: Probe = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write the answer as one page with pictures.")
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="With --json: what limits the step and what changes would gain, too.")
    ] = False,
    largest: Largest = False,
    as_json: Json = False,
) -> None:
    """Choose a plan for a run and print what it needs, why it was chosen, what limits it, and what a change would gain.

    No file is needed for a question. The chosen plan is one that this release can train, unless pins or a plan file ask for another, which
    is marked "planned only". Devices stay idle where a part of them takes a shorter step; the answer names that part.

    With --json: `name`, `plan`, `predicted`, `alternatives`, `search_seconds`, `sources`; `expense` (money, energy, days), `chips`,
    `software`, `features` and `formats` (--precision); `fixed` (the keys of the plan that the user
    fixed), `idle`, `does_not_fit` and `untrainable` where they apply. With --largest: `family`, `device_bytes_usable`,
    `host_bytes_usable`, `largest`; no other option is allowed.

    Exit codes: 0 a plan, 2 bad input or no layout, 3 nothing fits (with what would make it fit).

    Examples:

        meshwright plan run.yaml

        meshwright plan model=llama3-8b cluster.gpu=H100 cluster.nodes=4 cluster.gpus_per_node=8 train.seq_len=8192 train.global_batch=64

        meshwright plan run.yaml --pin pipeline=2 --out plan.yaml

        meshwright plan run.yaml --probe 3 --out plan.yaml

        meshwright plan --largest model=llama3-8b cluster.gpu=H200 train.global_batch=1 train.seq_len=2048

        meshwright plan run.yaml --gpus 8..1024 --html scaling.html

        meshwright plan run.yaml --gpus 64..1024 --objective training --critical-batch 4e6 --tokens 1e12 --price 2.5

        meshwright plan run.yaml --chips H100,H200,B200 --software torchtitan,megatron-bridge --tokens 1e12

        meshwright plan serve.yaml --out deployment.yaml

    A file with `serve` asks for a serving deployment. With --json: `instances`, `goodput_per_gpu`, `low`, `high`, `binding`,
    `alternatives`, `margin_over_colocated`, `search_seconds`, `fewest` (the instances on the fewest devices that serve the workload's
    own rate).
    """
    from meshwright.config.deployment_file import asks_for_deployment

    arguments = [*(arguments or []), *map(_override, pin or [])]
    given = {
        "--for": for_,
        "--include-untrainable": include_untrainable,
        "--gpus": gpus,
        "--objective": objective != "time",
        "--critical-batch": critical_batch,
        "--tokens": tokens,
        "--price": price,
        "--chips": chips,
        "--software": software,
        "--features": features,
        "--precision": precision,
        "--probe": probe,
        "--explain": explain,
    }
    if largest:
        _print_largest(arguments, {**given, "--out": out, "--html": html}, as_json=as_json)
        return
    if asks_for_deployment(*split_arguments(arguments)):
        from meshwright.cli.plan_deployment import answer_deployment

        answer_deployment(
            arguments, out, html, as_json=as_json, refused=[name for name, value in given.items() if value]
        )
        return
    from meshwright.cli.plan_answer import PlanQuestion, answer_question
    from meshwright.cli.plan_words import remarks
    from meshwright.launch.prepare import with_vocabulary
    from meshwright.planner.candidate import idle_fields

    question = PlanQuestion.of(
        for_,
        gpus,
        objective,
        critical_batch,
        tokens,
        price,
        probe,
        include_untrainable,
        _steps_assumed(arguments),
        chips,
        software,
        features,
        precision,
    )
    check_writable("--out", out)
    check_writable("--html", html)
    run = load(arguments, starts=False)
    for remark in remarks(run):
        say(remark)
    with telling("measuring plans" if probe else "searching for a plan", say):
        answer = answer_question(run if probe else with_vocabulary(run), question, note=say)
    for remark in idle_fields(answer.plan):
        say(remark)
    if question.chips and answer.search_seconds >= FIRST_SECONDS:
        count = len(question.chips)
        say(f"--chips: {count} more searches of about {answer.search_seconds:.0f} s")
    with telling("preparing the answer", say):
        _write_answer(answer, out, html, as_json=as_json, explain=explain)


def _write_answer(answer: PlanAnswer, out: Path | None, html: Path | None, *, as_json: bool, explain: bool) -> None:
    """Write the plan and the page, and print the answer. Some of its parts are searched for only now."""
    from meshwright.launch.prepare import plan_yaml

    if out is not None:
        write_durable(out, plan_yaml(answer.plan))
    if html is not None:
        from meshwright.cli.plan_html import page

        write_durable(html, page(answer))
    if as_json:
        from meshwright.cli.plan_json import as_plain

        print(json.dumps(as_plain(answer, explain=explain)))
    else:
        from meshwright.cli.plan_text import show

        show(answer)


def _print_largest(arguments: list[str] | None, given: dict[str, object], *, as_json: bool) -> None:
    """Print the answer of --largest. Raises BadInput if any option in `given` has a value, because none can be combined with it."""
    from meshwright.cli.plan_largest import largest_as_plain, largest_as_text

    if refused := [name for name, value in given.items() if value]:
        raise BadInput(f"--largest cannot be combined with {' and '.join(refused)}")
    run = load(arguments, starts=False)
    if as_json:
        print(json.dumps(largest_as_plain(run)))
    else:
        print("\n".join(largest_as_text(run)))


def _steps_assumed(arguments: list[str] | None) -> bool:
    """Return whether neither a run file nor an override gives the number of steps."""
    return not any("=" not in word or word.startswith("train.steps=") for word in arguments or ())


def _override(pin: str) -> str:
    """Return the override `plan.KEY=VALUE` for the value of a --pin. Raises BadInput if it is not KEY=VALUE."""
    if "=" not in pin:
        raise BadInput(f"--pin {pin}: expected KEY=VALUE with a key of the plan, such as tensor=2")
    return f"plan.{pin.removeprefix('plan.')}"
