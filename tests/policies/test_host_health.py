"""The table of health: what each defect leads to and when, and that healthy hosts lead to nothing."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
from health import readings_of, series_of

from meshwright.policies.host_health import (
    IGNORED_XIDS,
    READING_SECONDS,
    RULES,
    HealthReading,
    HealthWatch,
    action_of,
)

ROOT = Path(__file__).parents[2]
HEALTHY = {
    "lost": 0.0,
    "recovery_action": 0.0,
    "uncorrected_errors": 0.0,
    "corrected_errors": 12.0,
    "remap_pending": 0.0,
    "remap_failed": 0.0,
    "nvlinks_down": 0.0,
    "nvlink_recoveries": 3.0,
    "nvlink_crc_errors": 400.0,
    "pcie_lanes_missing": 0.0,
    "pcie_replays": 7.0,
    "thermal_slowdown": 0.0,
    "software_thermal_slowdown": 0.0,
    "power_brake": 0.0,
    "memory_of_others": 0.0,
}


def actions(xid: int) -> tuple[str, ...]:
    """Actions of an XID before the start, during the run, and after a failure."""
    (finding,) = HealthWatch().update(0.0, [HealthReading("GPU 1", {}, (xid,))])
    assert f"XID {xid}" in finding.description and finding.part == "GPU 1"
    return tuple(action_of(finding.rule, moment) for moment in ("start", "run", "failure"))


def test_xids_lead_to_the_actions_of_the_catalogue() -> None:
    assert actions(79) == actions(95) == ("exclude",) * 3
    assert actions(48) == actions(64) == ("exclude", "drain", "exclude")
    assert actions(74) == actions(149) == ("drain", "drain", "exclude")
    assert actions(63) == actions(94) == ("warn", "warn", "drain")
    assert actions(13) == actions(999) == ("warn",) * 3
    for xid in IGNORED_XIDS:
        assert HealthWatch().update(0.0, [HealthReading("GPU 1", {}, (xid,))]) == ()


def test_an_xid_counts_until_the_agent_ends() -> None:
    watch = HealthWatch()
    watch.update(0.0, [HealthReading("GPU 1", HEALTHY, (48,))])
    assert [finding.rule for finding in watch.update(1e6, [HealthReading("GPU 1", HEALTHY)])] == ["xid-memory"]


def first_seconds(changed: dict[str, float], rule: str) -> float:
    """Seconds from a change of the values to the finding of a rule, with readings as the reader makes them."""
    watch, now = HealthWatch(), 0.0
    for _ in range(30):
        now += READING_SECONDS
        assert watch.update(now, [HealthReading("GPU 0", HEALTHY)]) == ()
    changed_at = now  # just after a reading, which is the worst case
    for _ in range(60):
        now += READING_SECONDS
        if any(finding.rule == rule for finding in watch.update(now, [HealthReading("GPU 0", {**HEALTHY, **changed})])):
            return now - changed_at
    raise AssertionError(f"{changed} is not found")


@pytest.mark.parametrize(
    ("changed", "rule", "at_run"),
    [
        ({"lost": 1.0}, "gpu-lost", "exclude"),
        ({"recovery_action": 2.0}, "recovery-reset", "exclude"),
        ({"recovery_action": 4.0}, "recovery-drain", "drain"),
        ({"uncorrected_errors": 1.0}, "uncorrected-rise", "drain"),
        ({"remap_failed": 1.0}, "remap-failed", "drain"),
        ({"nvlinks_down": 1.0}, "nvlink-down", "drain"),
        ({"thermal_slowdown": 1.0}, "thermal", "drain"),
        ({"remap_pending": 1.0}, "remap-pending", "warn"),
    ],
)
def test_a_defect_is_found_within_ten_seconds(changed: dict[str, float], rule: str, at_run: str) -> None:
    assert first_seconds(changed, rule) < 10.0
    assert action_of(rule, "run") == at_run


def test_a_finding_stays_while_its_quantity_is_not_read() -> None:
    watch = HealthWatch()

    def found(seconds: float, **values: float) -> list[str]:
        return [finding.rule for finding in watch.update(seconds, [HealthReading("GPU 0", values)])]

    assert found(0, lost=0, nvlinks_down=1) == []
    assert found(3, lost=0, nvlinks_down=1) == ["nvlink-down"]
    assert found(6, lost=0) == ["nvlink-down"]
    assert found(9, lost=0, nvlinks_down=0) == []


def test_counters_are_compared_within_the_time_of_their_rule_and_may_start_again() -> None:
    watch, now = HealthWatch(), 0.0
    found: list[str] = []
    for replays in (5.0, 9.0, 13.0, 0.0, 4.0):  # four in each minute, and a driver that was loaded again
        now += 61.0
        found += [finding.rule for finding in watch.update(now, [HealthReading("GPU 0", {"pcie_replays": replays})])]
    assert found == []
    (finding,) = watch.update(now + 3.0, [HealthReading("GPU 0", {"pcie_replays": 13.0})])
    assert finding.rule == "pcie-replays" and "pcie_replays 9" in finding.text
    two_losses = [
        watch.update(now + late, [HealthReading("port a", {"link_downed": count})]) for late, count in ((9, 7), (99, 9))
    ]
    assert [finding.rule for finding in two_losses[1] if finding.part == "port a"] == ["port-flaps"]


def normal_day(seed: int) -> list[HealthReading]:
    """A reading of a busy GPU every 3 s for a day, with what healthy GPUs show."""
    chance = random.Random(seed)
    counters = {"corrected_errors": 12.0, "pcie_replays": 7.0, "nvlink_crc_errors": 400.0}
    day = []
    for number in range(round(86_400 / READING_SECONDS)):
        values = dict(HEALTHY)
        if chance.random() < 2e-3:  # corrected errors come in bursts
            counters["corrected_errors"] += chance.randrange(1, 2000)
        if chance.random() < 1e-3:
            counters["pcie_replays"] += chance.randrange(1, 4)
        counters["nvlink_crc_errors"] += chance.random() < 0.01
        values |= counters
        values["thermal_slowdown"] = float(number % 9000 == 4500)  # one reading, as a fan starts
        values["power_brake"] = float(number % 9000 == 7000)
        values["software_thermal_slowdown"] = float(number % 2000 < 15)  # 45 s, in the afternoon
        values["memory_of_others"] = 10e6  # a monitoring agent
        day.append(HealthReading("GPU 0", values, (43,) if number == 20_000 else ()))
    return day


@pytest.mark.parametrize("seed", range(3))
def test_a_normal_day_leads_to_nothing(seed: int) -> None:
    watch = HealthWatch()
    for number, reading in enumerate(normal_day(seed)):
        assert watch.update(number * READING_SECONDS, [reading]) == (), f"reading {number}"


def test_recorded_readings_of_healthy_gpus_lead_to_nothing() -> None:
    """Readings of `benchmarks/health.py --keep` on GPUs under load."""
    files = sorted((ROOT / "benchmarks" / "results").glob("*-health-*.json"))
    if not files:
        pytest.skip("benchmarks/results has no recorded readings of GPUs")
    for file in files:
        watch = HealthWatch()
        recorded = json.loads(file.read_text(encoding="utf-8"))
        for number, readings in enumerate(readings_of(recorded["series"], recorded["readings"])):
            found = watch.update(number * READING_SECONDS, readings)
            assert [finding for finding in found if finding.part.startswith("GPU")] == [], (
                f"{file.name}, reading {number}"
            )


def test_recorded_series_are_the_readings() -> None:
    kept = [
        [HealthReading("GPU 0", {"lost": 0.0, "temperature": 40 + n} | ({"flips": 1.0} if n else {}), (43,) * (n == 1))]
        for n in range(3)
    ]
    assert list(readings_of(series_of(kept), 3)) == kept


def test_the_memory_of_the_watch_does_not_grow() -> None:
    watch = HealthWatch()
    for number in range(10_000):
        watch.update(number * READING_SECONDS, [HealthReading("GPU 0", {**HEALTHY, "pcie_replays": number / 100})])
    assert max(len(series) for series in watch._series.values()) <= 202


def test_every_rule_has_a_source_and_a_name_of_its_own() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES) and all(rule.source for rule in RULES)
    listed = [xid for rule in RULES if rule.quantity == "xid" for xid in rule.values]
    assert len(listed) == len(set(listed)) and not set(listed) & IGNORED_XIDS
    severity = ["none", "warn", "drain", "exclude"]
    for rule in RULES:
        assert rule.failure == "none" or severity.index(rule.failure) >= severity.index(rule.run), rule.name


def test_the_page_lists_every_xid_with_its_actions() -> None:
    page = (ROOT / "docs/how-to/operate.md").read_text(encoding="utf-8")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("| ")
    ]
    listed: dict[int, tuple[str, ...]] = {}
    for cells in (row for row in rows if len(row) == 4 and "XID" in row[0]):
        text = re.sub(
            r"(\d+) to (\d+)", lambda ends: ", ".join(map(str, range(int(ends[1]), int(ends[2]) + 1))), cells[0]
        )
        listed |= {int(xid): tuple(cells[1:]) for xid in re.findall(r"\b\d{2,3}\b(?! checksum| million)", text)}
    expected = {
        xid: (rule.start, rule.run, rule.failure) for rule in RULES if rule.quantity == "xid" for xid in rule.values
    }
    expected |= dict.fromkeys(IGNORED_XIDS, ("none",) * 3)
    program_errors = next(rule.values for rule in RULES if rule.name == "xid-program")
    assert listed == {
        xid: actions for xid, actions in expected.items() if xid not in program_errors
    }  # those are "other XIDs"
