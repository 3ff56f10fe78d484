/*
 * files.c - folders and files that the program writes: nothing half-written is ever left.
 *
 * Files are written under a temporary name and renamed, where a link leads if it is one; devices,
 * pipes and the program's own output (/dev/stdout) are written themselves. Folders are filled under
 * a temporary name (cli_temp_create) and renamed by cli_temp_publish. A thread waits for SIGINT,
 * SIGTERM and SIGHUP and removes the temporary folders before the signal ends the program: a
 * handler could not do that safely. What the main thread then fails at is not reported: it waits
 * for the end (cli_wait_if_ending). The folder of a running build belongs to the library, which
 * names it by cli_temp_guard. The thread is started with the first temporary folder; threads made
 * later inherit the blocked signals.
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

/* Whether the path names a device, a pipe or what the program's own output goes to: written
 * itself, for a new file in its place would be something else. *own: the descriptor of that
 * output, else -1. */
static bool is_kept(const char *path, int *own)
{
    struct stat target, output;
    *own = -1;
    if (stat(path, &target) != 0)
        return false;
    for (int fd = STDOUT_FILENO; fd <= STDERR_FILENO && *own < 0; fd++) {
        if (fstat(fd, &output) == 0 && output.st_dev == target.st_dev &&
            output.st_ino == target.st_ino)
            *own = fd;
    }
    return *own >= 0 || !S_ISREG(target.st_mode);
}

/* The file that a path leads to through links, be it there or not; NULL: errno says why. */
static char *follow_links(const char *path)
{
    enum { MOST_LINKS = 40 };
    char *at = strdup(path), link[PATH_MAX];
    for (int i = 0; at && i < MOST_LINKS; i++) {
        const ssize_t length = readlink(at, link, sizeof link - 1);
        if (length < 0)
            return at;
        link[length] = 0;
        const char *slash = strrchr(at, '/');
        const int folder = link[0] == '/' || !slash ? 0 : (int)(slash + 1 - at);
        char *next = NULL;
        if (asprintf(&next, "%.*s%s", folder, at, link) < 0)
            next = NULL;
        free(at);
        at = next;
    }
    errno = at ? ELOOP : ENOMEM;
    free(at);
    return NULL;
}

/* Where the bytes go: into a file beside the one that it becomes, or, with both NULL, straight. */
struct target {
    char *file, *temp;
};

static void release_target(struct target *target)
{
    free(target->file);
    free(target->temp);
}

/* -1: errno says why. */
static int open_target(const char *path, struct target *target)
{
    int own;
    *target = (struct target){ NULL, NULL };
    if (is_kept(path, &own)) {
        if (own < 0)
            return open(path, O_WRONLY | O_CLOEXEC);
        fflush(own == STDOUT_FILENO ? stdout : stderr);
        return fcntl(own, F_DUPFD_CLOEXEC, 0);
    }
    target->file = follow_links(path);
    if (!target->file)
        return -1;
    if (asprintf(&target->temp, "%s.tmp", target->file) < 0)
        target->temp = NULL;
    return target->temp ? open(target->temp, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644) : -1;
}

int cli_try_file(const char *path)
{
    struct target target = { NULL, NULL };
    int own;
    bool is_good;
    if (cli_is_folder(path)) {
        errno = EISDIR;
        is_good = false;
    } else if (is_kept(path, &own)) { /* a pipe that was opened and closed would be at its end */
        is_good = own >= 0 || access(path, W_OK) == 0;
    } else {
        const int fd = open_target(path, &target);
        is_good = fd >= 0;
        if (is_good)
            close(fd);
    }
    if (!is_good)
        cli_error("cannot write '%s': %s", path, strerror(errno));
    if (is_good && target.temp)
        unlink(target.temp);
    release_target(&target);
    return is_good ? CLI_DONE : CLI_MACHINE;
}

int cli_write_file(const char *path, const void *data, size_t bytes)
{
    int code = CLI_MACHINE;
    struct target target;
    int fd = open_target(path, &target);
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
    if (closed == 0 && (!target.temp || rename(target.temp, target.file) == 0))
        code = CLI_DONE;
done:
    if (code)
        cli_error("cannot write '%s': %s", path, strerror(errno));
    if (fd >= 0)
        close(fd);
    if (code && target.temp)
        unlink(target.temp);
    release_target(&target);
    return code;
}

bool cli_is_folder(const char *path)
{
    struct stat status;
    return stat(path, &status) == 0 && S_ISDIR(status.st_mode);
}
