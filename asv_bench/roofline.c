/* The ceiling of this machine's disk and memory: loops with as little in them as can be.
 *
 *   put   durable writes: GROUP direct 64 KiB writes in flight, sync of their file, GROUP 200-byte
 *         lines to a log, sync of the log
 *   get   random direct 64 KiB reads of 1 GiB, DEPTH in flight
 *   copy  64 KiB copies from a memfd into private huge pages
 *
 * Built as a shared object and called from Python (roofline.py), since the liburing wheel's object
 * can only be loaded into a Python process; the engine under test resolves the same functions.
 * Files are kept in the directory and used again, so that both sides write blocks the file system
 * has already allocated.  Each function returns blocks a second; a failure ends the process.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define BLOCK ((size_t)65536)
#define HUGE ((size_t)2 << 20)
#define LINE ((size_t)200)
#define LOG_SPAN ((off_t)48 << 20)

typedef struct { uint64_t user_data; int32_t res; uint32_t flags; } completion;

static struct {
    int (*init)(unsigned, void *, unsigned);
    void *(*sqe)(void *);
    void (*read)(void *, int, void *, unsigned, uint64_t);
    void (*write)(void *, int, const void *, unsigned, uint64_t);
    void (*tag)(void *, uint64_t);
    int (*enter)(void *, unsigned);
    unsigned (*peek)(void *, completion **, unsigned);
    void (*advance)(void *, unsigned);
    void (*leave)(void *);
} uring;

static char ring[1024]; /* struct io_uring is 216 bytes and filled by the library */

static void die(const char *what) {
    perror(what);
    exit(2);
}

static void *symbol(void *library, const char *name) {
    void *found = dlsym(library, name);
    if (!found) {
        fprintf(stderr, "roofline: %s\n", dlerror());
        exit(2);
    }
    return found;
}

static void load(const char *path, unsigned entries) {
    void *library = dlopen(path, RTLD_NOW);
    if (!library) {
        fprintf(stderr, "roofline: %s\n", dlerror());
        exit(2);
    }
    *(void **)&uring.init = symbol(library, "io_uring_queue_init");
    *(void **)&uring.sqe = symbol(library, "io_uring_get_sqe");
    *(void **)&uring.read = symbol(library, "io_uring_prep_read");
    *(void **)&uring.write = symbol(library, "io_uring_prep_write");
    *(void **)&uring.tag = symbol(library, "io_uring_sqe_set_data64");
    *(void **)&uring.enter = symbol(library, "io_uring_submit_and_wait");
    *(void **)&uring.peek = symbol(library, "io_uring_peek_batch_cqe");
    *(void **)&uring.advance = symbol(library, "io_uring_cq_advance");
    *(void **)&uring.leave = symbol(library, "io_uring_queue_exit");
    if (uring.init(entries < 8 ? 8 : entries, ring, 0) < 0) die("io_uring_queue_init");
}

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static unsigned char *huge_memory(size_t bytes) {
    size_t whole = (bytes + HUGE - 1) & ~(HUGE - 1);
    unsigned char *memory = aligned_alloc(HUGE, whole);
    if (!memory) die("memory");
    madvise(memory, whole, MADV_HUGEPAGE);
    for (size_t i = 0; i < whole; i++) memory[i] = (unsigned char)(i * 2654435761u >> 13);
    return memory;
}

static int kept_file(const char *directory, const char *name, size_t bytes, int flags) {
    char path[4096];
    struct stat status;
    snprintf(path, sizeof path, "%s/%s", directory, name);
    if (stat(path, &status) || (size_t)status.st_size != bytes) {
        unsigned char *chunk = huge_memory(HUGE);
        int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
        if (fd < 0) die(path);
        for (size_t done = 0; done < bytes;) {
            size_t part = bytes - done < HUGE ? bytes - done : HUGE;
            if (write(fd, chunk, part) != (ssize_t)part) die(path);
            done += part;
        }
        if (fsync(fd)) die(path);
        close(fd);
        free(chunk);
    }
    int fd = open(path, O_RDWR | flags);
    if (fd < 0) die(path);
    return fd;
}

/* Wait until `wanted` transfers have ended; each must have moved a whole block. */
static void drain(unsigned wanted) {
    while (wanted) {
        completion *done[256];
        if (uring.enter(ring, 1) < 0) die("io_uring_enter");
        unsigned got = uring.peek(ring, done, wanted < 256 ? wanted : 256);
        for (unsigned i = 0; i < got; i++)
            if (done[i]->res != (int32_t)BLOCK) die("transfer");
        uring.advance(ring, got);
        wanted -= got;
    }
}

double roofline_put(const char *library, const char *directory, int group, long count) {
    load(library, (unsigned)group);
    int data = kept_file(directory, "roofline-put.bin", (size_t)count * BLOCK, O_DIRECT);
    int log = kept_file(directory, "roofline-put.log", (size_t)LOG_SPAN + ((size_t)1 << 20), 0);
    unsigned char *blocks = huge_memory((size_t)group * BLOCK);
    char *lines = malloc((size_t)group * LINE);
    off_t tail = 0;
    long written = 0;
    memset(lines, '-', (size_t)group * LINE);
    double start = seconds();
    while (written + group <= count) {
        for (int i = 0; i < group; i++)
            uring.write(uring.sqe(ring), data, blocks + (size_t)i * BLOCK, BLOCK,
                        (uint64_t)(written + i) * BLOCK);
        drain((unsigned)group);
        if (fdatasync(data)) die("fdatasync");
        size_t log_bytes = (size_t)group * LINE;
        if (pwrite(log, lines, log_bytes, tail) != (ssize_t)log_bytes) die("log");
        if (fdatasync(log)) die("fdatasync");
        tail = (tail + (off_t)group * (off_t)LINE) % LOG_SPAN;
        written += group;
    }
    double elapsed = seconds() - start;
    uring.leave(ring);
    close(data);
    close(log);
    free(blocks);
    free(lines);
    return (double)written / elapsed;
}

double roofline_get(const char *library, const char *directory, int depth, long count) {
    load(library, (unsigned)depth);
    uint64_t slots = 16384, state = (uint64_t)(seconds() * 1e9) | 1;
    int data = kept_file(directory, "roofline-get.bin", slots * BLOCK, O_DIRECT);
    unsigned char *buffers = huge_memory((size_t)depth * BLOCK);
    int *idle = malloc(sizeof(int) * (size_t)depth), idle_count = depth;
    long started = 0, ended = 0;
    for (int i = 0; i < depth; i++) idle[i] = i;
    double start = seconds();
    while (ended < count) {
        for (; idle_count && started < count; started++) {
            int buffer = idle[--idle_count];
            void *entry = uring.sqe(ring);
            state = state * 6364136223846793005u + 1442695040888963407u;
            uring.read(entry, data, buffers + (size_t)buffer * BLOCK, BLOCK,
                       ((state >> 33) % slots) * BLOCK);
            uring.tag(entry, (uint64_t)buffer);
        }
        completion *done[256];
        if (uring.enter(ring, 1) < 0) die("io_uring_enter");
        unsigned got = uring.peek(ring, done, 256);
        for (unsigned i = 0; i < got; i++) {
            if (done[i]->res != (int32_t)BLOCK) die("transfer");
            idle[idle_count++] = (int)done[i]->user_data;
        }
        uring.advance(ring, got);
        ended += got;
    }
    double elapsed = seconds() - start;
    uring.leave(ring);
    close(data);
    free(buffers);
    free(idle);
    return (double)ended / elapsed;
}

/* Memory is kept and used again: filling it takes longer than a run. */
double roofline_copy(size_t bytes, size_t span) {
    static unsigned char *source, *target;
    static size_t kept;
    size_t blocks = span / BLOCK, at = 0;
    if (kept != span) {
        if (kept) {
            munmap(source, kept);
            free(target);
        }
        int fd = memfd_create("roofline", MFD_CLOEXEC);
        if (fd < 0 || ftruncate(fd, (off_t)span)) die("memfd");
        source = mmap(NULL, span, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (source == MAP_FAILED) die("mmap");
        close(fd);
        target = huge_memory(span);
        memcpy(source, target, span);
        kept = span;
    }
    long count = (long)(bytes / BLOCK);
    double start = seconds();
    for (long i = 0; i < count; i++) {
        memcpy(target + at * BLOCK, source + at * BLOCK, BLOCK);
        at = (at + 29) % blocks;
    }
    return (double)count / (seconds() - start);
}
