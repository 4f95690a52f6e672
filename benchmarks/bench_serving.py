"""Measures the accuracy of the serving cost model on published points: `make bench-serving` (CPU only, five minutes).

Prints errors by class, refusals by reason, errors with each model and each chip left out of the fit, and how good the deployment is that
the model would choose; then each acceptance criterion with its figure. Writes them to benchmarks/results/serving-accuracy.json. For
another file of points, `python benchmarks/bench_serving.py FILE.csv.gz` prints all but the errors of what is left out.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from criteria import Criterion, print_criteria
from fit_serving import fit
from serving_points import FILE, Point, predict, read_points

from meshwright.costs.serving_software import ServingSoftware, software_table
from meshwright.planner.closed_loop import Latencies

RESULTS = Path(__file__).parent / "results" / "serving-accuracy.json"
SPECULATED = 1.9
"""How much faster tokens are with speculation: the usual ratio of the two measured times of rows with equal inputs."""
FEWEST, EVERY, LEFT_OUT_PROGRESS = 20, 3, 1e-3
"""Fewest points of a class that is left out of a fit; that fit is to each third of the other points, starts from the table, and ends at
this progress."""


@dataclass(frozen=True)
class Priced:
    """A point with its prediction."""

    point: Point
    predicted: Latencies

    @property
    def token_error(self) -> float:
        """Relative error of the time of a further token."""
        return self.predicted.tpot_seconds / self.point.tpot_seconds - 1

    @property
    def nearer_token_error(self) -> float:
        """`token_error`; of a row that does not say whether tokens were speculated, the smaller error of the two readings."""
        plain = self.token_error
        return min(plain, (1 + plain) / SPECULATED - 1, key=abs) if self.point.assumed else plain

    @property
    def first_error(self) -> float:
        """Relative error of the time to the first token."""
        return self.predicted.ttft_seconds / self.point.ttft_seconds - 1


def main(arguments: Sequence[str]) -> None:
    file = Path(arguments[0]) if arguments else FILE
    points, refused = read_points(file)
    priced = [Priced(point, predict(point)) for point in points]
    stated = [each for each in priced if not each.point.assumed]
    reasons = Counter(reason for _, reason in refused)
    print(f"{len(points):,} of {len(points) + len(refused):,} rows are priced; refused:")
    for reason, count in reasons.most_common():
        print(f"  {count:5} {reason}")
    classes = {
        "all": priced,
        "stated": stated,
        "assumed": [each for each in priced if each.point.assumed],
        **by_class(stated),
    }
    print(
        "\nerrors in percent (assumed: rows without numbers of workers, of which none says whether tokens were speculated)"
    )
    errors = {name: show(name, members) for name, members in classes.items()}
    choices = choice_shares(stated)
    print(f"\nchoice: {np.mean(choices):.2%} of the best measured rate, mean of {len(choices)} choices")
    left_out = {} if arguments else {key: left_out_errors(stated, of) for key, of in LEFT_OUT.items()}
    for key, found in left_out.items():
        print(f"\nerrors of the time of a token with each {key} left out of the fit")
        for name, values in found.items():
            print(f"  {name:28} {values['count']:5} median {values['median']:6.1f}  p90 {values['p90']:6.1f}")
    criteria = acceptance(priced, stated, len(points) / (len(points) + len(refused)), choices)
    print_criteria(criteria)
    if not arguments:
        result = {
            "fitted": software_table().fitted,
            "rows": len(points) + len(refused),
            "priced": len(points),
            "refused": dict(reasons.most_common()),
            "errors_percent": errors,
            "choice_share": float(np.mean(choices)),
            "left_out_percent": left_out,
            "criteria": [criterion.entry for criterion in criteria],
        }
        RESULTS.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def by_class(priced: Iterable[Priced]) -> dict[str, list[Priced]]:
    """Points by server, class of model and placement; the class of latent attention and of roles also over all servers."""
    classes: dict[str, list[Priced]] = defaultdict(list)
    for each in priced:
        point = each.point
        colocated = point.deployment.colocated
        classes[f"{point.software} {point.kind if colocated else 'roles'}"].append(each)
        classes[f"{point.kind}, all servers"].append(each)
        if not colocated:
            classes["roles, all servers"].append(each)
    return dict(sorted(classes.items()))


def show(name: str, priced: Sequence[Priced]) -> dict[str, float]:
    """Print and return the median and the 90th percentile of errors in percent, and the median with its sign."""
    token, first = (100 * np.array([getattr(each, key) for each in priced]) for key in ("token_error", "first_error"))
    found = {
        "count": len(priced),
        "tpot_median": _quantile(token, 0.5),
        "tpot_p90": _quantile(token, 0.9),
        "tpot_bias": round(float(np.median(token)), 2),
        "ttft_median": _quantile(first, 0.5),
        "ttft_p90": _quantile(first, 0.9),
    }
    print(
        f"  {name:24} {len(priced):5}  TPOT median {found['tpot_median']:5.1f} p90 {found['tpot_p90']:6.1f} bias {found['tpot_bias']:6.1f}"
        f"  TTFT median {found['ttft_median']:5.1f} p90 {found['ttft_p90']:7.1f}"
    )
    return found


def _quantile(errors: np.ndarray, share: float) -> float:
    return round(float(np.quantile(np.abs(errors), share)), 2)


LEFT_OUT: dict[str, Callable[[Point], str]] = {
    "model": lambda point: point.name.removesuffix("-NVFP4").replace("V3.1", "V3").replace("R1", "V3"),
    "chip": lambda point: point.chip,
}
"""What is left out of the fit in turn; DeepSeek's releases are one model."""


def left_out_errors(priced: Sequence[Priced], of: Callable[[Point], str]) -> dict[str, dict[str, float]]:
    """Errors in percent at the points of each group by constants fitted to the others; a server without other points is left out."""
    groups: dict[str, list[Point]] = defaultdict(list)
    for each in priced:
        groups[of(each.point)].append(each.point)
    found = {}
    for name, members in sorted(groups.items()):
        if len(members) < FEWEST:
            continue
        errors = []
        for server in {point.software for point in members}:
            others = [each.point for each in priced if each.point.software == server and of(each.point) != name]
            if len(others) < FEWEST:
                continue
            software = fit(others[::EVERY], software_table().software[server], LEFT_OUT_PROGRESS)
            own = [point for point in members if point.software == server]
            errors += [predict(point, software).tpot_seconds / point.tpot_seconds - 1 for point in own]
        if errors:
            values = 100 * np.array(errors)
            found[name] = {"count": len(errors), "median": _quantile(values, 0.5), "p90": _quantile(values, 0.9)}
    return found


def choice_shares(priced: Sequence[Priced]) -> list[float]:
    """Measured rate of the deployment with the best predicted rate, over the best measured.

    Alternatives are deployments of one model, chip, release of a server, formats and request sizes, with as many users a device.
    """
    groups: dict[Any, list[Priced]] = defaultdict(list)
    for each in priced:
        point = each.point
        server, sizes = (point.software, point.release), (point.load.input_tokens, point.load.output_tokens)
        key = (point.name, point.chip, server, point.formats, sizes)
        groups[(*key, point.load.users / point.devices)].append(each)
    shares = []
    for members in groups.values():
        if len({each.point.deployment for each in members}) < 2:
            continue
        # Equal deployments were measured several times: the mean of their rates counts.
        measured: dict[Any, list[float]] = defaultdict(list)
        for each in members:
            point = each.point
            seconds = point.ttft_seconds + point.load.output_tokens * point.tpot_seconds
            measured[point.deployment].append(point.load.users / seconds / point.devices)
        rates = {deployment: float(np.mean(values)) for deployment, values in measured.items()}
        chosen = max(members, key=lambda each: each.predicted.requests_per_s / each.point.devices)
        shares.append(rates[chosen.point.deployment] / max(rates.values()))
    return shares


def acceptance(
    priced: Sequence[Priced], stated: Sequence[Priced], coverage: float, choices: Sequence[float]
) -> list[Criterion]:
    """The criteria of serving predictions."""

    def percent(key: str, share: float, members: Iterable[Priced]) -> float:
        return _quantile(100 * np.array([getattr(each, key) for each in members]), share)

    latent = [each for each in stated if each.point.kind == "latent"]
    roles = [each for each in stated if not each.point.deployment.colocated]
    return [
        Criterion("rows that are priced, percent", 100 * coverage, 85, at_least=True),
        Criterion("time of a token, all rows: median error, percent", percent("token_error", 0.5, priced), 12),
        Criterion("time of a token, all rows: 90th percentile, percent", percent("token_error", 0.9, priced), 30),
        Criterion(
            "time of a token, all rows, the nearer of speculated and not where none is stated: median error, percent",
            percent("nearer_token_error", 0.5, priced),
            12,
        ),
        Criterion(
            "time of a token, all rows, the nearer reading: 90th percentile, percent",
            percent("nearer_token_error", 0.9, priced),
            30,
        ),
        Criterion(
            "time of a token, rows that state their workers: median error, percent",
            percent("token_error", 0.5, stated),
            12,
        ),
        Criterion(
            "time of a token, rows that state their workers: 90th percentile, percent",
            percent("token_error", 0.9, stated),
            30,
        ),
        Criterion(
            "time of a token, latent attention, stated: median error, percent", percent("token_error", 0.5, latent), 20
        ),
        Criterion("time of a token, roles, stated: median error, percent", percent("token_error", 0.5, roles), 18),
        Criterion("first token, stated: median error, percent", percent("first_error", 0.5, stated), 25),
        Criterion("constants of a server", len(fields(ServingSoftware)), 6),
        Criterion(
            "measured rate of the chosen deployment, percent of the best",
            100 * float(np.mean(choices)),
            97,
            at_least=True,
        ),
    ]


if __name__ == "__main__":
    main(sys.argv[1:])
