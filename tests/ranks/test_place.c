/*
 * test_place.c - who am I, as launchers say it; and ids that go through a file between processes.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "runtime/comm.h"
#include "tests/ranks/rig.h"

static void clear(void)
{
    static const char *const names[] = {
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "TORCHELASTIC_RUN_ID",
        "MASTER_PORT",
        "TORCHELASTIC_RESTART_COUNT",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "PMIX_NAMESPACE",
        "OMPI_MCA_ess_base_jobid",
        "PMI_RANK",
        "PMI_SIZE",
        "MPI_LOCALRANKID",
        "MPI_LOCALNRANKS",
        "SLURM_PROCID",
        "SLURM_NTASKS",
        "SLURM_LOCALID",
        "SLURM_JOB_ID",
        "SLURM_STEP_ID",
        "SLURM_NTASKS_PER_NODE",
        "FP8_COMM_FILE",
        "TMPDIR",
    };
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        unsetenv(names[i]);
}

static void set(const char *text) /* "NAME=value NAME=value" */
{
    char copy[512], *rest = copy, *word;
    snprintf(copy, sizeof copy, "%s", text);
    while ((word = strsep(&rest, " "))) {
        char *value = strchr(word, '=');
        *value++ = 0;
        setenv(word, value, 1);
    }
}

static fp8_comm_place expect(const char *environment, const char *launcher, int rank, int ranks)
{
    clear();
    set(environment);
    fp8_comm_place place = FP8_COMM_PLACE_INIT;
    assert_int_equal(fp8_comm_environment(&place), FP8_OK);
    assert_string_equal(place.launcher, launcher);
    assert_int_equal(place.rank, rank);
    assert_int_equal(place.ranks, ranks);
    return place;
}

static void test_launchers(void **state)
{
    (void)state;
    fp8_comm_place place =
        expect("RANK=3 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=8 MASTER_PORT=29500 "
               "TORCHELASTIC_RUN_ID=a/b",
               "torchrun", 3, 8);
    assert_int_equal(place.local_rank, 1);
    assert_int_equal(place.local_ranks, 8);
    char file[64];
    snprintf(file, sizeof file, "/tmp/fp8-%u-a_b-29500", (unsigned)getuid());
    assert_string_equal(place.file, file);
    /* on two nodes a file of one of them is of no use */
    place = expect("RANK=3 WORLD_SIZE=8 LOCAL_RANK=3 LOCAL_WORLD_SIZE=4", "torchrun", 3, 8);
    assert_string_equal(place.file, "");
    place = expect("RANK=3 WORLD_SIZE=8 LOCAL_RANK=3 LOCAL_WORLD_SIZE=4 FP8_COMM_FILE=/shared/id",
                   "torchrun", 3, 8);
    assert_string_equal(place.file, "/shared/id");
    place = expect("OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=0 "
                   "OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_NAMESPACE=77",
                   "mpirun", 1, 2);
    assert_int_equal(place.local_rank, 0);
    assert_non_null(strstr(place.file, "-77"));
    place = expect("PMI_RANK=2 PMI_SIZE=4 TMPDIR=/var/tmp", "mpirun", 2, 4);
    assert_int_equal(place.local_rank, 2);
    assert_non_null(strstr(place.file, "/var/tmp/fp8-"));
    (void)expect("SLURM_PROCID=0 SLURM_NTASKS=1 SLURM_LOCALID=0", "srun", 0, 1);
}

static void refuse(const char *environment, fp8_status status, const char *word)
{
    clear();
    if (*environment)
        set(environment);
    fp8_comm_place place = FP8_COMM_PLACE_INIT;
    assert_int_equal(fp8_comm_environment(&place), status);
    assert_true(says(word, NULL));
}

static void test_contradictions(void **state)
{
    (void)state;
    refuse("", FP8_ERR_NOT_FOUND, "torchrun");
    refuse("RANK=4 WORLD_SIZE=4", FP8_ERR_ARGUMENT, "RANK is 4");
    refuse("RANK=x WORLD_SIZE=4", FP8_ERR_ARGUMENT, "RANK is x");
    refuse("RANK=-1 WORLD_SIZE=4", FP8_ERR_ARGUMENT, "whole number");
    refuse("RANK=0 WORLD_SIZE=4 LOCAL_RANK=2 LOCAL_WORLD_SIZE=2", FP8_ERR_ARGUMENT,
           "LOCAL_RANK is 2");
    fp8_comm_place place = { .size = 4 };
    assert_int_equal(fp8_comm_environment(&place), FP8_ERR_ARGUMENT);
    char name[sizeof place.file + 1];
    memset(name, 'x', sizeof name - 1);
    name[sizeof name - 1] = 0;
    clear();
    set("RANK=0 WORLD_SIZE=2");
    setenv("FP8_COMM_FILE", name, 1);
    place = (fp8_comm_place)FP8_COMM_PLACE_INIT;
    assert_int_equal(fp8_comm_environment(&place), FP8_ERR_ARGUMENT);
    assert_true(says("FP8_COMM_FILE has 512 bytes", "511", NULL));
    clear();
}

/* ---- the file ---- */

static int meet(const char *file, int rank, int ranks, double timeout)
{
    fp8_comm_options options = FP8_COMM_OPTIONS_INIT;
    options.rank = rank;
    options.ranks = ranks;
    options.file = file;
    fp8_comm_id id;
    memset(&id, rank == 0 ? (int)(getpid() & 0x7f) : 0, sizeof id);
    fp8_status status = fp8_comm_rendezvous(&options, timeout, &id);
    if (status != FP8_OK)
        return 100 + (int)status;
    return (unsigned char)id.bytes[127];
}

/* Refused by rank 0 too, which would else wait for ranks that cannot write. */
static void test_long_name(void **state)
{
    (void)state;
    char name[1024];
    memset(name, 'x', sizeof name - 1);
    name[sizeof name - 1] = 0;
    for (int rank = 0; rank < 2; rank++) {
        assert_int_equal(meet(name, rank, 2, 5), 100 + FP8_ERR_ARGUMENT);
        assert_true(says("file has 1023 bytes", NULL));
    }
}

/* Ranks as processes; each must end with the low bits of rank 0's process id. */
static void run(const char *file, int ranks, useconds_t late)
{
    pid_t pids[16];
    for (int rank = 0; rank < ranks; rank++) {
        pids[rank] = fork();
        if (pids[rank] == 0) {
            if (rank == 0)
                usleep(late);
            _exit(meet(file, rank, ranks, 10));
        }
    }
    for (int rank = 0; rank < ranks; rank++) {
        int status;
        waitpid(pids[rank], &status, 0);
        assert_true(WIFEXITED(status));
        assert_int_equal(WEXITSTATUS(status), pids[0] & 0x7f);
    }
    assert_int_not_equal(access(file, F_OK), 0);
}

static void test_file(void **state)
{
    (void)state;
    char folder[] = "/tmp/fp8gen-test-XXXXXX", file[64], note[80];
    assert_non_null(mkdtemp(folder));
    snprintf(file, sizeof file, "%s/id", folder);
    run(file, 2, 0);
    run(file, 8, 0);
    run(file, 3, 200000);
    /* left-overs: of another program, of a run that died at each stage */
    static const char *const junk[] = { "", "fp8comm1",
                                        "something else that is much longer than a note" };
    for (size_t i = 0; i < 3; i++) {
        FILE *out = fopen(file, "w");
        assert_non_null(out);
        fputs(junk[i], out);
        fclose(out);
        snprintf(note, sizeof note, "%s.1", file);
        out = fopen(note, "w");
        assert_non_null(out);
        fputs(junk[i], out);
        fclose(out);
        run(file, 3, 1000);
    }
    pid_t dead = fork();
    if (dead == 0) {
        (void)meet(file, 1, 3, 0.05); /* leaves its note */
        _exit(0);
    }
    waitpid(dead, NULL, 0);
    run(file, 3, 1000);
    dead = fork();
    if (dead == 0)
        _exit(meet(file, 0, 3, 0.2)); /* rank 0 alone: in time out */
    int status;
    waitpid(dead, &status, 0);
    assert_int_equal(WEXITSTATUS(status), 100 + FP8_ERR_TIMEOUT);
    run(file, 3, 0);
    rmdir(folder);
}

static void test_file_refused(void **state)
{
    (void)state;
    assert_int_equal(meet("/nowhere/at/all/id", 1, 2, 0.2), 100 + FP8_ERR_COMM);
    assert_true(says("/nowhere/at/all/id.1", "No such file", NULL));
    assert_int_equal(meet("/tmp/fp8gen-test-nobody-comes", 0, 3, 0.05), 100 + FP8_ERR_TIMEOUT);
    assert_true(says("for rank 1 2", NULL));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_launchers),    cmocka_unit_test(test_contradictions),
        cmocka_unit_test(test_long_name),    cmocka_unit_test(test_file),
        cmocka_unit_test(test_file_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
