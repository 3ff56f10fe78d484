/*
 * comm_file.c - rank 0 hands the id of a new communicator to the other ranks through a file.
 *
 * In: a path that all ranks can write. Out: the same id on all of them. Left-overs of earlier runs
 * must do no harm, and no rank may take the id of another run, so nobody trusts a file that does
 * not answer its own question: rank r writes a random number into <path>.r; rank 0 writes the id
 * and the numbers it has seen into <path>, again whenever one changes; rank r takes an id only from
 * a file that holds its own number, and says so in <path>.r; rank 0 is done when all have said so,
 * and removes the files. Every file appears whole, by a rename. Clocks, process ids and file times
 * play no part.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "runtime/comm.h"

static const char magic[8] = "fp8comm1";

struct note { /* <path>.r */
    char magic[8];
    uint64_t number;
    uint64_t has_id; /* 1: taken */
};

struct letter { /* <path>, then one number a rank */
    char magic[8];
    uint64_t ranks;
    fp8_comm_id id;
};

enum { PATH = 1024 };

static fp8_status path_of(char *text, const char *path, int32_t rank, const char *ending)
{
    int n = rank < 0 ? snprintf(text, PATH, "%s%s", path, ending)
                     : snprintf(text, PATH, "%s.%d%s", path, rank, ending);
    if (n > 0 && n < PATH)
        return FP8_OK;
    return fp8_fail(FP8_ERR_ARGUMENT, "comm_create: file has %zu bytes, but at most %d fit",
                    strlen(path), PATH - 40);
}

static bool write_all(int file, const void *data, size_t bytes)
{
    const char *at = data;
    while (bytes > 0) {
        ssize_t n = write(file, at, bytes);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return false;
        at += n;
        bytes -= (size_t)n;
    }
    return true;
}

/* Puts a whole file in place. */
static fp8_status put_file(const char *path, int32_t rank, const void *data, size_t bytes)
{
    char target[PATH], scratch[PATH], ending[32];
    uint64_t number = 0;
    if (getrandom(&number, sizeof number, 0) != sizeof number)
        number = (uint64_t)getpid();
    snprintf(ending, sizeof ending, ".%llx", (unsigned long long)number);
    FP8_TRY(path_of(target, path, rank, ""));
    FP8_TRY(path_of(scratch, path, rank, ending));
    int file = open(scratch, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    bool good = file >= 0 && write_all(file, data, bytes);
    int error = errno;
    if (file >= 0 && close(file) != 0 && good)
        good = false, error = errno;
    if (good && rename(scratch, target) == 0)
        return FP8_OK;
    error = good ? errno : error;
    if (file >= 0)
        unlink(scratch);
    return fp8_fail(FP8_ERR_COMM,
                    "comm_create: %s cannot be written: %s; give a file that every rank "
                    "can write",
                    target, strerror(error));
}

/* Bytes read; 0 if there is no such file. */
static size_t get_file(const char *path, int32_t rank, void *data, size_t bytes)
{
    char name[PATH];
    if (path_of(name, path, rank, "") != FP8_OK)
        return 0;
    int file = open(name, O_RDONLY | O_CLOEXEC);
    if (file < 0)
        return 0;
    size_t have = 0;
    while (have < bytes) {
        ssize_t n = read(file, (char *)data + have, bytes - have);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            break;
        have += (size_t)n;
    }
    close(file);
    return have;
}

static void remove_file(const char *path, int32_t rank)
{
    char name[PATH];
    if (path_of(name, path, rank, "") == FP8_OK)
        unlink(name);
}

static bool read_note(const char *path, int32_t rank, struct note *note)
{
    return get_file(path, rank, note, sizeof *note) == sizeof *note &&
           memcmp(note->magic, magic, sizeof magic) == 0;
}

/* ---- rank 0 ---- */

static fp8_status not_all(const fp8_comm_options *options, double timeout, const bool *there)
{
    char list[256];
    int at = 0;
    for (int32_t rank = 1; rank < options->ranks && at < (int)sizeof list - 16; rank++) {
        if (!there[rank])
            at += snprintf(list + at, sizeof list - (size_t)at, " %d", rank);
    }
    return fp8_fail(
        FP8_ERR_TIMEOUT,
        "comm_create: rank 0 of %d waited %.3g s at %s for rank%s; start all ranks with "
        "the same file, or look why they ended",
        options->ranks, timeout, options->file, list);
}

/* letter: with room for the numbers; there: per rank, has taken the id. */
static fp8_status give(const fp8_comm_options *options, double timeout, struct letter *letter,
                       uint64_t *numbers, bool *there)
{
    const size_t bytes = sizeof *letter + (size_t)options->ranks * sizeof *numbers;
    const double end = fp8_clock() + timeout;
    for (;;) {
        int32_t taken = 1;
        bool changed = false;
        for (int32_t rank = 1; rank < options->ranks; rank++) {
            struct note note;
            there[rank] = false;
            if (!read_note(options->file, rank, &note))
                continue;
            there[rank] = note.has_id == 1 && note.number == numbers[rank];
            taken += there[rank];
            if (!note.has_id && note.number != numbers[rank]) {
                numbers[rank] = note.number;
                changed = true;
            }
        }
        if (taken == options->ranks)
            break;
        if (changed)
            FP8_TRY(put_file(options->file, -1, letter, bytes));
        if (fp8_clock() > end)
            return not_all(options, timeout, there);
        fp8_sleep(0.002);
    }
    remove_file(options->file, -1);
    for (int32_t rank = 1; rank < options->ranks; rank++)
        remove_file(options->file, rank);
    return FP8_OK;
}

/* ---- the others ---- */

static fp8_status take(const fp8_comm_options *options, double timeout, struct letter *letter,
                       const uint64_t *numbers, fp8_comm_id *id)
{
    const size_t bytes = sizeof *letter + (size_t)options->ranks * sizeof *numbers;
    const double end = fp8_clock() + timeout;
    struct note note = { .number = 0 };
    memcpy(note.magic, magic, sizeof magic);
    while (note.number == 0) {
        if (getrandom(&note.number, sizeof note.number, 0) != sizeof note.number)
            return fp8_fail(FP8_ERR_COMM, "comm_create: the system gives no random number");
    }
    FP8_TRY(put_file(options->file, options->rank, &note, sizeof note));
    while (get_file(options->file, -1, letter, bytes) != bytes ||
           memcmp(letter->magic, magic, sizeof magic) != 0 ||
           letter->ranks != (uint64_t)options->ranks || numbers[options->rank] != note.number) {
        if (fp8_clock() > end)
            return fp8_fail(FP8_ERR_TIMEOUT,
                            "comm_create: rank %d of %d waited %.3g s at %s for rank 0; start all "
                            "ranks with the same file, or look why rank 0 ended",
                            options->rank, options->ranks, timeout, options->file);
        fp8_sleep(0.002);
    }
    *id = letter->id;
    note.has_id = 1;
    return put_file(options->file, options->rank, &note, sizeof note);
}

fp8_status fp8_comm_rendezvous(const fp8_comm_options *options, double timeout, fp8_comm_id *id)
{
    const size_t ranks = (size_t)options->ranks;
    char longest[PATH];
    FP8_TRY(path_of(longest, options->file, options->ranks, ".0123456789abcdef"));
    struct letter *letter = fp8_allocate(sizeof *letter + ranks * sizeof(uint64_t));
    bool *there = fp8_allocate(ranks * sizeof *there);
    fp8_status status = letter && there ? FP8_OK : fp8_fail_memory("comm_create", ranks * 9);
    if (status == FP8_OK) {
        uint64_t *numbers = (uint64_t *)(letter + 1);
        memcpy(letter->magic, magic, sizeof magic);
        letter->ranks = ranks;
        if (options->rank == 0) {
            letter->id = *id;
            status = give(options, timeout, letter, numbers, there);
        } else {
            status = take(options, timeout, letter, numbers, id);
        }
    }
    fp8_release(there);
    fp8_release(letter);
    return status;
}
