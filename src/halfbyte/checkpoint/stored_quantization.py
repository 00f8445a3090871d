"""What config.json says about a quantized checkpoint: groups of modules with one scheme, and those left alone."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from halfbyte.matching import Patterns
from halfbyte.models.layout import Role
from halfbyte.schemes import FormName, Scheme

# The classes that compressed-tensors' configs name instead of modules, by what we know of a module.
_CLASS_ROLES = {
    "Linear": frozenset({Role.LINEAR, Role.EXPERT, Role.LM_HEAD, Role.OTHER}),
    "Embedding": frozenset({Role.EMBEDDING}),
}

_FORMS: dict[str, FormName] = {"qoq": "qserve", "w4afp8": "w4afp8"}
_SCALE_LEAVES = {"qserve": "s1_scales", "w4afp8": "weight_scale_inv"}


@dataclass(frozen=True)
class StoredGroup:
    """Modules that ``targets`` mean (names, ``re:`` patterns or class names), their scheme and storage format."""

    targets: tuple[str, ...]
    scheme: Scheme
    format: str


@dataclass(frozen=True)
class StoredQuantization:
    """The quantization of a checkpoint.

    quant_method: ``compressed-tensors``, ``halfbyte``, ``qoq`` or ``w4afp8``. kv_cache: arguments of the KV cache's
    scheme, if any. notes: what was read over, one line each.
    """

    quant_method: str
    groups: tuple[StoredGroup, ...]
    ignore: tuple[str, ...] = ()
    kv_cache: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = field(default=(), compare=False)

    @property
    def form(self) -> FormName:
        """How weights are stored, as :mod:`halfbyte.checkpoint.quantized_weight` names it."""
        return _FORMS.get(self.quant_method, "compressed-tensors")

    @property
    def scale_leaf(self) -> str:
        """Local name of the tensor that every quantized weight has."""
        return _SCALE_LEAVES.get(self.form, "weight_scale")

    def scheme_for(
        self, name: str, role: Role = Role.LINEAR, stored: Container[str] | None = None
    ) -> Scheme | None:
        """The scheme of a module, none if its weight is not quantized.

        An exact target counts before ``re:``, that before a class name; what is ignored is not quantized. Class
        names mean no routers: tools that target ``Linear`` leave those alone without saying so.
        stored: names of all stored tensors; then a module without stored scales is not quantized, whatever the
        config says.
        """
        if stored is not None and f"{name}.{self.scale_leaf}" not in stored:
            return None
        if role in self._ignored_roles or self._ignored.matching(name):
            return None
        if targets := self._targeted.matching(name):
            return self._group_of[targets[0]].scheme
        return self._scheme_of_role.get(role)

    @cached_property
    def _ignored(self) -> Patterns:
        return Patterns(entry for entry in self.ignore if entry not in _CLASS_ROLES)

    @cached_property
    def _targeted(self) -> Patterns:
        return Patterns(target for target in self._group_of if target not in _CLASS_ROLES)

    @cached_property
    def _group_of(self) -> dict[str, StoredGroup]:
        """The first group that has a target, as the file orders them."""
        return {target: group for group in reversed(self.groups) for target in group.targets}

    @cached_property
    def _ignored_roles(self) -> frozenset[Role]:
        return frozenset(role for entry in self.ignore for role in _CLASS_ROLES.get(entry, ()))

    @cached_property
    def _scheme_of_role(self) -> dict[Role, Scheme]:
        classes = [target for target in self._group_of if target in _CLASS_ROLES]
        return {role: self._group_of[name].scheme for name in classes for role in _CLASS_ROLES[name]}
