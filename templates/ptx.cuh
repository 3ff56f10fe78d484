// ptx.cuh - barriers, clusters, register budgets: the PTX of sm_90a that has no C++ spelling.
#pragma once
#include "stumble.cuh"
#include "types.cuh"

__device__ __forceinline__ u32 smem_address(const void *p) {
    return u32(__cvta_generic_to_shared(p));
}

// ---- mbarrier -----------------------------------------------------------------------------------
__device__ __forceinline__ void mbarrier_init(u32 bar, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count));
}
__device__ __forceinline__ void mbarrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void mbarrier_expect(u32 bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
                 : "memory");
}
// Where a barrier lies at a fixed offset from `bar`, it is the instruction that adds it.
template <int offset = 0> __device__ __forceinline__ void mbarrier_arrive(u32 bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0 + %1];" ::"r"(bar), "n"(offset)
                 : "memory");
}
// Arrive at the barrier of the same place in another CTA of the cluster.
__device__ __forceinline__ void mbarrier_arrive_at(u32 bar, u32 cta) {
    asm volatile("{\n\t.reg .b32 remote;\n\t"
                 "mapa.shared::cluster.u32 remote, %0, %1;\n\t"
                 "mbarrier.arrive.shared::cluster.b64 _, [remote];\n\t}" ::"r"(bar),
                 "r"(cta)
                 : "memory");
}
template <int offset = 0> __device__ __forceinline__ void mbarrier_wait(u32 bar, u32 parity) {
    asm volatile("{\n\t.reg .pred done;\n\t"
                 "again:\n\t"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0 + %2], %1;\n\t"
                 "@done bra out;\n\tbra again;\n\tout:\n\t}" ::"r"(bar),
                 "r"(parity), "n"(offset)
                 : "memory");
}

// ---- words in global memory ---------------------------------------------------------------------
__device__ __forceinline__ u64 load_acquire(const u64 *p) {
    u64 v;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ void store_release(u64 *p, u64 v) {
    asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

// ---- cluster ------------------------------------------------------------------------------------
__device__ __forceinline__ u32 cluster_rank() {
    u32 r;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return r;
}
// A word into another CTA's shared memory, which completes 4 bytes of the barrier there.
__device__ __forceinline__ void store_at(u32 address, u32 value, u32 bar, u32 cta) {
    asm volatile(
        "{\n\t.reg .b32 to, at;\n\t"
        "mapa.shared::cluster.u32 to, %0, %3;\n\t"
        "mapa.shared::cluster.u32 at, %2, %3;\n\t"
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [to], %1, [at];\n\t}" ::"r"(
            address),
        "r"(value), "r"(bar), "r"(cta)
        : "memory");
}
__device__ __forceinline__ void cluster_sync() {
    asm volatile(
        "barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::
            : "memory");
}

// ---- warps --------------------------------------------------------------------------------------
// Whether this lane is the one that a warp, all of whose lanes ask, leaves something to.
__device__ __forceinline__ bool is_elected() {
    u32 yes;
    asm volatile("{\n\t.reg .pred me;\n\telect.sync _|me, 0xffffffff;\n\t"
                 "selp.u32 %0, 1, 0, me;\n\t}"
                 : "=r"(yes));
    return yes;
}
template <int registers> __device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}
template <int registers> __device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}
__device__ __forceinline__ void named_barrier(int id, int count) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(count) : "memory");
}
__device__ __forceinline__ void named_arrive(int id, int count) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(count) : "memory");
}
__device__ __forceinline__ void fence_async_shared() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void wait_for_previous_kernel() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}
__device__ __forceinline__ void let_next_kernel_start() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// ---- start of a kernel --------------------------------------------------------------------------
// Waits for what the previous kernel wrote, lets the next one come up, and says whether to do
// nothing at all: `when` (may be NULL) is a word on the device, 0 = not this time.
__device__ __forceinline__ bool start_kernel(const u32 *when) {
    wait_for_previous_kernel();
    let_next_kernel_start();
    return !when || *reinterpret_cast<const volatile u32 *>(when) != 0;
}
