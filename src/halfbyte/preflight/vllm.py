"""What vLLM's kernels ask of a checkpoint beyond its format (read in vLLM 0.26 and 0.33).

W4A8 with FP8 activations: symmetric groups of 128; dense sizes in multiples of 128, sizes of experts of 256.
Block FP8: inputs and every fused output but the last in whole blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from halfbyte.assignment import Assignment
from halfbyte.models.fusion import tensor_parallel_axis
from halfbyte.models.layout import ModelLayout, ModuleInfo, Role
from halfbyte.preflight.finding import Findings
from halfbyte.preflight.shards import shard_shape
from halfbyte.schemes import Scheme

_W4A8_GROUP = 128
_DENSE_MULTIPLE = 128
_EXPERT_MULTIPLE = 256


def check_vllm(findings: Findings, layout: ModelLayout, assignment: Assignment, tp: int) -> None:
    """Notes for quantized modules that vLLM would refuse or run on a slower kernel; sizes are a rank's.

    Of modules whose target is vLLM's kernel, they are warnings.
    """
    groups: dict[str, list[ModuleInfo]] = {}
    for module in layout.modules:
        if assignment.schemes[module.name] is not None and module.role is not Role.LM_HEAD:
            groups.setdefault(module.fused_group or module.name, []).append(module)
    for key, modules in groups.items():
        scheme = assignment.schemes[modules[0].name]
        assert scheme is not None
        if _is_w4a8(scheme):
            complaints = _w4a8(modules, scheme, layout.kv_heads, tp)
        elif scheme.weights.block_shape:
            complaints = _block(modules, scheme.weights.block_shape, tp)
        else:
            continue
        for complaint in complaints:
            findings.add_module("warning" if scheme.target == "vllm" else "note", key, complaint)


def _is_w4a8(scheme: Scheme) -> bool:
    activations = scheme.activations
    return scheme.weights.element == "int4" and activations is not None and activations.element == "e4m3"


def _w4a8(modules: Sequence[ModuleInfo], scheme: Scheme, kv_heads: int | None, tp: int) -> Iterator[str]:
    weights = scheme.weights
    if not weights.symmetric:
        yield "vLLM's W4A8 has no zero points; halfbyte's own layers run it"
    elif weights.group_size != _W4A8_GROUP:
        per = f"groups of {weights.group_size}" if weights.group_size else "one scale per row"
        yield f"vLLM's W4A8 needs groups of {_W4A8_GROUP}, this has {per}; halfbyte's own layers run it"
    parts = [shard_shape(module, kv_heads, tp) for module in modules]
    if modules[0].role is Role.EXPERT:
        multiple, what = _EXPERT_MULTIPLE, "W4A8 expert kernel"
        rows = parts[0][0]
    else:
        multiple, what = _DENSE_MULTIPLE, "CUTLASS W4A8 kernel"
        rows = sum(part[0] for part in parts)
    columns = parts[0][1]
    if rows % multiple or columns % multiple:
        yield f"[{rows:g}, {columns:g}] per rank: vLLM's {what} needs multiples of {multiple}"


def _block(modules: Sequence[ModuleInfo], block: tuple[int, int], tp: int) -> Iterator[str]:
    rows, columns = block
    width = modules[0].in_features
    if width % columns:
        yield f"in_features {width} is no multiple of {columns}: vLLM's block FP8 needs whole blocks"
    if tp == 1 or tensor_parallel_axis(modules[0].name) is None:
        for module in modules[:-1]:
            if module.out_features % rows:
                yield (
                    f"{module.name.rpartition('.')[2]} has out_features {module.out_features}, no multiple "
                    f"of {rows}: vLLM's block FP8 needs whole blocks in every fused part but the last"
                )
