from __future__ import annotations

import sys

import pytest

from halfbyte.bench.process import measure
from halfbyte.errors import HalfbyteError


def test_memory_and_time_of_the_child() -> None:
    idle = measure([sys.executable, "-c", "pass"])
    busy = measure([sys.executable, "-c", "import time; block = b'x' * 200_000_000; time.sleep(0.3)"])
    assert busy.peak_rss - idle.peak_rss == pytest.approx(200e6, rel=0.1)
    assert busy.seconds > 0.3


def test_failure_is_said() -> None:
    with pytest.raises(HalfbyteError, match="exit code 3: no such thing"):
        measure([sys.executable, "-c", "import sys; print('no such thing', file=sys.stderr); sys.exit(3)"])
