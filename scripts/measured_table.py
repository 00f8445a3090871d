"""Makes src/halfbyte/data/measured-h200.json, what ``halfbyte plan`` counts with, from the records in benchmarks/.

python scripts/measured_table.py          write it
"""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "src" / "halfbyte" / "data" / "measured-h200.json"
# For each scheme the kernel that runs it, in records of which the first one counts where several have a case.
SOURCES = {
    "bf16": (("w4a8.json", "torch-bf16", "bf16"),),
    "fp8": (("fp8_int8.json", "scaled-mm", "fp8"),),
    "w4a16": (("w4a16.json", "hopper-w4a16", "w4a16"),),
    "w4a8": (("w4a8_int8.json", "hopper-w4a8", "w4a8"), ("w4a8.json", "hopper-w4a8", "w4a8")),
    "w4a8-int8": (("w4a8_int8.json", "hopper-w4a8-int8", "w4a8-int8"),),
}


def measured() -> dict[str, object]:
    """The table: by scheme rows of out_features, in_features, tokens, microseconds."""
    schemes, records = {}, {}
    for scheme, sources in SOURCES.items():
        cases: dict[tuple[int, int, int], float] = {}
        for file, kernel, stored in reversed(sources):
            record = json.loads((ROOT / "benchmarks" / "h200" / file).read_text(encoding="utf-8"))
            records[file] = record["meta"]["commit"]
            for row in record["rows"]:
                if (row["kernel"], row["scheme"]) == (kernel, stored):
                    cases[row["N"], row["K"], row["M"]] = row["us"]
        schemes[scheme] = [[*case, us] for case, us in sorted(cases.items())]
    return {"gpu": "H200", "records": dict(sorted(records.items())), "schemes": schemes}


def text(table: dict[str, object]) -> str:
    """As the file holds it, a row to a line."""
    return json.dumps(table).replace("], [", "],\n[").replace('": [[', '": [\n[') + "\n"


if __name__ == "__main__":
    TABLE.write_text(text(measured()), encoding="utf-8")
