/*
 * comm_agree.c - what ranks tell each other before they rely on it: texts that must be alike,
 * votes.
 *
 * In: what this rank has. Out: the same answer on all ranks. By votes: whatever can fail on one
 * rank alone (memory, a window, an event) is tried first and voted on then, so that no rank goes on
 * to a collective that another will never make; what a vote itself needs is taken before, when
 * opened. Of a communicator of one rank no vote is asked. Blocks.
 */
#include <stdio.h>
#include <string.h>

#include "runtime/comm.h"

/* ---- texts ---- */

enum { TEXT = 256 };

static fp8_status compare(const fp8_comm *comm, const char *what, const char *texts)
{
    for (int32_t rank = 1; rank < comm->ranks; rank++) {
        if (strncmp(texts, texts + (size_t)rank * TEXT, TEXT) != 0)
            return fp8_fail(
                FP8_ERR_COMM,
                "rank %d of '%s': the ranks differ in %s: rank 0 has %.200s, rank %d has "
                "%.200s; start all ranks from the same spec and files",
                comm->rank, comm->name, what, texts, rank, texts + (size_t)rank * TEXT);
    }
    return FP8_OK;
}

fp8_status fp8_comm_compare(fp8_comm *comm, const char *what, const char *text, bool *differ)
{
    *differ = false;
    if (!comm || !what || !text)
        return fp8_fail(FP8_ERR_ARGUMENT, "comm_agree: %s is NULL",
                        !comm  ? "comm"
                        : what ? "text"
                               : "what");
    if (strlen(text) >= TEXT)
        return fp8_fail(FP8_ERR_ARGUMENT, "comm_agree: text has %zu bytes, but at most %d fit",
                        strlen(text), TEXT - 1);
    size_t all = (size_t)comm->ranks * TEXT;
    void *memory = NULL;
    char *texts = fp8_allocate(all);
    fp8_stream stream = NULL;
    fp8_status status = texts ? FP8_OK : fp8_fail_memory("comm_agree", all);
    if (status == FP8_OK)
        status = fp8_stream_create(comm->context, &stream);
    if (status == FP8_OK)
        status = fp8_memory_alloc(comm->context, all, &memory);
    if (status == FP8_OK) {
        char *mine = (char *)memory + (size_t)comm->rank * TEXT;
        snprintf(texts, TEXT, "%s", text);
        const fp8_gather_part part = { mine, memory, TEXT };
        status = fp8_memory_copy(comm->context, mine, texts, TEXT, stream);
        if (status == FP8_OK)
            status = fp8_comm_all_gather(comm, &part, 1, what, stream);
        if (status == FP8_OK)
            status = fp8_comm_wait(comm, stream);
        if (status == FP8_OK)
            status = fp8_memory_copy(comm->context, texts, memory, all, stream);
        if (status == FP8_OK)
            status = fp8_stream_synchronize(comm->context, stream);
        if (status == FP8_OK) {
            status = compare(comm, what, texts);
            *differ = status != FP8_OK;
        }
    }
    fp8_memory_free(comm->context, memory);
    fp8_stream_destroy(comm->context, stream);
    fp8_release(texts);
    return fp8_report(comm->context, status);
}

fp8_status fp8_comm_agree(fp8_comm *comm, const char *what, const char *text)
{
    bool differ;
    return fp8_comm_compare(comm, what, text, &differ);
}

/* ---- votes ---- */

fp8_status fp8_vote_open(fp8_comm *comm, struct fp8_vote *vote)
{
    *vote = (struct fp8_vote){ .comm = comm };
    if (comm->ranks == 1)
        return FP8_OK;
    fp8_status status = fp8_stream_create(comm->context, &vote->stream);
    if (status == FP8_OK)
        status = fp8_memory_alloc(comm->context, sizeof(float), &vote->word);
    if (status != FP8_OK)
        fp8_vote_close(vote);
    return status;
}

void fp8_vote_close(struct fp8_vote *vote)
{
    fp8_memory_free(vote->comm->context, vote->word);
    fp8_stream_destroy(vote->comm->context, vote->stream);
    *vote = (struct fp8_vote){ .comm = vote->comm };
}

fp8_status fp8_vote_any(const struct fp8_vote *vote, bool mine, int32_t *rank)
{
    fp8_comm *comm = vote->comm;
    float highest = mine ? (float)comm->rank : -1.0f;
    fp8_status status = FP8_OK;
    if (comm->ranks > 1) {
        status = fp8_memory_copy(comm->context, vote->word, &highest, sizeof highest, vote->stream);
        if (status == FP8_OK)
            status =
                fp8_comm_all_reduce_max(comm, vote->word, 1, "what ranks can do", vote->stream);
        if (status == FP8_OK)
            status = fp8_comm_wait(comm, vote->stream);
        if (status == FP8_OK)
            status =
                fp8_memory_copy(comm->context, &highest, vote->word, sizeof highest, vote->stream);
        if (status == FP8_OK)
            status = fp8_stream_synchronize(comm->context, vote->stream);
    }
    *rank = (int32_t)highest;
    return status;
}

fp8_status fp8_vote_same(const struct fp8_vote *vote, fp8_status mine, const char *what)
{
    const fp8_comm *comm = vote->comm;
    int32_t failed;
    if (mine != FP8_OK) { /* its sentence is kept: the others point to it */
        char why[FP8_COMM_SENTENCE];
        snprintf(why, sizeof why, "%s", fp8_last_error());
        (void)fp8_vote_any(vote, true, &failed);
        return fp8_fail(mine, "%s", why);
    }
    FP8_TRY(fp8_vote_any(vote, false, &failed));
    if (failed < 0)
        return FP8_OK;
    return fp8_fail(FP8_ERR_COMM,
                    "rank %d of '%s': %s failed on rank %d, so it fails on all; the error of that "
                    "rank says why",
                    comm->rank, comm->name, what, failed);
}
