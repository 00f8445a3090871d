"""Which module gets which scheme: rules applied to a layout, group sizes settled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from halfbyte.errors import HalfbyteError
from halfbyte.matching import Patterns, matches
from halfbyte.method import Method
from halfbyte.models.layout import ModelLayout, ModuleInfo, Role
from halfbyte.models.names import template
from halfbyte.schemes import Scheme

FALLBACK_GROUP_SIZES = (64, 32)
_NOT_LINEAR = {
    Role.EMBEDDING: "an embedding table is looked up, not multiplied",
    Role.NORM: "a norm is no linear layer",
}


@dataclass(frozen=True)
class Choice:
    """A scheme, and how its numbers are chosen."""

    scheme: Scheme
    method: Method = field(default_factory=Method)


@dataclass(frozen=True)
class Assignment:
    """The recipe's decision for every module of a layout.

    schemes: module name -> scheme with its group size settled, none where the weight stays as it is; in
        module order.
    methods: how the numbers of each quantized module are chosen.
    notes: what the user should know about it, one line per kind.
    means: pattern -> how many modules it means.
    decides: pattern -> for how many modules it is the rule that counts.
    """

    schemes: Mapping[str, Scheme | None]
    methods: Mapping[str, Method]
    notes: Sequence[str]
    means: Mapping[str, int]
    decides: Mapping[str, int]


def assign(
    layout: ModelLayout,
    default: Choice | None,
    ignore: Sequence[str],
    targets: Mapping[str, Choice],
    dense: Choice | None = None,
) -> Assignment:
    """Applies ``ignore`` and ``targets`` to every module, ``default`` to the linears and experts left over.

    dense: what linears get instead, experts aside.
    Of the patterns that mean a module one decides: exact before ``re:`` before wildcards; among equals
    ``ignore`` before ``targets``, then the earlier one. ``lm_head``, routers and other weights that stay out
    by their role are quantized only by a target that means nothing but such weights: ``re:.*`` spares them.

    Errors: a target that means embeddings, norms or a tied ``lm_head``; ``in_features`` that no group fits.
    """
    rules = Patterns([*ignore, *targets])
    matching = {module.name: rules.matching(module.name) for module in layout.modules}
    means = Counter(pattern for patterns in matching.values() for pattern in patterns)
    broad = {p for module in layout.modules if module.role.quantizable for p in matching[module.name]}
    _refuse_tied_head(layout, targets)

    ignored = frozenset(ignore)
    decides: Counter[str] = Counter()
    chosen: dict[str, Choice] = {}
    for module in layout.modules:
        by_role = module.role.quantizable
        heeded = [p for p in matching[module.name] if by_role or p in ignored or p not in broad]
        choice = (dense if dense and module.role is Role.LINEAR else default) if by_role else None
        if heeded:
            decides[heeded[0]] += 1
            choice = None if heeded[0] in ignored else targets[heeded[0]]
            if choice and module.role in _NOT_LINEAR:
                raise HalfbyteError(
                    f"target {heeded[0]!r} means {module.name}: {_NOT_LINEAR[module.role]}; "
                    "accepted: linear layers, experts, routers and an untied lm_head"
                )
        if choice:
            chosen[module.name] = choice

    settled, notes = _settle_groups([m for m in layout.modules if m.name in chosen], chosen)
    return Assignment(
        schemes={module.name: settled.get(module.name) for module in layout.modules},
        methods={name: choice.method for name, choice in chosen.items()},
        notes=notes,
        means=means,
        decides=decides,
    )


def _refuse_tied_head(layout: ModelLayout, targets: Mapping[str, Choice]) -> None:
    if not layout.tied:
        return
    heads = {module.name for module in layout.modules if module.role is Role.LM_HEAD} | {"lm_head"}
    linears = [module.name for module in layout.modules if module.role.quantizable]
    for pattern in targets:
        head = next((head for head in sorted(heads) if matches(head, pattern)), None)
        if head and not any(matches(name, pattern) for name in linears):
            raise HalfbyteError(
                f"target {pattern!r} means {head}, which is tied to the embedding (tie_word_embeddings) and "
                "has no weight of its own; accepted: targets of a model with an untied lm_head"
            )


def _settle_groups(
    modules: Sequence[ModuleInfo], chosen: Mapping[str, Choice]
) -> tuple[dict[str, Scheme], list[str]]:
    settled: dict[str, Scheme] = {}
    smaller: Counter[tuple[int, int, int]] = Counter()
    misfits: Counter[tuple[str, int, str]] = Counter()
    for module in modules:
        scheme = chosen[module.name].scheme
        fitting = fit_group(scheme, module.in_features)
        if fitting is None:
            misfits[scheme.name, module.in_features, template(module.name)] += 1
            continue
        settled[module.name] = fitting
        wanted, got = scheme.weights.group_size, fitting.weights.group_size
        if wanted and got and wanted != got:
            smaller[module.in_features, got, wanted] += 1
    if misfits:
        raise HalfbyteError(_misfit_message(misfits, {c.scheme.name: c.scheme for c in chosen.values()}))
    notes = [
        f"{count} modules with in_features {width}: group {got} instead of {wanted}"
        for (width, got, wanted), count in smaller.items()
    ]
    return settled, notes


def fit_group(scheme: Scheme, in_features: int) -> Scheme | None:
    """``scheme`` with the largest group of its own, 64 or 32 that divides ``in_features``; none if none does.

    Only integer groups shrink: the group size of MX and NVFP4 is part of the format.
    """
    wanted = scheme.weights.group_size
    if wanted is None or in_features % wanted == 0:
        return scheme
    if scheme.weights.is_integer:
        for size in FALLBACK_GROUP_SIZES:
            if size < wanted and in_features % size == 0:
                return replace(scheme, weights=scheme.weights.with_group_size(size))
    return None


def _misfit_message(misfits: Counter[tuple[str, int, str]], schemes: Mapping[str, Scheme]) -> str:
    """Weights that stay in 16 bits unasked are a surprise later on, so a person decides."""
    (name, width, where), count = next(iter(misfits.items()))
    weights = schemes[name].weights
    sizes = [weights.group_size, *(s for s in FALLBACK_GROUP_SIZES if weights.is_integer)]
    others = sum(misfits.values()) - count
    per_row = " or, as targets, group_size: -1 (one scale per row)" if weights.is_integer else ""
    return (
        f"scheme {name}: {where} ({count} modules) has in_features {width}, no multiple of a group of "
        f"{' or '.join(map(str, sizes))}{f'; {others} other modules neither' if others else ''}; "
        f"accepted: such modules in ignore{per_row}"
    )
