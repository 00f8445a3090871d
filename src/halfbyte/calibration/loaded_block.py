"""One decoder block whose weights are in memory: read, replaced, run and observed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from halfbyte.calibration.arguments import BlockArguments
from halfbyte.calibration.fused_experts import fused_experts
from halfbyte.calibration.listed_experts import listed_experts
from halfbyte.calibration.live_tensors import LiveTensors
from halfbyte.calibration.observers import Observation, Observer
from halfbyte.calibration.places import Places
from halfbyte.errors import HalfbyteError, NonFiniteError
from halfbyte.models.layout import ModuleInfo


@dataclass(frozen=True)
class Sample:
    """Sequences of one length on their way through the blocks.

    hidden: ``[n, T, hidden]``, the block's input. ids: tokens ``[n, T]``. name: for messages.
    counts: bool ``[n * T]``, the tokens that enter statistics; none for all.
    """

    hidden: torch.Tensor
    ids: torch.Tensor
    name: str
    counts: torch.Tensor | None = None


class LoadedBlock:
    """A block between its loading and its release; made by :meth:`BlockModel.block`.

    name: of the block in the model. modules: the layout's names of the 2-D weights in it, experts one by one, in the
    layout's order. tensors: stored tensors in it. Weights are in the model's compute dtype, on its device.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        modules: Mapping[str, ModuleInfo],
        tensors: Sequence[str],
        places: Places,
        live: LiveTensors,
        arguments: Callable[[torch.Tensor], BlockArguments],
        placed: torch.Tensor,
    ) -> None:
        """arguments: of this block, for tokens. placed: a tensor of the device and dtype to compute in."""
        self.name = name
        self.modules = tuple(modules)
        self.tensors = tuple(tensors)
        self._model = model
        self._infos = modules
        self._places = places
        self._live = live
        self._arguments = arguments
        self._placed = placed
        self._aside: set[str] = set()

    def set_aside(self, names: Collection[str]) -> None:
        """Gives back the memory of the weights of modules ``names`` until each is put anew.

        :meth:`weight` reads them again as they are stored; the block can run when all have been put. Weights that share
        a parameter with one of another module stay.
        """
        by_parameter: dict[str, list[str]] = {}
        for name in self.modules:
            by_parameter.setdefault(self._places.modules[name].tensor, []).append(name)
        for parameter, owners in by_parameter.items():
            if all(name in names for name in owners):
                self._live.release([parameter])
                self._aside.update(owners)

    def weight(self, name: str) -> torch.Tensor:
        """A copy of the weight ``[out, in]`` of module ``name``, contiguous."""
        info = self._info(name)
        if name in self._aside:
            return self._live.read(info.source, self._places.modules[name].tensor)
        return self._view(name).clone(memory_format=torch.contiguous_format)

    def put(self, name: str, weight: torch.Tensor) -> None:
        """Puts ``weight`` ``[out, in]`` in the place of that of module ``name``, from now on.

        Errors: another shape.
        """
        self._live.allocate(self._places.modules[self._info(name).name].tensor)
        _overwrite(name, self._view(name), weight)
        self._aside.discard(name)

    def parameter(self, tensor: str) -> torch.Tensor:
        """A copy of the stored tensor ``tensor`` (a norm's weight, a bias, ...) as the block has it."""
        return self._stored(tensor).clone(memory_format=torch.contiguous_format)

    def put_parameter(self, tensor: str, values: torch.Tensor) -> None:
        """Puts ``values`` in the place of the stored tensor ``tensor``, from now on. Errors: another shape."""
        _overwrite(tensor, self._stored(tensor), values)

    def require_finite(self) -> None:
        """Errors: NonFiniteError with the first stored tensor of the block that holds NaN or Inf."""
        sound = torch.stack([self._live.stored(name).isfinite().all() for name in self.tensors]).tolist()
        if False in sound:
            raise NonFiniteError(
                f"{self.tensors[sound.index(False)]}: holds NaN or Inf; accepted: finite numbers only"
            )

    @torch.no_grad()
    def run(self, samples: Iterable[Sample]) -> Iterator[torch.Tensor]:
        """The block's output ``[n, T, hidden]`` for one sample after the other.

        Errors: NonFiniteError, if an output holds NaN or Inf; it is raised when the next one is asked for.
        """
        module, last = self._model.get_submodule(self.name), None
        for sample in samples:
            output = self._arguments(sample.ids).call(module, sample.hidden.to(self._placed))
            # One behind, so that a GPU has work while the answer is waited for.
            self._require_finite_output(last)
            last = sample.name, output.isfinite().all()
            yield output
        self._require_finite_output(last)

    def _require_finite_output(self, last: tuple[str, torch.Tensor] | None) -> None:
        if last is not None and not last[1]:
            raise NonFiniteError(f"{self.name}: its output for {last[0]} holds NaN or Inf")

    @torch.no_grad()
    def observe(self, names: Iterable[str], samples: Iterable[Sample]) -> Observation:
        """Statistics of the inputs of modules ``names`` over ``samples``, added up over all ranks that run.

        All moments of ``names`` are in memory at once (4 to 8 bytes times inputs squared each); for fewer, observe
        some names after others. Every rank needs the same names and at least one sample.
        Errors: as :meth:`run`; a module that is not in the block, is not called, or cannot be masked.
        """
        infos = {name: self._info(name) for name in names}
        places = self._places.modules
        fused = fused_experts(self._model, infos, places)
        listed = listed_experts(self._model, infos, places)
        taken = {name for mixture in fused for name in mixture.names}
        taken |= {name for mixture in listed for name in mixture.names}
        linears = {
            name: self._model.get_submodule(places[name].tensor.rpartition(".")[0])
            for name in infos
            if name not in taken
        }
        in_features = {name: info.in_features for name, info in infos.items()}
        with Observer(in_features, linears, fused, listed) as observer:

            def expected() -> Iterator[Sample]:
                for sample in samples:
                    observer.expect(None if sample.counts is None else sample.counts.to(self._placed.device))
                    yield sample

            for _ in self.run(expected()):
                pass
        return observer.observation()

    def _info(self, name: str) -> ModuleInfo:
        if name not in self._infos:
            raise HalfbyteError(f"{self.name}: no module {name!r}; it has {', '.join(self.modules[:4])}, ...")
        return self._infos[name]

    def _view(self, name: str) -> torch.Tensor:
        return self._live.view(self._places.modules[self._info(name).name])

    def _stored(self, tensor: str) -> torch.Tensor:
        if tensor not in self.tensors:
            raise HalfbyteError(
                f"{self.name}: no tensor {tensor!r}; it has {', '.join(self.tensors[:4])}, ..."
            )
        return self._live.stored(tensor)


def _overwrite(name: str, view: torch.Tensor, values: torch.Tensor) -> None:
    if values.shape != view.shape:
        raise HalfbyteError(f"{name}: is {list(view.shape)}, so {list(values.shape)} cannot take its place")
    view.copy_(values)
