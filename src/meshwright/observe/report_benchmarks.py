"""The report's card of benchmark results, which the comparison of runs uses too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from meshwright.observe import page
from meshwright.observe.runfolder import Record, number


def benchmarks_card(results: Sequence[Record]) -> str:
    """Return a table with the newest result of each task and step; empty without results."""
    newest = {(str(result.get("task")), str(result.get("step"))): result for result in results}
    lines = [
        (task, "–" if step == "None" else step, metric, text)
        for (task, step), result in newest.items()
        for metric, text in metric_texts(result)
    ]
    return page.table("Benchmarks", ("task", "step", "metric", "value"), lines)


def metric_texts(result: Record) -> Iterator[tuple[str, str]]:
    """Yield (label, text) for each metric of a result. The text has the value, and its standard error if there is one.

    The metrics have the names of lm-eval: `acc,none` and `acc_stderr,none`, where `none` is the filter of the answers.
    """
    metrics = result["metrics"]
    for key, value in metrics.items():
        name, _, answers = key.partition(",")
        if not name.endswith("_stderr") and (figure := number(value)) is not None:
            error = number(metrics.get(f"{name}_stderr,{answers}"))
            label = name if answers in ("", "none") else f"{name} ({answers})"
            yield label, f"{figure:.4f}" + (f" ± {error:.4f}" if error else "")
