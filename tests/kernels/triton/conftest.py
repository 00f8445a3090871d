from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.kernels.triton.runners import Runner, interpreted, on_gpu

# Nothing here can run where Triton is not for this system.
collect_ignore_glob = [] if find_spec("triton") else ["test_*.py"]


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def run(request: pytest.FixtureRequest) -> Runner:
    return interpreted if request.param == "interpreter" else on_gpu


@pytest.fixture
def shapes(run: Runner) -> list[tuple[int, int]]:
    """[M, K]: a few where the interpreter has to count every row, more on a GPU, where every K is compiled."""
    if run is interpreted:
        return [(0, 576), (1, 4096), (2, 200), (5, 64), (11, 1000)]
    narrow = [(5, 9), (300, 64), *((m, 576) for m in (0, 1, 2, 7, 16, 17, 1000))]
    # Fewer rows have more threads: rows.py.
    return [*narrow, (1, 4096), (64, 4096), (257, 4096), (600, 4096), (1, 14336), (17, 14336), (100, 14336)]
