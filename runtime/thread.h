/*
 * thread.h - threads, conditions with a time limit and sleeps, all on the monotonic clock.
 *
 * What our own threads need alike: they take no signal of the program's, and a wall clock that is
 * set does not move their deadlines. Shared by gen/ and runtime/, knows neither. Not public.
 */
#ifndef FP8_THREAD_H
#define FP8_THREAD_H

#include <pthread.h>
#include <time.h>

/* Seconds, for timeouts and for what is logged. */
double fp8_clock(void);
void fp8_sleep(double seconds);
/* So many seconds from now, for conditions of fp8_condition_init. */
struct timespec fp8_deadline(double seconds);
void fp8_condition_init(pthread_cond_t *condition);
/* A thread in which all signals are blocked: those of the program belong to its own threads. 0, or
 * an errno value. */
int fp8_thread_start(pthread_t *thread, void *(*body)(void *), void *user);

#endif
