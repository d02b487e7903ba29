/* LD_PRELOAD shim: writes, syncs, renames and allocations of files whose path holds WATCH are
 * appended to the file WATCH_LOG, one line when the call begins and one when it returned.
 * FAIL_CALL=NAME:TEXT:N:ERRNO makes the N-th call of that name on a path with TEXT in it (at its end
 * where TEXT ends with $) fail, that one alone; with a negative N all from there on.  FAIL_WHEN names a file that must
 * exist before anything is counted. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static int log_fd = -1;

static void tell(const char *when, const char *name, const char *path, long result) {
    char line[600];
    const char *log = getenv("WATCH_LOG");
    if (!log) return;
    if (log_fd < 0) log_fd = open(log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    int length = snprintf(line, sizeof line, "%s %s %s %ld\n", when, name, path, result);
    if (length > 0) (void)!write(log_fd, line, (size_t)length);
}

static int fits(const char *path, const char *text) {
    size_t length = strlen(text), all = strlen(path);
    if (!length || text[length - 1] != '$') return strstr(path, text) != NULL;
    return all >= --length && !strncmp(path + all - length, text, length);
}

/* Returns the errno to fail with, or 0. */
static int must_fail(const char *name, const char *path) {
    static int met;
    char wanted[32], text[200];
    int nth, code;
    const char *plan = getenv("FAIL_CALL"), *when = getenv("FAIL_WHEN");
    if (!plan || sscanf(plan, "%31[^:]:%199[^:]:%d:%d", wanted, text, &nth, &code) != 4) return 0;
    if (strcmp(name, wanted) || !fits(path, text) || (when && access(when, F_OK))) return 0;
    met++;
    return (nth < 0 ? met >= -nth : met == nth) ? code : 0;
}

/* Returns whether the file is watched; its path in `path`. */
static int watched(int fd, char *path, size_t room) {
    char link[40];
    const char *wanted = getenv("WATCH");
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, room - 1);
    path[length > 0 ? length : 0] = 0;
    return wanted && strstr(path, wanted) != NULL;
}

#define REAL(type, name) ((type)dlsym(RTLD_NEXT, name))

#define AROUND(name, fd, call)                              \
    do {                                                    \
        char path[512];                                     \
        if (!watched(fd, path, sizeof path)) return call;   \
        int saved = errno;                                  \
        pthread_mutex_lock(&mutex);                         \
        int code = must_fail(name, path);                   \
        tell("begin", name, path, 0);                       \
        pthread_mutex_unlock(&mutex);                       \
        errno = saved;                                      \
        long result = code ? -1 : (long)(call);             \
        saved = code ? code : errno;                        \
        pthread_mutex_lock(&mutex);                         \
        tell("end", name, path, result < 0 ? -saved : result); \
        pthread_mutex_unlock(&mutex);                       \
        errno = saved;                                      \
        return result;                                      \
    } while (0)

ssize_t pwrite(int fd, const void *buffer, size_t length, off_t offset) {
    AROUND("write", fd, REAL(ssize_t(*)(int, const void *, size_t, off_t), "pwrite")(
                            fd, buffer, length, offset));
}

ssize_t pwrite64(int fd, const void *buffer, size_t length, off_t offset) {
    return pwrite(fd, buffer, length, offset);
}

ssize_t pread(int fd, void *buffer, size_t length, off_t offset) {
    AROUND("read", fd,
           REAL(ssize_t(*)(int, void *, size_t, off_t), "pread")(fd, buffer, length, offset));
}

ssize_t pread64(int fd, void *buffer, size_t length, off_t offset) {
    return pread(fd, buffer, length, offset);
}

int fdatasync(int fd) { AROUND("sync", fd, REAL(int (*)(int), "fdatasync")(fd)); }

int fsync(int fd) { AROUND("sync", fd, REAL(int (*)(int), "fsync")(fd)); }

int fallocate(int fd, int mode, off_t offset, off_t length) {
    AROUND("allocate", fd,
           REAL(int (*)(int, int, off_t, off_t), "fallocate")(fd, mode, offset, length));
}

int fallocate64(int fd, int mode, off_t offset, off_t length) {
    return fallocate(fd, mode, offset, length);
}

int ftruncate(int fd, off_t length) {
    AROUND("truncate", fd, REAL(int (*)(int, off_t), "ftruncate")(fd, length));
}

int ftruncate64(int fd, off_t length) { return ftruncate(fd, length); }
