"""`meshwright bench`: scores a model on tasks of lm-eval, in this process and without a network."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from meshwright.cli.columns import aligned
from meshwright.cli.evaluate import Model
from meshwright.cli.options import Json, model_folder, say
from meshwright.cli.spread import found_weights
from meshwright.spec.errors import BadInput, nearest

FORMATS = ("json", "csv", "parquet", "text", "arrow")
"""Names that `datasets.load_dataset` takes for loaders of file formats. A task that names one of them names its files too."""


def bench(
    model: Model,
    tasks: Annotated[
        str, typer.Option(help="Tasks of lm-eval, separated by commas, e.g. `hellaswag,arc_easy`.", show_default=False)
    ],
    data_sets: Annotated[
        Path | None,
        typer.Option(
            "--data-sets", metavar="DIR", help="Folder with the data sets of the tasks, each under its name on the hub."
        ),
    ] = None,
    include: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder with task files of your own.")] = None,
    shots: Annotated[
        int | None, typer.Option(min=0, help="Examples before each question [default: the task's]", show_default=False)
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Questions of each task at most, to try something.", show_default=False)
    ] = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat", help="Write questions as chats, by the model's template (lm-eval's apply_chat_template)."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Score a model on benchmarks of lm-eval, on one device. Results of a run appear in its report and in `compare`.

    Needs `pip install 'meshwright[bench]'`. Nothing is downloaded: fetch the data sets where there is a network, by
    `hf download --repo-type dataset Rowan/hellaswag --local-dir sets/Rowan/hellaswag`, or let lm-eval use its cache.

    Examples:

        meshwright bench runs/quickstart --tasks hellaswag,arc_easy --data-sets sets

        meshwright bench runs/quickstart --tasks my_task --include tasks --limit 100

        meshwright bench tuned --tasks gsm8k --data-sets sets --chat
    """
    if find_spec("lm_eval") is None:
        raise BadInput("benchmarks need lm-eval: pip install 'meshwright[bench]'")
    names = [name for name in tasks.split(",") if name]
    folder = model_folder(model)
    for option, place in (("--data-sets", data_sets), ("--include", include)):
        if place is not None and not place.is_dir():
            raise BadInput(f"{option} {place}: no such folder")
    weights, facts = found_weights(folder)
    results = _evaluate(weights, names, data_sets, include, shots, limit, chat=chat)
    if "checkpoint" in facts:
        _keep(folder, results)
    if as_json:
        print(json.dumps({"results": results, **facts}))
        return
    from meshwright.observe.report_benchmarks import metric_texts

    rows = [(result["task"], metric, text) for result in results for metric, text in metric_texts(result)]
    for line in aligned([("task", "metric", "value"), *rows]):
        print(line)


def _evaluate(
    weights: Path,
    names: list[str],
    data_sets: Path | None,
    include: Path | None,
    shots: int | None,
    limit: int | None,
    *,
    chat: bool,
) -> list[dict[str, Any]]:
    """Run the tasks. Returns one result for each task, and for each group of tasks."""
    # This must precede the imports, which read these variables.
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import datasets
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    from meshwright.cli.bench_model import BenchModel
    from meshwright.cli.chat_prompts import ChatPrompts
    from meshwright.server.model_files import read_model_files

    manager = TaskManager(include_path=None if include is None else str(include))
    for name in names:
        if name not in manager.all_tasks:
            near = nearest(name, manager.all_tasks)
            raise BadInput(
                f"--tasks {name}: lm-eval has no such task{f'; nearest: {near}' if near else ''}; --include adds your own"
            )
    say(f"meshwright: {', '.join(names)} by {weights}")
    files = read_model_files(weights)
    model: Any = BenchModel(weights, files, ChatPrompts(weights, files) if chat else None)
    with _local_data_sets(datasets, data_sets):
        found: Any = simple_evaluate(
            model=model,
            tasks=list(names),
            num_fewshot=shots,
            limit=limit,
            task_manager=manager,
            apply_chat_template=chat,
            log_samples=False,
            bootstrap_iters=1000,
        )
    step = weights.name.removeprefix("step-")
    facts = {
        "step": int(step) if step.isdigit() else None,
        "limit": limit,
        "shots": shots,
        "chat": chat,
        "lm_eval": version("lm_eval"),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    results = {**found["results"], **found.get("groups", {})}
    return [{"task": task, **facts, "metrics": _numbers(metrics)} for task, metrics in results.items()]


def _numbers(metrics: dict[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in metrics.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and "," in name
    }


@contextmanager
def _local_data_sets(library: Any, folder: Path | None) -> Iterator[None]:
    """A context in which `datasets.load_dataset` looks for data sets in `folder`.

    Tasks name the data sets as the hub does.

    If a data set is neither there nor in the cache, it raises BadInput. `library` is the module `datasets`.
    """
    load = library.load_dataset

    def load_local(path: str, name: str | None = None, **options: Any) -> Any:
        if path in FORMATS or Path(path).exists():
            return load(path, name, **options)
        places = [] if folder is None else [folder / path, folder / Path(path).name]
        for place in places:
            if (place / "dataset_dict.json").is_file():
                return library.load_from_disk(str(place))
            if place.is_dir() and name is not None and (place / name).is_dir() and not (place / "README.md").is_file():
                # A folder of data files. With a README it would have configurations.
                return load(str(place / name), **options)
            if place.is_dir():
                return load(str(place), name, **options)
        try:
            return load(path, name, **options)  # Takes it from the cache of earlier downloads.
        except Exception as error:  # The kind of error depends on what is missing.
            where = (
                f"--data-sets {folder} has no {path}"
                if folder
                else f"the data set {path} is not here; name its folder by --data-sets DIR"
            )
            fetch = f"hf download --repo-type dataset {path} --local-dir {folder or 'DIR'}/{path}"
            raise BadInput(f"{where}. Where there is a network: {fetch}") from error

    library.load_dataset = load_local
    try:
        yield
    finally:
        library.load_dataset = load


def _keep(folder: Path, results: list[dict[str, Any]]) -> None:
    """Add the results to the file of the run, and write the report of the run again."""
    from meshwright.cli.span_findings import span_findings
    from meshwright.durable.writes import write_durable
    from meshwright.launch.run_list import is_run
    from meshwright.observe.report import write_report
    from meshwright.observe.runfolder import BENCHMARKS, read_run

    if not is_run(folder):
        return
    earlier = read_run(folder).benchmarks
    write_durable(folder / BENCHMARKS, json.dumps([*earlier, *results], indent=1) + "\n")
    write_report(folder, span_findings(folder))
