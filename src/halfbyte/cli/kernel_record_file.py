"""Reading a record of ``halfbyte bench kernels`` or ``experts`` back: nothing in it is believed unchecked."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from halfbyte.errors import HalfbyteError

_MOST_SHOWN = 40
# Whatever a time in microseconds or a side of a matrix is, it is less.
_MOST = 10**12
# A record has four levels. Without a limit of its own, what can be read and written again would depend on Python's,
# which other packages change.
_MOST_LEVELS = 100
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')

Check = Callable[[Any], bool]


@dataclass(frozen=True)
class RecordForm:
    """What a command writes. row: the fields of a row that are shown. missing_where: where something is missing."""

    command: str
    row: Mapping[str, Check]
    missing_where: Mapping[str, Check]


class _NoRecordError(Exception):
    """Says what is wrong, and where."""


def read_record(path: Path, form: RecordForm) -> dict[str, Any]:
    """The record in ``path``, all of its parts that are shown of the types and ranges that were written.

    Errors: a file that is no record of the form's command; the message says where it is none.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if _levels(text) > _MOST_LEVELS:
            raise _NoRecordError("its values are nested too deeply")
        result = json.loads(text)
        _check(result, form)
        # It may be written again. What else stands in it must allow that: no NaN.
        json.dumps(result, indent=1, allow_nan=False)
        return dict(result)
    except _NoRecordError as error:
        reason = f"{error}"
    except ValueError as error:
        reason = str(error)
    raise HalfbyteError(f"{path} is no record: {reason}; accepted: what {form.command} wrote with --out")


def _levels(text: str) -> int:
    """How deeply the objects and lists of a JSON text are nested."""
    steps = {"[": 1, "{": 1, "]": -1, "}": -1}
    brackets = re.findall(r"[][{}]", _STRING.sub("", text))
    return max(accumulate(map(steps.__getitem__, brackets)), default=0)


def _check(result: Any, form: RecordForm) -> None:
    _fields("", result, {"meta": _is_object, "rows": _is_list})
    _fields("meta", result["meta"], _META, {"gpu": _is_text})
    _fields("meta.versions", result["meta"]["versions"], dict.fromkeys(result["meta"]["versions"], _is_text))
    for number, row in enumerate(result["rows"]):
        _fields(f"rows[{number}]", row, form.row)
    if "missing" in result:
        _fields("", result, {"missing": _is_list})
        for number, entry in enumerate(result["missing"]):
            where = f"missing[{number}]"
            _fields(where, entry, _MISSING, form.missing_where)
            if ("N" in entry) != ("K" in entry):
                raise _NoRecordError(f"{where} has one of N and K; both or none belong there")


def _fields(
    where: str, value: Any, needed: Mapping[str, Check], optional: Mapping[str, Check] | None = None
) -> None:
    if not isinstance(value, dict):
        raise _NoRecordError(f"{where or 'the whole'} is {_short(value)}, not an object")
    for name, check in {**needed, **(optional or {})}.items():
        place = f"{where}.{name}" if where else name
        if name not in value and name in needed:
            raise _NoRecordError(f"{place} is missing")
        if name in value and not check(value[name]):
            raise _NoRecordError(f"{place} is {_short(value[name])}, not {_WANTED[check]}")


def _short(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    text = json.dumps(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_text_or_none(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable() and value != ""


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _MOST


def _is_size_or_none(value: Any) -> bool:
    return value is None or _is_size(value)


def _is_error(value: Any) -> bool:
    # Neither NaN nor Inf passes either comparison, and no integer that is too large for a float.
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and 0 <= value <= sys.float_info.max


def _is_time(value: Any) -> bool:
    return _is_error(value) and 0 < value <= _MOST


def _is_floor(value: Any) -> bool:
    return value is None or (_is_error(value) and value <= _MOST)


_WANTED: dict[Check, str] = {
    _is_object: "an object",
    _is_list: "a list",
    _is_text: "a text",
    _is_text_or_none: "a text or null",
    _is_name: "a name",
    _is_size: "a positive whole number",
    _is_size_or_none: "a positive whole number or null",
    _is_error: "a number from 0",
    _is_time: "a positive number of microseconds",
    _is_floor: "a number of microseconds or null",
}
_META = {"command": _is_text, "commit": _is_text_or_none, "date": _is_text, "versions": _is_object}
_MISSING = {"kernel": _is_name, "reason": _is_text}
KERNELS = RecordForm(
    "bench kernels",
    {
        **dict.fromkeys(("kernel", "op", "scheme", "inputs"), _is_name),
        **{"N": _is_size_or_none, "K": _is_size, "M": _is_size_or_none},
        **{"us": _is_time, "floor_us": _is_floor, "rel_err": _is_error},
    },
    {"op": _is_name, "N": _is_size_or_none, "K": _is_size, "M": _is_size_or_none},
)
EXPERTS = RecordForm(
    "bench experts",
    {
        **dict.fromkeys(("kernel", "model", "gemm", "routing"), _is_name),
        **dict.fromkeys(("tokens", "E", "top_k", "N", "K"), _is_size),
        **{"us": _is_time, "rel_err": _is_error},
    },
    {**dict.fromkeys(("model", "gemm", "routing"), _is_name), "tokens": _is_size},
)
