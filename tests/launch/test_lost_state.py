"""What a run has decides what each entrance does: start, ranks, restart policy, evaluation, server, mirror."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.checkpoint.made import blank, holds, save

from meshwright.checkpoint.format.inventory import FIRST_COMMIT, choose_newest, describe_continuation, present_steps
from meshwright.checkpoint.format.manifest import COMMITTED, FORMAT, MANIFEST, NewerFormat, commit_line
from meshwright.checkpoint.mirror.copies import COPIED, INDEX, fetch_newest, has_copies, upload_checkpoint
from meshwright.checkpoint.mirror.store import MirrorStore
from meshwright.checkpoint.read.reader import CheckpointReader
from meshwright.checkpoint.store import CheckpointStore
from meshwright.launch.attempts import opening_state
from meshwright.launch.folder import check_state, renamed, take_over
from meshwright.policies.job_events import Failed, Present
from meshwright.policies.restart import Incident, Restart, RestartPolicy, after_failure
from meshwright.policies.supervision import Rules, State, decide
from meshwright.spec.errors import BadInput, CommunicationFailure, Damaged, MeshwrightError
from meshwright.training import resume as resuming

SHARD = "tensors-00000.safetensors"
STEPS = (1, 2)


def run_with_steps(run: Path, *steps: int) -> None:
    (run / "checkpoints").mkdir(parents=True, exist_ok=True)
    store = CheckpointStore(run / "checkpoints", lease=take_over(run))
    for step in steps:
        save(run / "checkpoints", step, store)


def path_of(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def flip(path: Path) -> None:
    data = bytearray((path / SHARD).read_bytes())
    data[-1] ^= 1
    (path / SHARD).write_bytes(data)


def cut(path: Path) -> None:
    (path / SHARD).write_bytes((path / SHARD).read_bytes()[:-1])


def to_newer_format(path: Path, file: str = MANIFEST) -> None:
    """Rewrite a checkpoint as a later release would: its manifest, and what COMMITTED says of it."""
    data = json.dumps({**json.loads((path / MANIFEST).read_bytes()), "format": FORMAT + 1}).encode()
    (path / MANIFEST).write_bytes(data)
    (path / COMMITTED).write_bytes(commit_line(data))


def each(change: Callable[[Path], object], *steps: int) -> Callable[[Path], None]:
    def apply(run: Path) -> None:
        for step in steps:
            change(path_of(run, step))

    return apply


def replace_by_another_run(run: Path) -> None:
    run_with_steps(run.parent / "other", *STEPS)
    shutil.rmtree(run / "checkpoints")
    shutil.copytree(run.parent / "other" / "checkpoints", run / "checkpoints")


def left_by_a_crash_in_a_replacement(run: Path) -> None:
    shutil.rmtree(path_of(run, 1))
    path_of(run, 2).rename(replaced(run))


def replaced(run: Path) -> Path:
    return run / "checkpoints" / ".replaced-step-00000002.0123abcd"


def nothing(run: Path) -> None:
    """Leave the run as it is."""


# What happened to a run with checkpoints of STEPS → (what a start does by names and sizes, what its ranks load, what
# commands load by contents, by names and sizes); a step, None for a start from scratch, or the error.
Outcome = int | None | type[MeshwrightError]
CASES: dict[str, tuple[Callable[[Path], Any], Outcome, Outcome, Outcome, Outcome]] = {
    "never saved": (lambda run: None, None, None, BadInput, BadInput),
    "good": (nothing, 2, 2, 2, 2),
    "only one, which was about to be replaced": (left_by_a_crash_in_a_replacement, 2, 2, 2, 2),
    "all COMMITTED missing": (
        each(lambda path: (path / COMMITTED).unlink(), *STEPS),
        Damaged,
        Damaged,
        Damaged,
        Damaged,
    ),
    "all folders gone": (each(shutil.rmtree, *STEPS), Damaged, Damaged, Damaged, Damaged),
    "all cut": (each(cut, *STEPS), Damaged, Damaged, Damaged, Damaged),
    "all flipped": (each(flip, *STEPS), 2, Damaged, Damaged, 2),
    "another run's": (replace_by_another_run, Damaged, Damaged, Damaged, Damaged),
    "newest cut": (each(cut, 2), 1, 1, 1, 1),
    "newest flipped": (each(flip, 2), 2, 1, 1, 2),
    "newest without COMMITTED": (each(lambda path: (path / COMMITTED).unlink(), 2), 1, 1, 1, 1),
    "older flipped": (each(flip, 1), 2, 2, 2, 2),
    "newest of a newer format": (each(to_newer_format, 2), NewerFormat, BadInput, NewerFormat, NewerFormat),
    "older of a newer format": (each(to_newer_format, 1), 2, 2, 2, 2),
    "newest cut, older of a newer format": (
        lambda run: (cut(path_of(run, 2)), to_newer_format(path_of(run, 1))),
        NewerFormat,
        BadInput,
        NewerFormat,
        NewerFormat,
    ),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of STEPS, for copies."""
    run = tmp_path_factory.mktemp("saved") / "run"
    run_with_steps(run, *STEPS)
    return run


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, saved: Path, tmp_path: Path) -> tuple[Path, tuple[Outcome, ...]]:
    run, (change, *outcomes) = tmp_path / "run", CASES[request.param]
    if request.param == "never saved":
        run_with_steps(run)
    else:
        shutil.copytree(saved, run)
    change(run)
    return run, tuple(outcomes)


def outcome_of(work: Callable[[], Any]) -> Outcome:
    try:
        return work()
    except MeshwrightError as error:
        assert "step-0000" in str(error) or FIRST_COMMIT in str(error) or "no committed" in str(error), error
        return type(error)


def same_outcome(found: Outcome, expected: Outcome) -> bool:
    return found == expected or (
        isinstance(found, type)
        and isinstance(expected, type)
        and issubclass(found, MeshwrightError)
        and (issubclass(found, expected) or issubclass(expected, found))
        and found.exit_code == expected.exit_code
    )


def description(mirror: str | None = None) -> Any:
    return SimpleNamespace(checkpoint=SimpleNamespace(mirror=mirror), name="run")


def ranks_load(run: Path, monkeypatch: pytest.MonkeyPatch, at_most: int | None = None) -> int | None:
    """The step from which the ranks of a start continue; None if they begin from scratch."""
    lease, tensors, loaded = take_over(run), blank(), list[int]()
    monkeypatch.setattr(resuming, "find_snapshot", lambda ranks, run_id: None)
    monkeypatch.setattr(resuming, "_continue_from", lambda session, state: loaded.append(state["step"]))
    session: Any = SimpleNamespace(
        store=CheckpointStore(run / "checkpoints", lease=lease),
        state=lambda: tensors,
        lease=lease,
        folder=run,
        run=description(),
        step=0,
        world=SimpleNamespace(control=None, device_group=None, leads=True),
    )
    tier = resuming.resume(session, at_most)
    assert (tier is None) == (not loaded)
    return loaded[0] if loaded else None


def test_a_start_goes_on_or_is_refused_before_ranks_exist(case: tuple[Path, tuple[Outcome, ...]]) -> None:
    run, (start, *_) = case

    def begin() -> int | None:
        check_state(description(), run)
        return max(present_steps(run), default=None)

    assert same_outcome(outcome_of(begin), start)
    promised = describe_continuation(run)
    assert ("begins at step 1" in promised) == (start is None)


def test_ranks_never_start_from_scratch_where_a_checkpoint_was(
    case: tuple[Path, tuple[Outcome, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, (_, ranks, *_) = case
    assert same_outcome(outcome_of(lambda: ranks_load(run, monkeypatch)), ranks)


def test_commands_say_which_checkpoint_they_use_and_why(case: tuple[Path, tuple[Outcome, ...]]) -> None:
    run, (_, _, *outcomes) = case
    for contents, expected in zip((True, False), outcomes, strict=True):
        assert same_outcome(outcome_of(lambda contents=contents: choose_newest(run, contents=contents).step), expected)
        if expected == 1:
            chosen = choose_newest(run, contents=contents)
            assert (
                chosen.warning is not None
                and "step-00000002" in chosen.warning
                and "step-00000001 is used" in chosen.warning
            )
            assert chosen.facts()["checkpoint"] == str(path_of(run, 1))
            assert [entry["path"] for entry in chosen.facts()["damaged_checkpoints"]] == [str(path_of(run, 2))]  # type: ignore[attr-defined]
        elif expected == 2:
            (newest,) = {path for path in (path_of(run, 2), replaced(run)) if path.exists()}
            assert choose_newest(run, contents=contents).facts() == {"checkpoint": str(newest)}


@pytest.mark.parametrize("record", ["written", "lost"])
def test_a_start_writes_again_that_the_run_had_a_checkpoint(tmp_path: Path, record: str) -> None:
    run = tmp_path / "run"
    run_with_steps(run, 1)
    if record == "lost":
        (run / FIRST_COMMIT).unlink()  # as a copy of the checkpoints alone has none
        take_over(run)
    shutil.rmtree(path_of(run, 1))
    with pytest.raises(Damaged, match="had a checkpoint .* none is left"):
        check_state(description(), run)


def test_a_run_whose_saves_all_failed_begins_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_with_steps(tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / ".step-00000001.1-abcd.partial").mkdir()
    check_state(description(), tmp_path / "run")
    assert ranks_load(tmp_path / "run", monkeypatch) is None


@pytest.mark.parametrize(("kept", "damage"), [((2,), ()), ((1, 2), (1,)), ((1, 2), ())])
@pytest.mark.parametrize("change", [flip, cut])
def test_the_same_failure_twice_goes_back_only_to_what_can_be_loaded(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kept: tuple[int, ...],
    damage: tuple[int, ...],
    change: Callable[[Path], None],
) -> None:
    """Also with keep 1, and with an older checkpoint that is damaged: then the newest is used again."""
    run = tmp_path / "run"
    run_with_steps(run, *kept)
    for step in damage:
        change(path_of(run, step))
    incident = Incident(5, "rank 0 died", rank=0, host="a", step=3)
    decision = after_failure([incident, incident], RestartPolicy(3), present_steps(run), trained=True)
    assert isinstance(decision, Restart)
    loaded = ranks_load(run, monkeypatch, decision.resume_at_most)
    assert loaded == (1 if kept == (1, 2) and not damage else 2)


def test_checkpoints_that_are_gone_are_no_choice_of_the_state_machine(tmp_path: Path) -> None:
    run_with_steps(tmp_path / "run", *STEPS)
    state, rules = opening_state(tmp_path / "run"), Rules(1, 8, RestartPolicy(3), others_may_join=False)
    assert state.present == state.checkpoints == STEPS
    state = State(status="running", attempt=1, members=("a",), trained=True, checkpoints=STEPS, present=STEPS)
    incident = Incident(5, "rank 0 died", rank=0, host="a", step=3)
    for present, at_most in (((1, 2), 1), ((2,), None)):
        twice = decide(state, Present(present), 0.0, rules)[0]
        twice = decide(State(**{**vars(twice), "incidents": (incident,)}), Failed(1, incident), 0.0, rules)[0]
        assert twice.restart.resume_at_most == at_most


# Mirrors ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def mirrored(saved: Path, tmp_path: Path) -> str:
    """A mirror of a run with checkpoints of STEPS, whose folder is lost."""
    mirror = f"file://{tmp_path / 'mirror'}"
    shutil.copytree(saved, tmp_path / "lost" / "run")
    for step in STEPS:
        upload_checkpoint(MirrorStore(f"{mirror}/run", patience=1.0), path_of(tmp_path / "lost" / "run", step), keep=2)
    return mirror


def start(mirror: str, run: Path) -> int | None:
    fetch_newest(mirror, run, lambda text: None, patience=0.1)
    run.mkdir(parents=True, exist_ok=True)
    check_state(description(mirror), run)
    return max(present_steps(run), default=None)


def copies(tmp_path: Path, step: int) -> Path:
    (path,) = (tmp_path / "mirror" / "run").glob(f"step-{step:08d}.*")
    return path


@pytest.mark.parametrize("damaged", [(), (2,), (1, 2)])
def test_a_lost_folder_starts_from_a_good_copy_or_not_at_all(
    tmp_path: Path, mirrored: str, damaged: tuple[int, ...]
) -> None:
    for step in damaged:
        flip(copies(tmp_path, step))
    if len(damaged) < len(STEPS):
        assert start(mirrored, tmp_path / "new" / "run") == 2 - len(damaged)
        return
    for _ in range(2):  # the first refusal leaves nothing that the second takes for a run
        with pytest.raises(Damaged, match="every copy of a checkpoint in .*step-00000002.*step-00000001"):
            start(mirrored, tmp_path / "new" / "run")


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda store: (store / INDEX).unlink(), Damaged, "its index checkpoints.json is missing"),
        (
            lambda store: ((store / INDEX).unlink(), (store / INDEX).mkdir()),
            CommunicationFailure,
            "reading checkpoints.json",
        ),
        (lambda store: (store / INDEX).write_text("{"), Damaged, "not JSON"),
        (lambda store: edit_index(store, []), Damaged, "lists no checkpoints"),
        (lambda store: (store / INDEX).write_text('{"format": 2}'), BadInput, "format 2"),
    ],
)
def test_a_mirror_that_cannot_be_read_is_not_empty(
    tmp_path: Path, mirrored: str, change: Callable[[Path], Any], error: type[MeshwrightError], text: str
) -> None:
    change(tmp_path / "mirror" / "run")
    with pytest.raises(error, match=text):
        start(mirrored, tmp_path / "new" / "run")


def edit_index(store: Path, steps: list[int]) -> None:
    """Rewrite a store's index so that it lists the checkpoints of these steps only."""
    table = json.loads((store / INDEX).read_text())
    table["checkpoints"] = [entry for entry in table["checkpoints"] if entry["step"] in steps]
    (store / INDEX).write_text(json.dumps(table))


@pytest.mark.parametrize("local", [(1,), (1, 2)])
@pytest.mark.parametrize("change", ["missing", "without index", "empty index", "older index"])
def test_a_run_does_not_take_its_lost_copies_for_copies_that_never_were(
    tmp_path: Path, mirrored: str, local: tuple[int, ...], change: str
) -> None:
    """A store whose disk is not mounted has nothing: an older local checkpoint does not stand in for the copy in silence."""
    run, store = tmp_path / "lost" / "run", tmp_path / "mirror" / "run"
    for step in set(STEPS) - set(local):
        shutil.rmtree(path_of(run, step))
    match change:
        case "missing":
            shutil.rmtree(tmp_path / "mirror")
        case "without index":
            (store / INDEX).unlink()
        case "empty index":
            edit_index(store, [])
        case "older index":
            edit_index(store, [1])
    if 2 in local:
        assert start(mirrored, run) == 2
        return
    with pytest.raises(
        Damaged, match=rf"had a checkpoint of step 2 .*{COPIED}.* the newest in .* is of step 1.*mounted"
    ):
        start(mirrored, run)
    assert start(f"file://{tmp_path / 'elsewhere'}", run) == 1


def test_a_store_out_of_reach_is_no_reason_to_lose_steps(tmp_path: Path, mirrored: str) -> None:
    run, index = tmp_path / "lost" / "run", tmp_path / "mirror" / "run" / INDEX
    index.unlink()
    index.mkdir()
    assert start(mirrored, run) == 2
    shutil.rmtree(path_of(run, 2))
    with pytest.raises(CommunicationFailure, match="it has the checkpoint of step 2, and the newest in"):
        start(mirrored, run)


@pytest.mark.parametrize("text", ["{", "[]", '{"url": 1, "step": 2}', '{"url": "file://x", "step": "2"}', "\udcff"])
def test_a_damaged_record_of_copies_is_named(tmp_path: Path, mirrored: str, text: str) -> None:
    (tmp_path / "lost" / "run" / COPIED).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(Damaged, match=COPIED):
        start(mirrored, tmp_path / "lost" / "run")


def test_a_copy_of_a_newer_format_is_not_passed_over(tmp_path: Path, mirrored: str) -> None:
    to_newer_format(copies(tmp_path, 2))
    with pytest.raises(NewerFormat):
        start(mirrored, tmp_path / "new" / "run")


def test_an_empty_mirror_begins_a_run_and_a_lost_run_names_its_mirror(tmp_path: Path, mirrored: str) -> None:
    assert start(f"file://{tmp_path / 'empty'}", tmp_path / "new" / "run") is None
    run_with_steps(tmp_path / "new" / "run", 1)
    shutil.rmtree(path_of(tmp_path / "new" / "run", 1))
    with pytest.raises(Damaged, match="had a checkpoint .* its mirror file://.*/empty/run has no checkpoints.json"):
        start(f"file://{tmp_path / 'empty'}", tmp_path / "new" / "run")


def test_fresh_takes_a_name_that_its_mirror_does_not_have(tmp_path: Path, mirrored: str) -> None:
    from meshwright.config.load import load_run

    run = load_run(None, ["name=run", f"checkpoint.mirror={mirrored}", "train.steps=1", "cluster.gpu=cpu"])
    assert has_copies(mirrored, tmp_path / "runs" / "run")
    assert renamed(run, tmp_path / "runs").name == "run-2"


# A whole folder of another run --------------------------------------------------------------------------------------


def test_python_refuses_another_run_s_folder_under_the_same_step(tmp_path: Path) -> None:
    run_with_steps(tmp_path / "run", *STEPS)
    replace_by_another_run(tmp_path / "run")
    path = path_of(tmp_path / "run", 2)
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    assert store.newest_good() is None and store.load_newest(blank()) is None
    for work in (
        lambda: store.load(path, blank()),
        lambda: CheckpointReader(path),
        lambda: choose_newest(path),
        lambda: choose_newest(tmp_path / "run"),
    ):
        with pytest.raises(Damaged, match="does not belong here|foreign"):
            work()
    assert holds(path_of(tmp_path / "other", 2), 2) and torch.is_tensor(blank()["model.scale"])
