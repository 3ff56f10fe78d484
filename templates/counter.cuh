// counter.cuh - tiles by a counter in global memory: a cluster takes the next tile when it is ready
// for one, so it does not matter how fast each is or whether all of them run. Which cluster makes a
// tile changes nothing in the tile. The static order stands in walk.cuh.
//
// The producer of a cluster's first CTA takes a tile while the one before it is being loaded, and
// hands it to the producers and consumers of all CTAs of the cluster through slots in their shared
// memory.
//
// The counter needs no launch to set it: two words of any contents. The first cluster that meets
// them sets the count, then the epoch, a number that no other call has. All clusters together take
// as many tiles as there are and one more each; who takes the very last leaves another epoch
// behind, for a replayed graph.
#pragma once
#include "scheduler.cuh"

struct tile_counter {
    u64 *words; // epoch, count
    u64 epoch;  // below 2^63
};

constexpr int tile_slots = 4;
constexpr int slot_bytes = 8 + 8 + 4; // full barrier, empty barrier, tile

// Sets a counter of another epoch to `first`.
__device__ __forceinline__ void open_counter(const tile_counter &c, u32 first) {
    constexpr u64 opening = u64(1) << 63;
    for (;;) {
        u64 seen = load_acquire(c.words);
        if (seen == c.epoch) return;
        if (seen == (c.epoch | opening)) continue; // another cluster is at it
        if (atomicCAS(c.words, seen, c.epoch | opening) != seen) continue;
        stumble();
        c.words[1] = first;
        store_release(c.words, c.epoch);
        return;
    }
}
__device__ __forceinline__ u32 take_tile(const tile_counter &c) {
    return atomicAdd(reinterpret_cast<u32 *>(c.words + 1), 1u);
}

// Slot `number` of the sequence of a cluster's tiles.
struct tile_slot {
    u32 full, empty, value, phase;
};
__device__ __forceinline__ tile_slot slot_at(u32 base, int number) {
    int slot = number % tile_slots;
    u32 full = base + tiles_offset + 8 * slot;
    return {full, full + 8 * tile_slots, base + tiles_offset + 16 * tile_slots + 4 * slot,
            u32(number / tile_slots) & 1};
}
__device__ __forceinline__ int read_slot(const tile_slot &s) {
    int t;
    asm volatile("ld.shared.s32 %0, [%1];" : "=r"(t) : "r"(s.value) : "memory");
    return t;
}

// Called by one thread, before the others use the slots.
__device__ __forceinline__ void init_slots(u32 base) {
    constexpr int readers = cluster * (pingpong ? 1 : consumers) * 4 + cluster - 1;
    for (int i = 0; i < tile_slots; ++i) {
        mbarrier_init(slot_at(base, i).full, 1);
        mbarrier_init(slot_at(base, i).empty, readers);
    }
}

// The producer's walk, by all lanes of its warp: what is done once does the first one.
struct tiles_to_load {
    u32 base;
    tile_counter counter;
    int count, number, t;
    u32 taken;

    __device__ __forceinline__ tiles_to_load(u32 base, int count, const tile_counter &counter)
        : base(base), counter(counter), count(count), number(0), t(blockIdx.x / cluster), taken(t) {
        publish();
    }
    __device__ __forceinline__ static bool first_of_cluster() {
        return cluster == 1 || cluster_rank() == 0;
    }
    __device__ __forceinline__ static bool is_first_lane() { return lane_of_warp() == 0; }
    __device__ __forceinline__ bool inside() const { return t < count; }
    __device__ __forceinline__ bool is_first() const { return number == 1; }
    // Before the loads of a tile: the next one's number is under way meanwhile. The first tile does
    // not wait for the counter.
    __device__ __forceinline__ void look_ahead() {
        if (first_of_cluster() && !is_first() && is_first_lane()) taken = take_tile(counter);
    }
    __device__ __forceinline__ void publish() {
        tile_slot s = slot_at(base, number++);
        bool first_lane = is_first_lane();
        taken = uniform(taken);
        if (first_of_cluster()) {
            mbarrier_wait(s.empty, s.phase ^ 1);
            stumble();
            if (cluster > 1 && first_lane)
                for (int cta = 0; cta < cluster; ++cta) store_at(s.value, taken, s.full, cta);
        }
        if (cluster == 1) {
            if (first_lane) {
                asm volatile("st.shared.u32 [%0], %1;" ::"r"(s.value), "r"(taken) : "memory");
                mbarrier_arrive(s.full);
            }
            t = taken;
        } else {
            if (first_lane) mbarrier_expect(s.full, 4);
            mbarrier_wait(s.full, s.phase);
            stumble();
            t = uniform(read_slot(s));
            if (!first_of_cluster() && first_lane) mbarrier_arrive_at(s.empty, 0);
        }
    }
    __device__ __forceinline__ void next() {
        if (first_of_cluster() && is_first() && is_first_lane()) {
            open_counter(counter, gridDim.x / cluster);
            taken = take_tile(counter);
        }
        publish();
        if (inside()) return;
        u32 last = gridDim.x / cluster + count - 1;
        if (first_of_cluster() && taken == last && is_first_lane()) *counter.words = ~counter.epoch;
        if (pingpong) publish(); // the end, for the other warpgroup too
    }
};

// A consumer warpgroup's walk.
struct tiles_to_make {
    u32 base;
    int number;

    __device__ __forceinline__ tiles_to_make(u32 base, int group)
        : base(base), number(pingpong ? group : 0) {}
    __device__ __forceinline__ bool inside(int count) const {
        tile_slot s = slot_at(base, number);
        mbarrier_wait(s.full, s.phase);
        stumble();
        return uniform(read_slot(s)) < count;
    }
    // The tile; its slot is free from now on.
    __device__ __forceinline__ int take() const {
        tile_slot s = slot_at(base, number);
        int t = uniform(read_slot(s));
        stumble();
        __syncwarp();
        if (thread() % 32 == 0) {
            if (cluster == 1)
                mbarrier_arrive(s.empty);
            else
                mbarrier_arrive_at(s.empty, 0);
        }
        return t;
    }
    __device__ __forceinline__ void next() { number += pingpong ? 2 : 1; }
};
