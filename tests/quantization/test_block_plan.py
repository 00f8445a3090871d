"""What the identity of a calibrated run is made of."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from halfbyte.quantization import job
from halfbyte.quantization.block_plan import fingerprint
from tests.quantization.calibrated_runs import BEST, samples
from tests.tiny import tiny_model


def test_everything_that_changes_the_codes_is_in_the_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = job.prepare(tiny_model("llama", tmp_path), BEST)
    data = samples().samples
    found = {
        fingerprint(plan, data, "cpu", torch.float32),
        fingerprint(plan, data, "cpu", torch.bfloat16),
        fingerprint(plan, data[:-1], "cpu", torch.float32),
        fingerprint(plan, samples(masked=1).samples, "cpu", torch.float32),
    }
    for gpu in ("made-up GPU", "another GPU"):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, gpu=gpu: gpu)
        found.add(fingerprint(plan, data, "cuda:0", torch.float32))
    assert len(found) == 6
    assert fingerprint(plan, data, "cuda:0", torch.float32) == fingerprint(
        plan, data, "cuda:1", torch.float32
    )
