// mainloop.cuh - what a consumer warpgroup does between two tiles: wait for a stage, multiply, hand the
// stage back. Included by the GEMM template after its constants and its wgmma.
//
//   multiply_fast   one accumulator over all of K, one wgmma group always in flight
//   multiply_split  every 128 of K is summed apart and added in fp32 registers, since the tensor core's own
//                   accumulator keeps only about 13 bits of fraction. With two partial accumulators the
//                   next block multiplies while this one is added; with one, the two warpgroups fill each
//                   other's gaps.
//   multiply_runs   the same every `run` blocks, for the accumulation intervals 256 and 512
//
// Where b has a scale for every 128 of K, split sums are multiplied by it, and by that of a, on their way into
// the fp32 registers: one multiply-add in place of an add.
#pragma once

// Read anew at every use (volatile): kept over the main loop they would cost a register too many.
__device__ __forceinline__ int thread() {
    int t;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(t));
    return t;
}
__device__ __forceinline__ int lane_of_warp() {
    int t;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(t));
    return t;
}
// The same for all lanes, and known to be: such values cost no registers of the threads, and what is computed
// of them one instruction of the warp. Under the power limit every instruction costs time.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(0xffffffff, x, 0); }

// A consumer's view of the ring. Everything but its place in the ring is computed anew where it is needed:
// the accumulators leave few registers.
struct pipeline {
    u32 base;  // shared address of the first stage; the barriers lie at fixed offsets from it
    int group; // warpgroup
    ring<stages> at;

    __device__ __forceinline__ u32 full() const { return base + barriers_offset + 8 * at.stage; }
    // 64 rows of a, all of b
    __device__ __forceinline__ u32 a(int wave) const {
        int row = (pingpong ? 0 : group * waves * 64) + 64 * wave;
        return matrix_descriptor(base + at.stage * stage_bytes + row * bk);
    }
    __device__ __forceinline__ u32 b() const {
        return matrix_descriptor(base + at.stage * stage_bytes + a_bytes);
    }
    __device__ __forceinline__ void wait() const {
        stumble();
        mbarrier_wait(full(), at.phase);
        stumble();
    }
    // Every warp tells every CTA that writes into this stage.
    __device__ __forceinline__ void release(int stage) const {
        u32 empty = base + barriers_offset + 8 * (stages + stage);
        stumble();
        int lane = lane_of_warp();
        if (cluster == 1) {
            if (lane == 0) mbarrier_arrive(empty);
        } else {
            if (lane < cluster) mbarrier_arrive_at(empty, lane);
        }
    }
    // pingpong: wait for this warpgroup's turn, and pass it on once the last block of K is under way: the
    // other one's wgmma then queue behind it.
    __device__ __forceinline__ void take_turn() const {
        stumble();
        if (pingpong) named_barrier(turn_barrier + group, 256);
    }
    __device__ __forceinline__ void pass_turn() const {
        stumble();
        if (pingpong) named_arrive(turn_barrier + 1 - group, 256);
    }
};

__device__ __forceinline__ void multiply_fast(float (&acc)[waves][accumulators], pipeline &p,
                                              int blocks) {
    int previous = -1;
    p.take_turn();
#pragma unroll 1
    for (int k = 0; k < blocks; ++k) {
        p.wait();
        wgmma_begin();
#pragma unroll
        for (int w = 0; w < waves; ++w) multiply_block(acc[w], p.a(w), p.b(), k == 0);
        wgmma_commit();
        wgmma_wait<1>();
        if (previous >= 0) p.release(previous);
        previous = p.at.stage;
        p.at.next();
    }
    p.pass_turn();
    wgmma_wait<0>();
    p.release(previous);
}

// What the sums over each 128 of K are multiplied by.
struct block_factors {
    const float *of_b; // one for each block, of the tile's rows of b
    float of_a;

    // Asked for before the sums are waited for, so that it is there with them.
    __device__ __forceinline__ float at(int k) const {
        float x = 1.0f;
        if (b_tile_scaled) asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(x) : "l"(of_b + k));
        return b_tile_scaled ? x * of_a : x;
    }
};

__device__ __forceinline__ void promote(float (&acc)[accumulators],
                                        const float (&part)[accumulators], float factor) {
#pragma unroll
    for (int i = 0; i < accumulators; ++i)
        acc[i] = b_tile_scaled ? __fmaf_rn(part[i], factor, acc[i]) : acc[i] + part[i];
}

// Starts the next block into `part` and returns its stage.
__device__ __forceinline__ int start_block(float (&part)[accumulators], pipeline &p) {
    int stage = p.at.stage;
    p.wait();
    wgmma_begin();
    multiply_block(part, p.a(0), p.b(), true);
    wgmma_commit();
    p.at.next();
    return stage;
}

template <int pending>
__device__ __forceinline__ void finish_block(float (&acc)[accumulators],
                                             float (&part)[accumulators], const pipeline &p,
                                             int stage, float factor) {
    wgmma_wait<pending>();
    p.release(stage);
    promote(acc, part, factor);
}

// Two partial accumulators in turn; one wave only.
__device__ __forceinline__ void multiply_split_double(float (&acc)[accumulators], pipeline &p,
                                                      int blocks, const block_factors &f) {
    float part[2][accumulators];
    int even = start_block(part[0], p), odd, k = 1;
    for (; k + 1 < blocks; k += 2) {
        odd = start_block(part[1], p);
        finish_block<1>(acc, part[0], p, even, f.at(k - 1));
        even = start_block(part[0], p);
        finish_block<1>(acc, part[1], p, odd, f.at(k));
    }
    if (k < blocks) {
        odd = start_block(part[1], p);
        finish_block<1>(acc, part[0], p, even, f.at(k - 1));
        finish_block<0>(acc, part[1], p, odd, f.at(k));
    } else {
        finish_block<0>(acc, part[0], p, even, f.at(k - 1));
    }
}

__device__ __forceinline__ void multiply_split_single(float (&acc)[waves][accumulators],
                                                      pipeline &p, int blocks,
                                                      const block_factors &f) {
    float part[accumulators];
#pragma unroll 1
    for (int k = 0; k < blocks; ++k) {
        float factor = f.at(k);
        p.wait();
#pragma unroll
        for (int w = 0; w < waves; ++w) {
            wgmma_begin();
            multiply_block(part, p.a(w), p.b(), true);
            wgmma_commit();
            wgmma_wait<0>();
            if (w == waves - 1) p.release(p.at.stage);
            promote(acc[w], part, factor);
        }
        p.at.next();
    }
}

// Sums of `run` blocks, each added up at its end; one wave only.
__device__ __forceinline__ void multiply_runs(float (&acc)[accumulators], pipeline &p, int blocks) {
    float part[accumulators];
#pragma unroll 1
    for (; blocks > 0; blocks -= run) {
        int previous = -1;
#pragma unroll 1
        for (int k = 0; k < min(run, blocks); ++k) {
            p.wait();
            wgmma_begin();
            multiply_block(part, p.a(0), p.b(), k == 0);
            wgmma_commit();
            wgmma_wait<1>();
            if (previous >= 0) p.release(previous);
            previous = p.at.stage;
            p.at.next();
        }
        wgmma_wait<0>();
        p.release(previous);
        promote(acc, part, 1.0f);
    }
}

__device__ __forceinline__ void multiply(float (&acc)[waves][accumulators], pipeline &p, int blocks,
                                         const block_factors &f = {nullptr, 1.0f}) {
    if (partials > 0 || slices > 1) { // the others begin with fresh ones
#pragma unroll
        for (int w = 0; w < waves; ++w)
#pragma unroll
            for (int i = 0; i < accumulators; ++i) acc[w][i] = 0.0f;
    }
    if (slices > 1 && blocks == 0) return;
    if (partials == 0)
        multiply_fast(acc, p, blocks);
    else if (run > 1)
        multiply_runs(acc[0], p, blocks);
    else if (partials == 2)
        multiply_split_double(acc[0], p, blocks, f);
    else
        multiply_split_single(acc, p, blocks, f);
}
