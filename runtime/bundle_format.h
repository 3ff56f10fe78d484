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
 *   mesh            { "tensor": 1, "fsdp": F }: F ranks share every weight. A bundle is the same for
 *                   all of them; `rank` is 0
 *   rank            0
 *   shard           { "backward": "gather"|"keep", "reduce": "average"|"sum" }: whether backward gathers
 *                   the weights again; what dw is over the ranks
 *   nvrtc           version of the NVRTC that compiled the cubins ("13.0"); absent if archs is
 *                   empty
 *   archs           ["sm_90a", ...], may be empty: then only a host context opens the bundle
 *   kernels         array of kernel records
 *   layers          array of layer records, in spec order
 *   collectives     absent for one rank; for people: what every rank issues in one step, in order:
 *                   [{ "op": "all_reduce_max"|"all_gather"|"reduce_scatter", "pass", "layers":
 *                   [names], "bytes" (a rank sends, or gives to the sum), "dtype",
 *                   "seconds" (null: not known) }]
 *   digest          xxh128 of the manifest's compact form (json_dumps JSON_COMPACT|JSON_SORT_KEYS)
 *                   with this key removed
 *
 * kernel record:
 *   name        unique in the bundle, also the file stem ("quantize_bf16_e4m3")
 *   op          the op it implements (FP8_OP_* below)
 *   entry       extern "C" symbol in the cubin
 *   template    "quantize.cu"
 *   parameters  what the template was expanded with (object of scalars; for people and tools)
 *   semantics   { "source_dtype", "second_dtype"?, "target_dtype", "power_of_two"?,
 *                 "accumulate"? }: what the op computes, read by the host backend; quantize:
 *               target_dtype is the format; gemm: source_dtype is that of a, second_dtype that of
 *               b, target_dtype that of out, all given
 *   args        ordered: [{ "name": <an argument of the op>, "type": "pointer"|"int64"|"int32" }];
 *               the kernel's parameter list. Names are the op's, in any order, none twice.
 *               A kernel of op gemm takes these twelve, each once:
 *                 { "name": "a"|"b"|"out", "type": "tensor_map", "box": [inner, outer] }
 *                   128 bytes by value (const __grid_constant__ CUtensorMap), made for each call:
 *                   2-D, 128-byte swizzle, L2 promotion of 256 bytes, no interleave, zeros outside.
 *                   a: uint8, extents { depth, rows }, a_ld bytes from row to row; b: uint8,
 *                   { depth, cols }, b_ld bytes; out: dtype of out, { cols, rows }, out_ld
 *                   elements. box in elements: of a [128, tile_rows / cluster], of b
 *                   [128, tile_cols / cluster], of out a slab of at most 128 bytes a row
 *                 a_scales, b_scales, bias, out (pointer), out_ld, rows, cols, depth (int64);
 *                   out_ld is cols if there is one row
 *                 { "name": "out_by_map", "type": "int32" }
 *                   1: out is written through its map. 0: out's address, row pitch or row is no
 *                   multiple of 16 bytes (TMA writes whole steps), or it is 16 bits wide and
 *                   accumulates; its map is 128 zero bytes, and the kernel's threads store, any
 *                   alignment and ld, nothing outside out touched
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
 *                 { "rule": "clusters", "rows": .., "cols": .., "tile_rows": r, "tile_cols": c }
 *                     one CTA an SM: gridDim.x = cluster * min(ceil(rows/r) * ceil(cols/c),
 *                     max(1, floor(SMs / cluster))); the clusters stride over the tiles
 *               A grid of 0 is not launched.
 *   block       threads per CTA
 *   cluster     CTAs per cluster (1)
 *   shared_bytes  dynamic shared memory
 *   archs       optional: the archs that the kernel exists for; without it, all of the bundle
 *   cubins      [{ "arch", "file", "bytes", "xxh128" }], one per arch of the bundle that the kernel
 *               exists for, in the bundle's order
 *
 * layer record:
 *   name, in_features, out_features, tokens, max_tokens, count
 *   recipe        { "name": "current", "format": "hybrid"|"e4m3", "power_of_two": bool }
 *   compute       "fp8"
 *   bias          bool
 *   accumulation  { "fprop": "fast"|"split", "dgrad": .., "wgrad": .. }
 *   shard         { "rows", "multiple", "gather_group": name | null }: rank r of the mesh's fsdp axis
 *                 has rows [r * rows, (r + 1) * rows) of w, as far as there are any; rows =
 *                 roundup(ceil(out_features / fsdp), multiple), multiple 1 or 128. Neighbours of one
 *                 group are gathered by one collective. Passes and buffers are those of the whole w.
 *   buffers       array of buffer records
 *   passes        { "weight": [step..], "fprop": [..], "quantize_dy": [..], "wgrad": [..],
 *                   "dgrad": [..] }. The steps before the gemm step of fprop quantise x; they alone
 *                   run for the quantise primitive, the gemm step alone for an x already quantised.
 *   dequantize    { "e4m3": kernel name, "e5m2": kernel name }, the formats this layer uses
 *
 * buffer record: { "name", "object", "part"?, "dtype", "rows": dim, "cols": dim }
 *   object  "caller"     an argument of the pass: x w bias y dy dx dw dbias found_inf operand
 *           target
 *           "x" "w" "dy" a part of that operand: part = "scales" | "row" | "transposed"
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
 *   Every argument of the op is given. Ops other than gemm name the `kernel` that implements them
 *   on CUDA; the host backend executes the op itself. They also have a "reason", for people.
 *   gemm steps have, besides args:
 *     a_dtype, b_dtype  "e4m3" | "e5m2"       out_dtype "bf16" | "fp16" | "fp32"
 *     accumulation      "fast" | "split"
 *     stage             workspace buffer for outputs that cuBLASLt cannot write in place
 *     stage_bias        workspace buffer for a bias that must be moved for it, or null
 *     gemm_workspace    workspace buffer for cuBLASLt
 *     store             { "overwrite": { "kernel", "stage_dtype" },
 *                         "accumulate": the same | null }: the kernel of op "store" that copies (adds) the stage into the caller's
 *                       tensor; null where the pass never accumulates
 *     dispatch          array, ascending and without gaps from 1 to max_tokens:
 *                       { "min_tokens", "max_tokens", "dtype", "choices": [choice..] }
 *   choice: the first that this context can run is taken, for all calls of that range; one of
 *     { "backend": "generated", "kernel", "accumulate_kernel", "reason" }
 *         kernels of op gemm with the step's dtypes: out = and out += (null where the pass never
 *         accumulates). It can be run where they have cubins for the context's arch.
 *     { "backend": "cublaslt", "reason", "algo"?, "version"? }
 *         always the last, and can always be run. algo: a cublasLtMatmulAlgo_t as 128 hex digits,
 *         measured with cuBLASLt `version` (cublasLtGetVersion), both or none; with another
 *         version, and where it refuses, the heuristic's algorithms.
 *   A choice may also have "seconds" (a number, for people).
 *
 * The stage holds at least one row; a product of cuBLASLt that does not fit it runs in row chunks.
 */
#ifndef FP8_BUNDLE_FORMAT_H
#define FP8_BUNDLE_FORMAT_H

#define FP8_BUNDLE_FORMAT "fp8gen-bundle"
#define FP8_BUNDLE_FORMAT_VERSION 2
#define FP8_BUNDLE_MANIFEST "manifest.json"
#define FP8_BUNDLE_KERNEL_DIR "kernels"

/* Leading dims of FP8 buffers are multiples of this many bytes, their rows of FP8_PAD_ROWS. */
#define FP8_PAD_LD 128
#define FP8_PAD_ROWS 16
/* Every part of an operand and every workspace buffer starts at a multiple of this. */
#define FP8_PART_ALIGN 256
/* Places in the float32[16] "scales" part of an operand (cuBLASLt wants them 16 bytes apart). */
#define FP8_SCALES_COUNT 16
#define FP8_SCALES_SCALE 0
#define FP8_SCALES_SCALE_INV 4
#define FP8_SCALES_AMAX 8
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

/* The ops, with their arguments: X(name, type). What each must do:
 *
 * amax: partials[0 .. n_partials) receives non-negative float32 values (bit patterns of |x|), whose
 *   maximum is the largest finite |source[i,j]|, 0 if there is none; every entry is written.
 *   found_inf, if not NULL, is set to 1 if any element is inf or NaN, else not written.
 *   dbias_partials, if not NULL: row r of dbias_partials[ceil(rows/128)][dbias_ld] receives the
 *   fp32 column sums of source rows [128 r, 128 r + 128), columns [0, cols).
 *
 * quantize: amax = max of partials; scale and scale_inv by NUMERICS section 2 with the maximum of
 *   the kernel's format; scales[0], [4], [8] = scale, scale_inv, amax (the rest 0).
 *   row[row_rows][row_ld] and transposed[transposed_rows][transposed_ld] (each may be NULL) receive
 *   cast(source * scale), zero outside rows x cols.
 *   dbias, if not NULL: dbias[j] = (accumulate ? dbias[j] : 0) + sum over r of
 *   dbias_partials[r][j], in ascending order of r, in fp32; the amax step before it left the
 *   partials.
 *
 * store: target[i,j] = convert(source[i,j]) or, for an accumulate kernel, convert(target + source).
 *
 * dequantize: target[i,j] = decode(source[i,j]) * scales[4], or decode(source[j,i]) if transposed.
 *
 * gemm: out[i,j] = sum_k a[i,k] b[j,k] * a_scales[4] * b_scales[4] (+ bias[j]) (+ out[i,j] if
 *   accumulate), rows x cols, k < depth; rounded once. depth is not padded: the tail up to ld is
 *   zero in both operands.
 */
/* clang-format off */
#define FP8_OP_ARGS_AMAX(X)                                                                        \
    X(source, POINTER) X(source_ld, INT64) X(rows, INT64) X(cols, INT64) X(partials, POINTER)      \
    X(n_partials, INT32) X(found_inf, POINTER) X(dbias_partials, POINTER) X(dbias_ld, INT64)

#define FP8_OP_ARGS_QUANTIZE(X)                                                                    \
    X(source, POINTER) X(source_ld, INT64) X(rows, INT64) X(cols, INT64) X(partials, POINTER)      \
    X(n_partials, INT32) X(scales, POINTER) X(row, POINTER) X(row_ld, INT64) X(row_rows, INT64)    \
    X(transposed, POINTER) X(transposed_ld, INT64) X(transposed_rows, INT64) X(dbias, POINTER)     \
    X(dbias_partials, POINTER) X(dbias_ld, INT64) X(accumulate, INT32)

#define FP8_OP_ARGS_STORE(X)                                                                       \
    X(source, POINTER) X(source_ld, INT64) X(target, POINTER) X(target_ld, INT64) X(rows, INT64)   \
    X(cols, INT64)

#define FP8_OP_ARGS_DEQUANTIZE(X)                                                                  \
    X(source, POINTER) X(source_ld, INT64) X(scales, POINTER) X(target, POINTER)                   \
    X(target_ld, INT64) X(rows, INT64) X(cols, INT64) X(is_transposed, INT32)

#define FP8_OP_ARGS_GEMM(X)                                                                        \
    X(a, POINTER) X(a_ld, INT64) X(b, POINTER) X(b_ld, INT64) X(a_scales, POINTER)                 \
    X(b_scales, POINTER) X(bias, POINTER) X(out, POINTER) X(out_ld, INT64) X(rows, INT64)          \
    X(cols, INT64) X(depth, INT64) X(accumulate, INT32)
/* clang-format on */

/* X(NAME, "name", argument list) */
#define FP8_OPS(X)                                                                                 \
    X(AMAX, "amax", FP8_OP_ARGS_AMAX)                                                              \
    X(QUANTIZE, "quantize", FP8_OP_ARGS_QUANTIZE)                                                  \
    X(STORE, "store", FP8_OP_ARGS_STORE)                                                           \
    X(DEQUANTIZE, "dequantize", FP8_OP_ARGS_DEQUANTIZE)                                            \
    X(GEMM, "gemm", FP8_OP_ARGS_GEMM)

#endif
