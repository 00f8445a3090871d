"""The processes that calibrate one model together, started by ``torchrun``: each has a share of the samples."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import distributed

from halfbyte.errors import HalfbyteError

Item = TypeVar("Item")


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
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield Ranks(), device
        return
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield Ranks(distributed.get_rank(), size), device
    finally:
        distributed.destroy_process_group()
