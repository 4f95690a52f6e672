"""`meshwright bench-serve`: plans a deployment, starts it on this host, tests it under load, and writes a report."""

from __future__ import annotations

import asyncio
import json
import signal
from bisect import bisect_right
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.cli.options import Json, check_writable, model_folder, print_now, say
from meshwright.cli.spread import check_deployment, cluster_here, model_in
from meshwright.durable.writes import write_durable
from meshwright.observe.number_text import duration, short
from meshwright.observe.number_text import rate as rate_text
from meshwright.spec.errors import BadInput, MeshwrightError, attach_key, call_all, raise_together
from meshwright.spec.fields import to_plain

if TYPE_CHECKING:
    import numpy as np

    from meshwright.config.reading import LocatedValues
    from meshwright.config.yaml_positions import Position
    from meshwright.costs.serve_costs import ServeCosts
    from meshwright.observe.load_report import InstanceTimeline, LatencyFigures, LoadReport, RateResult
    from meshwright.server.deployment_servers import RunningDeployment, RunningInstance
    from meshwright.server.load_client import LoadTest
    from meshwright.simulator.serve_types import Occupancy, ServedDeployment
    from meshwright.spec.cluster import ClusterSpec
    from meshwright.spec.deployment import Deployment, DeploymentSpec, TimedRequest
    from meshwright.spec.model import ModelSpec

SHARES = (0.4, 0.55, 0.7, 0.8, 0.9, 1.0, 1.1)
"""Default rates of the test, as fractions of the predicted goodput."""
INTERRUPTED = "interrupted"
"""Reason in the report if the user interrupted the test."""
CHECK_SECONDS = 0.5
"""Seconds between two checks whether all servers still run."""
FEWEST_REQUESTS = 20
"""Minimum number of requests at each rate."""
SAME_DIMENSIONS = (
    "layers",
    "hidden",
    "heads",
    "kv_heads",
    "head_dim",
    "ffn_hidden",
    "experts",
    "expert_hidden",
    "kv_rank",
)
"""Keys of the model that must agree between the file and the weights. Otherwise the prediction would be for another model."""

Question = Annotated[
    list[str],
    typer.Argument(metavar="SERVE.yaml [KEY=VALUE]...", help="What to serve, as for `meshwright plan`."),
]


def bench_serve(
    arguments: Question,
    plan: Annotated[
        Path | None,
        typer.Option("--plan", metavar="DEPLOYMENT.yaml", help="Deployment to start; the planner's if left out."),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option("--model", metavar="FOLDER", help="Weights to serve; those of `model.init` if left out."),
    ] = None,
    rates: Annotated[
        str | None,
        typer.Option(
            metavar="R,R,…", help="Requests per second to test; 40% to 110% of the predicted goodput if left out."
        ),
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Length of the test at each rate.")] = 40.0,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Report to write.")] = Path("report.html"),
    as_json: Json = False,
) -> None:
    """Start a deployment on this host, replay the workload at several rates, and report predicted beside measured latencies.

    The deployment is planned first unless --plan names one. Each instance is a `meshwright serve` process, behind a
    `meshwright route` process. The report has attainment over rate, and batch and cache over time of each role and instance.

    If it is interrupted, or a server ends, the report has the rates tested until then.

    With --json: `instances`, `rates` (each with `measured` and `predicted`), `missing` rates, `report`.

    Examples:

        meshwright bench-serve serve.yaml

        meshwright bench-serve serve.yaml --plan deployment.yaml --model exported-model --rates 1,2,4
    """
    from meshwright.cli.plan_deployment import deployment_question
    from meshwright.config.deployment_file import read_deployment
    from meshwright.config.trace_file import workload_requests
    from meshwright.observe.load_report import page
    from meshwright.spec.deployment import deployment_name

    check_writable("--out", out)
    tested = None if rates is None else read_rates(rates)
    files: list[Any] = call_all(
        lambda: deployment_question(arguments), lambda: None if plan is None else read_deployment(plan)
    )
    question: LocatedValues[DeploymentSpec] = files[0]
    planned: LocatedValues[Deployment] | None = files[1]
    spec = question.value
    with question.at_keys():
        if spec.serve.software is not None:
            raise BadInput(
                f"serve.software: expected none, as this program is measured, got {spec.serve.software}",
                key="serve.software",
            )
        folder = model_folder(model) if model is not None else _folder_of(spec)
        served, _ = model_in(folder)
    call_all(lambda: _check_model(question, served, folder), lambda: _check_file(planned, served, spec.cluster, plan))
    with question.at_keys():
        requests = workload_requests(spec.serve.workload)
        costs = _costs(spec)
        deployment = _planned(spec, requests) if planned is None else planned.value
    if planned is None:
        _check_deployment(deployment, served, spec.cluster, arguments[0])
    tested = tested or _rates_of(deployment)
    # Treat it like Ctrl-C, so that the servers are stopped before the process ends.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    say(f"{deployment_name(deployment)}: starting {deployment.devices} device{'s' * (deployment.devices > 1)}")
    test = _Test(spec, deployment, costs, served, plan, folder.resolve())
    try:
        test.run(
            requests, tested, seconds, say if as_json else print_now, lambda report: write_durable(out, page(report))
        )
    except (KeyboardInterrupt, MeshwrightError) as end:
        if test.report is None:
            raise
        say(f"report of {len(test.report.rates)} of {len(tested)} rates: {out}; {test.report.missing_line}")
        if not as_json:
            raise
        failure = {"ok": False, "error": str(end) or INTERRUPTED, "errors": []}
        print(json.dumps(_as_plain(deployment, test.report, out) | failure))
        if isinstance(end, KeyboardInterrupt):
            raise
        say(f"meshwright: {end}")
        raise typer.Exit(end.exit_code) from None  # The JSON object is printed on stdout already.
    assert test.report is not None
    if as_json:
        print(json.dumps(_as_plain(deployment, test.report, out)))
    else:
        print(f"report: {out}")


def read_rates(text: str) -> list[float]:
    """Parse rates in requests per second, separated by commas. Returns them in ascending order. Raises BadInput."""
    try:
        values = sorted(float(part) for part in text.split(","))
    except ValueError:
        values = []
    if not values or not all(0 < value < 1e9 for value in values):
        raise BadInput(f"--rates {text}: expected requests per second above 0 with commas between, such as 1,2,4")
    return values


def _folder_of(spec: DeploymentSpec) -> Path:
    """Return the folder of weights that `model.init` names. Raises BadInput for `scratch`."""
    source, _, folder = spec.model.init.partition(":")
    if source == "scratch":
        expected = "expected --model FOLDER, or hf:DIR or checkpoint:DIR in the file, for the weights to serve"
        raise BadInput(f"model.init: {expected}, got {spec.model.init}", key="model.init")
    with attach_key("model.init"):
        return model_folder(Path(folder))


def _check_model(question: LocatedValues[DeploymentSpec], served: ModelSpec, folder: Path) -> None:
    """Raise BadConfig unless the dimensions in the file are those of `served`, the model in `folder`."""
    differences: dict[Position, BadInput] = {}
    """Differences by their position in the file.

    If a preset gives the dimensions, all of them have the position of the preset's name, and one difference is enough
    there.
    """
    for name in SAME_DIMENSIONS:
        theirs = getattr(served, name)
        ours = getattr(question.value.model, name)
        if theirs != ours:
            problem = f"model.{name}: expected {theirs}, as in the weights {folder}, got {ours}"
            position = question.document.value_position(("model", name))
            differences.setdefault(position, BadInput(problem, key=f"model.{name}"))
    with question.at_keys():
        raise_together(differences.values())


def _check_file(
    file: LocatedValues[Deployment] | None, model: ModelSpec, cluster: ClusterSpec, path: Path | None
) -> None:
    if file is not None:
        with file.at_keys():
            _check_deployment(file.value, model, cluster, str(path))


def _check_deployment(deployment: Deployment, model: ModelSpec, cluster: ClusterSpec, source: str) -> None:
    """Raise BadInput if this host cannot serve the deployment or the simulator cannot predict it. `source` is the deployment's file."""
    call_all(lambda: check_deployment(deployment, model), lambda: _check_instances(deployment, cluster, source))


def _check_instances(deployment: Deployment, cluster: ClusterSpec, source: str) -> None:
    """Raise BadInput if the roles of the instances cannot be simulated together, or if this host has too few devices."""
    with attach_key("instances"):
        if len(roles := {instance.role for instance in deployment.instances}) > 1 and "both" in roles:
            listed = ", ".join(instance.role for instance in deployment.instances)
            raise BadInput(f"expected instances of role both, or of prefill and decode, got {listed}")
        if not cluster.is_cpu:
            cluster_here(deployment.devices, source, "expected a deployment for at most that many")


def _costs(spec: DeploymentSpec) -> ServeCosts | None:
    """Return the costs from which the test is predicted. If the device's speeds are not known, print a remark and return None."""
    from meshwright.costs.serve_costs import ServeCosts

    try:
        return ServeCosts(spec.model, spec.cluster, spec.serve.quantisation)
    except BadInput as error:
        say(f"no prediction: {error}")
        return None


def _planned(spec: DeploymentSpec, requests: Sequence[TimedRequest]) -> Deployment:
    from meshwright.planner.deployment_search import plan_deployment

    serve = spec.serve
    return plan_deployment(spec.model, spec.cluster, requests, serve.limits, serve.quantisation, note=say).deployment


def _rates_of(deployment: Deployment) -> list[float]:
    """Return the default rates in requests per second: SHARES of the predicted goodput. Raises BadInput if no goodput is predicted."""
    if deployment.predicted is None or not deployment.predicted.goodput_per_gpu:
        raise BadInput("--rates: expected requests per second to test, as the deployment has no predicted goodput")
    whole = deployment.predicted.goodput_per_gpu * deployment.devices
    return [share * whole for share in SHARES]


@dataclass
class _Test:
    """A load test of a deployment at several rates."""

    spec: DeploymentSpec
    """The question that the user asked: model, cluster, workload and limits."""
    deployment: Deployment
    costs: ServeCosts | None
    """The costs for the prediction; None if there is no prediction."""
    model: ModelSpec
    """The model in the folder of weights."""
    plan: Path | None
    """The file of the deployment; None if the planner made it."""
    folder: Path
    """The folder of weights."""
    report: LoadReport | None = None
    """The results. None until the first rate is tested and the test has ended."""
    _results: list[RateResult] = field(default_factory=list)
    """The result of each rate tested so far."""
    _starts: list[float] = field(default_factory=list)
    """When each rate began, in seconds since the first one began."""
    _gauges: list[tuple[float, int, dict[str, float]]] = field(default_factory=list)
    """What the servers reported: (seconds since the first rate began, index of the instance, gauges by name)."""
    _served: list[ServedDeployment] = field(default_factory=list)
    """The simulation of each rate."""

    def run(
        self,
        requests: Sequence[TimedRequest],
        rates: Sequence[float],
        seconds: float,
        tell: Callable[[str], None],
        write: Callable[[LoadReport], None],
    ) -> None:
        """Start the servers and test all rates.

        - `requests`: the workload. At each rate, a sample of it is sent for about `seconds`, of at least
          FEWEST_REQUESTS requests.
        - `rates`: requests per second.
        - `tell`: receives one line about each rate once it is tested.
        - `write`: receives the report before the servers are stopped. It does so even if the test ends before its last
          rate.

        Raises KeyboardInterrupt, and MeshwrightError if a server ends or if no request is answered.
        """
        from meshwright.server.deployment_servers import deployment_servers

        with deployment_servers(
            self.folder, self.deployment, gpu=not self.spec.cluster.is_cpu, file=self.plan
        ) as running:
            first = [request._replace(arrival_seconds=0.0) for request in requests[: len(running.instances)]]
            self._replay(running, first, "warm-up")
            why = "internal error"
            try:
                self._test_rates(running, requests, rates, seconds, tell)
            except (KeyboardInterrupt, MeshwrightError) as end:
                why = (str(end) or INTERRUPTED).splitlines()[0].rstrip(":")
                raise
            finally:
                if self._results:
                    self.report = self._report(running.instances, rates[len(self._results) :], why)
                    write(self.report)

    def _test_rates(
        self,
        running: RunningDeployment,
        requests: Sequence[TimedRequest],
        rates: Sequence[float],
        seconds: float,
        tell: Callable[[str], None],
    ) -> None:
        """Replay the workload at each rate in turn, and store the result, the simulation and the gauges of the servers."""
        from meshwright.planner.deployment_goodput import RequestSample

        begin = 0.0
        for number, rate in enumerate(rates, 1):
            count = max(FEWEST_REQUESTS, round(rate * seconds))
            say(f"rate {number} of {len(rates)}: {count:,} requests at {rate_text(rate)}/s, {count / rate:.3g} s")
            sample = RequestSample(requests, count).at(rate)
            test = self._replay(running, sample, f"rate {number}")
            result, served = self._result(rate, test, sample)
            self._served += [] if served is None else [served]
            self._starts.append(begin)
            self._gauges += [(begin + time, index, gauges) for time, index, gauges in test.occupancy]
            self._results.append(result)
            begin += max([entry.end for entry in test.measured if not entry.error], default=0.0)
            tell(_line(result))

    def _replay(self, running: RunningDeployment, sample: Sequence[TimedRequest], name: str) -> LoadTest:
        """Send the requests of `sample` at their times and return the test.

        Raises CommunicationFailure if a server ends.

        Tests of different names have different prompts, so that no prefix cache has the prompts of an earlier test.
        """
        from meshwright.server.load_client import LoadTest

        test = LoadTest([running.url], self.model.vocab_size, name=name)
        asyncio.run(_checked(test.run(sample, [instance.url for instance in running.instances]), running))
        running.check()
        return test

    def _result(
        self, rate: float, test: LoadTest, sample: Sequence[TimedRequest]
    ) -> tuple[RateResult, ServedDeployment | None]:
        """Return the result of a rate, and its simulation if there are costs. Raises BadInput if every request failed."""
        import numpy as np

        from meshwright.observe.load_report import RateResult
        from meshwright.server.load_client import failures
        from meshwright.simulator.serve_simulation import simulate

        failed = failures(test.measured)
        if failed["failed"] == len(test.measured):
            raise BadInput(f"every request failed, the first with: {failed['first_error']}")
        if failed["failed"]:
            say(f"{failed['failed']} requests failed, the first with: {failed['first_error']}")
        entries = sorted(test.measured, key=lambda entry: entry.request.arrival_seconds)
        measured = self._figures(np.array([e.ttft for e in entries]), np.array([e.tpot for e in entries]))
        if self.costs is None:
            return RateResult(rate, len(entries), failed["failed"], measured, None), None
        served = simulate(self.deployment, sample, self.costs, self.spec.serve.limits, watched=True)
        predicted = self._figures(served.ttft, served.tpot)
        return RateResult(rate, len(entries), failed["failed"], measured, predicted), served

    def _figures(self, ttft: np.ndarray, tpot: np.ndarray) -> LatencyFigures:
        """Return attainment and quantiles of latencies.

        `ttft` and `tpot` are in seconds, `(requests,)`, in the order of arrival.

        The first and the last requests are left out (the fraction WARM_UP of each), as the planner does.
        """
        import numpy as np

        from meshwright.observe.load_report import LatencyFigures
        from meshwright.simulator.serve_types import WARM_UP

        edge = int(WARM_UP * len(ttft))
        limits = self.spec.serve.limits
        ttft = ttft[edge : len(ttft) - edge]
        tpot = tpot[edge : len(tpot) - edge]
        met = (ttft <= limits.ttft_seconds) & (tpot <= limits.tpot_seconds)
        ends = np.isfinite(ttft) & np.isfinite(tpot)
        if not ends.any():
            return LatencyFigures(0.0, 0.0, 0.0, 0.0, 0.0)
        quantiles = [float(np.quantile(values[ends], share)) for values in (ttft, tpot) for share in (0.5, 0.9)]
        return LatencyFigures(float(met.mean()), *quantiles)

    def _report(self, instances: Sequence[RunningInstance], missing: Sequence[float], why: str) -> LoadReport:
        """Return the report of the rates that were tested. `missing` are the rates that were not, and `why` says why not."""
        from meshwright.observe.load_report import LoadReport
        from meshwright.spec.deployment import deployment_name
        from meshwright.spec.model import parameter_count

        limits = self.spec.serve.limits
        spec = self.spec
        return LoadReport(
            model=f"{spec.model.preset or self.model.family}, {short(parameter_count(self.model))} parameters",
            weights=str(self.folder),
            deployment=deployment_name(self.deployment),
            devices=self.deployment.devices,
            goal=limits.attainment,
            limits=f"{limits.attainment:.0%} within {limits.ttft_seconds:g} s to the first token, {limits.tpot_seconds:g} s a further one",
            rates=self._results,
            starts=self._starts[: len(self._results)],  # A rate that was interrupted may have a start but no result.
            timelines=[self._timeline(index, instance) for index, instance in enumerate(instances)],
            why=self.deployment.why,
            missing=missing,
            why_missing=why,
        )

    def _timeline(self, index: int, instance: RunningInstance) -> InstanceTimeline:
        """Return running requests and cache use of one instance over the time of the test, measured and predicted."""
        from meshwright.observe.load_report import InstanceTimeline

        own = [(time, gauges) for time, of, gauges in self._gauges if of == index]
        times = [time for time, _ in own]
        running, cache = ([gauges.get(name, 0.0) for _, gauges in own] for name in ("running", "cache"))
        predicted = self._predicted(instance, times)
        return InstanceTimeline(
            instance.name,
            times,
            running,
            cache,
            instance.role,
            [p.running for p in predicted],
            [p.cache for p in predicted],
        )

    def _predicted(self, instance: RunningInstance, times: Sequence[float]) -> list[Occupancy]:
        """Return the simulated occupancy of an instance at `times`, in seconds since the test began. Empty without a prediction."""
        if not self._served:
            return []
        roles = [entry.role for entry in self.deployment.instances for _ in range(entry.count)]
        index = [number for number, role in enumerate(roles) if role == instance.role][instance.number]
        predicted = []
        for time in times:
            rate = bisect_right(self._starts, time) - 1
            occupancy = self._served[rate].occupancy[index]
            since = time - self._starts[rate]
            predicted.append(occupancy[max(0, bisect_right(occupancy, since, key=lambda entry: entry.seconds) - 1)])
        return predicted


async def _checked(test: Coroutine[Any, Any, None], running: RunningDeployment) -> None:
    """Wait until the test has ended. Raises CommunicationFailure if a server ends, KeyboardInterrupt after SIGTERM."""
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(test)
    received: list[int] = []

    def stop(number: int, frame: object) -> None:
        del frame
        received.append(number)
        loop.call_soon_threadsafe(task.cancel)

    # The handler does not raise, because asyncio would log an exception raised while it handles a request.
    previous = signal.signal(signal.SIGTERM, stop)
    try:
        while not (await asyncio.wait([task], timeout=CHECK_SECONDS))[0]:
            running.check()
    finally:
        signal.signal(signal.SIGTERM, previous)
    if received:
        raise KeyboardInterrupt
    await task


def _line(result: RateResult) -> str:
    """Return one line about the result of a rate."""
    predicted = "" if result.predicted is None else f", predicted {result.predicted.attainment:.1%}"
    figures = result.measured
    times = f"{duration(figures.ttft_p90)}, of TPOT {duration(figures.tpot_p90)}"
    return f"{rate_text(result.rate)} requests/s: {figures.attainment:.1%} meet both limits{predicted}; p90 of TTFT {times}"


def _as_plain(deployment: Deployment, report: LoadReport, out: Path) -> dict[str, Any]:
    """Return the results as JSON values, for `--json`."""
    rates = [to_plain(result) for result in report.rates]
    instances = to_plain(deployment.instances)
    return {"instances": instances, "rates": rates, "missing": list(report.missing), "report": str(out)}
