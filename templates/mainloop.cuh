// mainloop.cuh - what a consumer warpgroup does between two tiles: wait for a stage, multiply, hand
// the stage back. Included by the GEMM template after its constants and its wgmma.
//
//   multiply_fast   one accumulator over all of K, one wgmma group always in flight
//   multiply_split  every 128 of K is summed apart and added in fp32 registers, since the tensor
//                   core's own accumulator keeps only about 13 bits of fraction. With two partial
//                   accumulators the next block multiplies while this one is added; with one, the
//                   other warpgroups fill the gap. The first 128 are multiplied into the sum
//                   itself.
//   multiply_runs   the same every `run` blocks, for the accumulation intervals 256 and 512
//
// Where b has a scale for every 128 of K, split sums are multiplied by it, and by that of a, on
// their way into the fp32 registers: one multiply-add in place of an add.
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
// The same for all lanes, and known to be: such values cost no registers of the threads, and what
// is computed of them one instruction of the warp. Under the power limit every instruction costs
// time.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(0xffffffff, x, 0); }

// A consumer's view of the ring. base, group and the descriptors are the same for all lanes; what a
// stage adds to a descriptor is one multiply-add.
struct pipeline {
    u32 base;        // shared address of the first stage; the barriers lie at fixed offsets from it
    int group;       // warpgroup
    u32 left, right; // matrix_descriptor of the warpgroup's rows of a, of b, in the first stage
    ring<stages> at;

    __device__ __forceinline__ pipeline(u32 shared, int group)
        : base(uniform(shared)), group(group) {
        left = uniform(matrix_descriptor(base + (pingpong ? 0 : group * waves * 64) * bk));
        right = uniform(matrix_descriptor(base + a_bytes));
    }
    // 64 rows of a, all of b
    __device__ __forceinline__ u32 a(int wave) const {
        return left + at.stage * (stage_bytes / 16) + 64 * wave * bk / 16;
    }
    __device__ __forceinline__ u32 b() const { return right + at.stage * (stage_bytes / 16); }
    __device__ __forceinline__ void wait() const {
        stumble();
        mbarrier_wait<barriers_offset>(base + 8 * at.stage, at.phase);
        stumble();
    }
    // Every warp tells every CTA that writes into this stage.
    __device__ __forceinline__ void release(int stage, bool there = true) const {
        constexpr int empty = barriers_offset + 8 * stages;
        stumble();
        if (cluster == 1) {
            if (is_elected() && there) mbarrier_arrive<empty>(base + 8 * stage);
        } else {
            int lane = lane_of_warp();
            if (lane < cluster && there) mbarrier_arrive_at(base + empty + 8 * stage, lane);
        }
    }
    // pingpong: wait for this warpgroup's turn, and pass it on once the last block of K is under
    // way: the other one's wgmma then queue behind it.
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
        p.release(previous, previous >= 0);
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
    int last; // block

    // Asked for before the sums are waited for, so that it is there with them.
    __device__ __forceinline__ float at(int k) const {
        float x = 1.0f;
        if (b_tile_scaled)
            asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(x) : "l"(of_b + min(k, last)));
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

// The first block is multiplied into `acc` itself.
template <int pending>
__device__ __forceinline__ void finish_first(float (&acc)[accumulators], const pipeline &p,
                                             int stage, float factor) {
    wgmma_wait<pending>();
    p.release(stage);
#pragma unroll
    for (int i = 0; b_tile_scaled && i < accumulators; ++i) acc[i] *= factor;
}

// Two partial accumulators in turn; the number of blocks is even (whole_turns). The compiler must
// not know that, and see a way out on which nothing is read: else it has every wgmma finish before
// the next (C7514).
__device__ __forceinline__ void multiply_split_double(float (&acc)[accumulators], pipeline &p,
                                                      int blocks, const block_factors &f) {
    float part[2][accumulators];
    int odd = start_block(acc, p), even = start_block(part[0], p), k = 2;
    finish_first<1>(acc, p, odd, f.at(0));
    for (; k + 1 < blocks; k += 2) {
        odd = start_block(part[1], p);
        finish_block<1>(acc, part[0], p, even, f.at(k - 1));
        even = start_block(part[0], p);
        finish_block<1>(acc, part[1], p, odd, f.at(k));
    }
    if (k == blocks)
        finish_block<0>(acc, part[0], p, even, f.at(blocks - 1));
    else
        wgmma_wait<0>();
}

__device__ __forceinline__ void multiply_split_single(float (&acc)[accumulators], pipeline &p,
                                                      int blocks, const block_factors &f) {
    float part[accumulators];
    finish_first<0>(acc, p, start_block(acc, p), f.at(0));
#pragma unroll 1
    for (int k = 1; k < blocks; ++k) {
        float factor = f.at(k);
        finish_block<0>(acc, part, p, start_block(part, p), factor);
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
            p.release(previous, previous >= 0);
            previous = p.at.stage;
            p.at.next();
        }
        wgmma_wait<0>();
        p.release(previous);
        promote(acc, part, 1.0f);
    }
}

__device__ __forceinline__ void multiply(float (&acc)[waves][accumulators], pipeline &p, int blocks,
                                         const block_factors &f = {nullptr, 1.0f, 0}) {
    if (run > 1 || slices > 1) { // the others begin with fresh ones
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
        multiply_split_single(acc[0], p, blocks, f);
}
