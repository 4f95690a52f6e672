import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.schedules.action import Action, parse, parse_all, together
from meshwright.spec.errors import BadInput

number = st.integers(0, 300)
unit = st.none() | number


def compute(*ops):
    return st.tuples(st.sampled_from(ops), number, number, unit).map(lambda fields: Action(*fields))


transfers = st.tuples(
    st.sampled_from(["send", "recv"]), number, number, st.none(), number, st.sampled_from(["activation", "gradient"])
).map(lambda fields: Action(*fields))
unit_actions = st.tuples(st.sampled_from(["unshard", "reshard", "reduce_grad"]), number, number).map(
    lambda fields: Action(fields[0], fields[1], unit=fields[2])
)
actions = st.one_of(
    compute("forward", "backward", "backward_input", "backward_weight", "forward_only"),
    transfers,
    unit_actions,
    st.sampled_from([Action("norm_barrier"), Action("optim")]),
    st.tuples(compute("forward", "backward"), number).map(
        lambda pair: together(pair[0], pair[0]._replace(micro_batch=pair[1]))
    ),
)


@settings(max_examples=150)
@given(st.lists(actions, max_size=6))
def test_printed_actions_parse_back(action_list):
    assert parse_all(" ".join(map(str, action_list))) == tuple(action_list)


def test_printed_forms():
    forward, backward = Action("forward", 3, 2), Action("backward", 4, 0, 1)
    assert str(forward) == "F3.2"
    assert str(backward) == "B4.0/1"
    pair = together(forward, forward._replace(micro_batch=3))
    assert str(pair) == "F3.2&F3.3" and parse(str(pair)) == pair
    assert str(Action("send", 3, 2, peer=4, payload="activation")) == "SA3.2>4"
    assert str(Action("unshard", 3, unit=1)) == "U3/1"
    assert str(Action("optim")) == "O"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "F",
        "F3",
        "X1.2",
        "SA1.2<3",
        "RG1.2>0",
        "U3",
        "F1.2/",
        "F1.2&",
        "F1.2&B1.3",
        "F1.2&F2.3",
        "F1.2/0&F1.3",
        "N&N",
        "N1",
    ],
)
def test_text_that_is_no_action_is_refused(text):
    with pytest.raises(BadInput, match="is no action; expected a form such as F3.2"):
        parse(text)
