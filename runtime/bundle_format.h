/*
 * bundle_format.h - the inner contract: what fp8gen writes and libfp8 reads.
 *
 * A bundle is a folder:
 *
 *     manifest.json            everything below
 *     kernels/<name>.<arch>.cubin
 *
 * It is the only thing that passes from gen/ to runtime/. Both sides include this header and
 * nothing else of each other. Any change of meaning raises FP8_BUNDLE_FORMAT_VERSION; the loader
 * accepts exactly its own version.
 *
 * manifest.json (keys sorted, 2-space indent, one trailing newline):
 *
 *   format          "fp8gen-bundle"
 *   format_version  FP8_BUNDLE_FORMAT_VERSION
 *   generator       version of fp8gen ("0.1.0")
 *   model           name from the spec
 *   spec_hash       xxh128 (32 hex digits) of the spec's canonical form
 *   tuning_hash     xxh128 of the tuning file, or null
 *   mesh            { "tensor": 1, "fsdp": F }: F ranks share every weight. A bundle is the same
 *                   for all of them; `rank` is 0
 *   rank            0
 *   shard           { "backward": "gather"|"keep", "reduce": "average"|"sum" }: whether backward
 *                   gathers the weights again; what dw is over the ranks
 *   nvrtc           version of the NVRTC that compiled the cubins ("13.0"); absent if archs is
 *                   empty
 *   archs           ["sm_90a", ...], may be empty: then only a host context opens the bundle
 *   kernels         array of kernel records
 *   layers          array of layer records, in spec order
 *   collectives     absent for one rank; for people: what every rank issues in one step, in the
 *                   order in which it first comes:
 *                   [{ "op": "all_reduce_max"|"all_gather"|"reduce_scatter", "pass" (or "advance":
 *                   of the histories), "layers": [names], "bytes_a_rank" (a rank's piece, which it
 *                   sends of a gather and receives of a sum; of a maximum all numbers), "dtype",
 *                   "times" (in the whole step), "seconds" (of one; null: not known) }]
 *   digest          xxh128 of the manifest's compact form (json_dumps JSON_COMPACT|JSON_SORT_KEYS)
 *                   with this key removed
 *
 * kernel record:
 *   name        unique in the bundle, also the file stem ("quantize_bf16_e4m3")
 *   op          the op it implements (FP8_OP_* below)
 *   entry       extern "C" symbol in the cubin. Kernels of one entry are one text: they differ in
 *               semantics that an argument tells (e5m2), and list the same files
 *   template    "quantize.cu"
 *   parameters  what the template was expanded with (object of scalars; for people and tools)
 *   semantics   { "source_dtype"?, "second_dtype"?, "target_dtype"?, "power_of_two"?,
 *                 "accumulate"?, "scaling"?, "block"?, "a_scaling"?, "b_scaling"?,
 *                 "a_transposed"?, "b_transposed"?, "margin"? }: what the op computes,
 *               read by the host backend
 *               quantising ops: source_dtype, target_dtype (the format; not of amax), power_of_two;
 *               cast: margin 0..8 (default 0), that of recipe delayed;
 *               quantize_block: block "1x128" | "128x128"; dequantize: scaling "tensor" | "row" |
 *               "block" | "tile"; gemm: source_dtype is that of a, second_dtype that of b,
 *               target_dtype that of out, accumulate, a_scaling, b_scaling as in its step, all
 *               given; a_transposed, b_transposed default to false
 *   args        ordered: [{ "name": <an argument of the op>, "type": "pointer"|"int64"|"int32" }];
 *               the kernel's parameter list. Names are the op's, in any order, none twice.
 *               A kernel of op gemm takes these twelve, each once:
 *                 { "name": "a"|"b"|"out", "type": "tensor_map", "box": [inner, outer] }
 *                   128 bytes by value (const __grid_constant__ CUtensorMap), made for each call:
 *                   2-D, 128-byte swizzle, L2 promotion of 256 bytes, no interleave, zeros outside.
 *                   a: uint8, extents { depth, rows }, a_ld bytes from row to row; b: uint8,
 *                   { depth, cols }, b_ld bytes; out: dtype of out, { cols, rows }, out_ld
 *                   elements. box in elements: of a [128, tile_rows * s / cluster], of b
 *                   [128, tile_cols * s / cluster], of out a slab of at most 128 bytes a row
 *                 a_scales, b_scales, bias, out (pointer), out_ld, rows, cols, depth (int64);
 *                   out_ld is cols if there is one row
 *                 { "name": "out_by_map", "type": "int32" }
 *                   1: out is written through its map. 0: out's address, row pitch or row is no
 *                   multiple of 16 bytes (TMA writes whole steps), or it is 16 bits wide and
 *                   accumulates; its map is 128 zero bytes, and the kernel's threads store, any
 *                   alignment and ld, nothing outside out touched
 *                 tiles (pointer) and epoch (int64), both or neither: clusters take tiles from a
 *                   counter
 *   grid        one of
 *                 { "rule": "tiles", "rows": <op arg>, "cols": <op arg>,
 *                   "tile_rows": r, "tile_cols": c, "ctas_per_sm": p, "max_ctas": m,
 *                   "persistent": bool }
 *                     gridDim.x = ceil(rows/r) * ceil(cols/c), at most p * SMs (0 = no such cap)
 *                     and at most m (0 = no cap); the kernel strides over the tiles. Where
 *                     persistent is false, the cap of p * SMs holds only if the call or its context
 *                     limits the SMs.
 *                 { "rule": "elements", "rows": .., "cols": .., "tile_elements": n,
 *                   "ctas_per_sm": p, "max_ctas": m, "persistent": bool }
 *                     gridDim.x = ceil(rows * cols / n), capped in the same way
 *                 { "rule": "clusters", "rows": .., "cols": .., "tile_rows": r, "tile_cols": c,
 *                   "slices": s }
 *                     one CTA an SM: gridDim.x = cluster * min(ceil(rows/r) * ceil(cols/c),
 *                     max(1, floor(SMs / cluster))); the clusters stride over the tiles. s CTAs of
 *                     a cluster share the contraction of a tile, cluster / s the tile itself
 *               A grid of 0 is not launched.
 *   block       threads per CTA
 *   cluster     CTAs per cluster (1)
 *   shared_bytes  dynamic shared memory
 *   cooperative  optional, true: all CTAs must be resident at once (they wait for each other); such
 *               a grid is persistent, with both caps
 *   overlaps      optional, false: the kernel waits by griddepcontrol.wait before it reads or
 *                 writes global memory, so it may be launched while the kernel before it in the
 *                 stream still runs (programmatic stream serialization)
 *   archs       optional: the archs that the kernel exists for; without it, all of the bundle
 *   cubins      [{ "arch", "file", "bytes", "xxh128" }], one per arch of the bundle that the kernel
 *               exists for, in the bundle's order
 *
 * layer record:
 *   name, in_features, out_features, tokens, max_tokens, count
 *   recipe        { "name": "current" | "delayed" | "rowwise" | "rowwise_hp_wgrad" | "block",
 *                   "format": "hybrid" | "e4m3" (the last three recipes: "e4m3"),
 *                   "power_of_two": bool }; current also has
 *                 { "weight_scale": "tensor" | "shard" } (shard: fsdp > 1), delayed
 *                 { "history_length": 1..65536, "algo": "max" | "most_recent", "margin": 0..8,
 *                   "calibrate": bool, "amax_group": "rank" | "fsdp" }
 *   compute       "fp8" | "bf16": with "bf16" there are no operands; the products read the caller's
 *                 tensors x, w and dy
 *   bias          bool
 *   accumulation  { "fprop": "fast"|"split"|"256"|"512", "dgrad": .., "wgrad": .. }
 *   shard         { "rows", "multiple", "gather_group": name | null, "sums" }: rank r of the mesh's
 *                 fsdp axis has rows [r * rows, (r + 1) * rows) of w, as far as there are any; rows
 *                 = roundup(ceil(out_features / fsdp), multiple), multiple 1 or 128. Neighbours of
 *                 one group are gathered by one collective. Passes and buffers are those of the
 *                 whole w. sums: with fsdp > 1, names of the kernels of op sum from dw's dtype (and
 *                 dbias's) to the same and to fp32; maxima: of the kernel of op column_maxima,
 *                 where w's rows or columns have scales of their own
 *   buffers       array of buffer records
 *   passes        { "weight": [step..], "fprop": [..], "quantize_dy": [..], "wgrad": [..],
 *                   "dgrad": [..] }. The steps before the gemm step of fprop quantise x; they alone
 *                   run for the quantise primitive, the gemm step alone for an x already quantised.
 *                   Together the steps of weight, fprop and quantize_dy write every part that the
 *                   recipe gives w, x and dy.
 *   given         { "x": [step..], "w": [..], "dy": [..] } or null: what runs instead where the
 *                 caller has the amax of the tensor already (recipes of tensor scaling)
 *   dequantize    { "<format>_<scaling>": kernel name }, e.g. "e4m3_tensor", for every copy that
 *                 this layer's operands have
 *   transpose     name of a kernel of op transpose, or null: w's transposed copy cannot be made
 *                 from its row copy (recipes of row scaling, compute "bf16")
 *   roll          delayed: name of a kernel of op roll; absent otherwise
 *
 * The scalings of a recipe's operands, row copy / transposed copy ("-": no such copy):
 *                      x              w              dy
 *   current, delayed   tensor/tensor  tensor/tensor  tensor/tensor
 *     weight_scale shard              row/tile
 *   rowwise            row/row        row/row        row/row
 *   rowwise_hp_wgrad   row/-          row/tensor     row/-
 *   block              block/block    tile/tile      block/block
 * With weight_scale shard all rows of a shard of w have one scale, and so have all blocks of its
 * transposed copy; shards end at multiples of 128. Each cast of pass weight then runs for every
 * shard by itself, from its entry of `known` and `amax`, which has one for each.
 * Where x has no transposed copy, wgrad multiplies the caller's own dy and x, in bf16.
 *
 * buffer record: { "name", "object", "part"?, "dtype", "rows": dim, "cols": dim }
 *   object  "caller"     an argument of the pass: x w bias y dy dx dw dbias found_inf; amax: the
 *                        amax that is given; when: the device's word that a call depends on
 *           "x" "w" "dy" a part of that operand, in this order in memory: part =
 *                          "scales"             fp32 [1][16]; tensor scaling: [0] scale,
 *                                               [4] scale_inv, [8] amax; else not written
 *                          "row_scales"         if there is a row copy, not of tensor scaling
 *                          "row"
 *                          "transposed_scales"  if there is such a copy, not of tensor scaling
 *                          "transposed"
 *                        Scale parts hold scale_inv in fp32, entries beyond the operand are 0; for
 *                        a copy of r rows and depth d:
 *                          row    [1][roundup(r, 16)]
 *                          block  [ceil(d / 128)][roundup(r, 8)]      element (k block, row)
 *                          tile   [ceil(r / 128)][roundup(ceil(d / 128), 4)]  (row block, k block)
 *           "state"      delayed: the place of the pass's tensor in the state: part = "scale",
 *                        "amax" (its running maximum; NULL in evaluation) of fp32, "fresh" of
 *                        uint32
 *           "workspace"  scratch of one call
 *   rows x cols elements are what the buffer holds; for "caller" these are the exact extents and
 *   the leading dim is the caller's; for others the memory is rows * cols elements, ld = cols
 *   (padded).
 *   dim     an integer, or { "of": "M" | integer, "div": d, "pad": p, "max": m }:
 *           min(roundup(ceil(of / d), p), m); div and pad default to 1, max to no limit.
 *
 * step record: { "op", "kernel"?, "args": { <op arg>: value }, ... }
 *   value   integer; null (a NULL pointer); or a string:
 *             "M"                the tokens of this call
 *             "<buffer>"         its address (NULL if the caller gave none, or the copy is not
 *                                wanted)
 *             "<buffer>.ld"      elements from row to row     "<buffer>.rows"  its rows (padded)
 *             "accumulate"       the call's accumulate flag (0 or 1)
 *             "epoch"            a number that no other call of this process has
 *   Every argument of the op is given. Ops other than gemm name the `kernel` that implements them
 *   on CUDA; the host backend executes the op itself. They also have a "reason", for people.
 *   An amax step that a quantize step follows may have
 *     alternative       { "kernel", "args", "elements_per_sm" }: a step of op fused, taken instead
 *                       of both where rows * cols <= elements_per_sm * SMs of the call (threads
 *                       on the host); on CUDA if the kernel has a cubin for the context's arch
 *   gemm steps have, besides args:
 *     a_dtype, b_dtype  "e4m3" | "e5m2" | "bf16" (both or none)
 *     out_dtype         "bf16" | "fp16" | "fp32"
 *     a_scaling, b_scaling  "tensor" | "row" | "block" | "tile": of the copies that the pass reads;
 *                       "none" of bf16
 *     a_transposed, b_transposed  bool: the operand, of bf16, lies as [depth][rows] ([depth][cols])
 *     accumulation      "fast" | "split" | "256" | "512" (split by cuBLASLt)
 *     stage             workspace buffer for outputs that cuBLASLt cannot write in place
 *                       (of fp32 where an operand has scaling row: the store applies the scales,
 *                       since cuBLASLt's own order of the two factors overflows)
 *     stage_bias        workspace buffer for a bias that must be moved for it, or null; the stage
 *                       of a pass with a bias is fp32, and the store adds the bias
 *     gemm_workspace    workspace buffer for cuBLASLt
 *     store             { "overwrite": { "kernel", "stage_dtype" },
 *                         "accumulate": the same | null }: the kernel of op "store" that copies
 *                       (adds) the stage into the caller's tensor; null where the pass never
 *                       accumulates
 *     dispatch          array, ascending and without gaps from 1 to max_tokens:
 *                       { "min_tokens", "max_tokens", "dtype", "choices": [choice..] }
 *   choice: the first that this context can run is taken, for all calls of that range; one of
 *     { "backend": "generated", "kernel", "accumulate_kernel", "reason" }
 *         kernels of op gemm with the step's dtypes: out = and out += (null where the pass never
 *         accumulates). It can be run where they have cubins for the context's arch.
 *     { "backend": "cublaslt", "reason", "algo"?, "version"? }
 *         always the last; what it has no product for is refused when the layer is created. algo: a
 *         cublasLtMatmulAlgo_t as 128 hex digits, measured with cuBLASLt `version`
 *         (cublasLtGetVersion), both or none; with another version, and where it refuses, the
 *         heuristic's algorithms.
 *   A choice may also have "seconds" (a number, for people).
 *
 * The stage holds at least one row; a product of cuBLASLt that does not fit it runs in row chunks.
 */
#ifndef FP8_BUNDLE_FORMAT_H
#define FP8_BUNDLE_FORMAT_H

#define FP8_BUNDLE_FORMAT "fp8gen-bundle"
#define FP8_BUNDLE_FORMAT_VERSION 5
#define FP8_BUNDLE_MANIFEST "manifest.json"
#define FP8_BUNDLE_KERNEL_DIR "kernels"

/* Leading dims of FP8 buffers are multiples of this many bytes, their rows of FP8_PAD_ROWS. */
#define FP8_PAD_LD 128
#define FP8_PAD_ROWS 16
/* Rows of scales are padded: of "row" and "block" scaling by rows, of "tile" by k blocks. */
#define FP8_PAD_ROW_SCALES 16
#define FP8_PAD_BLOCK_SCALES 8
#define FP8_PAD_TILE_SCALES 4
/* uint32 words of the counter of a gemm's tiles. */
#define FP8_COUNTER_WORDS 4
/* Sides of the blocks of scaling by block. */
#define FP8_BLOCK 128
/* Rows of the source that one row of partial sums (dbias) stands for. */
#define FP8_DBIAS_ROWS 128
/* Elements of a row or column that one of its partial amaxes stands for. */
#define FP8_LINE_ELEMENTS 128
/* Every part of an operand and every workspace buffer starts at a multiple of this. */
#define FP8_PART_ALIGN 256
/* Places in the float32[16] "scales" part of an operand (cuBLASLt wants them 16 bytes apart). */
#define FP8_SCALES_COUNT 16
#define FP8_SCALES_SCALE 0
#define FP8_SCALES_SCALE_INV 4
#define FP8_SCALES_AMAX 8
/* Largest margin of recipe delayed. */
#define FP8_MOST_MARGIN 8
/* Ranks along one axis of a mesh at most. */
#define FP8_MAX_RANKS 4096
/* Longest argument list of an op. */
#define FP8_OP_MAX_ARGS 24
/* The one parameter of gemm kernels that is no argument of the op. */
#define FP8_ARG_OUT_BY_MAP "out_by_map"
/* Bytes of a tensor map, and of one of its box's rows at most. */
#define FP8_TENSOR_MAP_BYTES 128
#define FP8_BOX_ROW_BYTES 128
/* Rows of a box at most. */
#define FP8_BOX_ROWS 256
/* A tensor map needs an address and a row pitch that are multiples of this. */
#define FP8_MAP_ALIGN 16

/* The ops, with their arguments: X(name, type). `when`, of all that quantise: NULL, or a uint32 in
 * device memory: the op does nothing at all where it is 0 at run time. What each must do:
 *
 * amax: partials[0 .. n_partials) receives non-negative float32 values (bit patterns of |x|), whose
 *   maximum is the largest finite |source[i,j]|, 0 if there is none; every entry is written.
 *   found_inf, if not NULL, is set to 1 if any element is inf or NaN, else not written.
 *   dbias_partials, if not NULL: row r of dbias_partials[ceil(rows/128)][dbias_ld] receives the
 *   fp32 column sums of source rows [128 r, 128 r + 128), columns [0, cols).
 *
 * quantize: amax = max of partials; scale and scale_inv by NUMERICS section 2 with the maximum of
 *   the format, which e5m2 (0: E4M3, 1: E5M2) says as target_dtype does; scales[0], [4], [8] =
 *   scale, scale_inv, amax (the rest 0).
 *   row[row_rows][row_ld] and transposed[transposed_rows][transposed_ld] (each may be NULL) receive
 *   cast(source * scale), zero outside rows x cols; of a row of transposed, roundup(rows, 128)
 *   bytes are written.
 *   dbias, if not NULL: dbias[j] = (accumulate ? dbias[j] : 0) + sum over r of
 *   dbias_partials[r][j], in ascending order of r, in fp32; the amax step before it left the
 *   partials.
 *
 * fused: amax, then quantize, in one cooperative launch. barrier: uint64[CTAs + 1], any contents;
 *   CTAs tell each other by epoch that their partial is there, and leave another value behind, so
 *   that the same epoch serves again when a graph is replayed.
 *
 * cast: as quantize, with a scale that is known before source is read, in one pass.
 *   fresh, if not NULL, and not 0 at run time: amax = max of partials, as in quantize;
 *   else known_is_amax: amax = *known, which should be finite: +inf is taken as FLT_MAX, NaN and
 *   what is negative as 0; else the scale is *known and scales[8] is 0. A scale made from an amax
 *   is that of maximum / 2^margin of the kernel.
 *   amax, if not NULL, becomes max(amax, the largest finite |source|) in any order of CTAs; what is
 *   negative (did not run) counts as 0. row, transposed: as in quantize. found_inf, dbias_partials:
 *   as in amax. partials is only read where fresh is given. row_scales, if not NULL: scale_inv for
 *   each row, 0 for i >= rows up to roundup(rows, 16).
 *
 * column_sums: dbias[j] = (accumulate ? dbias[j] : 0) + sum over r < partial_rows of
 * partials[r][j],
 *   in fp32 and in an order that depends on partial_rows alone. dbias NULL: nothing.
 *
 * column_maxima: maxima[j] = the largest of partials[r][j], r < partial_rows; 0 if there is none.
 *
 * quantize_row: row[i,j] = cast(source[i,j] * scale of row i), from the amax of row i, zero outside
 *   rows x cols; row_scales[i] = scale_inv, 0 for i >= rows up to roundup(rows, 16). row may be
 *   NULL, row_scales too. found_inf: as in amax.
 *
 * line_amax: row_partials[ceil(cols/128)][row_partials_ld], if not NULL: the finite amax of every
 * row
 *   within each 128 columns; column_partials[ceil(rows/128)][column_partials_ld], if not NULL: that
 *   of every column within each 128 rows. found_inf, dbias_partials: as in amax.
 *
 * line_scales: from the partials of a line_amax over rows x cols row_maxima[i], the amax of row i,
 * and
 *   row_scales[i] = scale_inv by it, 0 for i >= rows up to roundup(rows, 16); column_maxima and
 *   transposed_scales likewise of the columns. row_partials NULL: nothing of rows; column_partials
 *   NULL: nothing of columns. dbias: as in column_sums, from dbias_partials[ceil(rows/128)].
 *
 * quantize_lines: row[i,j] = cast(source[i,j] * scale of row i) by row_maxima[i], transposed[j,i] =
 *   cast(source[i,j] * scale of column j) by column_maxima[j], zero outside. row may be NULL,
 *   transposed too, and then its maxima.
 *
 * quantize_block: a scale for each 1 x 128 along the row ("1x128": the row copy has scaling block,
 * the
 *   transposed copy a scale for each 128 x 1 of source) or for each 128 x 128 ("128x128": both
 *   copies have scaling tile, the same numbers). Each copy and its scales may be NULL. found_inf,
 *   dbias_partials: as in amax.
 *
 * transpose: transposed[j,i] = source[i,j] of FP8 bytes, zero outside, the scale kept. scales,
 *   transposed_scales: of scaling tile, transposed likewise; with scales_ld 0, scales are of
 *   scaling row, the same within 128 rows, and transposed_scales of scaling tile; else NULL. source
 *   NULL: the scales alone.
 *
 * roll: an optimizer step of delayed scaling, of all tensors t of a state with running[t] >= 0:
 *   history[counts[t] % length][t] = running[t], counts[t] += 1 (from 2 length - 1 to length),
 *   running[t] = -1, fresh[t] = 0;
 *   amax = that entry (most_recent), or the largest of the min(counts[t], length) entries; scale[t]
 *   by NUMERICS section 2 with maxima[t] (the format's, over 2^margin), kept where amax is 0.
 *   scale, running, maxima: fp32[tensors]; counts: int32, fresh: uint32[tensors]; history:
 *   fp32[length][tensors].
 *
 * store: target[i,j] = convert(value) or, for an accumulate kernel, convert(target + value), with
 *   value = source[i,j]; where a_scales (and then b_scales too) is not NULL,
 *   (source * min(sa, sb)) * max(sa, sb)
 *   with sa = a_scales[i * a_scales_step] and sb = b_scales[j * b_scales_step]; then + bias[j], if
 *   any. accumulate: 1 for an accumulate kernel, which shares its text with the other.
 *
 * sum: target[i,j] = s (+ target[i,j] if accumulate), rounded once; s = the sum over p < parts,
 *   ascending, in fp32, of source[p * part_stride + i * source_ld + j], times 1 / parts if average,
 *   rounded to source_dtype.
 *
 * dequantize: target[i,j] = decode(source[i,j]) * scale_inv of the element by the kernel's scaling,
 *   or of source[j,i] if transposed (scales are then those of the transposed copy). scales: a scale
 *   part, scales_ld its ld; tensor: the part "scales".
 *
 * gemm: out[i,j] = sum_k a[i,k] b[j,k], scaled, (+ bias[j]) (+ out[i,j] if accumulate), rows x
 * cols,
 *   k < depth; rounded once. depth is not padded: the tail up to ld is zero in both operands of
 *   FP8. tensor: a_scales[4] * b_scales[4]; row: (sum * min(sa, sb)) * max(sa, sb) with the scales
 *   of row i and row j; block and tile (b alone may be tile): sums of 128 of k each times sa * sb.
 *   bf16: a and b are the caller's, scales NULL; a_transposed: element (i, k) is at a[k * a_ld +
 *   i]. tiles: uint64[2] of any contents, a counter of the tiles that are taken; by epoch a call
 *   tells it from what was there, and it leaves another value behind, as in fused. NULL for
 *   products that no kernel of the bundle computes.
 */
/* clang-format off */
#define FP8_OP_ARGS_AMAX(X)                                                                        \
    X(source, POINTER) X(source_ld, INT64) X(rows, INT64) X(cols, INT64) X(partials, POINTER)      \
    X(n_partials, INT32) X(found_inf, POINTER) X(dbias_partials, POINTER) X(dbias_ld, INT64)       \
    X(when, POINTER)

#define FP8_OP_ARGS_QUANTIZE(X)                                                                    \
    X(source, POINTER) X(source_ld, INT64) X(rows, INT64) X(cols, INT64) X(partials, POINTER)      \
    X(n_partials, INT32) X(scales, POINTER) X(row, POINTER) X(row_ld, INT64) X(row_rows, INT64)    \
    X(transposed, POINTER) X(transposed_ld, INT64) X(transposed_rows, INT64) X(dbias, POINTER)     \
    X(dbias_partials, POINTER) X(dbias_ld, INT64) X(accumulate, INT32) X(when, POINTER)            \
    X(e5m2, INT32)

#define FP8_OP_ARGS_FUSED(X)                                                                       \
    X(source, POINTER) X(source_ld, INT64) X(rows, INT64) X(cols, INT64) X(barrier, POINTER)       \
    X(epoch, INT64) X(partials, POINTER) X(n_partials, INT32) X(scales, POINTER) X(row, POINTER)   \
    X(row_ld, INT64) X(row_rows, INT64) X(transposed, POINTER) X(transposed_ld, INT64)             \
    X(transposed_rows, INT64) X(found_inf, POINTER) X(dbias, POINTER) X(dbias_partials, POINTER)   \
    X(dbias_ld, INT64) X(accumulate, INT32) X(when, POINTER) X(e5m2, INT32)

#define FP8_OP_ARGS_CAST(X)                                                                        \
    X(source, POINTER) X(source_ld, INT64) X(rows, INT64) X(cols, INT64) X(known, POINTER)         \
    X(known_is_amax, INT32) X(fresh, POINTER) X(partials, POINTER) X(n_partials, INT32)            \
    X(scales, POINTER) X(row_scales, POINTER) X(row, POINTER) X(row_ld, INT64) X(row_rows, INT64)  \
    X(transposed, POINTER) X(transposed_ld, INT64) X(transposed_rows, INT64) X(amax, POINTER)      \
    X(found_inf, POINTER) X(dbias_partials, POINTER) X(dbias_ld, INT64) X(when, POINTER)           \
    X(e5m2, INT32)

#define FP8_OP_ARGS_COLUMN_SUMS(X)                                                                 \
    X(partials, POINTER) X(partials_ld, INT64) X(partial_rows, INT64) X(cols, INT64)               \
    X(dbias, POINTER) X(accumulate, INT32)

#define FP8_OP_ARGS_COLUMN_MAXIMA(X)                                                               \
    X(partials, POINTER) X(partials_ld, INT64) X(partial_rows, INT64) X(cols, INT64)               \
    X(maxima, POINTER)

#define FP8_OP_ARGS_QUANTIZE_ROW(X)                                                                \
    X(source, POINTER) X(source_ld, INT64) X(rows, INT64) X(cols, INT64) X(row, POINTER)           \
    X(row_ld, INT64) X(row_rows, INT64) X(row_scales, POINTER) X(found_inf, POINTER)               \
    X(when, POINTER)

#define FP8_OP_ARGS_LINE_AMAX(X)                                                                   \
    X(source, POINTER) X(source_ld, INT64) X(rows, INT64) X(cols, INT64) X(row_partials, POINTER)  \
    X(row_partials_ld, INT64) X(column_partials, POINTER) X(column_partials_ld, INT64)             \
    X(found_inf, POINTER) X(dbias_partials, POINTER) X(dbias_ld, INT64) X(when, POINTER)

#define FP8_OP_ARGS_LINE_SCALES(X)                                                                 \
    X(row_partials, POINTER) X(row_partials_ld, INT64) X(rows, INT64) X(cols, INT64)               \
    X(column_partials, POINTER) X(column_partials_ld, INT64) X(row_maxima, POINTER)                \
    X(column_maxima, POINTER) X(row_scales, POINTER) X(transposed_scales, POINTER)                 \
    X(dbias, POINTER) X(dbias_partials, POINTER) X(dbias_ld, INT64) X(accumulate, INT32)           \
    X(when, POINTER)

#define FP8_OP_ARGS_QUANTIZE_LINES(X)                                                              \
    X(source, POINTER) X(source_ld, INT64) X(rows, INT64) X(cols, INT64) X(row_maxima, POINTER)    \
    X(column_maxima, POINTER) X(row, POINTER) X(row_ld, INT64) X(row_rows, INT64)                  \
    X(transposed, POINTER) X(transposed_ld, INT64) X(transposed_rows, INT64) X(when, POINTER)

#define FP8_OP_ARGS_QUANTIZE_BLOCK(X)                                                              \
    X(source, POINTER) X(source_ld, INT64) X(rows, INT64) X(cols, INT64) X(row, POINTER)           \
    X(row_ld, INT64) X(row_rows, INT64) X(row_scales, POINTER) X(row_scales_ld, INT64)             \
    X(transposed, POINTER) X(transposed_ld, INT64) X(transposed_rows, INT64)                       \
    X(transposed_scales, POINTER) X(transposed_scales_ld, INT64) X(found_inf, POINTER)             \
    X(dbias_partials, POINTER) X(dbias_ld, INT64) X(when, POINTER)

#define FP8_OP_ARGS_TRANSPOSE(X)                                                                   \
    X(source, POINTER) X(source_ld, INT64) X(rows, INT64) X(cols, INT64) X(transposed, POINTER)    \
    X(transposed_ld, INT64) X(transposed_rows, INT64) X(scales, POINTER) X(scales_ld, INT64)       \
    X(transposed_scales, POINTER) X(transposed_scales_ld, INT64) X(when, POINTER)

#define FP8_OP_ARGS_ROLL(X)                                                                        \
    X(scale, POINTER) X(running, POINTER) X(history, POINTER) X(counts, POINTER)                   \
    X(fresh, POINTER) X(maxima, POINTER) X(tensors, INT64) X(length, INT64)                        \
    X(most_recent, INT32) X(power_of_two, INT32)

#define FP8_OP_ARGS_STORE(X)                                                                       \
    X(source, POINTER) X(source_ld, INT64) X(a_scales, POINTER) X(a_scales_step, INT64)            \
    X(b_scales, POINTER) X(b_scales_step, INT64) X(bias, POINTER) X(target, POINTER)               \
    X(target_ld, INT64) X(rows, INT64) X(cols, INT64) X(accumulate, INT32)

#define FP8_OP_ARGS_SUM(X)                                                                         \
    X(source, POINTER) X(part_stride, INT64) X(source_ld, INT64) X(parts, INT64)                   \
    X(target, POINTER) X(target_ld, INT64) X(rows, INT64) X(cols, INT64) X(average, INT32)         \
    X(accumulate, INT32)

#define FP8_OP_ARGS_DEQUANTIZE(X)                                                                  \
    X(source, POINTER) X(source_ld, INT64) X(scales, POINTER) X(scales_ld, INT64)                  \
    X(target, POINTER) X(target_ld, INT64) X(rows, INT64) X(cols, INT64) X(is_transposed, INT32)   \
    X(e5m2, INT32)

#define FP8_OP_ARGS_GEMM(X)                                                                        \
    X(a, POINTER) X(a_ld, INT64) X(b, POINTER) X(b_ld, INT64) X(a_scales, POINTER)                 \
    X(a_scales_ld, INT64) X(b_scales, POINTER) X(b_scales_ld, INT64) X(bias, POINTER)              \
    X(out, POINTER) X(out_ld, INT64) X(rows, INT64) X(cols, INT64) X(depth, INT64)                 \
    X(accumulate, INT32) X(tiles, POINTER) X(epoch, INT64)
/* clang-format on */

/* X(NAME, "name", argument list) */
#define FP8_OPS(X)                                                                                 \
    X(AMAX, "amax", FP8_OP_ARGS_AMAX)                                                              \
    X(QUANTIZE, "quantize", FP8_OP_ARGS_QUANTIZE)                                                  \
    X(FUSED, "fused", FP8_OP_ARGS_FUSED)                                                           \
    X(CAST, "cast", FP8_OP_ARGS_CAST)                                                              \
    X(COLUMN_SUMS, "column_sums", FP8_OP_ARGS_COLUMN_SUMS)                                         \
    X(COLUMN_MAXIMA, "column_maxima", FP8_OP_ARGS_COLUMN_MAXIMA)                                   \
    X(QUANTIZE_ROW, "quantize_row", FP8_OP_ARGS_QUANTIZE_ROW)                                      \
    X(LINE_AMAX, "line_amax", FP8_OP_ARGS_LINE_AMAX)                                               \
    X(LINE_SCALES, "line_scales", FP8_OP_ARGS_LINE_SCALES)                                         \
    X(QUANTIZE_LINES, "quantize_lines", FP8_OP_ARGS_QUANTIZE_LINES)                                \
    X(QUANTIZE_BLOCK, "quantize_block", FP8_OP_ARGS_QUANTIZE_BLOCK)                                \
    X(TRANSPOSE, "transpose", FP8_OP_ARGS_TRANSPOSE)                                               \
    X(ROLL, "roll", FP8_OP_ARGS_ROLL)                                                              \
    X(STORE, "store", FP8_OP_ARGS_STORE)                                                           \
    X(SUM, "sum", FP8_OP_ARGS_SUM)                                                                 \
    X(DEQUANTIZE, "dequantize", FP8_OP_ARGS_DEQUANTIZE)                                            \
    X(GEMM, "gemm", FP8_OP_ARGS_GEMM)

#endif
