/* Loaded before everything else: makes file calls fail, or stop there, as the environment says.

   FULL_AFTER: posix_fallocate fails with ENOSPC once so many bytes were taken.
   FULL_WRITES: pwrite and pwritev of more than a page fail with ENOSPC.
   STOP_AT: a call (fallocate, pwritev, fdatasync, rename) before which the process kills itself. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static long long taken;

static void stop(const char *name)
{
    const char *at = getenv("STOP_AT");
    if (at && !strcmp(at, name)) kill(getpid(), SIGKILL);
}

static int allocate(const char *name, int fd, off_t offset, off_t length)
{
    int (*real)(int, off_t, off_t) = (int (*)(int, off_t, off_t))dlsym(RTLD_NEXT, name);
    const char *limit = getenv("FULL_AFTER");
    stop("fallocate");
    if (limit && taken + length > atoll(limit)) return ENOSPC;
    taken += length;
    return real(fd, offset, length);
}

int posix_fallocate(int fd, off_t offset, off_t length)
{
    return allocate("posix_fallocate", fd, offset, length);
}

int posix_fallocate64(int fd, off_t offset, off_t length)
{
    return allocate("posix_fallocate64", fd, offset, length);
}

/* What Python's os.pwritev calls. */
static ssize_t write_all(const char *name, int fd, const struct iovec *parts, int n, off_t at,
                         int flags)
{
    ssize_t (*real)(int, const struct iovec *, int, off_t, int) =
        (ssize_t (*)(int, const struct iovec *, int, off_t, int))dlsym(RTLD_NEXT, name);
    stop("pwritev");
    if (getenv("FULL_WRITES") && parts[0].iov_len > 4096) {
        errno = ENOSPC;
        return -1;
    }
    return real(fd, parts, n, at, flags);
}

ssize_t pwritev2(int fd, const struct iovec *parts, int n, off_t at, int flags)
{
    return write_all("pwritev2", fd, parts, n, at, flags);
}

ssize_t pwritev64v2(int fd, const struct iovec *parts, int n, off_t at, int flags)
{
    return write_all("pwritev64v2", fd, parts, n, at, flags);
}

int fdatasync(int fd)
{
    int (*real)(int) = (int (*)(int))dlsym(RTLD_NEXT, "fdatasync");
    stop("fdatasync");
    return real(fd);
}

int rename(const char *from, const char *to)
{
    int (*real)(const char *, const char *) =
        (int (*)(const char *, const char *))dlsym(RTLD_NEXT, "rename");
    stop("rename");
    return real(from, to);
}
