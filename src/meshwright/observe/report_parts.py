"""Parts of a report other than charts: headline figures, the picture of the plan, memory, samples, tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from meshwright.events.start import start_line
from meshwright.observe import number_text, page
from meshwright.observe.report_charts import RECENT_VALUES, recent_mean, steady_median
from meshwright.observe.runfolder import RunFolder, column, number
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.layout import Layout
from meshwright.spec.plan import LayerStrategy, Plan
from meshwright.spec.plan_name import axis_with_term, divides_weights, plan_name, zero_stage

MOST_RANKS_DRAWN = 128
"""Most ranks in the picture of a plan, rounded to whole nodes."""
MOST_ROWS = 200
"""Most lines of a table."""
LONG_LABEL = 16
"""The label of a table line wraps if it has more characters than this."""
SHORT_NAMES = {"context_ring": "ring", "context_ulysses": "Ulysses"}
"""Short names of axes for the narrow boxes of ranks."""
MOST_SAMPLES = 12
"""Most generated samples that are shown."""
SAMPLE_CHARACTERS = 3000
"""Most characters of a sample that are shown."""
_BLANK_LINES = re.compile(r"\n(?:[^\S\n]*\n){2,}")
"""Matches several blank lines in a row."""
CONFIG_CHARACTERS = 60_000
"""Most characters of the configuration that are shown."""


def tiles(run: RunFolder) -> str:
    """Return the headline figures, each with a line of context. Unknown figures are left out."""
    tiles_or_none = [
        _loss_tile(run),
        _validation_tile(run),
        _accuracy_tile(run),
        _speed_tile(run),
        _mfu_tile(run),
        _token_tile(run),
        _time_tile(run),
    ]
    tiles_or_none.append(_parameter_tile(run))
    cells = [
        f'<div class="tile"><dt>{escape(label)}</dt><dd>{escape(value)}</dd><dd class="sub">{escape(context)}</dd></div>'
        for label, value, context in (tile for tile in tiles_or_none if tile)
    ]
    return f'<dl class="tiles">{"".join(cells)}</dl>' if cells else ""


Tile = tuple[str, str, str] | None
"""(name, value, context) of a headline figure; None if it is unknown."""


def _loss_tile(run: RunFolder) -> Tile:
    losses = [value for value in column(run.steps, "loss") if value is not None]
    if (mean := recent_mean(losses)) is None:
        return None
    count = min(len(losses), RECENT_VALUES)
    context = f"of step {run.steps[-1]['step']:,}; mean of the last {count}: {mean:.3f}" if count > 1 else "one step"
    return "Training loss", f"{losses[-1]:.3f}", context


def _validation_tile(run: RunFolder) -> Tile:
    known = [record for record in run.validations if number(record.get("loss")) is not None]
    loss = number(known[-1]["loss"]) if known else number(run.summary.get("held_out_loss"))
    if loss is None:
        return None
    bits = number(known[-1].get("bits_per_byte")) if known else None
    words = [f"of step {known[-1]['step']:,}" if known else "nat per token"]
    words += [f"{bits:.3f} bits per byte"] if bits is not None else []
    entropy = number(run.summary.get("unigram_entropy_nats"))
    if entropy is not None:
        words.append(f"{abs(entropy - loss):.2f} {'below' if loss < entropy else 'above'} unigram entropy")
    return "Validation loss", f"{loss:.3f}", "; ".join(words)


def _accuracy_tile(run: RunFolder) -> Tile:
    """Return the accuracy of held-out answers now and at the first validation."""
    known = [
        (record["step"], value) for record in run.validations if (value := number(record.get("accuracy"))) is not None
    ]
    if not known:
        return None
    margin = number(run.validations[-1].get("margin"))
    words = [f"of step {known[-1][0]:,}"]
    words += [f"{known[0][1]:.1%} after step {known[0][0]:,}"] if len(known) > 1 else []
    words += [f"margin {margin:.3g}"] if margin is not None else []
    error = number(run.validations[-1].get("calibration_error"))
    words += [f"calibration error {error:.3f}"] if error is not None else []
    return "Held-out accuracy", f"{known[-1][1]:.1%}", "; ".join(words)


def _speed_tile(run: RunFolder) -> Tile:
    speed = steady_median(column(run.steps, "tokens_per_second"))
    if speed is None:
        return None
    ranks = run.plan.ranks if run.plan else 1
    context = (
        f"tokens/s, {number_text.short(speed / ranks)} on each of {ranks} ranks" if ranks > 1 else "tokens/s, median"
    )
    return "Throughput", number_text.short(speed), context


def _mfu_tile(run: RunFolder) -> Tile:
    mfu = steady_median(column(run.steps, "mfu"))
    if mfu is None:
        return None
    full = steady_median(column(run.steps, "mfu_full"))
    return (
        "MFU",
        number_text.percent(mfu),
        f"{number_text.percent(full)} with full attention" if full else "model FLOPs over peak",
    )


def _token_tile(run: RunFolder) -> Tile:
    tokens = [value for value in column(run.steps, "tokens") if value is not None]
    return ("Tokens", number_text.short(tokens[-1]), f"in {run.steps[-1]['step']:,} steps") if tokens else None


def _time_tile(run: RunFolder) -> Tile:
    in_steps = sum(value for value in column(run.steps, "step_seconds") if value is not None)
    breakdown = run.goodput
    if breakdown is not None and breakdown.wall_seconds:
        productive = f"{number_text.percent(breakdown.goodput)} productive"
        return "Wall time", number_text.duration(breakdown.wall_seconds), f"of all starts; {productive}"
    return ("Training time", number_text.duration(in_steps), "sum of all steps") if in_steps else None


def _parameter_tile(run: RunFolder) -> Tile:
    parameters = run.parameters
    layers = run.setting("model", "layers")
    hidden = run.setting("model", "hidden")
    shape = f"{layers} layers, width {hidden}" if layers and hidden else "stored weights"
    return ("Parameters", number_text.short(parameters), shape) if parameters else None


def memory(run: RunFolder) -> str:
    """Return the figure of memory: predicted parts above the measured peak on one scale, with the device's limit."""
    reserved, allocated = _peaks(run)
    predicted = _predicted_parts(run.plan)
    if reserved is None and not predicted:
        return ""
    total = sum(size for _, size in predicted)
    limit = _device_memory(run)
    top = 1.04 * max(total, reserved or 0, limit or 0)
    line = f'<span class="limit" style="left:{100 * limit / top:.2f}%"></span>' if limit else ""
    bars = []
    keys = []
    if predicted:
        parts = [
            f'<i class="k{index % 8}" style="width:{100 * size / top:.2f}%" title="{escape(part)}"></i>'
            for index, (part, size) in enumerate(predicted)
        ]
        bars.append(_bar("predicted", number_text.size(total), "".join(parts) + line))
        keys = [
            f'<li class="k{index % 8} column">{escape(name)} <b>{number_text.size(size)}</b></li>'
            for index, (name, size) in enumerate(predicted)
        ]
    if reserved is not None:
        bars.append(
            _measured_bar(reserved, allocated, _comparable_bytes(predicted, allocated=allocated is not None), top, line)
        )
    sentences = [f"The dashed line is the device's memory, {number_text.size(limit)}."] if limit else []
    if allocated is not None and predicted:
        sentences.append("Tensors are compared with the prediction without its framework, which torch does not count.")
    note = f'<p class="aside">{escape(" ".join(sentences))}</p>' if sentences else ""
    return f"""<figure class="card memory">
<figcaption><h3>Memory</h3><span class="unit">largest of a rank</span></figcaption>
<div class="bars">{"".join(bars)}</div><ul class="legend">{"".join(keys)}</ul>{note}</figure>"""


def _peaks(run: RunFolder) -> tuple[float | None, float | None]:
    """Return (peak memory, the part allocated by tensors on a GPU), in bytes; None if unknown.

    They are of rank 0, or of the fullest rank if the run has compared its ranks.
    """
    reserved, allocated = (
        max((value for value in column(run.steps, key) if value is not None), default=None)
        for key in ("memory_peak_bytes", "memory_allocated_peak_bytes")
    )
    fullest = run.prediction_check.memory_bytes.measured if run.prediction_check else 0.0
    if allocated is not None:
        allocated = max(allocated, fullest)
    return (None if reserved is None else max(reserved, fullest)), allocated


def _comparable_bytes(predicted: Sequence[tuple[str, float]], *, allocated: bool) -> float:
    """Return the predicted bytes that can be compared with the measurement. torch does not count the framework's memory."""
    return sum(size for part, size in predicted if not (allocated and part == "framework"))


def _measured_bar(reserved: float, allocated: float | None, expected: float, top: float, line: str) -> str:
    """Return the bar of the measured peak. On a GPU it has two parts: allocated memory, and further reserved memory."""
    compared = reserved if allocated is None else allocated
    error_text = f" ({100 * (compared / expected - 1):+.1f}%)" if expected else ""
    inside = f'<i class="measured" style="width:{100 * compared / top:.2f}%"></i>'
    if allocated is None:
        return _bar("measured peak", number_text.size(compared) + error_text, inside + line)
    reserved_width = 100 * max(0.0, reserved - allocated) / top
    reserved_bar = f'<i class="measured reserved" style="width:{reserved_width:.2f}%" title="reserved besides"></i>'
    text = f"{number_text.size(allocated)}{error_text}, {number_text.size(reserved)} reserved"
    return _bar("measured peak", text, inside + reserved_bar + line)


def _bar(label: str, value: str, inside: str) -> str:
    return f'<p class="bar-label"><span>{escape(label)}</span><b>{escape(value)}</b></p><div class="bar">{inside}</div>'


def _predicted_parts(plan: Plan | None) -> list[tuple[str, float]]:
    """Return (part, bytes) of the plan's predicted memory; one part "all" if only the peak is known."""
    if plan is None or plan.predicted is None:
        return []
    parts = [(part, number(size)) for part, size in plan.predicted.memory_bytes.items()]
    positive = [(str(part), size) for part, size in parts if size is not None and size > 0]
    peak = number(plan.predicted.memory_peak_bytes)
    return positive or ([("all", peak)] if peak else [])


def _device_memory(run: RunFolder) -> float | None:
    gpu = run.setting("cluster", "gpu")
    memory_gib = number(run.setting("cluster", "memory_gib"))
    limit = ClusterSpec(gpu=gpu, memory_gib=memory_gib).memory_bytes() if isinstance(gpu, str) else None
    return float(limit) if limit else None


def plan_picture(run: RunFolder) -> str:
    """Return `plan_section` of the run's plan; empty if the run has no plan."""
    per_node = number(run.setting("cluster", "gpus_per_node"))
    if not run.plan:
        return ""
    return plan_section(run.plan, int(per_node) if per_node and per_node >= 1 else None)


def plan_section(
    plan: Plan,
    ranks_per_node: int | None,
    limit: int = MOST_RANKS_DRAWN,
    facts: Sequence[tuple[str, str]] | None = None,
) -> str:
    """Return a picture of the plan's ranks by node, and the plan's facts and reasons.

    Ranks have the colour of their copy of the model. About `limit` ranks are drawn, rounded to whole nodes. Without
    `ranks_per_node`, all ranks are on one node. `facts` are pairs (label, text); without them, batch, precision and
    strategies are described from the plan alone.
    """
    entries = [("Layout", plan_name(plan)), ("Mesh", _mesh_text(plan))]
    entries += _facts(plan) if facts is None else [(label.capitalize(), text) for label, text in facts]
    table = "".join(f"<tr>{_label_cell(label)}<td>{escape(text)}</td></tr>" for label, text in entries)
    reason_items = "".join(f"<li>{escape(str(reason))}</li>" for reason in plan.why[:MOST_ROWS])
    reasons = f'<h4>Why this plan</h4><ul class="why">{reason_items}</ul>' if reason_items else ""
    mesh = _mesh(plan, ranks_per_node or plan.ranks, limit)
    return f"""<section class="card plan" id="plan"><h2>Plan</h2><div class="pair"><div>{mesh}</div>
<div><table class="facts"><tbody>{table}</tbody></table>{reasons}</div></div></section>"""


def _facts(plan: Plan) -> list[tuple[str, str]]:
    entries = [("Batch", _batch_text(plan)), ("Precision", _precision_text(plan)), *_strategies(plan)[:MOST_ROWS]]
    return [*entries, ("Compiled", "each block, with torch.compile" if plan.compile else "no")]


def _label_cell(label: str) -> str:
    """Return the label cell of a table line. A long list of layer ranges may wrap."""
    wraps = ' class="long"' if len(label) > LONG_LABEL else ""
    return f"<th{wraps}>{escape(label)}</th>"


def _mesh(plan: Plan, ranks_per_node: int, limit: int) -> str:
    """Return the picture of the ranks by node, and its key."""
    layout = Layout.of(plan, ranks_per_node)
    drawn_ranks = min(plan.ranks, max(layout.ranks_per_node, limit // layout.ranks_per_node * layout.ranks_per_node))
    nodes = []
    for first in range(0, min(drawn_ranks, 4 * limit), layout.ranks_per_node):
        ranks = range(first, min(first + layout.ranks_per_node, drawn_ranks))
        boxes = "".join(_rank(layout, rank) for rank in ranks)
        nodes.append(f'<div class="node"><p>node {layout.node(first)}</p><div class="ranks">{boxes}</div></div>')
    hidden = plan.ranks - drawn_ranks
    remark = f'<p class="aside">and {hidden:,} more ranks with the same layout</p>' if hidden > 0 else ""
    picture = f'<div class="mesh" role="img" aria-label="{escape(_mesh_text(plan))}">{"".join(nodes)}</div>'
    return picture + remark + _mesh_key(plan)


def _rank(layout: Layout, rank: int) -> str:
    coordinates = layout.coordinates(rank)
    sizes = dict(layout.axes)
    split_axes = [
        (SHORT_NAMES.get(axis, axis), index) for axis, index in reversed(coordinates.items()) if sizes[axis] > 1
    ]
    coordinates_html = "".join(f"<span>{escape(axis)} {index}</span>" for axis, index in split_axes)
    return f'<div class="rank k{coordinates.get("replicate", 0) % 8}"><b>{rank}</b>{coordinates_html}</div>'


def _mesh_key(plan: Plan) -> str:
    lines = []
    if (copies := plan.axis_size("replicate")) > 1:
        lines.append(f"<li>Ranks of one colour hold one copy of the model; {copies} copies sum their gradients.</li>")
    if (parts := plan.axis_size("shard")) > 1:
        lines.append(f"<li>Each shard index holds 1/{parts} of the weights, gradients and optimizer state.</li>")
    if (parts := plan.axis_size("hybrid")) > 1:
        held = f"1/{parts} of the weights, gradients and optimizer state"
        lines.append(f"<li>Each hybrid index holds {held}; samples, or parts of them, go to any of these ranks.</li>")
    return f'<ul class="key">{"".join(lines)}</ul>' if lines else ""


def _mesh_text(plan: Plan) -> str:
    axes = " × ".join(
        axis_with_term(axis.axis, axis.size, "between nodes" if axis.crosses == "node" else "")
        for axis in plan.mesh
        if axis.size > 1
    )
    return f"{axes or 'one rank'} = {plan.ranks} rank{'s' if plan.ranks > 1 else ''}"


def _batch_text(plan: Plan) -> str:
    batch = plan.batch
    samples_per_rank = batch.micro_batch * batch.accumulate
    data_ranks = batch.global_batch // samples_per_rank if samples_per_rank else 0
    division = f"{data_ranks} ranks × {batch.micro_batch} at a time × {batch.accumulate} accumulated"
    return f"{batch.global_batch} sequences a step = {division}"


def _precision_text(plan: Plan) -> str:
    precision = plan.precision
    low = "" if precision.linear == "compute" else f", its linear layers in {precision.linear}"
    return f"computes in {precision.compute}{low}, sums gradients in {precision.reduce}"


def _strategies(plan: Plan) -> list[tuple[str, str]]:
    """Return (layers, strategy). Layer ranges with the same strategy share one entry."""
    ranges: dict[str, list[str]] = {}
    for strategy in plan.layers:
        ranges.setdefault(_strategy_text(strategy, gathered=divides_weights(plan)), []).append(strategy.range)
    return [
        ("All layers" if layer_ranges == ["all"] else f"Layers {', '.join(layer_ranges)}", text)
        for text, layer_ranges in ranges.items()
    ]


def _strategy_text(strategy: LayerStrategy, *, gathered: bool) -> str:
    """A strategy in words. Where no rank holds a part of the weights (not `gathered`), only copies for compute are freed."""
    weights = {
        1: "kept after forward, gradients kept whole (ZeRO-1)",
        2: "kept after forward (ZeRO-2)",
        3: "freed after forward, gathered again for backward (ZeRO-3)",
    }[zero_stage(strategy)]
    recompute = {
        "none": "no recompute",
        "selective": "selective recompute",
        "all_but_attention": "all but attention recomputed",
        "full": "full recompute",
    }
    linear = f"; linear layers in {strategy.linear}" if strategy.linear else ""
    offloaded = {"none": "", "both": "activations and optimizer"}.get(strategy.offload, strategy.offload)
    host = f"; {offloaded} in host memory" if offloaded else ""
    freed = "copies for compute freed after forward; " if strategy.reshard else ""
    kept = f"parameters {weights}; " if gathered else freed
    return f"{kept}{recompute.get(strategy.recompute, strategy.recompute)}{host}{linear}"


def samples(run: RunFolder) -> str:
    """Return the generated samples, each after its prompt."""
    cards = []
    for sample in run.samples[:MOST_SAMPLES]:
        prompt, text = (str(sample.get(key) or "")[:SAMPLE_CHARACTERS] for key in ("prompt", "text"))
        # samples.json has the whole text. Without this, the text of a model that has learned little could fill pages
        # with blank lines.
        text = _BLANK_LINES.sub("\n\n", text.removeprefix(prompt)).rstrip()
        shown = escape(text) or '<span class="aside">  (white space only)</span>'
        cards.append(f'<pre class="sample"><b>{escape(prompt)}</b>{shown}</pre>')
    return (
        f'<section class="card" id="samples"><h2>Samples</h2><div class="samples">{"".join(cards)}</div></section>'
        if cards
        else ""
    )


def answers(run: RunFolder) -> str:
    """Return a table with answers of the first and the newest recorded steps of an RL run, and their rewards."""
    lines = []
    for record in (*run.answers[:1], *run.answers[1:][-MOST_SAMPLES:]):
        found = record.get("answers")
        shown = [answer for answer in found if isinstance(answer, Mapping)] if isinstance(found, list) else []
        for row, answer in enumerate(shown):
            question = str(record.get("question") or "")[:SAMPLE_CHARACTERS] if row == 0 else ""
            reward = number(answer.get("reward"))
            text = _BLANK_LINES.sub("\n\n", str(answer.get("answer") or ""))[:SAMPLE_CHARACTERS]
            judged = str(answer.get("outcome") or "") if reward is None else f"{reward:.4g}"
            lines.append((f"{record['step']:,}" if row == 0 else "", question, text, judged))
    return page.table("Answers", ("step", "question", "answer", "reward"), lines)


def history(run: RunFolder) -> str:
    """Return tables of passes over the data, checkpoints, starts and events, each with the newest last."""
    checkpoints = [
        f"<tr><td><code>{escape(name)}</code></td><td>{'committed' if committed else 'not committed'}</td></tr>"
        for name, committed in run.checkpoints[-MOST_ROWS:]
    ]
    events = [
        f"<tr><th>step {record['step']:,}</th><td>{escape(str(record.get('text', '')))}</td></tr>"
        for record in run.events[-MOST_ROWS:]
    ]
    starts = [
        f"<tr><th>step {record['step']:,}</th><td>{escape(_start_text(record))}</td></tr>"
        for record in run.starts[-MOST_ROWS:]
    ]
    passes = run.steps[-1].get("epochs") if run.steps else None
    epochs = [
        f"<tr><th>{escape(str(name))}</th><td>{count:.3g}</td></tr>"
        for name, value in (passes if isinstance(passes, Mapping) else {}).items()
        if (count := number(value)) is not None
    ]
    return (
        _listing("Epochs", epochs[:MOST_ROWS])
        + _listing("Checkpoints", checkpoints)
        + _listing("Starts", starts)
        + _listing("Events", events)
    )


def _start_text(record: Mapping[str, Any]) -> str:
    """Return words about a start with the seconds of its phases, as far as they can be read."""
    phases, compiler = (
        {str(name): seconds for name, value in part.items() if (seconds := number(value)) is not None}
        if isinstance(part := record.get(key), Mapping)
        else {}
        for key in ("phases", "compiler")
    )
    return start_line(phases, compiler).removeprefix("start took ")


def _listing(title: str, items: Sequence[str]) -> str:
    if not items:
        return ""
    return (
        f'<section class="card"><h2>{title}</h2><table class="facts"><tbody>{"".join(items)}</tbody></table></section>'
    )


def environment(run: RunFolder) -> str:
    """Return the card about software and hardware of the run."""
    cells = [
        f"<div><dt>{escape(key.replace('_', ' '))}</dt><dd>{escape(text[:500])}</dd></div>"
        for key, text in list(_flattened(run.environment))[:MOST_ROWS]
    ]
    inside = f'<dl class="cells">{"".join(cells)}</dl>'
    return f'<section class="card wide"><h2>Environment</h2>{inside}</section>' if cells else ""


def _flattened(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _flattened(value, f"{name} ")
        elif value is not None:
            text = number_text.size(value) if str(key).endswith("_bytes") and number(value) is not None else value
            yield name.removesuffix("_bytes"), ", ".join(map(str, text)) if isinstance(text, list) else str(text)


def config(run: RunFolder) -> str:
    """Return the resolved configuration as a collapsed element with highlighted keys; empty without a configuration."""
    if not run.config_text:
        return ""
    text = run.config_text[:CONFIG_CHARACTERS]
    ellipsis = "\n… (cut; the whole text is in config.yaml)" if len(text) < len(run.config_text) else ""
    highlighted = re.sub(r"(?m)^(\s*(?:- )?)([\w.-]+)(?=:(?:\s|$))", r"\1<b>\2</b>", escape(text))
    return f"""<section class="card wide"><details>
<summary><h2>Configuration</h2><span class="unit">config.yaml, resolved</span></summary>
<pre class="config">{highlighted}{ellipsis}</pre></details></section>"""


def notes(texts: Sequence[str]) -> str:
    """Return the section that says which parts of the report are missing and why; empty if nothing is missing."""
    items = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f'<section class="missing"><h2>Not in this report</h2><ul>{items}</ul></section>' if items else ""
