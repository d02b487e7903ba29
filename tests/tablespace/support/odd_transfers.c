/* LD_PRELOAD shim: of the transfers of files whose path holds ODD_IN, a share moves one byte or half
 * of what was asked for, or is interrupted, as by signals and over a network. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static unsigned seed = 1;

/* Returns an errno or 0; shortens the length. */
static int odd(int fd, size_t *length) {
    char link[40], path[512];
    const char *wanted = getenv("ODD_IN");
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t got = readlink(link, path, sizeof path - 1);
    path[got > 0 ? got : 0] = 0;
    if (!wanted || !strstr(path, wanted)) return 0;
    pthread_mutex_lock(&mutex);
    seed = seed * 1103515245 + 12345;
    unsigned chance = (seed >> 16) % 10;
    pthread_mutex_unlock(&mutex);
    if (chance == 0) *length = 1;
    if (chance == 1 || chance == 2) *length = (*length + 1) / 2;
    return chance == 3 || chance == 4 ? EINTR : chance == 5 ? EAGAIN : 0;
}

#define WRAP(name, type)                                                                  \
    ssize_t name(int fd, type buffer, size_t length, off_t offset) {                      \
        static ssize_t (*real)(int, type, size_t, off_t);                                 \
        if (!real) real = (ssize_t (*)(int, type, size_t, off_t))dlsym(RTLD_NEXT, #name); \
        int code = odd(fd, &length);                                                      \
        if (code) {                                                                       \
            errno = code;                                                                 \
            return -1;                                                                    \
        }                                                                                 \
        return real(fd, buffer, length, offset);                                          \
    }

WRAP(pread, void *)
WRAP(pread64, void *)
WRAP(pwrite, const void *)
WRAP(pwrite64, const void *)
