// The few Hopper instructions that the kernels are made of, one function each. PTX ISA 8.x, sm_90a.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

struct alignas(64) TensorMap {
    u64 words[16];
};

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ int thread_now() {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

// ---- Barriers in shared memory -------------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

__device__ __forceinline__ void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_arrive_remote(u32 barrier, u32 rank) {
    asm volatile(
        "{\n.reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(barrier),
        "r"(rank)
        : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

__device__ __forceinline__ void barrier_wait_cluster(u32 barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

__device__ __forceinline__ void named_barrier(u32 id, u32 threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- Clusters ------------------------------------------------------------------------------------------

__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Orders nothing but the blocks' progress: what they write to each other is counted by barriers in shared memory.
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

// All that this thread has sent to other blocks is there before they see it arrive.
__device__ __forceinline__ void cluster_arrive_last() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ u32 remote_address(u32 address, u32 rank) {
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}

// Sixteen bytes into another block's shared memory; its barrier counts them when they have landed.
__device__ __forceinline__ void store_remote(u32 address, u32 barrier, const u32 (&words)[4]) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
        "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]), "r"(barrier)
        : "memory");
}

// ---- Between blocks of one kernel, through global memory ---------------------------------------------------

// After all threads of the warpgroup have written and met: what they have written is there for whoever sees the flag.
__device__ __forceinline__ void raise_flag(u32* flag) {
    asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(flag) : "memory");
}

__device__ __forceinline__ void wait_for_flag(const u32* flag) {
    u32 raised;
    do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(raised) : "l"(flag) : "memory");
    while (!raised);
}

// Past the first-level cache, which others' writes do not reach.
__device__ __forceinline__ uint4 load_fresh(const uint4* from) {
    uint4 value;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(from)
                 : "memory");
    return value;
}

__device__ __forceinline__ int4 load_fresh(const int4* from) {
    const uint4 value = load_fresh(reinterpret_cast<const uint4*>(from));
    return make_int4(value.x, value.y, value.z, value.w);
}

__device__ __forceinline__ int load_fresh(const int* from) {
    int value;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}

// ---- Copies by each thread ----------------------------------------------------------------------------------

// A number, or zero, that is asked for before the next barrier, however late it is used.
__device__ __forceinline__ float load_now(const float* from, bool is_there) {
    float number = 0;
    if (is_there) asm volatile("ld.global.f32 %0, [%1];" : "=f"(number) : "l"(from) : "memory");
    return number;
}

__device__ __forceinline__ int load_now(const int* from, bool is_there) {
    int number = 0;
    if (is_there) asm volatile("ld.global.s32 %0, [%1];" : "=r"(number) : "l"(from) : "memory");
    return number;
}

// Four bytes past the registers, or zero; `copied_numbers` waits for all that this thread has asked for.
__device__ __forceinline__ void copy_number(u32 to, const void* from, bool is_there) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(is_there ? 4 : 0) : "memory");
}

__device__ __forceinline__ void copied_numbers() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// ---- Copies by the tensor memory accelerator: called by a whole warp, issued once ---------------------------

#define HALFBYTE_ELECTED "{\n.reg .pred one;\nelect.sync _|one, 0xffffffff;\n@one "

__device__ __forceinline__ u64 policy_evict_first() {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

__device__ __forceinline__ void expect_once(u32 barrier, u32 bytes) {
    asm volatile(
        HALFBYTE_ELECTED "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n}" ::"r"(barrier), "r"(bytes)
        : "memory");
}

__device__ __forceinline__ void copy_bulk(u32 to, const void* from, u32 bytes, u32 barrier, u64 policy) {
    asm volatile(
        HALFBYTE_ELECTED
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;\n}" ::
            "r"(to),
        "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
        : "memory");
}

__device__ __forceinline__ void copy_bulk(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile(
        HALFBYTE_ELECTED "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n}" ::
            "r"(to),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
}

__device__ __forceinline__ void copy_tile(u32 to, const TensorMap& map, int inner, int outer, u32 barrier) {
    asm volatile(
        HALFBYTE_ELECTED
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];\n}" ::
            "r"(to),
        "l"(reinterpret_cast<u64>(&map)), "r"(inner), "r"(outer), "r"(barrier)
        : "memory");
}

__device__ __forceinline__ void copy_tile_multicast(
    u32 to, const TensorMap& map, int inner, int outer, u32 barrier, u16 ranks) {
    asm volatile(
        HALFBYTE_ELECTED
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%2, %3}], [%4], %5;\n}" ::"r"(to),
        "l"(reinterpret_cast<u64>(&map)), "r"(inner), "r"(outer), "r"(barrier), "h"(ranks)
        : "memory");
}

// A tile from shared to global memory. A thread that has issued copies can wait until they have read what they copy.
__device__ __forceinline__ void copy_tile_out(const TensorMap& map, int inner, int outer, u32 from) {
    asm volatile(
        "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];\n"
        "cp.async.bulk.commit_group;" ::"l"(reinterpret_cast<u64>(&map)),
        "r"(inner), "r"(outer), "r"(from)
        : "memory");
}

template <int PENDING>
__device__ __forceinline__ void wait_for_copies_out() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

__device__ __forceinline__ void prefetch_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<u64>(&map)) : "memory");
}

// Ordinary stores to shared memory before it, copies into the same place after it.
__device__ __forceinline__ void copy_engine_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- Kernels that follow each other (programmatic dependent launch) ----------------------------------------

__device__ __forceinline__ void let_next_kernel_start() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

__device__ __forceinline__ void wait_for_previous_kernel() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

// ---- Matrix products of a warpgroup ----------------------------------------------------------------------

__device__ __forceinline__ void mma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void mma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int PENDING>
__device__ __forceinline__ void mma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// After the last products: the sums have to be in their registers here. Or the compiler reads some of them on a path of
// its own, before they are all there, and lets products run one by one for that.
template <int N>
__device__ __forceinline__ void settle(float (&sums)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(sums[i]));
}

template <int N>
__device__ __forceinline__ void settle(int (&sums)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+r"(sums[i]));
}

// The descriptor of a K-major tile with rows of 128 or 32 bytes, eight of which lie together, in the swizzle of as many
// bytes that the accelerator writes (PTX ISA, matrix descriptor). Sixteen bytes on are one more.
template <int ROW_BYTES>
__device__ __forceinline__ u64 tile_of(u32 address) {
    constexpr u64 UPPER = ROW_BYTES == 128 ? 0x40000040 : 0xC0000010;
    return UPPER << 32 | 1u << 16 | (address & 0x3FFFF) >> 4;
}

template <int REGISTERS>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS>
__device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// Two 8 x 8 matrices of 2-byte numbers, given as their fragments, into shared memory transposed. to: lane i's address is
// where column i % 8 of matrix i / 8 goes.
__device__ __forceinline__ void store_transposed(u32 to, u32 first, u32 second) {
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(to), "r"(first), "r"(second)
        : "memory");
}

// ---- Numbers ---------------------------------------------------------------------------------------------

struct Bf16 {
    static constexpr bool FITS_BF16 = true;
    u16 bits;
    static __device__ __forceinline__ Bf16 of(float value) {
        Bf16 out;
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out.bits) : "f"(value));
        return out;
    }
    static __device__ __forceinline__ u32 pack(float low, float high) {
        u32 both;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
        return both;
    }
    __device__ __forceinline__ float value() const { return __uint_as_float(static_cast<u32>(bits) << 16); }
};

struct Half {
    static constexpr bool FITS_BF16 = false;
    u16 bits;
    static __device__ __forceinline__ Half of(float value) {
        Half out;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out.bits) : "f"(value));
        return out;
    }
    static __device__ __forceinline__ u32 pack(float low, float high) {
        u32 both;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
        return both;
    }
    static __device__ __forceinline__ Half of_pair(u32 both, int i) { return {static_cast<u16>(both >> i * 16)}; }
    __device__ __forceinline__ float value() const {
        float out;
        asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(bits));
        return out;
    }
};

struct Float {
    static constexpr bool FITS_BF16 = false;
    float number;
    __device__ __forceinline__ float value() const { return number; }
};

// E4M3 numbers: what one is, and two as the lower half of a word.
__device__ __forceinline__ float fp8_value(u32 bits) {
    u32 both;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(both) : "h"(static_cast<u16>(bits)));
    return Half::of_pair(both, 0).value();
}

__device__ __forceinline__ u32 fp8_pair(float low, float high) {
    u16 both;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(high), "f"(low));
    return both;
}

// Byte i: the byte of `bytes` that nibble i of `select` says by its low three bits; with its bit 3 set, eight times that
// byte's bit 7. (The language's own __byte_perm does not promise to look at bit 3.)
__device__ __forceinline__ u32 permute(const u32 (&bytes)[2], u32 select) {
    u32 out;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(bytes[0]), "r"(bytes[1]), "r"(select));
    return out;
}
