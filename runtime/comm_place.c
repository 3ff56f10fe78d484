/*
 * comm_place.c - which rank this process is, as its launcher says in the environment.
 *
 * In: the variables of torchrun, Open MPI, MPICH and Intel MPI, Slurm, in this order. Out: rank,
 * ranks, their places on the node, and a path for the id that only this run uses. Opens nothing,
 * writes nothing.
 */
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/comm.h"

struct launcher {
    const char *name;
    const char *rank, *ranks, *local_rank, *local_ranks; /* local ones may be missing */
    const char *run[3]; /* name the run; those that are set count */
};

static const struct launcher launchers[] = {
    { "torchrun",
      "RANK",
      "WORLD_SIZE",
      "LOCAL_RANK",
      "LOCAL_WORLD_SIZE",
      { "TORCHELASTIC_RUN_ID", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT" } },
    { "mpirun",
      "OMPI_COMM_WORLD_RANK",
      "OMPI_COMM_WORLD_SIZE",
      "OMPI_COMM_WORLD_LOCAL_RANK",
      "OMPI_COMM_WORLD_LOCAL_SIZE",
      { "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", NULL } },
    { "mpirun",
      "PMI_RANK",
      "PMI_SIZE",
      "MPI_LOCALRANKID",
      "MPI_LOCALNRANKS",
      { "PMI_ID", "HYDRA_JOBID", NULL } },
    { "srun",
      "SLURM_PROCID",
      "SLURM_NTASKS",
      "SLURM_LOCALID",
      "SLURM_NTASKS_PER_NODE",
      { "SLURM_JOB_ID", "SLURM_STEP_ID", NULL } },
};
enum { LAUNCHERS = sizeof launchers / sizeof launchers[0] };

/* A whole number of [0, 2^31). */
static fp8_status read_number(const struct launcher *launcher, const char *variable,
                              int32_t *number)
{
    const char *text = getenv(variable);
    char *end;
    long value = text ? strtol(text, &end, 10) : -1;
    if (!text || end == text || *end || value < 0 || value > INT32_MAX)
        return fp8_fail(FP8_ERR_ARGUMENT,
                        "comm_environment: %s sets %s, but %s is %s; it must be a whole number",
                        launcher->name, launcher->rank, variable, text ? text : "not set");
    *number = (int32_t)value;
    return FP8_OK;
}

static fp8_status read_place(const struct launcher *launcher, fp8_comm_place *place)
{
    FP8_TRY(read_number(launcher, launcher->rank, &place->rank));
    FP8_TRY(read_number(launcher, launcher->ranks, &place->ranks));
    if (place->ranks < 1 || place->rank >= place->ranks)
        return fp8_fail(FP8_ERR_ARGUMENT,
                        "comm_environment: %s is %d and %s is %d; ranks count from 0",
                        launcher->rank, place->rank, launcher->ranks, place->ranks);
    place->local_rank = place->rank;
    if (getenv(launcher->local_rank))
        FP8_TRY(read_number(launcher, launcher->local_rank, &place->local_rank));
    if (getenv(launcher->local_ranks))
        FP8_TRY(read_number(launcher, launcher->local_ranks, &place->local_ranks));
    if (place->local_ranks && place->local_rank >= place->local_ranks)
        return fp8_fail(
            FP8_ERR_ARGUMENT, "comm_environment: %s is %d and %s is %d; local ranks count from 0",
            launcher->local_rank, place->local_rank, launcher->local_ranks, place->local_ranks);
    return FP8_OK;
}

/* <TMPDIR>/fp8-<user>-<what names the run>, letters that are safe in a file's name only. */
static void name_file(const struct launcher *launcher, fp8_comm_place *place)
{
    const char *folder = getenv("TMPDIR");
    int at = snprintf(place->file, sizeof place->file, "%s/fp8-%u",
                      folder && *folder ? folder : "/tmp", (unsigned)getuid());
    for (int i = 0; i < 3 && launcher->run[i]; i++) {
        const char *text = getenv(launcher->run[i]);
        if (!text || at >= (int)sizeof place->file - 1)
            continue;
        place->file[at++] = '-';
        for (; *text && at < (int)sizeof place->file - 1; text++)
            place->file[at++] = (char)(isalnum((unsigned char)*text) ? *text : '_');
        place->file[at] = 0;
    }
}

fp8_status fp8_comm_environment(fp8_comm_place *place)
{
    if (!place)
        return fp8_fail(FP8_ERR_ARGUMENT, "comm_environment: place is NULL");
    if (place->size != sizeof *place)
        return fp8_fail(FP8_ERR_ARGUMENT,
                        "comm_environment: place->size is %u, this library's is %zu; start from "
                        "FP8_COMM_PLACE_INIT",
                        place->size, sizeof *place);
    *place = (fp8_comm_place)FP8_COMM_PLACE_INIT;
    const struct launcher *launcher = NULL;
    for (int i = 0; i < LAUNCHERS && !launcher; i++) {
        if (getenv(launchers[i].rank) && getenv(launchers[i].ranks))
            launcher = &launchers[i];
    }
    if (!launcher)
        return fp8_fail(FP8_ERR_NOT_FOUND,
                        "comm_environment: no launcher's variables are set; start with torchrun, "
                        "mpirun or srun, or set RANK, WORLD_SIZE and LOCAL_RANK");
    FP8_TRY(read_place(launcher, place));
    place->launcher = launcher->name;
    const char *file = getenv("FP8_COMM_FILE");
    if (file && strlen(file) >= sizeof place->file)
        return fp8_fail(FP8_ERR_ARGUMENT,
                        "comm_environment: FP8_COMM_FILE has %zu bytes, but at most %zu fit",
                        strlen(file), sizeof place->file - 1);
    if (file && *file)
        snprintf(place->file, sizeof place->file, "%s", file);
    else if (!place->local_ranks || place->local_ranks == place->ranks)
        name_file(launcher, place);
    return FP8_OK;
}
