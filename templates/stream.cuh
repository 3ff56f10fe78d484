// stream.cuh - the flow for many tiles: each CTA, or each consumer warpgroup, takes one tile after
// the other and the producer runs ahead into the next one. Two schedules:
//   cooperative   both consumers work on one tile, half of its rows each
//   pingpong      each has a tile of its own; while one writes its tile out, the other multiplies
// In a cluster of two CTAs the tiles lie one below the other and share b: each CTA loads half of it
// and multicasts it to both, which saves a quarter to a third of what L2 must deliver.
#pragma once
#include "epilogue.cuh"

static_assert(slices == 1 && !swapped, "these belong to the exchange");

// By one warp, which elects a thread for what is done once: so the compiler knows that the loops
// are the same for all lanes.
__device__ __forceinline__ void produce(const tensor_map &map_a, const tensor_map &map_b,
                                        const output &out, const volatile extents &e, u32 shared,
                                        const tile_counter &counter) {
    if (uniform(thread() / 32) != consumers * 4) return;
    const raster tiles = tiles_of(e);
    const int blocks = uniform(whole_turns(e.blocks));
    const u32 base = uniform(shared), rank = cluster > 1 ? cluster_rank() : 0;
    const int boxes = add && out.by_tma ? (boxes_of_tile + blocks - 1) / blocks : 0; // a block
    ring<stages> at;
    if (is_elected()) {
        prefetch(map_a);
        prefetch(map_b);
    }
    wait_for_previous_kernel();
    for (tiles_to_load walk(base, tiles.count(), counter); walk.inside(); walk.next()) {
        tile_at tile = tiles.at(walk.t);
        walk.look_ahead();
        const int row = uniform((tile.m * cluster + int(rank)) * bm), col = uniform(tile.n * bn);
#pragma unroll 1 // 24 registers must do
        for (int k = 0; k < blocks; ++k) {
            u32 a = base + at.stage * stage_bytes, b = a + a_bytes, bar = base + 8 * at.stage;
            stumble();
            mbarrier_wait<barriers_offset + 8 * stages>(bar, at.phase ^ 1);
            stumble();
            if (is_elected()) {
                bar += barriers_offset;
                mbarrier_expect(bar, stage_bytes);
                tma_load(a, map_a, k * bk, row, bar);
                if (cluster == 1) {
                    tma_load(b, map_b, k * bk, col, bar);
                } else {
                    constexpr int part = bn / cluster;
                    tma_load_multicast(b + rank * part * bk, map_b, k * bk, col + rank * part, bar,
                                       u16((1 << cluster) - 1));
                }
                if (add) fetch_boxes(out, k * boxes, boxes, row, col);
            }
            at.next();
        }
    }
    __syncwarp(); // its lanes took unequal ways, and the cluster's barrier at the end is the warp's
}

__device__ __forceinline__ void consume(const output &out, const scales &s,
                                        const volatile extents &e, u32 base) {
    int slab = 0;
    u32 rank = cluster > 1 ? cluster_rank() : 0;
    const int group = uniform(thread() / 128), blocks = uniform(whole_turns(e.blocks));
    int first_row = pingpong ? 0 : group * waves * 64;
    pipeline p(base, group);
    if (pingpong && group == 1) {
        p.pass_turn(); // the first one is the other's
        p.at.skip(blocks);
    }
    for (tiles_to_make walk(base, group); walk.inside(tiles_of(e).count()); walk.next()) {
        const tile_at tile = tiles_of(e).at(walk.take());
        const int col = uniform(tile.n * bn);
        const int row = uniform((tile.m * cluster + int(rank)) * bm + first_row);
        if (has_vectors) put_vectors(p, s, out, col);
        float acc[waves][accumulators];
        block_factors factors = {nullptr, 1.0f, 0};
        if (b_tile_scaled) {
            int line = col / bk, ld = (e.blocks + 3) / 4 * 4;
            factors = {s.of_cols + i64(line) * ld, __ldg(s.of_rows + 4), e.blocks - 1};
        }
        multiply(acc, p, blocks, factors);
        if (pingpong) p.at.skip(blocks); // the other one's stages
        stumble();
        write_out(acc, s, out, p, slab, row, col);
    }
    tma_wait<0>();
}
