import sys
import threading
import types
from importlib.machinery import ModuleSpec

import pytest

from meshwright.observe.sinks import SinkThread, hyperparameters, open_sinks, scalars
from meshwright.spec.errors import BadInput
from meshwright.spec.job import ObserveSpec, WandbSpec


class Collecting:
    name = "collecting"

    def __init__(self):
        self.records, self.closed = [], False

    def write(self, record):
        self.records.append(record)

    def close(self):
        self.closed = True


class Blocked(Collecting):
    """Sleeps in its first write until it is let go."""

    name = "blocked"

    def __init__(self):
        super().__init__()
        self.entered, self.let_go = threading.Event(), threading.Event()

    def write(self, record):
        self.entered.set()
        self.let_go.wait(60)
        super().write(record)


class Failing(Collecting):
    name = "failing"

    def write(self, record):
        super().write(record)
        raise ConnectionError("no route to host")


def test_records_arrive_in_order_and_sinks_are_closed():
    sinks, warnings = [Collecting(), Collecting()], []
    thread = SinkThread(sinks, warnings.append)
    for step in range(100):
        thread.put({"step": step})
    thread.close()
    for sink in sinks:
        assert [record["step"] for record in sink.records] == list(range(100)) and sink.closed
    assert warnings == [] and thread.dropped == 0


def test_a_sleeping_sink_costs_lines_and_never_time():
    sink, warnings = Blocked(), []
    thread = SinkThread([sink], warnings.append, capacity=4)
    thread.put({"step": 0})
    assert sink.entered.wait(60)
    for step in range(1, 101):
        thread.put({"step": step})  # would hang here if it waited: the sink is held until below
    assert thread.dropped == 96
    assert len(warnings) == 1 and "too slow" in warnings[0]
    sink.let_go.set()
    thread.close()
    assert [record["step"] for record in sink.records] == [0, 1, 2, 3, 4]
    assert "missed 96" in warnings[-1]


def test_a_sink_that_never_returns_is_left_behind():
    sink, warnings = Blocked(), []
    thread = SinkThread([sink], warnings.append, capacity=1)
    thread.put({"step": 0})
    assert sink.entered.wait(60)
    thread.close(timeout=0.01)
    assert "blocked did not finish" in warnings[-1]
    sink.let_go.set()


def test_a_failing_sink_is_switched_off_once_and_the_others_go_on():
    failing, good, warnings = Failing(), Collecting(), []
    thread = SinkThread([failing, good], warnings.append)
    for step in range(5):
        thread.put({"step": step})
    thread.close()
    assert len(failing.records) == 1 and len(good.records) == 5
    assert warnings == ["failing is switched off: ConnectionError: no route to host"]


def test_no_sinks_no_thread():
    before = threading.active_count()
    thread = SinkThread([], print)
    thread.put({"step": 1})
    assert threading.active_count() == before
    thread.close()


def test_scalars_are_named_by_kind_and_nesting():
    record = {
        "kind": "step",
        "step": 3,
        "loss": 2.0,
        "mfu": None,
        "phases": {"forward": 0.5},
        "text": "x",
        "flag": True,
    }
    assert dict(scalars(record)) == {"train/loss": 2.0, "train/phases/forward": 0.5}
    validation = {"kind": "validation", "step": 3, "loss": 1.0, "by_source": {"corpora/code": 0.5, "web": 2.0}}
    assert dict(scalars(validation)) == {"validation/loss": 1.0, "val/corpora/code": 0.5, "val/web": 2.0}


def test_tensorboard_files_hold_the_scalars(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    thread = open_sinks(ObserveSpec(tensorboard=True), tmp_path, {}, print)
    for step in (1, 2, 3):
        thread.put({"kind": "step", "step": step, "loss": 4.0 / step})
    thread.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [
        (1, 4.0),
        (2, 2.0),
        (3, pytest.approx(4 / 3)),
    ]


@pytest.mark.parametrize(
    ("spec", "package"),
    [(ObserveSpec(tensorboard=True), "tensorboard"), (ObserveSpec(wandb=WandbSpec(project="p")), "wandb")],
)
def test_a_missing_package_is_named_with_its_key(tmp_path, monkeypatch, spec, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(BadInput, match=rf"observe.{package}: .* `pip install {package}`"):
        open_sinks(spec, tmp_path, {}, print)


class FakeWandb(types.ModuleType):
    """The part of wandb's interface that the sink uses."""

    class Error(Exception):
        pass

    def __init__(self, refuse=False):
        super().__init__("wandb")
        self.__spec__ = ModuleSpec("wandb", None)
        self.refuse, self.logged, self.options, self.finished = refuse, [], {}, False

    def init(self, **options):
        if self.refuse:
            raise self.Error("api_key not configured")
        self.options = options
        return self

    def define_metric(self, name, step_metric):
        assert (name, step_metric) == ("*", "step")

    def log(self, values):
        self.logged.append(values)

    def finish(self):
        self.finished = True


def test_wandb_gets_steps_and_the_config(tmp_path, monkeypatch):
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    thread = open_sinks(ObserveSpec(wandb=WandbSpec(project="project")), tmp_path / "quick", {"seed": 1}, print)
    thread.put({"kind": "step", "step": 7, "loss": 2.0})
    thread.close()
    assert wandb.logged == [{"step": 7, "train/loss": 2.0}] and wandb.finished
    assert (wandb.options["project"], wandb.options["name"], wandb.options["config"]) == (
        "project",
        "quick",
        {"seed": 1},
    )


def test_wandb_is_told_team_name_tags_and_notes(tmp_path, monkeypatch):
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    spec = WandbSpec(project="project", entity="team", name="first", tags=("a", "b"), notes="why")
    open_sinks(ObserveSpec(wandb=spec), tmp_path / "quick", {}, print).close()
    told = {key: wandb.options[key] for key in ("project", "entity", "name", "group", "tags", "notes")}
    assert told == {
        "project": "project",
        "entity": "team",
        "name": "first",
        "group": "quick",
        "tags": ["a", "b"],
        "notes": "why",
    }


def test_wandb_is_told_group_and_job_type(tmp_path, monkeypatch):
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    spec = WandbSpec(project="project", group="a-sweep", job_type="tune")
    open_sinks(ObserveSpec(wandb=spec), tmp_path / "quick", {}, print).close()
    assert (wandb.options["group"], wandb.options["job_type"]) == ("a-sweep", "tune")


def test_tensorboard_files_hold_the_hyperparameters(tmp_path):
    config = {
        "name": "quick",
        "seed": 1,
        "model": {"layers": 2, "init": None},
        "data": {"mix": {"a/b": 1.0}},
        "observe": {"spans": True},
    }
    assert dict(hyperparameters(config)) == {"seed": 1, "model.layers": 2, "data.mix.a/b": 1.0}
    thread = open_sinks(ObserveSpec(tensorboard=True), tmp_path, config, print)
    thread.put({"kind": "step", "step": 1, "loss": 2.0})
    thread.close()
    (file,) = (tmp_path / "tensorboard").glob("events*")
    content = file.read_bytes()
    assert b"_hparams_/session_start_info" in content and b"model.layers" in content and b"spans" not in content


def test_wandb_without_a_login_is_bad_input(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb(refuse=True))
    with pytest.raises(BadInput, match="WANDB_MODE=offline"):
        open_sinks(ObserveSpec(wandb=WandbSpec(project="project")), tmp_path, {}, print)
