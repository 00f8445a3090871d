"""Running the command line as a user does: a process of its own, no terminal."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def complaint(self) -> str:
        """The one line of an error. Fails if there is more, a traceback for example."""
        lines = self.err.strip().splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("error: "), self.err
        return lines[0]


def halfbyte(*arguments: object) -> Ran:
    done = subprocess.run(
        [sys.executable, "-m", "halfbyte", *map(str, arguments)], capture_output=True, text=True, check=False
    )
    return Ran(done.returncode, done.stdout, done.stderr)
