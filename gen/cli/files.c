/*
 * files.c - folders and files that the program writes: nothing half-written is ever left.
 *
 * Files are written under a temporary name and renamed, but what is no plain file (/dev/null, a
 * link) is written itself; folders are filled under a temporary name (cli_temp_create) and renamed
 * by cli_temp_publish. A thread waits for SIGINT, SIGTERM and SIGHUP and removes the temporary
 * folders before the signal ends the program: a handler could not do that safely. What the main
 * thread then fails at is not reported: it waits for the end (cli_wait_if_ending). The folder of a
 * running build belongs to the library, which names it by cli_temp_guard. The thread is started
 * with the first temporary folder; threads made later inherit the blocked signals.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "gen/cli/cli.h"

#define MAX_TEMPS 8

static struct {
    pthread_mutex_t lock;
    pthread_once_t once;
    char *paths[MAX_TEMPS];
    char guarded[PATH_MAX]; /* "" = none */
    atomic_bool ending; /* a signal is ending the program; set while the lock is held for good */
} temps = { .lock = PTHREAD_MUTEX_INITIALIZER, .once = PTHREAD_ONCE_INIT };

static int remove_entry(const char *path, const struct stat *status, int type, struct FTW *walk)
{
    (void)status;
    (void)type;
    (void)walk;
    remove(path);
    return 0;
}

static void remove_tree(const char *path)
{
    nftw(path, remove_entry, 16, FTW_DEPTH | FTW_PHYS);
}

static void *wait_for_signal(void *argument)
{
    sigset_t *signals = argument;
    int number;
    if (sigwait(signals, &number) != 0)
        return NULL;
    pthread_mutex_lock(&temps.lock); /* kept: nothing is created any more */
    temps.ending = true;
    if (temps.guarded[0])
        remove_tree(temps.guarded);
    for (int i = 0; i < MAX_TEMPS; i++) {
        if (temps.paths[i])
            remove_tree(temps.paths[i]);
    }
    cli_progress_end();
    signal(number, SIG_DFL);
    sigset_t one;
    sigemptyset(&one);
    sigaddset(&one, number);
    raise(number);
    pthread_sigmask(SIG_UNBLOCK, &one, NULL);
    _exit(128 + number);
}

static void start_signal_thread(void)
{
    static sigset_t signals;
    static const int numbers[] = { SIGINT, SIGTERM, SIGHUP };
    pthread_t thread;
    sigemptyset(&signals);
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        struct sigaction action;
        if (sigaction(numbers[i], NULL, &action) == 0 && action.sa_handler == SIG_DFL)
            sigaddset(&signals, numbers[i]); /* an ignored signal (nohup) stays ignored */
    }
    pthread_sigmask(SIG_BLOCK, &signals, NULL);
    if (pthread_create(&thread, NULL, wait_for_signal, &signals) == 0)
        pthread_detach(thread);
    else
        pthread_sigmask(SIG_UNBLOCK, &signals, NULL);
}

void cli_wait_if_ending(void)
{
    while (temps.ending)
        pause();
}

void cli_temp_guard(void *user, int32_t hold, const char *path)
{
    (void)user;
    if (hold) {
        pthread_once(&temps.once, start_signal_thread);
        pthread_mutex_lock(&temps.lock);
    } else {
        snprintf(temps.guarded, sizeof temps.guarded, "%s", path ? path : "");
        pthread_mutex_unlock(&temps.lock);
    }
}

int cli_temp_create(const char *parent, const char *prefix, char **path)
{
    *path = NULL;
    if (!parent)
        parent = cli_environment(CLI_ENV_TMPDIR);
    if (!parent)
        parent = "/tmp";
    pthread_once(&temps.once, start_signal_thread);
    size_t size = strlen(parent) + strlen(prefix) + 16;
    char *name = malloc(size);
    if (!name) {
        cli_error("out of memory");
        return CLI_MACHINE;
    }
    snprintf(name, size, "%s/%s.XXXXXX", parent, prefix);
    pthread_mutex_lock(&temps.lock);
    int slot = 0, code = CLI_DONE;
    while (slot < MAX_TEMPS - 1 && temps.paths[slot])
        slot++;
    if (!mkdtemp(name)) {
        cli_error("cannot create a temporary folder in '%s': %s", parent, strerror(errno));
        code = CLI_MACHINE;
    } else {
        temps.paths[slot] = name;
        *path = name;
    }
    pthread_mutex_unlock(&temps.lock);
    if (code)
        free(name);
    return code;
}

static void forget(const char *path)
{
    for (int i = 0; i < MAX_TEMPS; i++) {
        if (temps.paths[i] == path)
            temps.paths[i] = NULL;
    }
    free((char *)path);
}

void cli_temp_remove(const char *path)
{
    if (!path)
        return;
    pthread_mutex_lock(&temps.lock);
    remove_tree(path);
    forget(path);
    pthread_mutex_unlock(&temps.lock);
}

int cli_temp_publish(const char *temp, const char *path)
{
    int code = CLI_DONE;
    pthread_mutex_lock(&temps.lock);
    chmod(temp, 0755);
    if (rename(temp, path) != 0) {
        /* A folder that is not empty: moved aside first, so that one of the two is always whole. */
        char *aside = malloc(strlen(temp) + 8);
        bool done = false;
        if (aside) {
            sprintf(aside, "%s.old", temp);
            bool moved = rename(path, aside) == 0;
            done = moved && rename(temp, path) == 0;
            if (done)
                remove_tree(aside);
            else if (moved)
                rename(aside, path);
        }
        if (!done) {
            cli_error("cannot rename '%s' to '%s': %s", temp, path, strerror(errno));
            remove_tree(temp);
            code = CLI_MACHINE;
        }
        free(aside);
    }
    forget(temp);
    pthread_mutex_unlock(&temps.lock);
    return code;
}

char *cli_path_join(const char *folder, const char *name)
{
    char *path = NULL;
    if (asprintf(&path, "%s/%s", folder, name) < 0) {
        cli_error("out of memory");
        return NULL;
    }
    return path;
}

/* A device, a pipe or a link is written itself: a new file in its place would be something else. */
static bool is_kept(const char *path)
{
    struct stat status;
    return lstat(path, &status) == 0 && !S_ISREG(status.st_mode);
}

/* Opens a file beside the one that it becomes, or with *temp NULL that one; -1: errno says why. */
static int open_target(const char *path, char **temp)
{
    const int flags = O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC;
    *temp = NULL;
    if (is_kept(path))
        return open(path, flags, 0644);
    if (asprintf(temp, "%s.tmp", path) < 0)
        *temp = NULL;
    return *temp ? open(*temp, flags, 0644) : -1;
}

int cli_try_file(const char *path)
{
    char *temp = NULL;
    bool is_good;
    if (cli_is_folder(path)) {
        errno = EISDIR;
        is_good = false;
    } else if (is_kept(path) && access(path, F_OK) == 0) {
        is_good = access(path, W_OK) == 0;
    } else {
        int fd = open_target(path, &temp);
        is_good = fd >= 0;
        if (is_good)
            close(fd);
    }
    if (!is_good)
        cli_error("cannot write '%s': %s", path, strerror(errno));
    if (is_good && temp)
        unlink(temp);
    free(temp);
    return is_good ? CLI_DONE : CLI_MACHINE;
}

int cli_write_file(const char *path, const void *data, size_t bytes)
{
    int code = CLI_MACHINE;
    char *temp = NULL;
    int fd = open_target(path, &temp);
    if (fd < 0)
        goto done;
    for (size_t at = 0; at < bytes;) {
        ssize_t n = write(fd, (const char *)data + at, bytes - at);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            goto done;
        at += (size_t)n;
    }
    int closed = close(fd);
    fd = -1;
    if (closed == 0 && (!temp || rename(temp, path) == 0))
        code = CLI_DONE;
done:
    if (code)
        cli_error("cannot write '%s': %s", path, strerror(errno));
    if (fd >= 0)
        close(fd);
    if (code && temp)
        unlink(temp);
    free(temp);
    return code;
}

bool cli_is_folder(const char *path)
{
    struct stat status;
    return stat(path, &status) == 0 && S_ISDIR(status.st_mode);
}
