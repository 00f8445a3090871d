"""Names of algorithms, and the order that they are given."""

from __future__ import annotations

import itertools

import pytest

from halfbyte.errors import HalfbyteError
from halfbyte.method import Method


@pytest.mark.parametrize("named", itertools.permutations(["gptq", "awq", "rotation"]))
def test_steps_run_in_one_order_however_they_are_named(named: tuple[str, ...]) -> None:
    assert Method.parse("+".join(named)).steps == ("rotation", "awq", "gptq")


@pytest.mark.parametrize(
    ("algorithm", "clip", "steps", "ranges", "needs_data"),
    [
        ("rtn", None, ("rtn",), "none", False),
        ("rtn", "mse", ("rtn",), "mse", False),
        ("rtn", "output", ("rtn",), "output", True),
        ("GPTQ", None, ("gptq",), "output", True),
        ("gptq", "none", ("gptq",), "none", True),
        ("awq", None, ("awq", "rtn"), "output", True),
        ("smoothquant + rtn", "none", ("smoothquant", "rtn"), "none", True),
        ("rotation", None, ("rotation", "rtn"), "none", False),
    ],
)
def test_what_is_not_named(
    algorithm: str, clip: str | None, steps: tuple[str, ...], ranges: str, needs_data: bool
) -> None:
    method = Method.parse(algorithm, clip)
    assert (method.steps, method.clip, method.needs_data) == (steps, ranges, needs_data)


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        ("gptx", "'gptx' is not known; accepted: rotation, smoothquant, awq, rtn, gptq"),
        ("", "'' is not known"),
        ("awq+", "'' is not known"),
        ("awq+awq", "twice"),
        ("awq+smoothquant", "awq and smoothquant"),
        ("gptq+rtn", "gptq and rtn"),
    ],
)
def test_refused(algorithm: str, said: str) -> None:
    with pytest.raises(HalfbyteError, match=said):
        Method.parse(algorithm)


def test_parts() -> None:
    method = Method.parse("awq+gptq")
    assert (method.scaling, method.rounding, str(method)) == ("awq", "gptq", "awq+gptq clip output")
    assert (Method().scaling, Method().rounding, str(Method())) == (None, "rtn", "rtn")


@pytest.mark.parametrize(
    ("algorithm", "clip", "steps", "left"),
    [
        ("awq+gptq", None, ("rtn",), "none"),
        ("rotation+gptq", "mse", ("rotation", "rtn"), "mse"),
        ("rtn", "output", ("rtn",), "none"),
        ("rtn", "mse", ("rtn",), "mse"),
    ],
)
def test_what_is_left_without_data(
    algorithm: str, clip: str | None, steps: tuple[str, ...], left: str
) -> None:
    assert Method.parse(algorithm, clip).without_data == Method(steps, left)
