/* A library with the calls of cuFile or hipFile, that moves bytes by pread and pwrite.

   It is as strict as the real ones are said to be: memory and files have to be registered, files
   open with O_DIRECT, everything aligned and inside its range. `standin_fail` makes the n-th call
   of a name fail in a way of choice. Compiled with -DPREFIX=cuFile or -DPREFIX=hipFile. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

#define JOIN(a, b) a##b
#define JOINED(a, b) JOIN(a, b)
#define CALL(name) JOINED(PREFIX, name)

enum { OK = 0, NOT_INITIALIZED = 5001, MAPPING = 5016, NO_DIRECT = 5020, INVALID = 5022,
       TWICE = 5023, UNREGISTERED = 5024, ALREADY_OPEN = 5026, NO_HANDLE = 5027 };
/* Ways of failing other than a status. */
enum { BY_ERRNO = 1, SHORT = 2, NOTHING = 3, ELSEWHERE = 4, LIE = 5, MINUS_ERRNO = 6, GPU = 7 };

typedef struct { int err, gpu_err; } status_t;
typedef struct { int type; union { int fd; void *handle; } handle; const void *ops; } descr_t;
typedef struct file { int fd; struct file *next; } file_t;
typedef struct buffer { const char *base; size_t length; struct buffer *next; } buffer_t;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static int users, opened_before, left;
static file_t *files;
static buffer_t *buffers;
static struct { char name[32]; int nth, way, value, times; } fault;
static long long read_bytes, written_bytes;

static status_t status(int code) { status_t s = {code, code == 5011 ? 999 : 0}; return s; }

/* Returns the way in which this call is to fail, 0 for not at all. */
static int failing(const char *name)
{
    int way = 0;
    pthread_mutex_lock(&mutex);
    if (fault.times && !strcmp(fault.name, name) && --fault.nth <= 0) {
        fault.times--;
        way = fault.way;
    }
    pthread_mutex_unlock(&mutex);
    return way;
}

void standin_fail(const char *name, int nth, int way, int value, int times)
{
    pthread_mutex_lock(&mutex);
    snprintf(fault.name, sizeof fault.name, "%s", name);
    fault.nth = nth;
    fault.way = way;
    fault.value = value;
    fault.times = times;
    pthread_mutex_unlock(&mutex);
}

void standin_open_before(int is_open) { opened_before = is_open; }
int standin_users(void) { return users; }
int standin_files(void) { int n = 0; for (file_t *f = files; f; f = f->next) n++; return n; }
int standin_buffers(void) { int n = 0; for (buffer_t *b = buffers; b; b = b->next) n++; return n; }
/* Buffers that were still registered when the driver was closed. */
int standin_left(void) { return left; }
long long standin_read(void) { return read_bytes; }
long long standin_written(void) { return written_bytes; }

status_t CALL(DriverOpen)(void)
{
    if (failing("DriverOpen")) return status(fault.value);
    if (users || opened_before) return status(ALREADY_OPEN);
    users++;
    return status(OK);
}

#ifdef OLD_CLOSE
status_t CALL(DriverClose)(void)
#else
status_t CALL(DriverClose_v2)(void)
#endif
{
    if (failing("DriverClose")) return status(fault.value);
    if (!users) return status(NOT_INITIALIZED);
    users--;
    /* Closing lets go of everything. */
    left = standin_buffers();
    while (buffers) {
        buffer_t *gone = buffers;
        buffers = gone->next;
        free(gone);
    }
    return status(OK);
}

status_t CALL(HandleRegister)(void **handle, descr_t *descr)
{
    int flags;
    file_t *file;
    if (failing("HandleRegister")) return status(fault.value);
    if (!users && !opened_before) return status(NOT_INITIALIZED);
    if (!handle || !descr || descr->type != 1 || descr->ops) return status(INVALID);
    if ((flags = fcntl(descr->handle.fd, F_GETFL)) < 0) return status(INVALID);
    if (!(flags & O_DIRECT)) return status(NO_DIRECT);
    file = malloc(sizeof *file);
    pthread_mutex_lock(&mutex);
    file->fd = descr->handle.fd;
    file->next = files;
    files = file;
    pthread_mutex_unlock(&mutex);
    *handle = file;
    return status(OK);
}

void CALL(HandleDeregister)(void *handle)
{
    pthread_mutex_lock(&mutex);
    for (file_t **at = &files; *at; at = &(*at)->next)
        if (*at == handle) {
            *at = (*at)->next;
            free(handle);
            break;
        }
    pthread_mutex_unlock(&mutex);
}

static buffer_t *find(const void *base)
{
    for (buffer_t *b = buffers; b; b = b->next) if (b->base == base) return b;
    return NULL;
}

status_t CALL(BufRegister)(const void *base, size_t length, int flags)
{
    buffer_t *buffer;
    if (failing("BufRegister")) return status(fault.value);
    if (!users && !opened_before) return status(NOT_INITIALIZED);
    if (!base || !length || flags || (uintptr_t)base % 4096) return status(INVALID);
    pthread_mutex_lock(&mutex);
    if (find(base)) {
        pthread_mutex_unlock(&mutex);
        return status(TWICE);
    }
    buffer = malloc(sizeof *buffer);
    buffer->base = base;
    buffer->length = length;
    buffer->next = buffers;
    buffers = buffer;
    pthread_mutex_unlock(&mutex);
    return status(OK);
}

status_t CALL(BufDeregister)(const void *base)
{
    status_t found = status(UNREGISTERED);
    if (failing("BufDeregister")) return status(fault.value);
    pthread_mutex_lock(&mutex);
    for (buffer_t **at = &buffers; *at; at = &(*at)->next)
        if ((*at)->base == base) {
            buffer_t *gone = *at;
            *at = gone->next;
            free(gone);
            found = status(OK);
            break;
        }
    pthread_mutex_unlock(&mutex);
    return found;
}

/* Returns the file's descriptor, or a status below zero. */
static int check(void *handle, const void *base, size_t size, off_t at, off_t offset)
{
    int fd = -NO_HANDLE;
    buffer_t *buffer;
    pthread_mutex_lock(&mutex);
    for (file_t *f = files; f; f = f->next) if (f == handle) fd = f->fd;
    buffer = find(base);
    if (fd >= 0 && !buffer) fd = -UNREGISTERED;
    else if (fd >= 0 && (size % 4096 || at % 4096 || offset % 4096 || at < 0 || offset < 0))
        fd = -INVALID;
    else if (fd >= 0 && (size_t)offset + size > buffer->length) fd = -MAPPING;
    pthread_mutex_unlock(&mutex);
    return fd;
}

static ssize_t moved(const char *name, void *handle, char *base, size_t size, off_t at,
                     off_t offset, int writes)
{
    ssize_t done;
    int way = failing(name);
    int fd = check(handle, base, size, at, offset);
    if (way == BY_ERRNO) { errno = fault.value; return -1; }
    if (way == MINUS_ERRNO) return -fault.value;
    if (way == NOTHING) return 0;
    if (way == LIE) return size;
    if (way > 5000) return -way;
    if (fd < 0) return fd;
    if (way == SHORT) size = size / 2 / 4096 * 4096;
    if (way == ELSEWHERE) at += 4096;
    done = writes ? pwrite(fd, base + offset, size, at) : pread(fd, base + offset, size, at);
    if (done > 0 && writes) written_bytes += done;
    if (done > 0 && !writes) read_bytes += done;
    /* What was asked for at the right place is what counts as moved. */
    return way == ELSEWHERE && done >= 0 ? (ssize_t)size : done;
}

ssize_t CALL(Read)(void *handle, void *base, size_t size, off_t at, off_t offset)
{
    return moved("Read", handle, base, size, at, offset, 0);
}

#ifndef NO_WRITE
ssize_t CALL(Write)(void *handle, const void *base, size_t size, off_t at, off_t offset)
{
    return moved("Write", handle, (char *)base, size, at, offset, 1);
}
#endif
