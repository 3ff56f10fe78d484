/*
 * absent_rig.h - two processes on two GPUs, of which one leaves a gather by copy engines to the
 * other.
 */
#ifndef ABSENT_RIG_H
#define ABSENT_RIG_H

/* Runs both as children of this program, which must give its arguments to absent_process. 0: the
 * one that waits ends in time with the right words; 77: gathers are not by copy engines here. */
int absent_run(void);
/* The exit code of a child; -1: the arguments are not a child's. */
int absent_process(int count, char **arguments);

#endif
