"""The warpgroup matrix instructions as CUDA C++ functions: their operand lists are too long to write by hand."""

from __future__ import annotations

_SUFFIX = {
    "e4m3": "m64n{n}k32.f32.e4m3.e4m3",
    "bf16": "m64n{n}k16.f32.bf16.bf16",
    "f16": "m64n{n}k16.f32.f16.f16",
}


def warpgroup_mma(columns: int, operands: str, name: str = "mma") -> str:
    """A function ``name(sum, a, b, accumulate)``: ``sum (+)= a @ b`` for 64 rows, ``columns`` columns, 32 bytes of K.

    a: four registers a thread (PTX ISA, wgmma, register fragment of A). b: descriptor of a K-major tile.
    """
    instruction = "wgmma.mma_async.sync.aligned." + _SUFFIX[operands].format(n=columns)
    count = columns // 2
    listed = ", ".join(f"%{i}" for i in range(count))
    a = ", ".join(f"%{count + i}" for i in range(4))
    outputs = ", ".join(f'"+f"(sum[{i}])' for i in range(count))
    signs = "1, 1" if operands == "e4m3" else "1, 1, 0"
    return f"""
__device__ __forceinline__ void {name}(float (&sum)[{count}], const u32 (&a)[4], u64 b, bool accumulate) {{
    asm volatile(
        "{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + 5}, 0;\\n"
        "{instruction} {{{listed}}}, {{{a}}}, %{count + 4}, p, {signs};\\n}}"
        : {outputs}
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)));
}}
"""
