"""What one of ``--tp`` ranks holds of a module; whether groups, blocks and packed words survive the cut."""

from __future__ import annotations

from collections.abc import Iterable

from halfbyte.assignment import Assignment, fit_group
from halfbyte.models.fusion import is_key_or_value, tensor_parallel_axis
from halfbyte.models.layout import ModelLayout, ModuleInfo, Role
from halfbyte.preflight.finding import Findings
from halfbyte.schemes import Scheme

_WORD_BITS = 32


def check_tensor_parallel(findings: Findings, layout: ModelLayout, assignment: Assignment, tp: int) -> None:
    """Errors for every quantized module that ``tp`` ranks cannot share, with the largest number that can."""
    if tp == 1:
        return
    if layout.heads and layout.heads % tp:
        findings.add("error", "num_attention_heads", f"{layout.heads} heads cannot be shared by --tp {tp}")
    if layout.kv_heads and layout.kv_heads % tp and tp % layout.kv_heads:
        findings.add(
            "error",
            "num_key_value_heads",
            f"{layout.kv_heads} heads cannot be shared or repeated by --tp {tp}",
        )
    for module in layout.modules:
        scheme = assignment.schemes[module.name]
        # The vocabulary is padded for sharing, so a quantized lm_head is no obstacle.
        if scheme is None or module.role is Role.LM_HEAD:
            continue
        problem = shard_problem(module, scheme, layout.kv_heads, tp)
        if problem:
            advice = _advice(module, scheme, layout.kv_heads, tp)
            findings.add_module("error", module.name, f"{problem} under --tp {tp}; {advice}")


def _advice(module: ModuleInfo, scheme: Scheme, kv_heads: int | None, tp: int) -> str:
    ranks = next(n for n in range(tp - 1, 0, -1) if not shard_problem(module, scheme, kv_heads, n))
    advice = f"the largest --tp that fits is {ranks}"
    _, columns = shard_shape(module, kv_heads, tp)
    smaller = fit_group(scheme, int(columns)) if columns.is_integer() else None
    if smaller and smaller != scheme and not shard_problem(module, smaller, kv_heads, tp):
        advice += f", and group_size {smaller.weights.group_size} fits --tp {tp}"
    return advice


def shard_shape(module: ModuleInfo, kv_heads: int | None, tp: int) -> tuple[float, float]:
    """``(out, in)`` of one rank's part, broken numbers where it cannot be cut.

    Key/value heads are repeated where there are fewer of them than ranks.
    """
    axis = tensor_parallel_axis(module.name)
    out_features, in_features = map(float, module.shape)
    if axis == "in":
        return out_features, in_features / tp
    if axis == "out":
        ranks = min(tp, kv_heads) if kv_heads and is_key_or_value(module.name) else tp
        return out_features / ranks, in_features
    return out_features, in_features


def shard_problem(module: ModuleInfo, scheme: Scheme, kv_heads: int | None, tp: int) -> str | None:
    """Why a rank's part of the stored weight is no whole number of units, or none if it is."""
    axis = tensor_parallel_axis(module.name)
    if tp == 1 or axis is None:
        return None
    rows, columns = shard_shape(module, kv_heads, tp)
    if axis == "in":
        size, total, what = columns, module.in_features, "in_features"
        units = _column_units(scheme)
    else:
        size, total, what = rows, module.out_features, "out_features"
        units = _row_units(scheme)
    for unit, name in units:
        if size % unit:
            return f"{what} {total} is {size:g} per rank, no multiple of {name}"
    return None


def _column_units(scheme: Scheme) -> Iterable[tuple[int, str]]:
    weights = scheme.weights
    yield 1, "1"
    if weights.group_size:
        yield weights.group_size, f"its group of {weights.group_size}"
    elif weights.block_shape:
        yield weights.block_shape[1], f"its block of {weights.block_shape[1]}"
    elif weights.bits < 8:
        yield _WORD_BITS // weights.bits, f"the {_WORD_BITS // weights.bits} codes of a packed word"


def _row_units(scheme: Scheme) -> Iterable[tuple[int, str]]:
    weights = scheme.weights
    yield 1, "1"
    if weights.block_shape:
        yield weights.block_shape[0], f"its block of {weights.block_shape[0]}"
    elif not weights.symmetric and weights.outer is None and weights.bits < 8:
        # Packed zero points run along the outputs.
        yield _WORD_BITS // weights.bits, f"the {_WORD_BITS // weights.bits} zero points of a packed word"
