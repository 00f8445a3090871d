"""The processes that calibrate one model together, started by ``torchrun``: each has a share of the samples."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
from torch import distributed

from halfbyte.errors import HalfbyteError

Item = TypeVar("Item")
# Ranks wait for each other while the first one writes, for as long as a slow disk takes: by default NCCL ends a
# process that waits for ten minutes. Of a rank that died the others hear from torchrun, not by this.
_PATIENCE = timedelta(hours=12)
_SET_BY_TORCHRUN = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Ranks:
    """rank: of this process, from 0. size: how many there are."""

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes and speaks."""
        return self.rank == 0

    def share(self, items: Sequence[Item]) -> list[Item]:
        """Every ``size``-th of ``items``. Errors: fewer items than ranks."""
        if len(items) < self.size:
            raise HalfbyteError(
                f"{len(items)} samples cannot be shared by {self.size} ranks; accepted: one each"
            )
        return list(items[self.rank :: self.size])

    def from_first(self, item: Item | None) -> Item:
        """What the first rank has, on all of them."""
        held = [item]
        if self.size > 1:
            distributed.broadcast_object_list(held, src=0)
        (sent,) = held
        assert sent is not None
        return sent


def is_first_process() -> bool:
    """Whether this process is the first that ``torchrun`` started, or the only one."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def joined(device: torch.device) -> Iterator[tuple[Ranks, torch.device]]:
    """The ranks that ``torchrun`` started, joined for as long as the context lasts, and this one's device.

    Outside of ``torchrun`` there is one rank. On GPUs each rank of a machine takes its own.
    Errors: ``WORLD_SIZE`` without what else torchrun sets; more ranks on a machine than GPUs.
    """
    size = _number("WORLD_SIZE", 1)
    if size == 1:
        yield Ranks(), device
        return
    missing = [name for name in _SET_BY_TORCHRUN if name not in os.environ]
    if missing:
        raise HalfbyteError(
            f"environment: WORLD_SIZE is {size} without {', '.join(missing)}; accepted: what torchrun sets, or no "
            "WORLD_SIZE"
        )
    if device.type == "cuda":
        device = _own_gpu()
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=_PATIENCE)
    try:
        yield Ranks(distributed.get_rank(), size), device
    finally:
        distributed.destroy_process_group()


def _own_gpu() -> torch.device:
    local, gpus = _number("LOCAL_RANK", 0), torch.cuda.device_count()
    if local >= gpus:
        raise HalfbyteError(
            f"rank {local} of this machine finds no GPU of its own; accepted: up to {gpus} ranks (torchrun "
            f"--nproc-per-node {gpus}), or device cpu"
        )
    return torch.device("cuda", local)


def _number(variable: str, unset: int) -> int:
    value = os.environ.get(variable, str(unset))
    if not value.isdecimal():
        raise HalfbyteError(f"environment: {variable} is {value!r}; accepted: a number, as torchrun sets it")
    return int(value)
