/*
 * rig_driver.h - entry points of libcuda for tests that ask the driver itself: only with rig.cuda.
 */
#ifndef RIG_DRIVER_H
#define RIG_DRIVER_H

#include <cuda.h>

/* Looks a symbol up in the runtime's copy of libcuda; entry points to a function pointer. */
void rig_driver_entry(const char *symbol, void *entry);
/* Makes the device's primary context current in this thread, as a program would that uses CUDA. */
void rig_driver_make_current(void);

#endif
