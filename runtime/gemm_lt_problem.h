/*
 * gemm_lt_problem.h - a layer's product in cuBLASLt's terms: what its rules allow, and what must be
 * padded, moved or repeated so that they hold.
 *
 * Between gemm_cublaslt.c, which chooses algorithms and runs them, and gemm_lt_problem.c.
 */
#ifndef FP8_GEMM_LT_PROBLEM_H
#define FP8_GEMM_LT_PROBLEM_H

#include "runtime/gemm_lt.h"
#include "runtime/gemm_plan.h"

enum { FP8_LT_COLS_PAD = 16, FP8_LT_OUT_ALIGN = 16 };

/* Ways to write the output; those in place exist without and with a bias, of which the stage knows
 * nothing. */
enum fp8_lt_way { FP8_LT_IN_PLACE, FP8_LT_IN_PLACE_ADD, FP8_LT_STAGED, FP8_LT_WAY_COUNT };

/* FP8_ERR_CUBLASLT: this library or device does not know the scaling. */
fp8_status fp8_lt_check_scaling(const struct fp8_gemm_plan *plan);

/* Whether dtypes and extents allow this way at all. */
bool fp8_lt_way_exists(const struct fp8_gemm_plan *plan, enum fp8_lt_way way, int64_t rows,
                       int64_t cols);
/* Everything about the problem but its scales and what the way decides. workspace and its size are
 * those of the plan. */
struct fp8_lt_problem fp8_lt_base_problem(const struct fp8_gemm_plan *plan, const fp8_value *args,
                                          void *workspace, size_t workspace_bytes);
void fp8_lt_write_in_place(struct fp8_lt_problem *problem, const struct fp8_gemm_plan *plan,
                           const fp8_value *args);
void fp8_lt_write_staged(struct fp8_lt_problem *problem, const struct fp8_gemm_plan *plan,
                         void *stage, int64_t stage_ld);

/* Rows of a product that go to a stage of stage_rows at once; 0: the stage is too small. */
int64_t fp8_lt_chunk(const struct fp8_gemm_plan *plan, const struct fp8_lt_problem *problem,
                     int64_t stage_rows);
/* The problem for rows [first, first + rows) of a staged product. */
void fp8_lt_take_rows(struct fp8_lt_problem *problem, const fp8_value *args, int64_t first,
                      int64_t rows);
/* Whether the store of the stage applies the scales, not the library. */
bool fp8_lt_scaled_by_store(const struct fp8_gemm_plan *plan);
/* Scales of rows [first, first + problem->rows) of a and of all of b, as the library reads them: in
 * place, or enqueued copies at the head of the workspace. */
fp8_status fp8_lt_place_scales(const struct fp8_gemm_plan *plan, struct fp8_lt_problem *problem,
                               const fp8_value *args, int64_t first);

#endif
