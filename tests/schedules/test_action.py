import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.schedules.action import Action, overlap, parse, parse_all
from meshwright.spec.errors import BadInput

number = st.integers(0, 300)
unit = st.none() | number


def compute(*kinds):
    return st.tuples(st.sampled_from(kinds), number, number, unit).map(lambda fields: Action(*fields))


transfers = st.tuples(
    st.sampled_from(["send", "recv"]), number, number, st.none(), number, st.sampled_from(["activation", "gradient"])
).map(lambda fields: Action(*fields))
of_units = st.tuples(st.sampled_from(["unshard", "reshard", "reduce_grad"]), number, number).map(
    lambda fields: Action(fields[0], fields[1], unit=fields[2])
)
actions = st.one_of(
    compute("forward", "backward", "backward_input", "backward_weight", "forward_only"),
    transfers,
    of_units,
    st.sampled_from([Action("norm_barrier"), Action("optim")]),
    st.tuples(compute("forward"), compute("backward")).map(lambda pair: overlap(*pair)),
)


@settings(max_examples=150)
@given(st.lists(actions, max_size=6))
def test_what_is_printed_is_read_back(some):
    assert parse_all(" ".join(map(str, some))) == tuple(some)


def test_the_printed_form_is_short():
    forward, backward = Action("forward", 3, 2), Action("backward", 4, 0, 1)
    assert str(forward) == "F3.2"
    assert str(overlap(forward, backward)) == "F3.2&B4.0/1"
    assert str(Action("send", 3, 2, peer=4, payload="activation")) == "SA3.2>4"
    assert str(Action("unshard", 3, unit=1)) == "U3/1"
    assert str(Action("optim")) == "O"


@pytest.mark.parametrize("text", ["", "F", "F3", "X1.2", "SA1.2<3", "RG1.2>0", "U3", "F1.2/", "F1.2&", "N1"])
def test_what_is_no_action_is_refused(text):
    with pytest.raises(BadInput, match="is no action; expected a form such as F3.2"):
        parse(text)
