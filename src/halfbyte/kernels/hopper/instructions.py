"""The warpgroup matrix instructions as CUDA C++ functions: their operand lists are too long to write by hand."""

from __future__ import annotations

_KINDS = {
    "e4m3": ("k32.f32.e4m3.e4m3", "1, 1"),
    "e4m3 from shared memory": ("k32.f32.e4m3.e4m3", "1, 1"),
    "e4m3 in fp16": ("k32.f16.e4m3.e4m3", "1, 1"),
    "bf16": ("k16.f32.bf16.bf16", "1, 1, 0"),
    "f16": ("k16.f32.f16.f16", "1, 1, 0"),
    "tf32": ("k8.f32.tf32.tf32", "1, 1"),
    "u8": ("k32.s32.u8.s8", ""),
}


def warpgroup_mma(columns: int, operands: str, name: str) -> str:
    """A function ``name(sum, a, b, accumulate)``: ``sum (+)= a @ b`` for 64 rows, ``columns`` columns, 32 bytes of K.

    sum: a thread's numbers, fp32, int32 or pairs of fp16; a: four registers a thread (PTX ISA, wgmma, register
    fragments of D and A), or from shared memory the descriptor of a K-major tile, as b is.
    """
    shape, modifiers = _KINDS[operands]
    in_fp16 = shape.startswith("k32.f16")
    shared = operands.endswith("shared memory")
    count = columns // (4 if in_fp16 else 2)
    word, register = ("u32", "r") if in_fp16 else ("int", "r") if "s32" in shape else ("float", "f")
    modifiers = f", {modifiers}" if modifiers else ""
    sums = ", ".join(f"%{i}" for i in range(count))
    given = 1 if shared else 4
    a = f"%{count}" if shared else f"{{{', '.join(f'%{count + i}' for i in range(4))}}}"
    outputs = ", ".join(f'"+{register}"(sum[{i}])' for i in range(count))
    inputs = '"l"(a)' if shared else ", ".join(f'"r"(a[{i}])' for i in range(4))
    return f"""
__device__ __forceinline__ void {name}(
    {word} (&sum)[{count}], {"u64 a" if shared else "const u32 (&a)[4]"}, u64 b, bool accumulate) {{
    asm volatile(
        "{{\\n.reg .pred p;\\n"
        "setp.ne.b32 p, %{count + given + 1}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{columns}{shape} "
        "{{{sums}}}, {a}, %{count + given}, p{modifiers};\\n}}"
        : {outputs}
        : {inputs}, "l"(b), "r"(static_cast<int>(accumulate)));
}}
"""
