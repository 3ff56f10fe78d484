/*
 * gemm_contest.c - finds the fastest of many GEMM kernels, fairly and in bounded time.
 *
 * Three stages. Each contender alone, once: does it run, is its product right, about how long does
 * it take. Then those near the best of their group, all in turns over rotated buffers. Then the
 * three best of each group (and what must stay, the plan's choice), all in turns, more rounds:
 * these are the figures. Contenders of all groups meet in the same rounds, because only neighbours
 * in time compare. A watchdog stands by: a kernel that never ends would block everything.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gen/cli/gemm.h"

#define ALONE_SECONDS 20.0  /* the watchdog's patience with one contender, */
#define TURNS_SECONDS 300.0 /* and with a stage of many */
#define WARM_ALONE 0.15
#define WARM_TURNS 0.1
#define NEAR 1.15 /* of the group's best: who enters the second stage, */
#define NEAR_MOST 6
#define NEAR_ROUNDS 5
#define FINALISTS 3
#define TOO_SLOW 0.2 /* seconds of one run that is not worth a second one */

/* ---- the list -------------------------------------------------------------------------------- */

static struct gemm_contender *add(struct gemm_contest *contest)
{
    if (contest->count == contest->capacity) {
        int capacity = contest->capacity ? 2 * contest->capacity : 64;
        struct gemm_contender *list = realloc(contest->list, sizeof *list * (size_t)capacity);
        if (!list) {
            cli_error("out of memory");
            return NULL;
        }
        contest->list = list;
        contest->capacity = capacity;
    }
    struct gemm_contender *c = &contest->list[contest->count++];
    *c = (struct gemm_contender){ .seconds = -1, .error = -1 };
    return c;
}

/* An equal kernel is there already: the plan chose one of the configurations. */
static struct gemm_contender *find_kernel(struct gemm_contest *contest, enum gemm_group group,
                                          const char *kernel)
{
    for (int i = 0; i < contest->count; i++) {
        struct gemm_contender *c = &contest->list[i];
        if (c->group == group && strcmp(c->name, kernel) == 0)
            return c;
    }
    return NULL;
}

int gemm_contest_add_set(struct gemm_contest *contest, enum gemm_group group,
                         const struct gemm_problem *problem, struct gemm_check *check,
                         const struct gemm_set *set, fp8_layer **layers)
{
    bool kept = false;
    for (int i = set->count - 1; i >= 0; i--) { /* the plan's come last, to find themselves */
        fp8_dispatch dispatch = FP8_DISPATCH_INIT;
        if (!layers[i])
            continue;
        fp8_status status =
            fp8_layer_dispatch(layers[i], problem->pass, problem->data->m, &dispatch);
        if (status)
            return cli_fp8_failed(status, "asking which kernel runs");
        const char *kernel = gemm_set_kernel(&set->items[i], problem->data->layer->name,
                                             problem->pass, problem->data->m, problem->accumulate);
        /* not every configuration serves every output */
        if (!kernel || strcmp(dispatch.backend, "cublaslt") == 0)
            continue;
        int code = gemm_data_reserve(problem->data, layers[i]);
        if (code)
            return code;
        struct gemm_contender *c = find_kernel(contest, group, kernel);
        if (!c) {
            if (!(c = add(contest)))
                return CLI_MACHINE;
            c->group = group;
            c->problem = problem;
            c->check = check;
            c->candidate = &set->items[i];
            c->layer = layers[i];
            snprintf(c->name, sizeof c->name, "%s", kernel);
        }
        if (set->items[i].plan && !kept) /* the tuned one before the predicted one */
            kept = c->keep = true;
    }
    return CLI_DONE;
}

int gemm_contest_add_baseline(struct gemm_contest *contest, enum gemm_group group,
                              const struct gemm_problem *problem, struct gemm_check *check,
                              const struct baseline_gemm *gemm, int algorithm)
{
    int first = algorithm < 0 ? 0 : algorithm;
    int end = algorithm < 0 ? gemm ? baseline_gemm_offered(gemm) : 0 : algorithm + 1;
    for (int i = first; i < end; i++) {
        struct gemm_contender *c = add(contest);
        if (!c)
            return CLI_MACHINE;
        c->group = group;
        c->problem = problem;
        c->check = check;
        c->gemm = gemm;
        c->algorithm = i;
        snprintf(c->name, sizeof c->name, "%s_%d", group == GEMM_BF16 ? "bf16" : "cublaslt", i);
    }
    return CLI_DONE;
}

void gemm_contest_destroy(struct gemm_contest *contest)
{
    free(contest->list);
    contest->list = NULL;
    contest->count = contest->capacity = 0;
}

static bool faster(const struct gemm_contender *a, const struct gemm_contender *b)
{
    return a->stage != b->stage ? a->stage > b->stage : a->seconds < b->seconds;
}

const struct gemm_contender *gemm_contest_best(const struct gemm_contest *contest,
                                               enum gemm_group group, int place)
{
    const struct gemm_contender *best = NULL;
    for (int i = 0; i < contest->count; i++) {
        const struct gemm_contender *c = &contest->list[i];
        if (c->group == group && !c->out && c->seconds > 0 && (!best || faster(c, best)))
            best = c;
    }
    if (place == 0 || !best)
        return best;
    const struct gemm_contender *second = NULL;
    for (int i = 0; i < contest->count; i++) {
        const struct gemm_contender *c = &contest->list[i];
        if (c->group == group && !c->out && c->seconds > 0 && c != best &&
            (!second || faster(c, second)))
            second = c;
    }
    return second;
}

const struct gemm_contender *gemm_contest_plan(const struct gemm_contest *contest,
                                               enum gemm_group group)
{
    for (int i = 0; i < contest->count; i++) {
        if (contest->list[i].group == group && contest->list[i].keep && !contest->list[i].out)
            return &contest->list[i];
    }
    return NULL;
}

int gemm_contest_members(const struct gemm_contest *contest, enum gemm_group group)
{
    int count = 0;
    for (int i = 0; i < contest->count; i++)
        count += contest->list[i].group == group && contest->list[i].seconds > 0;
    return count;
}

/* ---- first stage: alone ---------------------------------------------------------------------- */

/* Enqueues one run; false: it was refused, and why is set. */
static bool enqueue(struct gemm_contender *c, int set)
{
    if (c->gemm) {
        bool done = baseline_gemm_enqueue(c->gemm, c->algorithm, set);
        if (!done)
            snprintf(c->why, sizeof c->why, "does not run");
        return done;
    }
    fp8_status status = gemm_run(c->problem, c->layer, set);
    if (status)
        snprintf(c->why, sizeof c->why, "%.95s", fp8_last_error());
    return !status;
}

static int run_item(void *user, int set)
{
    struct gemm_contender *c = user;
    if (enqueue(c, set))
        return CLI_DONE;
    cli_error("%s: %s", c->name, c->why);
    return CLI_BUG;
}

/* Seconds of one of several runs over all sets, after enough others for the host to get ahead. */
static int time_alone(struct gemm_contest *contest, struct gemm_contender *c, double guess,
                      fp8_event *events[2])
{
    const struct cli_device *device = &contest->bench->device;
    int ahead = guess > 1.5e-4 ? 1 : 4, turns = guess > 3e-4 ? 1 : 3;
    fp8_status status = FP8_OK;
    for (int i = 0; i < ahead; i++)
        c->out = c->out || !enqueue(c, 1 + i % 2);
    status = fp8_event_record(events[0], device->stream);
    for (int i = 0; i < turns * BENCH_SETS; i++)
        c->out = c->out || !enqueue(c, i % BENCH_SETS);
    if (!status)
        status = fp8_event_record(events[1], device->stream);
    if (!status)
        status = fp8_event_seconds(events[0], events[1], &c->seconds);
    c->seconds /= turns * BENCH_SETS;
    return status ? cli_fp8_failed(status, "measuring %s", c->name) : CLI_DONE;
}

static int run_alone(struct gemm_contest *contest, struct gemm_contender *c, fp8_event *events[2])
{
    const struct cli_device *device = &contest->bench->device;
    int code = c->check ? gemm_check_prepare(c->check) : CLI_DONE;
    if (!code)
        code = cli_device_synchronize(device);
    if (code)
        return code;
    double start = cli_seconds();
    c->out = !enqueue(c, 0);
    if (c->out)
        return CLI_DONE;
    c->stage = 1;
    code = cli_device_synchronize(device);
    if (code) {
        cli_hint("it was running %s", c->name);
        return code;
    }
    double guess = cli_seconds() - start;
    if (c->check)
        code = gemm_check_verify(c->check, &c->error, c->why);
    c->out = c->why[0] != '\0';
    if (!code && !c->out && guess > TOO_SLOW && gemm_contest_best(contest, c->group, 0)) {
        snprintf(c->why, sizeof c->why, "too slow: %.2g s", guess);
        c->seconds = guess;
        c->out = true;
    }
    return code || c->out ? code : time_alone(contest, c, guess, events);
}

static int first_stage(struct gemm_contest *contest)
{
    fp8_context *context = contest->bench->device.context;
    fp8_event *events[2] = { NULL, NULL };
    fp8_status status = fp8_event_create(context, &events[0]);
    if (!status)
        status = fp8_event_create(context, &events[1]);
    int code = status ? cli_fp8_failed(status, "creating an event") : CLI_DONE;
    for (int i = 0; !code && i < contest->count; i++) {
        struct gemm_contender *c = &contest->list[i];
        cli_progress("[%d/%d] %s", i + 1, contest->count, c->name);
        code = cli_watchdog_arm(c->name, ALONE_SECONDS);
        if (!code)
            code = run_alone(contest, c, events);
        cli_watchdog_disarm();
        if (!code && c->out && c->candidate)
            cli_warning("%s is out: %s", c->name, c->why);
        else if (!code && c->out && c->stage > 0 && cli_verbosity() > 0)
            cli_note("%s is out: %s", c->name, c->why);
    }
    fp8_event_destroy(events[0]);
    fp8_event_destroy(events[1]);
    return code;
}

/* ---- the others: in turns -------------------------------------------------------------------- */

/* How many of the group are faster, by the stage they have all been in. */
static int place_of(const struct gemm_contest *contest, const struct gemm_contender *c)
{
    int place = 0;
    for (int i = 0; i < contest->count; i++) {
        const struct gemm_contender *o = &contest->list[i];
        if (o != c && o->group == c->group && !o->out && o->stage == c->stage &&
            (o->seconds < c->seconds || (o->seconds == c->seconds && o < c)))
            place++;
    }
    return place;
}

static int in_turns(struct gemm_contest *contest, int stage, int most, double near, int rounds,
                    double seconds)
{
    struct bench_item items[BENCH_MAX_ITEMS];
    struct gemm_contender *chosen[BENCH_MAX_ITEMS];
    int count = 0;
    double slowest = 0;
    for (int i = 0; i < contest->count && count < BENCH_MAX_ITEMS; i++) {
        struct gemm_contender *c = &contest->list[i];
        if (c->out || c->stage != stage - 1)
            continue;
        const struct gemm_contender *best = gemm_contest_best(contest, c->group, 0);
        if (!c->keep &&
            (place_of(contest, c) >= most || (best && c->seconds > near * best->seconds)))
            continue;
        chosen[count] = c;
        items[count++] = (struct bench_item){ run_item, c, 0 };
        slowest = c->seconds > slowest ? c->seconds : slowest;
    }
    if (count == 0)
        return CLI_DONE;
    if (seconds > 0 && slowest > 0) { /* as many rounds as there is time for */
        double fit = seconds / (BENCH_SETS * slowest);
        rounds = fit < rounds ? (int)fit : rounds;
        rounds = rounds < NEAR_ROUNDS ? NEAR_ROUNDS : rounds;
    }
    int code = cli_watchdog_arm("a round of GEMMs", TURNS_SECONDS);
    if (!code)
        code = bench_measure(contest->bench, items, count, rounds,
                             stage == 2 ? WARM_ALONE : WARM_TURNS);
    cli_watchdog_disarm();
    for (int i = 0; !code && i < count; i++) {
        chosen[i]->seconds = items[i].seconds;
        chosen[i]->stage = stage;
    }
    return code;
}

/* Brings the device to the clocks that it can sustain. */
static int warm_up(struct gemm_contest *contest)
{
    for (int i = 0; i < contest->count; i++) {
        struct gemm_contender *c = &contest->list[i];
        if (c->group != GEMM_CUBLASLT || !enqueue(c, 0))
            continue;
        struct bench_item item = { run_item, c, 0 };
        return bench_measure(contest->bench, &item, 1, 1, WARM_ALONE);
    }
    return CLI_DONE;
}

int gemm_contest_run(struct gemm_contest *contest, double seconds)
{
    int rounds = (int)contest->bench->values->rounds;
    int code = warm_up(contest);
    if (!code)
        code = first_stage(contest);
    if (!code)
        code = in_turns(contest, 2, NEAR_MOST, NEAR, NEAR_ROUNDS, 0);
    return code ? code : in_turns(contest, 3, FINALISTS, 1e9, rounds, seconds);
}
