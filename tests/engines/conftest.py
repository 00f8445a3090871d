from __future__ import annotations

import pytest
import transformers

from tests.engines.checkpoints import Checkpoints


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    transformers.utils.logging.disable_progress_bar()
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))
