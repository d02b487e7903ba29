/* A fixed set of threads doing pread and pwrite: what the posix engine flies its transfers on.
 * One user thread pushes and reaps; workers take jobs in order and finish them in any order. */
#ifndef TABLESPACE_POSIX_POOL_H
#define TABLESPACE_POSIX_POOL_H

#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

typedef struct {
    uint64_t tag;
    int64_t result;
} pool_completion;

typedef struct {
    int fd;
    int is_write;
    void *buffer;
    size_t length;
    uint64_t offset;
    uint64_t tag;
} pool_job;

typedef struct {
    pthread_mutex_t mutex;
    pthread_cond_t work, finished;
    pool_job *jobs;           /* a ring of `depth` jobs not yet taken */
    uint32_t depth, job_head, job_count;
    pool_completion *done;    /* a stack of finished jobs not yet reaped */
    uint32_t done_count;
    int stopping;
    uint32_t thread_count;
    pthread_t *threads;
} posix_pool;

static int64_t pool_transfer(const pool_job *job) {
    ssize_t moved = job->is_write ? pwrite(job->fd, job->buffer, job->length, (off_t)job->offset)
                                  : pread(job->fd, job->buffer, job->length, (off_t)job->offset);
    return moved < 0 ? -errno : moved;
}

static void *pool_worker(void *argument) {
    posix_pool *pool = argument;
    pthread_mutex_lock(&pool->mutex);
    for (;;) {
        while (!pool->job_count && !pool->stopping) pthread_cond_wait(&pool->work, &pool->mutex);
        if (pool->stopping) break;
        pool_job job = pool->jobs[pool->job_head];
        pool->job_head = (pool->job_head + 1) % pool->depth;
        pool->job_count--;
        pthread_mutex_unlock(&pool->mutex);
        int64_t result = pool_transfer(&job);
        pthread_mutex_lock(&pool->mutex);
        pool->done[pool->done_count++] = (pool_completion){job.tag, result};
        pthread_cond_signal(&pool->finished);
    }
    pthread_mutex_unlock(&pool->mutex);
    return NULL;
}

static void pool_destroy(posix_pool *pool) {
    if (!pool) return;
    pthread_mutex_lock(&pool->mutex);
    pool->stopping = 1;
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->mutex);
    for (uint32_t i = 0; i < pool->thread_count; i++) pthread_join(pool->threads[i], NULL);
    pthread_cond_destroy(&pool->work);
    pthread_cond_destroy(&pool->finished);
    pthread_mutex_destroy(&pool->mutex);
    free(pool->jobs);
    free(pool->done);
    free(pool->threads);
    free(pool);
}

static posix_pool *pool_create(uint32_t depth, uint32_t threads) {
    posix_pool *pool = calloc(1, sizeof *pool);
    if (!pool) return NULL;
    pool->depth = depth;
    pool->jobs = calloc(depth, sizeof *pool->jobs);
    pool->done = calloc(depth, sizeof *pool->done);
    pool->threads = calloc(threads, sizeof *pool->threads);
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->work, NULL);
    pthread_condattr_t monotonic; /* a step of the wall clock must not end or prolong a wait */
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&pool->finished, &monotonic);
    pthread_condattr_destroy(&monotonic);
    if (pool->jobs && pool->done && pool->threads)
        while (pool->thread_count < threads &&
               !pthread_create(&pool->threads[pool->thread_count], NULL, pool_worker, pool))
            pool->thread_count++;
    if (!pool->thread_count) {
        pool_destroy(pool);
        return NULL;
    }
    return pool;
}

/* The caller keeps at most `depth` jobs in flight, so neither ring nor stack can overflow. */
static void pool_push(posix_pool *pool, pool_job job) {
    pthread_mutex_lock(&pool->mutex);
    pool->jobs[(pool->job_head + pool->job_count) % pool->depth] = job;
    pool->job_count++;
    pthread_cond_signal(&pool->work);
    pthread_mutex_unlock(&pool->mutex);
}

/* Drops the jobs not yet taken, and lets the threads end when their transfers do. They are not
 * joined, and the pool is never freed. */
static void pool_abandon(posix_pool *pool) {
    pthread_mutex_lock(&pool->mutex);
    pool->job_count = 0;
    pool->stopping = 1;
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->mutex);
}

/* A `timeout_ns` of 0 waits for ever; when it is over, what there is comes back. */
static uint32_t pool_reap(posix_pool *pool, pool_completion *out, uint32_t limit,
                          uint32_t wait_for, uint64_t timeout_ns) {
    uint32_t got = 0;
    struct timespec end = {0, 0};
    if (timeout_ns) {
        clock_gettime(CLOCK_MONOTONIC, &end);
        uint64_t nanoseconds = (uint64_t)end.tv_nsec + timeout_ns;
        end.tv_sec += (time_t)(nanoseconds / 1000000000u);
        end.tv_nsec = (long)(nanoseconds % 1000000000u);
    }
    pthread_mutex_lock(&pool->mutex);
    while (pool->done_count < wait_for && got < limit) {
        if (!timeout_ns)
            pthread_cond_wait(&pool->finished, &pool->mutex);
        else if (pthread_cond_timedwait(&pool->finished, &pool->mutex, &end) == ETIMEDOUT)
            break;
    }
    while (pool->done_count && got < limit) out[got++] = pool->done[--pool->done_count];
    pthread_mutex_unlock(&pool->mutex);
    return got;
}

#endif
