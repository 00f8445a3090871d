"""A model that runs one decoder block at a time, so that the others need not be in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from halfbyte.calibration.arguments import BlockArguments, ModelAround
from halfbyte.calibration.live_tensors import LiveTensors, TensorSource
from halfbyte.calibration.loaded_block import LoadedBlock
from halfbyte.calibration.places import Places, find_places
from halfbyte.calibration.skeleton import build_skeleton, entry_dtypes, find_blocks
from halfbyte.errors import HalfbyteError
from halfbyte.formats.scales import FLOAT_SCALE_DTYPES
from halfbyte.models.layout import ModelLayout


class BlockModel:
    """transformers' own code for a checkpoint, whose weights come and go.

    blocks: names of the decoder's blocks in the model, in the order in which they run. A sequence goes through
    :meth:`enter`, each block's :meth:`LoadedBlock.run`, and :meth:`leave`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layout: ModelLayout,
        places: Places,
        live: LiveTensors,
        placed: torch.Tensor,
    ) -> None:
        """placed: a tensor of the device and dtype to compute in."""
        self.blocks: Sequence[str] = find_blocks(model, layout, places)
        self._model = model
        self._layout = layout
        self._places = places
        self._live = live
        self._placed = placed
        self._around = ModelAround(model, [model.get_submodule(name) for name in self.blocks])
        inside = tuple(f"{name}." for name in self.blocks)
        outside = [name for name in live.names if not name.startswith(inside)]
        head = _head_names(model)
        self._before = [name for name in outside if name not in head]
        self._head = [name for name in outside if name in head]

    @classmethod
    def open(
        cls,
        source: TensorSource,
        layout: ModelLayout,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> BlockModel:
        """The model of ``source``, whose layout is ``layout``; reads no weight yet.

        dtype: to compute in; unless given, fp32 on a CPU and elsewhere what the weights are stored in, so that none is
            rounded when it is loaded.
        Errors: a model that transformers cannot build, that the checkpoint does not fill, whose tensors it
        converts in ways not known here, or whose blocks cannot be found.
        """
        device = torch.device(device)
        if dtype is None:
            dtype = torch.float32 if device.type == "cpu" else FLOAT_SCALE_DTYPES[source.model_dtype]
        model = build_skeleton(source.config, device=device, dtype=dtype)
        try:
            places = find_places(model, source.shapes, layout)
        except HalfbyteError as error:
            raise HalfbyteError(f"{source.path}: {error}") from None
        live = LiveTensors(model, source, places, entry_dtypes(model, dtype), device)
        live.release(live.names)
        return cls(model, layout, places, live, torch.empty(0, device=device, dtype=dtype))

    @property
    def device(self) -> torch.device:
        """Where blocks compute."""
        return self._placed.device

    @property
    def dtype(self) -> torch.dtype:
        """What blocks compute in."""
        return self._placed.dtype

    def modules(self, index: int) -> tuple[str, ...]:
        """The layout's names of the 2-D weights in block ``index``, without loading it."""
        return tuple(module.name for module in self._layout.modules if self._is_in(index, module.name))

    def tensors(self, index: int) -> tuple[str, ...]:
        """The stored tensors of block ``index``, without loading it."""
        inside = f"{self.blocks[index]}."
        return tuple(
            stored for stored, place in self._places.tensors.items() if place.tensor.startswith(inside)
        )

    @torch.no_grad()
    def enter(self, ids: torch.Tensor) -> torch.Tensor:
        """Hidden states ``[n, T, hidden]`` that go into the first block, for tokens ``[n, T]``.

        Embeddings are loaded for the first call and stay until :meth:`release` or the end of a :meth:`block`.
        """
        self._live.load(self._before, in_parts=True)
        return self._around.enter(ids.to(self._placed.device))

    @torch.no_grad()
    def leave(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits ``[n, T, vocabulary]`` for what the last block returned, ``[n, T, hidden]``."""
        self._live.load([*self._before, *self._head], in_parts=True)
        try:
            return self._around.leave(hidden.to(self._placed))
        finally:
            self._live.release(self._head)

    def release(self) -> None:
        """Gives back what is loaded outside the blocks; it is loaded again where it is needed."""
        self._live.release(self._before)

    def load(self, index: int) -> None:
        """Brings the weights of block ``index`` into memory ahead of :meth:`block`, at whose end they leave it."""
        self._live.load(self._inside(index))

    @contextmanager
    def block(self, index: int) -> Iterator[LoadedBlock]:
        """Block ``index`` with its weights in memory, until the end of the ``with``; what was put there is lost."""
        name = self.blocks[index]
        inside = self._inside(index)
        try:
            self._live.load(inside)
            yield LoadedBlock(
                name,
                self._model,
                {module.name: module for module in self._layout.modules if self._is_in(index, module.name)},
                [stored for stored, place in self._places.tensors.items() if place.tensor in inside],
                self._places,
                self._live,
                lambda ids: self._arguments(index, ids),
                self._placed,
            )
        finally:
            # Arguments that were made anew for a sequence have loaded what is in front of the blocks.
            self._live.release([*inside, *self._before])

    def _inside(self, index: int) -> list[str]:
        return [entry for entry in self._live.names if entry.startswith(f"{self.blocks[index]}.")]

    def _arguments(self, index: int, ids: torch.Tensor) -> BlockArguments:
        if not self._around.known(ids):
            self._live.load(self._before, in_parts=True)
        return self._around.arguments(ids.to(self._placed.device))[index]

    def _is_in(self, index: int, module: str) -> bool:
        place = self._places.modules.get(module)
        return place is not None and place.tensor.startswith(f"{self.blocks[index]}.")


def _head_names(model: PreTrainedModel) -> set[str]:
    head = model.get_output_embeddings()
    if head is None:
        return set()
    name = next(name for name, module in model.named_modules() if module is head)
    return {f"{name}.{leaf}" for leaf in head.state_dict()}
