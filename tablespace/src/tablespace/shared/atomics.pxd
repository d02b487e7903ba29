"""C11 orders by the compiler's builtins: the memory is foreign, so it has no _Atomic type."""

from libc.stdint cimport uint64_t

cdef extern from *:
    """
    #ifndef TABLESPACE_SHARED_ATOMICS
    #define TABLESPACE_SHARED_ATOMICS
    #include <stdint.h>
    static inline uint64_t ts_load_acquire(const uint64_t *p)
    { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
    static inline uint64_t ts_load_relaxed(const uint64_t *p)
    { return __atomic_load_n(p, __ATOMIC_RELAXED); }
    static inline void ts_store_relaxed(uint64_t *p, uint64_t v)
    { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
    static inline void ts_store_release(uint64_t *p, uint64_t v)
    { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
    static inline void ts_fence_acquire(void) { __atomic_thread_fence(__ATOMIC_ACQUIRE); }
    static inline void ts_fence_seq_cst(void) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
    static inline void ts_prefetch(const void *p) { __builtin_prefetch(p); }
    #endif
    """
    uint64_t ts_load_acquire(const uint64_t *p) noexcept nogil
    uint64_t ts_load_relaxed(const uint64_t *p) noexcept nogil
    void ts_store_relaxed(uint64_t *p, uint64_t v) noexcept nogil
    void ts_store_release(uint64_t *p, uint64_t v) noexcept nogil
    void ts_fence_acquire() noexcept nogil
    void ts_fence_seq_cst() noexcept nogil
    void ts_prefetch(const void *p) noexcept nogil
