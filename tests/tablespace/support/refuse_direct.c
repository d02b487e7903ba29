/* LD_PRELOAD shim: pread and pwrite refuse descriptors with O_DIRECT, as some file systems do,
 * although open accepted the flag.  REFUSE_AFTER=N lets the first N direct writes through, and all
 * reads; REFUSE_READS_AFTER=N the first N direct reads, and all writes. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

static int refused(int fd) {
    static int let_through = -1;
    int flags = fcntl(fd, F_GETFL);
    if (flags < 0 || !(flags & O_DIRECT)) return 0;
    if (getenv("REFUSE_READS_AFTER")) return 0;
    if (let_through < 0) {
        const char *text = getenv("REFUSE_AFTER");
        let_through = text ? atoi(text) : 0;
    }
    if (let_through > 0) {
        let_through--;
        return 0;
    }
    errno = EINVAL;
    return 1;
}

ssize_t pwrite(int fd, const void *buffer, size_t length, off_t offset) {
    static ssize_t (*real)(int, const void *, size_t, off_t);
    if (!real) real = (ssize_t(*)(int, const void *, size_t, off_t))dlsym(RTLD_NEXT, "pwrite");
    return refused(fd) ? -1 : real(fd, buffer, length, offset);
}

ssize_t pread(int fd, void *buffer, size_t length, off_t offset) {
    static ssize_t (*real)(int, void *, size_t, off_t);
    if (!real) real = (ssize_t(*)(int, void *, size_t, off_t))dlsym(RTLD_NEXT, "pread");
    static int met;
    const char *after = getenv("REFUSE_READS_AFTER");
    int flags = fcntl(fd, F_GETFL);
    int direct = flags >= 0 && (flags & O_DIRECT) && !getenv("REFUSE_AFTER");
    if (direct && (!after || met++ >= atoi(after))) {
        errno = EINVAL;
        return -1;
    }
    return real(fd, buffer, length, offset);
}

ssize_t pwrite64(int fd, const void *buffer, size_t length, off_t offset) {
    return pwrite(fd, buffer, length, offset);
}

ssize_t pread64(int fd, void *buffer, size_t length, off_t offset) {
    return pread(fd, buffer, length, offset);
}
