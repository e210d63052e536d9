/* Loaded before libc: sees every call by which a process changes files below a folder.
 *
 * IOLOG_FOLDER  only files below this folder count
 * IOLOG_FILE    each call is appended here: one line of words, then the bytes
 * IOLOG_KILL    the process dies at the call of that number, counted from 0: before it (IOLOG_PART=0), after
 *               half of its bytes (1), or after all of it (2)
 * IOLOG_FAIL    calls from that number on fail, IOLOG_TIMES of them, with errno IOLOG_ERRNO
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER;
static long calls, kill_at = -1, fail_from = -1, fail_times;
static int part, fail_errno, log_fd = -1, is_ready;
static char folder[PATH_MAX];

static long number(const char *name, long otherwise) {
    const char *text = getenv(name);
    return text ? atol(text) : otherwise;
}

static void prepare(void) {
    if (is_ready) return;
    is_ready = 1;
    const char *where = getenv("IOLOG_FOLDER"), *file = getenv("IOLOG_FILE");
    if (where) snprintf(folder, sizeof folder, "%s/", where);
    kill_at = number("IOLOG_KILL", -1);
    part = (int)number("IOLOG_PART", 0);
    fail_from = number("IOLOG_FAIL", -1);
    fail_times = number("IOLOG_TIMES", 1);
    fail_errno = (int)number("IOLOG_ERRNO", EIO);
    if (file) log_fd = open(file, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
}

static int below(const char *path) { return folder[0] && strncmp(path, folder, strlen(folder)) == 0; }

static const char *name_of(int fd, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    path[length < 0 ? 0 : length] = 0;
    if (below(path)) return path + strlen(folder);
    if (folder[0] && strlen(path) + 1 == strlen(folder) && strncmp(path, folder, strlen(path)) == 0) return ".";
    return NULL;
}

static void die(void) { kill(getpid(), SIGKILL); for (;;) pause(); }

static void note(const char *op, const char *name, long long offset, const struct iovec *parts, int count, size_t bytes) {
    if (log_fd < 0) return;
    char line[PATH_MAX + 96];
    int length = snprintf(line, sizeof line, "%s %s %lld %zu\n", op, name, offset, bytes);
    (void)!syscall(SYS_write, log_fd, line, length);
    for (int i = 0; i < count && bytes; i++) {
        size_t piece = parts[i].iov_len < bytes ? parts[i].iov_len : bytes;
        (void)!syscall(SYS_write, log_fd, parts[i].iov_base, piece);
        bytes -= piece;
    }
}

/* Returns 1 where the call must fail; `half` says that only half of it may be done before the end. */
static int armed(int *half, int *last) {
    long now = calls++;
    *half = *last = 0;
    if (now == kill_at) {
        if (part == 0) die();
        *half = part == 1;
        *last = 1;
    }
    if (fail_from >= 0 && now >= fail_from && now < fail_from + fail_times) {
        errno = fail_errno;
        return 1;
    }
    return 0;
}

static ssize_t vector(int fd, const struct iovec *parts, int count, off_t offset) {
    static ssize_t (*real)(int, const struct iovec *, int, off_t);
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, "pwritev64");
    char path[PATH_MAX];
    pthread_mutex_lock(&guard);
    prepare();
    const char *name = name_of(fd, path);
    int half, last;
    if (name && armed(&half, &last)) {
        pthread_mutex_unlock(&guard);
        return -1;
    }
    if (name && half) {
        size_t total = 0;
        for (int i = 0; i < count; i++) total += parts[i].iov_len;
        size_t wanted = total / 2 / 4096 * 4096;
        struct iovec some[count];
        int used = 0;
        for (int i = 0; i < count && wanted; i++) {
            some[used] = parts[i];
            if (some[used].iov_len > wanted) some[used].iov_len = wanted;
            wanted -= some[used++].iov_len;
        }
        if (used) real(fd, some, used, offset);
        die();
    }
    ssize_t done = real(fd, parts, count, offset);
    if (name && done > 0) note("write", name, offset, parts, count, done);
    if (name && last) die();
    pthread_mutex_unlock(&guard);
    return done;
}

ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t offset) { return vector(fd, parts, count, offset); }
ssize_t pwritev64(int fd, const struct iovec *parts, int count, off64_t offset) { return vector(fd, parts, count, offset); }
ssize_t pwritev2(int fd, const struct iovec *parts, int count, off_t offset, int flags) {
    (void)flags; /* Python passes none unless asked to */
    return vector(fd, parts, count, offset);
}
ssize_t pwritev64v2(int fd, const struct iovec *parts, int count, off64_t offset, int flags) {
    (void)flags;
    return vector(fd, parts, count, offset);
}

static ssize_t plain(int fd, const void *data, size_t bytes, off_t offset) {
    static ssize_t (*real)(int, const void *, size_t, off_t);
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, "pwrite64");
    char path[PATH_MAX];
    pthread_mutex_lock(&guard);
    prepare();
    const char *name = name_of(fd, path);
    int half, last;
    if (name && armed(&half, &last)) {
        pthread_mutex_unlock(&guard);
        return -1;
    }
    if (name && half) {
        real(fd, data, bytes / 2, offset);
        die();
    }
    ssize_t done = real(fd, data, bytes, offset);
    struct iovec whole = {(void *)data, bytes};
    if (name && done > 0) note("write", name, offset, &whole, 1, done);
    if (name && last) die();
    pthread_mutex_unlock(&guard);
    return done;
}

ssize_t pwrite(int fd, const void *data, size_t bytes, off_t offset) { return plain(fd, data, bytes, offset); }
ssize_t pwrite64(int fd, const void *data, size_t bytes, off64_t offset) { return plain(fd, data, bytes, offset); }

ssize_t write(int fd, const void *data, size_t bytes) {
    char path[PATH_MAX];
    prepare();
    if (!name_of(fd, path)) return syscall(SYS_write, fd, data, bytes);
    ssize_t done = plain(fd, data, bytes, lseek(fd, 0, SEEK_CUR));
    if (done > 0) lseek(fd, done, SEEK_CUR);
    return done;
}

/* The other calls: done whole or not at all. */
#define SIMPLE(result, symbol, parameters, arguments, name_expression, op, offset)                                    \
    result symbol parameters {                                                                                        \
        static result(*real) parameters;                                                                              \
        if (!real) *(void **)&real = dlsym(RTLD_NEXT, #symbol);                                                       \
        char path[PATH_MAX];                                                                                          \
        (void)path;                                                                                                   \
        pthread_mutex_lock(&guard);                                                                                   \
        prepare();                                                                                                    \
        const char *name = name_expression;                                                                           \
        int half, last;                                                                                               \
        if (name && armed(&half, &last)) {                                                                            \
            pthread_mutex_unlock(&guard);                                                                             \
            return FAILURE(op);                                                                                       \
        }                                                                                                             \
        result done = real arguments;                                                                                 \
        if (name && done == 0) note(op, name, offset, NULL, 0, 0);                                                    \
        if (name && last) die();                                                                                      \
        pthread_mutex_unlock(&guard);                                                                                 \
        return done;                                                                                                  \
    }
#define FAILURE(op) (strcmp(op, "reserve") == 0 ? errno : -1)
#define BELOW(path) (prepare(), below(path) ? path + strlen(folder) : NULL)

SIMPLE(int, fdatasync, (int fd), (fd), name_of(fd, path), "sync", 0)
SIMPLE(int, fsync, (int fd), (fd), name_of(fd, path), "sync", 0)
SIMPLE(int, ftruncate64, (int fd, off64_t length), (fd, length), name_of(fd, path), "cut", (long long)length)
SIMPLE(int, ftruncate, (int fd, off_t length), (fd, length), name_of(fd, path), "cut", (long long)length)
SIMPLE(int, posix_fallocate64, (int fd, off64_t from, off64_t length), (fd, from, length), name_of(fd, path), "reserve",
       (long long)(from + length))
SIMPLE(int, posix_fallocate, (int fd, off_t from, off_t length), (fd, from, length), name_of(fd, path), "reserve",
       (long long)(from + length))
SIMPLE(int, unlink, (const char *file), (file), BELOW(file), "unlink", 0)

int rename(const char *from, const char *to) {
    static int (*real)(const char *, const char *);
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, "rename");
    pthread_mutex_lock(&guard);
    prepare();
    int half, last, is_ours = below(to);
    if (is_ours && armed(&half, &last)) {
        pthread_mutex_unlock(&guard);
        return -1;
    }
    int done = real(from, to);
    if (is_ours && done == 0) {
        char names[PATH_MAX];
        snprintf(names, sizeof names, "%s>%s", from + strlen(folder), to + strlen(folder));
        note("rename", names, 0, NULL, 0, 0);
        if (last) die();
    }
    pthread_mutex_unlock(&guard);
    return done;
}
