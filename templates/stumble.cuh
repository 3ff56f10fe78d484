// stumble.cuh - places where a thread may be late: between two steps that other threads synchronise
// with.
//
// Does nothing. The test of races (tests/runtime/test_delays.c) puts a wait of random length in its
// place: a barrier that is missing, or arrived at too early, then shows in the product.
#pragma once

__device__ __forceinline__ void stumble() {}
