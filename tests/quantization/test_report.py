from __future__ import annotations

import json
from pathlib import Path

import pytest

from halfbyte.errors import HalfbyteError
from halfbyte.models.folding import Fold
from halfbyte.models.producers import NormProducer, RowsProducer
from halfbyte.quantization.report import (
    REPORT_FILE,
    BlockReport,
    ModuleReport,
    fold_report,
    read_origin,
    read_reports,
    run_report,
)

MODULES = (
    ModuleReport("a.q", "w4a8", "gptq", (4, 8), 8, 100, 0.2, 0.1, 0.5, 1.5, 0.25, None, 0.01, None),
    ModuleReport("a.k", "w4a8", "rtn", (4, 8), 8, 10, 0.4, 0.3, 0.5, 1.5, fallback="saw 10 tokens"),
    ModuleReport("a.v", "w8a16", "rtn", (4, 8), None, 0, None, None, 0.5, 1.5),
)
FOLDS = (
    Fold(NormProducer("a.norm.weight", None, 1.0), ("a.q", "a.k"), 8, 8),
    Fold(RowsProducer("a.v", "a.v.bias", 0, 2, 2, 2), ("a.o",), 4, 2, 2),
)
ORIGIN = {"source": "0123", "rotated": False, "target": "halfbyte"}
BLOCK = BlockReport("a", MODULES, {"a.experts": [3, 0]}, tuple(map(fold_report, FOLDS)), ("a note",))


def test_a_block_goes_through_json() -> None:
    assert BlockReport.from_dict(json.loads(json.dumps(BLOCK.to_dict()))) == BLOCK


def test_folds_say_their_kind() -> None:
    assert fold_report(FOLDS[0])["producer"] == {
        "kind": "norm",
        "weight": "a.norm.weight",
        "bias": None,
        "offset": 1.0,
    }
    assert fold_report(FOLDS[1])["producer"]["kind"] == "rows"
    assert fold_report(FOLDS[1])["repeats"] == 2


def test_totals() -> None:
    document = run_report({"scheme": "w4a8"}, {"samples": 3}, [BLOCK], ["one"], origin=ORIGIN)
    assert document["totals"] == {
        "modules": 3,
        "error_rtn": pytest.approx(0.3),
        "error": pytest.approx(0.2),
        "fallbacks": {"a.k": "saw 10 tokens"},
    }
    assert run_report({}, None, [], [], origin=ORIGIN)["totals"]["error"] is None


def test_reading_back(tmp_path: Path) -> None:
    assert read_reports(tmp_path) == {}
    assert read_origin(tmp_path) is None
    (tmp_path / REPORT_FILE).write_text(json.dumps(run_report({}, None, [BLOCK], [], origin=ORIGIN)))
    assert read_reports(tmp_path) == {"a": BLOCK}
    assert read_origin(tmp_path) == ORIGIN
    for damaged in ("", "{}", '{"blocks": [{"block": "a"}]}', "[]"):
        (tmp_path / REPORT_FILE).write_text(damaged)
        with pytest.raises(HalfbyteError, match="is no report of a calibrated run"):
            read_reports(tmp_path)


def test_a_report_without_an_origin(tmp_path: Path) -> None:
    (tmp_path / REPORT_FILE).write_text('{"blocks": []}')
    assert read_origin(tmp_path) is None
    for damaged in ("", '{"origin": 3}'):
        (tmp_path / REPORT_FILE).write_text(damaged)
        with pytest.raises(HalfbyteError, match="is no report of a calibrated run"):
            read_origin(tmp_path)
