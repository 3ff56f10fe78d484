/*
 * turns.c - who makes what: one thread of this process at a time, one process at a time.
 *
 * In: the hashes of keys. A flight is the making of what has one key: threads that want the same
 * wait for its end. Inside a flight a process may take the lock of the entry, a file in the cache,
 * for which other processes wait. Both only save work: entries are right without them, so whatever
 * goes wrong here means "go on".
 *
 * What the threads of this process share, here and in the other files, lies under one lock, which a
 * fork takes: the child finds it whole and free. The threads that were flying are not in the child,
 * so their flights are void there, and the locks that it inherited are the parent's. NVRTC has
 * locks of its own, which a child would find taken for ever; so a fork waits for the compilations
 * that run at that moment, and none begins meanwhile.
 */
#include "gen/cache.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

struct flight {
    struct flight *next;
    char hash[33];
    bool running;
    int users;
    int lock; /* the descriptor of the entry's lock; -1 = not held */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t flight_changed = PTHREAD_COND_INITIALIZER;
static pthread_cond_t slots_changed = PTHREAD_COND_INITIALIZER;
static struct flight *flights;
static long slots_taken; /* by compilations that run */
static int forks;        /* that wait for these */

void gen_shared_lock(void)
{
    pthread_mutex_lock(&lock);
}

void gen_shared_unlock(void)
{
    pthread_mutex_unlock(&lock);
}

/* ---- forks ----------------------------------------------------------------------------------- */

/* Before a fork, with its lock kept until after. */
static void settle(void)
{
    gen_shared_lock();
    forks++;
    while (slots_taken > 0)
        pthread_cond_wait(&slots_changed, &lock);
}

static void go_on(void)
{
    forks--;
    pthread_cond_broadcast(&slots_changed);
    gen_shared_unlock();
}

/* In the child. Closing a descriptor here leaves the parent its lock. */
static void begin_anew(void)
{
    while (flights != NULL) {
        struct flight *flight = flights;
        flights = flight->next;
        if (flight->lock >= 0)
            close(flight->lock);
        gen_free(flight);
    }
    forks = 0;
    flight_changed = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
    slots_changed = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
    gen_shared_unlock();
}

__attribute__((constructor)) static void watch_forks(void)
{
    pthread_atfork(settle, go_on, begin_anew);
}

/* ---- threads --------------------------------------------------------------------------------- */

static struct flight **find_flight(const char *hash)
{
    struct flight **at = &flights;
    while (*at != NULL && strcmp((*at)->hash, hash) != 0)
        at = &(*at)->next;
    return at;
}

bool gen_flight_enter(const char hash[33])
{
    gen_shared_lock();
    struct flight *flight = *find_flight(hash);
    if (flight == NULL && (flight = gen_realloc(NULL, sizeof(*flight))) != NULL) {
        *flight = (struct flight){ .next = flights, .lock = -1 };
        memcpy(flight->hash, hash, sizeof(flight->hash));
        flights = flight;
    }
    if (flight != NULL) {
        flight->users++;
        while (flight->running)
            pthread_cond_wait(&flight_changed, &lock);
        flight->running = true;
    }
    gen_shared_unlock();
    return flight != NULL;
}

void gen_flight_leave(const char hash[33])
{
    gen_shared_lock();
    struct flight **at = find_flight(hash), *flight = *at;
    if (flight != NULL) { /* else this is a child that was forked inside the flight */
        flight->running = false;
        if (--flight->users == 0) {
            *at = flight->next;
            gen_free(flight);
        }
        pthread_cond_broadcast(&flight_changed);
    }
    gen_shared_unlock();
}

void gen_slot_take(void)
{
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    gen_shared_lock();
    while (forks > 0 || slots_taken >= (cores > 0 ? cores : 1))
        pthread_cond_wait(&slots_changed, &lock);
    slots_taken++;
    gen_shared_unlock();
}

void gen_slot_give(void)
{
    gen_shared_lock();
    slots_taken--;
    pthread_cond_broadcast(&slots_changed);
    gen_shared_unlock();
}

/* ---- processes ------------------------------------------------------------------------------- */

enum { NAP_US = 1000, NAP_MOST_US = 32000, PATIENCE_US = 120 * 1000000 };

static void lock_name(const char *hash, char name[64])
{
    snprintf(name, 64, GEN_LOCKS "/%s", hash);
}

static int open_lock(const struct gen_store *store, const char *hash)
{
    char name[64];
    if (store->fd < 0 || (mkdirat(store->fd, GEN_LOCKS, 0700) != 0 && errno != EEXIST))
        return -1;
    lock_name(hash, name);
    return openat(store->fd, name, O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600);
}

/* The flight of the key keeps the descriptor from now on; false: there is no flight. */
static bool keep_lock(const char *hash, int descriptor)
{
    gen_shared_lock();
    struct flight *flight = *find_flight(hash);
    if (flight != NULL)
        flight->lock = descriptor;
    gen_shared_unlock();
    return flight != NULL;
}

/* -1: there is none, or this is a child that was forked meanwhile. */
static int take_lock(const char *hash)
{
    gen_shared_lock();
    struct flight *flight = *find_flight(hash);
    int descriptor = flight != NULL ? flight->lock : -1;
    if (flight != NULL)
        flight->lock = -1;
    gen_shared_unlock();
    return descriptor;
}

void gen_store_lock(const struct gen_store *store, const struct gen_entry *entry)
{
    int descriptor = open_lock(store, entry->hash), nap = NAP_US, waited = 0;
    if (descriptor < 0)
        return;
    if (!keep_lock(entry->hash, descriptor)) {
        close(descriptor);
        return;
    }
    while (flock(descriptor, LOCK_EX | LOCK_NB) != 0) {
        if ((errno != EWOULDBLOCK && errno != EINTR) || waited > PATIENCE_US ||
            gen_entry_find(store, entry, NULL, NULL) == GEN_FOUND) {
            close(take_lock(entry->hash));
            return;
        }
        usleep((useconds_t)nap);
        waited += nap;
        nap = nap < NAP_MOST_US ? nap * 2 : nap;
    }
}

/* Unlocks before it closes: whoever has a copy of the descriptor would hold the lock for us. */
void gen_store_unlock(const struct gen_store *store, const struct gen_entry *entry)
{
    char name[64];
    int descriptor = take_lock(entry->hash);
    if (descriptor < 0)
        return;
    lock_name(entry->hash, name);
    (void)unlinkat(store->fd, name, 0);
    (void)flock(descriptor, LOCK_UN);
    close(descriptor);
}
