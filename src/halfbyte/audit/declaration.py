"""A quantization config as plain data: which modules are declared to hold which numbers. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from halfbyte.formats.spec import ActivationFormat, TensorFormat
from halfbyte.matching import Patterns
from halfbyte.models.layout import Role
from halfbyte.schemes import PRESETS

LINEAR_CLASSES = ("Linear", "LinearBase")


@dataclass(frozen=True)
class Rule:
    """The numbers that a config declares for a set of modules.

    layout: how they are stored (``pack-quantized``, ``awq``, ``gptq``, ...), as :mod:`halfbyte.audit.stored` names it.
    weights: none when the config names a scheme without saying what its numbers are.
    """

    layout: str
    weights: TensorFormat | None
    activations: ActivationFormat | None = None


class Match(NamedTuple):
    """The rule of a module, and whether a name or pattern chose it; else the class of linear layers did."""

    rule: Rule
    named: bool

    def binds(self, role: Role) -> bool:
        """Whether a module of this role must be stored so. A class means linear layers and experts."""
        return self.named or role.quantizable


@dataclass
class Declared:
    """The whole declaration.

    method: ``quant_method`` (``none`` without a quantization config). why: where it was found.
    target: whose kernel the weights were rounded for, where it says so.
    rules: target patterns and what they get; a pattern of :data:`LINEAR_CLASSES` means every linear layer.
    ignored: says whether a module is left alone. kv: the KV cache's numbers in words, or none.
    problems: what could not be understood, one line each.
    """

    method: str = "none"
    format: str | None = None
    why: str = "config.json has no quantization_config"
    rules: list[tuple[Sequence[str], Rule]] = field(default_factory=list)
    ignored: Callable[[str], bool] = lambda name: False
    kv: str | None = None
    target: str | None = None
    problems: list[str] = field(default_factory=list)

    def rule_for(self, name: str) -> Match | None:
        """What the config says about the module ``name``; none: nothing, or that it is left alone.

        An exact name decides before a pattern, a pattern before a class.
        """
        if not self.rules or self.ignored(name):
            return None
        by_target, patterns, by_class = self._lookup
        if by_target and (found := patterns.matching(name)):
            return Match(by_target[found[0]], named=True)
        return by_class

    @cached_property
    def _lookup(self) -> tuple[dict[str, Rule], Patterns, Match | None]:
        """Rule of every target that is no class, those targets, and what classes get. The first rule wins."""
        by_target = {target: rule for targets, rule in reversed(self.rules) for target in targets}
        classes = [by_target.pop(name) for name in LINEAR_CLASSES if name in by_target]
        return by_target, Patterns(by_target), Match(classes[0], named=False) if classes else None


def preset_name(weights: TensorFormat, activations: ActivationFormat | None) -> str | None:
    """Our preset with these numbers, whatever the group size and the 16-bit or fp32 scale dtype; or none."""

    def shape_of(w: TensorFormat, a: ActivationFormat | None) -> tuple[Any, ...]:
        scale = "any" if w.scale in ("model", "bf16", "f16", "f32") else w.scale
        group = w.group_size if scale != "any" and w.outer != "channel" else None
        acts = (a.element, a.granularity) if a else None
        return w.element, w.granularity, w.symmetric, scale, group, w.outer, acts

    wanted = shape_of(weights, activations)
    for name, scheme in PRESETS.items():
        if shape_of(scheme.weights, scheme.activations) == wanted:
            return name
    return None


def ignore_by_pattern(patterns: Sequence[str]) -> Callable[[str], bool]:
    """Exact names, ``re:`` and wildcards, as :class:`halfbyte.matching.Patterns` understands them."""
    if not patterns:
        return frozenset[str]().__contains__
    compiled = Patterns(patterns)
    return lambda name: bool(compiled.matching(name))


def ignore_by_part(parts: Sequence[str]) -> Callable[[str], bool]:
    if not parts:
        return frozenset[str]().__contains__
    return lambda name: any(part in name for part in parts)
