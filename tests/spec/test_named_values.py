"""Names that options take: one, or a list."""

from __future__ import annotations

import pytest

from meshwright.spec.errors import BadInput
from meshwright.spec.named_values import value_named, values_listed

KNOWN = {"H100": 1, "B200": 2, "fp8-row": 3}


def test_names_are_found_without_regard_to_case_and_punctuation_and_once() -> None:
    assert values_listed(" b200,h100, ,B200,FP8_row", KNOWN, "--chips") == (2, 1, 3)
    assert value_named("h-100", KNOWN, "--chip") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("H10O", r"^--chips H10O: expected one of H100, B200, fp8-row \(nearest: H100\)$"),
        ("B200,zzz", r"^--chips zzz: expected one of H100, B200, fp8-row$"),
        (" , ", r"^--chips: expected names such as --chips H100,B200; known: H100, B200, fp8-row$"),
    ],
)
def test_what_is_not_known_is_refused(text: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        values_listed(text, KNOWN, "--chips")
