"""Joining without other processes: what is refused, where a rank computes, how long it waits."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import distributed

from halfbyte.calibration.ranks import Ranks, joined
from halfbyte.errors import HalfbyteError

GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Rank 1 of 2 on a machine with two GPUs; what the process group is made with."""
    for name, value in {
        "WORLD_SIZE": "2",
        "RANK": "1",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
    }.items():
        monkeypatch.setenv(name, value)
    made: dict[str, Any] = {}
    monkeypatch.setattr(
        distributed, "init_process_group", lambda backend, **options: made.update(options, backend=backend)
    )
    monkeypatch.setattr(distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(distributed, "destroy_process_group", made.clear)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: made.update(current=device))
    return made


def test_each_rank_takes_its_own_gpu_and_waits_for_hours(launched: dict[str, Any]) -> None:
    with joined(GPU) as (ranks, place):
        assert ranks == Ranks(1, 2)
        assert place == launched["current"] == torch.device("cuda", 1)
        assert launched["backend"] == "nccl"
        assert launched["timeout"] >= timedelta(hours=6)
    assert not launched


def test_more_ranks_than_gpus(launched: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with (
        pytest.raises(HalfbyteError, match=r"rank 1 of this machine .* accepted: up to 1 ranks"),
        joined(GPU),
    ):
        pass
    with joined(CPU) as (_, place):
        assert place == CPU
        assert launched["backend"] == "gloo"


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_a_world_that_torchrun_did_not_start(
    name: str, launched: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(name)
    with (
        pytest.raises(HalfbyteError, match=rf"WORLD_SIZE is 2 without {name}; accepted:"),
        joined(GPU),
    ):
        pass
    assert not launched


@pytest.mark.parametrize("name", ["WORLD_SIZE", "LOCAL_RANK"])
def test_a_variable_that_is_no_number(
    name: str, launched: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "two")
    with pytest.raises(HalfbyteError, match=rf"{name} is 'two'; accepted: a number"), joined(GPU):
        pass
    assert not launched


def test_a_process_by_itself_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with joined(CPU) as (ranks, place):
        assert (ranks, place) == (Ranks(), CPU)
