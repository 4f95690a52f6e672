"""The self-test of a host finds wrong matmuls, memory and exchanges."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from meshwright.training.self_test import (
    Check,
    find_wrong_word,
    main,
    partners,
    write_pattern,
    wrong_matmul,
    wrong_memory,
)
from tests.slow import quick_first

CPU = torch.device("cpu")


def test_right_matmuls_and_memory_pass() -> None:
    assert wrong_matmul(CPU) == "" and wrong_memory(CPU, 1 << 20) == ""


def test_a_wrong_matmul_is_found() -> None:
    calls = []

    def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        matmul = a @ b
        calls.append(1)
        if len(calls) == 3:
            matmul[17, 5] += 1
        return matmul

    assert wrong_matmul(CPU, multiply) == "torch.float32 matmul 2: 1 of 262144 elements differ, first [17, 5]"


def test_a_flipped_bit_is_found() -> None:
    words = torch.empty(5_000_000, dtype=torch.int64)
    write_pattern(words, -0x5555555555555556)
    assert find_wrong_word(words, -0x5555555555555556) is None
    words[4_999_999] ^= 1 << 40
    assert find_wrong_word(words, -0x5555555555555556) == 4_999_999


@pytest.mark.parametrize("ranks", range(1, 10))
def test_every_pair_meets_once(ranks: int) -> None:
    table = [partners(rank, ranks) for rank in range(ranks)]
    for rank, row in enumerate(table):
        assert sorted(partner for partner in row if partner is not None) == [
            each for each in range(ranks) if each != rank
        ]
        assert all(partner is None or table[partner][turn] == rank for turn, partner in enumerate(row))


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[object, Any]]:
    """Runs the command with these arguments in this process, which has imported torch; returns its exit code and answer."""

    def run(*arguments: str) -> tuple[object, Any]:
        monkeypatch.setattr(sys, "argv", ["self_test", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        return end.value.code, json.loads(capfd.readouterr().out)

    return run


@pytest.mark.parametrize(
    ("words", "problem"),
    [((), "required: device, ranks"), (("cpuu", "2"), "invalid choice: 'cpuu'"), (("cpu", "0"), "at least 1, got 0")],
)
def test_wrong_words_end_with_a_usage(
    words: tuple[str, ...], problem: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["self_test", *words])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2 and problem in capsys.readouterr().err


@pytest.mark.parametrize("ranks", quick_first(1, [1, 2]))
def test_the_command_tests_all_ranks(command: Callable[..., tuple[object, Any]], ranks: int) -> None:
    """Exchanges of two processes are in `tests/launch/test_agent.py` too."""
    code, answer = command("cpu", str(ranks))
    checks = [Check(**check) for check in answer["checks"]]
    assert code == 0 and answer["ok"] and (answer["device"], answer["ranks"]) == ("cpu", ranks)
    assert checks == [Check(rank, name, True) for rank in range(ranks) for name in ("matmul", "memory", "exchange")]


def test_a_process_that_does_not_answer_fails(command: Callable[..., tuple[object, Any]]) -> None:
    code, answer = command("cpu", "1", "0.1")
    assert code == 3 and not answer["ok"]
    assert [Check(**check) for check in answer["checks"]] == [Check(0, "answer", False, "did not answer in time")]
