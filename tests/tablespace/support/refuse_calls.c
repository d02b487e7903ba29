/* LD_PRELOAD shim: fallocate and flock fail with the errno in REFUSE_FALLOCATE or REFUSE_FLOCK, as
 * on file systems without them.  With REFUSE_TIMES=N only the first N calls do. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <sys/types.h>

static int refused(const char *name) {
    static int met;
    const char *text = getenv(name), *times = getenv("REFUSE_TIMES");
    if (!text || (times && met++ >= atoi(times))) return 0;
    errno = atoi(text);
    return 1;
}

int fallocate(int fd, int mode, off_t offset, off_t length) {
    static int (*real)(int, int, off_t, off_t);
    if (!real) real = (int (*)(int, int, off_t, off_t))dlsym(RTLD_NEXT, "fallocate");
    return refused("REFUSE_FALLOCATE") ? -1 : real(fd, mode, offset, length);
}

int fallocate64(int fd, int mode, off_t offset, off_t length) {
    return fallocate(fd, mode, offset, length);
}

int flock(int fd, int operation) {
    static int (*real)(int, int);
    if (!real) real = (int (*)(int, int))dlsym(RTLD_NEXT, "flock");
    return refused("REFUSE_FLOCK") ? -1 : real(fd, operation);
}
