#!/usr/bin/env bash
# runtime/nccl_abi.h says what nccl.h says, where there is one: FP8_NCCL_INCLUDE, the compiler's own
# folders, CUDA's, or the Python package's.
set -u
command -v cc >/dev/null || { echo "skip: no C compiler"; exit 77; }
cuda=$(sed -n 's/^FP8GEN_CUDA_INCLUDE_DIR:[A-Z]*=//p' "$FP8_TEST_BUILD/CMakeCache.txt")
[ -f "$cuda/cuda_runtime.h" ] ||
    { echo "skip: nccl.h needs cuda_runtime.h, which is not in $cuda"; exit 77; }
python=$(python3 -c 'import nvidia.nccl, os; print(os.path.join(list(nvidia.nccl.__path__)[0], "include"))' 2>/dev/null)
found=
for folder in "${FP8_NCCL_INCLUDE:-}" /usr/include /usr/local/include "$cuda" "$python"; do
    [ -n "$folder" ] && [ -f "$folder/nccl.h" ] && found=$folder && break
done
[ -n "$found" ] ||
    { echo "skip: no nccl.h on this machine; FP8_NCCL_INCLUDE names its folder"; exit 77; }
file=$(mktemp --suffix=.c)
trap 'rm -f "$file"' EXIT
{
    echo '#include <nccl.h>'
    echo '#include "runtime/nccl_abi.h"'
    same() { # theirs ours
        echo "_Static_assert((long long)($1) == (long long)($2), \"$1 is not $2\");"
    }
    same NCCL_UNIQUE_ID_BYTES 'sizeof(fp8_nccl_id)'
    same 'sizeof(ncclUniqueId)' 'sizeof(fp8_nccl_id)'
    same ncclSuccess FP8_NCCL_SUCCESS
    same ncclInvalidArgument FP8_NCCL_INVALID_ARGUMENT
    same ncclInvalidUsage FP8_NCCL_INVALID_USAGE
    same ncclInProgress FP8_NCCL_IN_PROGRESS
    same ncclUint8 FP8_NCCL_UINT8
    same ncclFloat16 FP8_NCCL_FLOAT16
    same ncclFloat32 FP8_NCCL_FLOAT32
    same ncclBfloat16 FP8_NCCL_BFLOAT16
    same ncclSum FP8_NCCL_SUM
    same ncclMax FP8_NCCL_MAX
    same ncclAvg FP8_NCCL_AVG
    same NCCL_CONFIG_UNDEF_INT FP8_NCCL_UNDEFINED
    field() { # theirs ours
        same "offsetof(ncclConfig_t, $1)" "offsetof(fp8_nccl_config, $2)"
    }
    field size size
    field magic magic
    field version version
    field blocking blocking
    field cgaClusterSize cga_cluster_size
    field minCTAs min_ctas
    field maxCTAs max_ctas
    field netName net_name
    field splitShare split_share
    if grep -q 'trafficClass' "$found/nccl.h"; then
        field trafficClass traffic_class
        field commName comm_name
    fi
    if grep -q 'nvlsCTAs' "$found/nccl.h"; then
        field collnetEnable collnet_enable
        field CTAPolicy cta_policy
        field shrinkShare shrink_share
        field nvlsCTAs nvls_ctas
        same NCCL_WIN_COLL_SYMMETRIC FP8_NCCL_WIN_COLL_SYMMETRIC
    fi
    if grep -q 'NCCL_CTA_POLICY_ZERO' "$found/nccl.h"; then
        same NCCL_CTA_POLICY_ZERO FP8_NCCL_CTA_POLICY_ZERO
    fi
    if grep -q 'NCCL_WIN_REQUIRED_ALIGNMENT' "$found/nccl.h"; then
        same NCCL_WIN_REQUIRED_ALIGNMENT FP8_NCCL_WINDOW_ALIGNMENT
    fi
    if grep -q 'nvlsHostMode' "$found/nccl.h"; then
        field hostCftMode host_cft_mode
        field nvlsHostMode nvls_host_mode
        same ncclNvlsHostModeDisable FP8_NCCL_NVLS_DISABLE
        same 'sizeof(ncclConfig_t) >= sizeof(fp8_nccl_config)' 1
    fi
    # The functions: a call of ours must be one of theirs.
    echo 'void calls(ncclComm_t comm, ncclUniqueId id, ncclConfig_t *config, void *memory, cudaStream_t s);'
    echo 'void calls(ncclComm_t comm, ncclUniqueId id, ncclConfig_t *config, void *memory, cudaStream_t s) {'
    echo '    int number; (void)ncclGetVersion(&number); (void)ncclGetUniqueId(&id);'
    echo '    (void)ncclCommInitRankConfig(&comm, 1, id, 0, config); (void)ncclCommDestroy(comm);'
    echo '    (void)ncclCommAbort(comm); (void)ncclCommGetAsyncError(comm, (ncclResult_t *)&number);'
    echo '    (void)ncclCommCount(comm, &number); (void)ncclCommCuDevice(comm, &number);'
    echo '    (void)ncclCommUserRank(comm, &number); (void)ncclGroupStart(); (void)ncclGroupEnd();'
    echo '    (void)ncclAllGather(memory, memory, (size_t)1, ncclUint8, comm, s);'
    echo '    (void)ncclReduceScatter(memory, memory, (size_t)1, ncclFloat32, ncclSum, comm, s);'
    echo '    (void)ncclAllReduce(memory, memory, (size_t)1, ncclFloat32, ncclMax, comm, s);'
    if grep -q 'ncclCommSplit' "$found/nccl.h"; then
        echo '    (void)ncclCommSplit(comm, 0, 0, &comm, config);'
    fi
    if grep -q 'ncclAlltoAll' "$found/nccl.h"; then
        echo '    (void)ncclAlltoAll(memory, memory, (size_t)1, ncclUint8, comm, s);'
    fi
    if grep -q 'ncclCommWindowRegister' "$found/nccl.h"; then
        echo '    ncclWindow_t window; (void)ncclMemAlloc(&memory, (size_t)1); (void)ncclMemFree(memory);'
        echo '    (void)ncclCommWindowRegister(comm, memory, (size_t)1, &window, 1);'
        echo '    (void)ncclCommWindowDeregister(comm, window);'
    fi
    echo '}'
} >"$file"
cc -std=c11 -fsyntax-only -Werror -I. -isystem "$found" -isystem "$cuda" "$file" || exit 1
grep -c _Static_assert "$file" | sed "s/\$/ values and offsets as in ${found//\//\\/}\/nccl.h/"
