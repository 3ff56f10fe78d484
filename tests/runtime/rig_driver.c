/*
 * rig_driver.c - see rig_driver.h.
 */
#include "tests/runtime/rig_driver.h"

#include "tests/runtime/rig.h"

void rig_driver_entry(const char *symbol, void *entry)
{
    void *address;
    RIG_OK(fp8_library_symbol(FP8_LIBRARY_CUDA, symbol, &address, NULL));
    memcpy(entry, &address, sizeof address);
}

void rig_driver_make_current(void)
{
    CUresult (*retain)(CUcontext *, CUdevice);
    CUresult (*set_current)(CUcontext);
    CUcontext primary;
    rig_driver_entry("cuDevicePrimaryCtxRetain", &retain);
    rig_driver_entry("cuCtxSetCurrent", &set_current);
    assert_int_equal(retain(&primary, rig.info.device), CUDA_SUCCESS);
    assert_int_equal(set_current(primary), CUDA_SUCCESS);
}
