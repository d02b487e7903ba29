/* Preloaded into a test's process: once the file named by STUCK_WHEN exists, transfers of 4096
 * bytes to or from offset 4096 do not end. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/types.h>
#include <unistd.h>

static void stick(size_t length, off_t offset) {
    const char *when = getenv("STUCK_WHEN");
    if (length == 4096 && offset == 4096 && when && access(when, F_OK) == 0)
        for (;;) pause();
}

#define WRAP(name, type)                                                     \
    ssize_t name(int fd, type buffer, size_t length, off_t offset) {         \
        static ssize_t (*real)(int, type, size_t, off_t);                    \
        if (!real) real = (ssize_t (*)(int, type, size_t, off_t))dlsym(RTLD_NEXT, #name); \
        stick(length, offset);                                               \
        return real(fd, buffer, length, offset);                             \
    }

WRAP(pread, void *)
WRAP(pread64, void *)
WRAP(pwrite, const void *)
WRAP(pwrite64, const void *)
