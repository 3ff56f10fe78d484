// tma.cuh - the tensor memory accelerator: 2-D boxes between global and shared memory.
#pragma once
#include "ptx.cuh"

// CUtensorMap as the driver encodes it; a __grid_constant__ parameter.
struct alignas(64) tensor_map {
    u64 opaque[16];
};

__device__ __forceinline__ void prefetch(const tensor_map &map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
__device__ __forceinline__ void tma_load(u32 target, const tensor_map &map, int inner, int outer,
                                         u32 bar) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3}], [%4];" ::"r"(target),
                 "l"(&map), "r"(inner), "r"(outer), "r"(bar)
                 : "memory");
}
// To the same place of every CTA in `mask`, completing on the barrier at the same place there.
__device__ __forceinline__ void tma_load_multicast(u32 target, const tensor_map &map, int inner,
                                                   int outer, u32 bar, u16 mask) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes."
                 "multicast::cluster "
                 "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(target),
                 "l"(&map), "r"(inner), "r"(outer), "r"(bar), "h"(mask)
                 : "memory");
}
__device__ __forceinline__ void tma_store(const tensor_map &map, u32 source, int inner, int outer) {
    asm volatile(
        "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map),
        "r"(inner), "r"(outer), "r"(source)
        : "memory");
}
// What is added to is not needed again soon: the first to leave L2.
__device__ __forceinline__ void tma_add(const tensor_map &map, u32 source, int inner, int outer) {
    asm volatile("{\n\t.reg .b64 policy;\n\t"
                 "createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n\t"
                 "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group.L2::cache_hint "
                 "[%0, {%1, %2}], [%3], policy;\n\t}" ::"l"(&map),
                 "r"(inner), "r"(outer), "r"(source)
                 : "memory");
}
// Asks L2 for a box.
__device__ __forceinline__ void tma_prefetch(const tensor_map &map, int inner, int outer) {
    asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global [%0, {%1, %2}];" ::"l"(&map),
                 "r"(inner), "r"(outer)
                 : "memory");
}
__device__ __forceinline__ void tma_commit() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
template <int pending> __device__ __forceinline__ void tma_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
}
template <int pending> __device__ __forceinline__ void tma_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(pending) : "memory");
}
