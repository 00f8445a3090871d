from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from halfbyte.bench.kernels.table import markdown
from halfbyte.cli.kernel_record import print_record
from halfbyte.cli.kernel_record_file import KERNELS, read_record
from halfbyte.errors import HalfbyteError
from tests.cli.test_bench_kernels import RECORD

ROW = RECORD["rows"][0]
META = RECORD["meta"]
H200 = Path(__file__).parents[2] / "benchmarks" / "h200"


def with_row(**changed: Any) -> str:
    return json.dumps({**RECORD, "rows": [ROW, {**ROW, **changed}]})


def with_meta(**changed: Any) -> str:
    return json.dumps({**RECORD, "meta": {**META, **changed}})


def with_missing(missing: Any) -> str:
    return json.dumps({**RECORD, "missing": missing})


NESTED = "[" * 100_000 + "]" * 100_000
# Some that a parser in C reads are too deep for a writer in Python.
DEEP = "[" * 990 + "]" * 990

BAD = {
    "": "char 0",
    "[]": "a list, not an object",
    "null": "null, not an object",
    "{}": "meta is missing",
    '{"meta": {}}': "rows is missing",
    '{"meta": 1, "rows": []}': "meta is 1",
    json.dumps({**RECORD, "rows": {}}): "rows is an object, not a list",
    json.dumps({**RECORD, "rows": ""}): 'rows is "", not a list',
    json.dumps({**RECORD, "rows": [1]}): r"rows\[0\] is 1",
    json.dumps({**RECORD, "rows": [{"op": "linear", "us": 1.0}]}): r"rows\[0\].kernel is missing",
    with_row(us=None): r"rows\[1\].us is null",
    with_row(us="fast"): r'rows\[1\].us is "fast"',
    with_row(us=float("nan")): r"rows\[1\].us is NaN",
    with_row(us=float("inf")): r"rows\[1\].us is Infinity",
    with_row(us=0): r"rows\[1\].us is 0",
    with_row(us=True): r"rows\[1\].us is true",
    with_row(us=10**400): r"rows\[1\].us is 1000",
    with_row(us=1.5).replace("1.5", "1e999"): r"rows\[1\].us is Infinity",
    with_row(us=1.5).replace("1.5", "9" * 5000): "4300 digits",
    with_row(floor_us="low"): r"rows\[1\].floor_us",
    with_row(floor_us=float("nan")): r"rows\[1\].floor_us",
    with_row(rel_err=None): r"rows\[1\].rel_err is null",
    with_row(rel_err="small"): r"rows\[1\].rel_err",
    with_row(rel_err=float("nan")): r"rows\[1\].rel_err",
    with_row(rel_err=-1.0): r"rows\[1\].rel_err",
    with_row(rel_err=10**400): r"rows\[1\].rel_err",
    with_row(M="16"): r'rows\[1\].M is "16"',
    with_row(M=1.5): r"rows\[1\].M",
    with_row(M=0): r"rows\[1\].M",
    with_row(N=[64]): r"rows\[1\].N is a list",
    with_row(K=None): r"rows\[1\].K is null",
    with_row(op=None): r"rows\[1\].op is null",
    with_row(op=["w4a8_linear"]): r"rows\[1\].op is a list",
    with_row(kernel="two\nlines"): r"rows\[1\].kernel",
    with_row(scheme={}): r"rows\[1\].scheme",
    with_row(inputs=1): r"rows\[1\].inputs",
    with_row(tbps=float("nan")): "not JSON compliant",
    with_meta(versions=["torch"]): "meta.versions is a list",
    with_meta(versions={"torch": 2}): "meta.versions.torch is 2",
    with_meta(commit=1): "meta.commit is 1",
    with_meta(gpu=[]): "meta.gpu is a list",
    with_missing(None): "missing is null",
    with_missing([1]): r"missing\[0\] is 1",
    with_missing([{"kernel": "absent"}]): r"missing\[0\].reason is missing",
    with_missing([{"kernel": ["absent"], "reason": ""}]): r"missing\[0\].kernel",
    with_missing([{"kernel": "absent", "reason": "", "K": 4}]): r"missing\[0\] has one of N and K",
    NESTED: "nested too deeply",
    with_row(more=0).replace('"more": 0', f'"more": {DEEP}'): "nested too deeply",
}


@pytest.mark.parametrize("content", BAD, ids=range(len(BAD)))
def test_what_is_no_record_is_refused_with_the_place(tmp_path: Path, content: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(HalfbyteError, match=rf"other\.json is no record: .*{BAD[content]}") as refused:
        read_record(path, KERNELS)
    assert len(str(refused.value)) < 400 + len(str(path))


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_bytes(b"\xff\xfe{")
    with pytest.raises(HalfbyteError, match="is no record"):
        read_record(path, KERNELS)


@pytest.mark.parametrize("name", ["w4a8.json"])
def test_records_of_this_project_are_read(name: str) -> None:
    assert read_record(H200 / name, KERNELS) == json.loads((H200 / name).read_text())


def test_none_where_a_record_has_none(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text(with_row(N=None, M=None, floor_us=None, rel_err=0.0))
    assert read_record(path, KERNELS)["rows"][1]["M"] is None
    path.write_text(with_meta(commit=None))
    assert read_record(path, KERNELS)["meta"]["commit"] is None
    path.write_text(json.dumps({"meta": META, "rows": []}))
    assert read_record(path, KERNELS)["rows"] == []


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150, deadline=None)
@given(
    where=st.sampled_from(["rows", "meta", "missing", "top"]),
    field=st.sampled_from([*ROW, *META, "missing", "rows", "meta", "reason", "more"]),
    value=VALUES,
)
def test_a_record_is_refused_or_can_be_shown(tmp_path: Path, where: str, field: str, value: Any) -> None:
    record = json.loads(json.dumps(RECORD))
    place = {
        "rows": record["rows"][0],
        "meta": record["meta"],
        "missing": record["missing"][0],
        "top": record,
    }
    place[where][field] = value
    path = tmp_path / "record.json"
    path.write_text(json.dumps(record))
    try:
        read = read_record(path, KERNELS)
    except HalfbyteError:
        return
    print_record(read)
    markdown(read)
    json.dumps(read, allow_nan=False)
