from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from halfbyte.bench.quality import Rung, bench_quality, parse_ladder, relative_to_rtn
from halfbyte.errors import HalfbyteError

REPORT = {
    "data": {"sources": ["built-in"], "samples": 3, "counted": 90},
    "totals": {"error": 0.05, "error_rtn": 0.125, "fallbacks": {"one": "why"}},
}


def test_a_ladder_names_algorithms_with_and_without_clips() -> None:
    rungs = parse_ladder(["rtn", "gptq:mse", "awq+gptq"], [], "w4a16")
    assert [(rung.name, str(rung.choice.method)) for rung in rungs] == [
        ("rtn", "rtn"),
        ("gptq:mse", "gptq clip mse"),
        ("awq+gptq", "awq+gptq clip output"),
    ]
    assert {rung.choice.scheme.name for rung in rungs} == {"w4a16"}


def test_clips_are_tried_with_what_names_none() -> None:
    rungs = parse_ladder(["rtn", "gptq:mse"], ["none", "mse"], "w4a8")
    assert [rung.name for rung in rungs] == ["rtn:none", "rtn:mse", "gptq:mse"]
    assert [rung.choice.method.clip for rung in rungs] == ["none", "mse", "mse"]


@pytest.mark.parametrize(
    ("ladder", "clips", "scheme", "message"),
    [
        (["rtn", "gptk"], [], "w4a8", r"rung 'gptk': .*'gptk' is not known"),
        (["rtn:wide"], [], "w4a8", r"rung 'rtn:wide': .*clip"),
        (["rtn:"], [], "w4a8", r"rung 'rtn:': .*clip"),
        (["rtn", "rtn"], [], "w4a8", r"rung 'rtn' is named twice"),
        (["rtn", "rtn:mse"], ["mse"], "w4a8", r"rung 'rtn:mse' is named twice"),
        (["rtn"], [], "w9", r"'w9' is not known"),
        (["rtn"], [], "none", r"scheme 'none' quantizes nothing"),
    ],
)
def test_a_bad_ladder_is_refused(ladder: list[str], clips: list[str], scheme: str, message: str) -> None:
    with pytest.raises(HalfbyteError, match=message):
        parse_ladder(ladder, clips, scheme)


@dataclass
class Fakes:
    """Makes a directory with a report for methods with data; scores it by what is in it."""

    made: list[Path] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)

    def make(self, rung: Rung, out: Path) -> None:
        if rung.name == "awq":
            raise ZeroDivisionError("no width")
        if rung.name == "smoothquant":
            raise HalfbyteError("too little memory")
        self.made.append(out)
        out.mkdir(parents=True)
        (out / "rung").write_text(rung.name)
        if rung.choice.method.needs_data:
            (out / "quantization_report.json").write_text(json.dumps(REPORT))
        elif rung.name == "rotation":  # leaves a report, and has no data
            (out / "quantization_report.json").write_text(json.dumps({**REPORT, "data": None}))

    def original(self) -> Mapping[str, dict[str, Any]]:
        return {"prose": {"perplexity": 10.0}, "code": {"perplexity": 5.0}}

    def of(self, checkpoint: Path) -> Mapping[str, dict[str, Any]]:
        self.seen.append((checkpoint / "rung").read_text())
        increase = 0.4 if self.seen[-1] == "rtn" else 0.1
        return {text: {"perplexity": 10.0, "increase": increase} for text in ("prose", "code")}


def climb(fakes: Fakes, *rungs: str, others: list[Path] | None = None, keep: Path | None = None) -> list[Any]:
    ladder = parse_ladder(rungs, [], "w4a8")
    parts = bench_quality(ladder, others or [], make=fakes.make, scores=fakes, keep=keep)
    return [row for part in parts for row in part]


def test_a_row_for_each_text_of_the_original_and_of_each_rung() -> None:
    rows = climb(Fakes(), "rtn", "gptq")
    assert [(row["rung"], row["text"]) for row in rows] == [
        ("original", "prose"),
        ("original", "code"),
        ("rtn", "prose"),
        ("rtn", "code"),
        ("gptq", "prose"),
        ("gptq", "code"),
    ]
    assert {row["op"] for row in rows} == {"quality"}
    assert (rows[2]["error"], rows[2]["error_rtn"], "data" in rows[2]) == (None, None, False)
    told = {name: rows[4][name] for name in ("error", "error_rtn", "data", "samples", "tokens", "fallbacks")}
    assert told == {
        "error": 0.05,
        "error_rtn": 0.125,
        "data": ["built-in"],
        "samples": 3,
        "tokens": 90,
        "fallbacks": 1,
    }
    assert rows[4]["seconds"] >= 0


def test_a_rotation_without_data_is_scored_too() -> None:
    *_, row = climb(Fakes(), "rotation")
    assert (row["perplexity"], row["error"], "data" in row) == (10.0, None, False)


def test_a_rung_is_removed_once_it_is_scored() -> None:
    fakes = Fakes()
    rungs = bench_quality(parse_ladder(["rtn", "gptq"], [], "w4a8"), [], make=fakes.make, scores=fakes)
    for _ in rungs:
        assert not any(path.exists() for path in fakes.made)
    assert fakes.seen == ["rtn", "gptq"]


def test_rungs_are_kept_where_they_are_wanted_and_nothing_is_overwritten(tmp_path: Path) -> None:
    climb(Fakes(), "rtn", "gptq:mse", keep=tmp_path)
    assert (tmp_path / "rtn" / "rung").read_text() == "rtn"
    assert (tmp_path / "gptq-clip-mse" / "rung").read_text() == "gptq:mse"
    fakes = Fakes()
    with pytest.raises(HalfbyteError, match=r"gptq-clip-mse: exists already"):
        climb(fakes, "awq+gptq", "gptq:mse", keep=tmp_path)
    assert not fakes.made


def test_what_fails_is_a_row_and_the_rest_goes_on(tmp_path: Path) -> None:
    rows = climb(Fakes(), "awq", "smoothquant", "rtn", others=[tmp_path / "nowhere"])
    assert [row for row in rows if "failed" in row][:2] == [
        {"op": "quality", "rung": "awq", "failed": "ZeroDivisionError: no width"},
        {"op": "quality", "rung": "smoothquant", "failed": "too little memory"},
    ]
    assert [row["rung"] for row in rows if row.get("text") == "prose"] == ["original", "rtn"]
    assert rows[-1]["rung"] == str(tmp_path / "nowhere")
    assert "nowhere" in rows[-1]["failed"]


def test_an_original_that_fails_is_an_error() -> None:
    class Broken(Fakes):
        def original(self) -> Mapping[str, dict[str, Any]]:
            raise HalfbyteError("NaN")

    with pytest.raises(HalfbyteError, match="NaN"):
        climb(Broken(), "rtn")


def row(rung: str, text: str, increase: float, method: str | None = None) -> dict[str, Any]:
    found: dict[str, Any] = {"rung": rung, "text": text, "increase": increase}
    return found if method is None else {**found, "method": method}


def test_increases_are_shares_of_those_of_rtn_on_the_same_text() -> None:
    rows = [
        {"rung": "original", "text": "prose", "perplexity": 10.0},
        row("other", "prose", 0.3),
        row("rtn:none", "prose", 0.4, "rtn"),
        row("rtn:none", "code", 0.2, "rtn"),
        row("gptq", "code", 0.05, "gptq clip output"),
        row("gptq", "poem", 0.05, "gptq clip output"),
        {"rung": "awq", "failed": "so"},
    ]
    assert [found.get("increase_of_rtn", "no key") for found in relative_to_rtn(rows)] == [
        "no key",
        0.75,
        1.0,
        1.0,
        0.25,
        None,
        "no key",
    ]


def test_there_is_no_share_of_an_rtn_that_costs_nothing() -> None:
    rows = relative_to_rtn([row("rtn", "prose", -0.01, "rtn"), row("gptq", "prose", 0.1, "gptq")])
    assert [found["increase_of_rtn"] for found in rows] == [None, None]
