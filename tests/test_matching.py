"""The one matcher: exact names, ``re:`` from the start, shell wildcards, and which of several decides."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.errors import HalfbyteError
from halfbyte.matching import Patterns, matches, specificity

Q = "model.layers.3.self_attn.q_proj"
GATE_UP = "model.layers.3.mlp.gate_up_proj"
VISION = "vision_tower.encoder.layers.0.fc1"

NAMES = st.lists(st.from_regex(r"[a-z_0-9]{1,6}", fullmatch=True), min_size=1, max_size=5).map(".".join)


@pytest.mark.parametrize(
    ("name", "pattern", "expected"),
    [
        (Q, Q, True),
        (Q, "q_proj", False),
        (Q, "model.layers.3", False),
        (Q, Q.upper(), False),
        ("model.layers.30.self_attn.q_proj", Q, False),
        ("modelXlayers", "model.layers", False),  # a dot is a dot
        # re: is tried from the start of the name and may end before it does
        (VISION, "re:vision_tower.*", True),
        ("model.vision_tower.x", "re:vision_tower.*", False),
        (Q, "re:q_proj", False),
        (Q, "re:.*q_proj", True),
        (Q, r"re:model\.layers", True),
        (GATE_UP, "re:.*up_proj", True),
        ("model.layers.3.mlp.gate_proj", "re:.*mlp.gate$", False),
        ("model.layers.3.mlp.gate", "re:.*mlp.gate$", True),
        (Q, r"re:.*layers\.[0-2]\.", False),
        # a regular expression is never taken as plain text
        ("re:vision_tower.*", "re:vision_tower.*", False),
        # wildcards cover the whole name, and * crosses dots
        (Q, "*q_proj", True),
        (Q, "*.layers.3.*", True),
        (Q, "q_proj*", False),
        (Q, "model.layers.?.self_attn.q_proj", True),
        ("model.layers.30.self_attn.q_proj", "model.layers.?.self_attn.q_proj", False),
        (Q, "*.[qk]_proj", True),
        (Q, "*.[!qk]_proj", False),
        (GATE_UP, "*.up_proj", False),
        # wrappers around a projection
        (f"{Q}.linear", Q, True),
        (Q, f"{Q}.linear", True),
        (f"{Q}.linear", "*.q_proj", True),
        (Q, "*.q_proj.linear", True),
        (f"{Q}.linear", "re:.*q_proj$", True),
        (f"{Q}.linear", "re:.*\\.linear$", True),
        ("model.linear_attn.in_proj", "model.linear_attn", False),
        ("", "*", True),
    ],
)
def test_name_by_pattern(name: str, pattern: str, expected: bool) -> None:
    assert matches(name, pattern) is expected


@given(NAMES)
def test_every_name_means_itself_in_each_spelling(name: str) -> None:
    assert matches(name, name)
    assert matches(name, f"re:{re.escape(name)}$")
    assert matches(name, "*")


@given(NAMES, NAMES)
def test_exact_patterns_mean_one_module(name: str, other: str) -> None:
    plain, wrapped = name.removesuffix(".linear"), other.removesuffix(".linear")
    assert matches(name, other) == (plain == wrapped)


@given(NAMES, st.lists(st.one_of(NAMES, st.sampled_from(["*", "re:.*", "*a*", "re:a", "b*"])), max_size=8))
def test_patterns_agree_with_matches_and_put_the_deciding_one_first(name: str, patterns: list[str]) -> None:
    found = Patterns(patterns).matching(name)
    expected = [p for p in dict.fromkeys(patterns) if matches(name, p)]
    exact = [p for p in expected if specificity(p) == 0]
    # of two exact spellings of a name (with and without a wrapper) the earlier one stands for both
    assert found == exact[:1] + sorted((p for p in expected if specificity(p)), key=specificity)


def test_exact_beats_regular_expression_beats_wildcard_beats_order() -> None:
    patterns = Patterns(["*proj", "model.*", "re:.*q", "re:model", Q])
    assert patterns.matching(Q) == [Q, "re:.*q", "re:model", "*proj", "model.*"]


def test_broken_regular_expression_is_named() -> None:
    with pytest.raises(HalfbyteError, match=r"re:\(.*no regular expression"):
        matches(Q, "re:(")
    with pytest.raises(HalfbyteError, match="no regular expression"):
        Patterns(["re:["])
