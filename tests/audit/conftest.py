from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.audit.tamper import copied, quantized
from tests.tiny import tiny_model


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in BF16."""
    return tiny_model("llama", tmp_path_factory.mktemp("audit-source"), num_hidden_layers=1)


@pytest.fixture(scope="session")
def made(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The tiny Llama in a scheme, made once; not to be changed."""
    root = tmp_path_factory.mktemp("audit-made")

    def make(scheme: str) -> Path:
        return root / scheme if (root / scheme).exists() else quantized(llama, root / scheme, scheme)

    return make


@pytest.fixture
def fresh(made: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """The tiny Llama in a scheme, to be damaged."""
    return lambda scheme: copied(made(scheme), tmp_path / scheme)
