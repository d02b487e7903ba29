"""The clocks that readers of shared memory go by, in nanoseconds."""

from libc.stdint cimport uint64_t

cdef extern from *:
    """
    #ifndef TABLESPACE_SHARED_CLOCKS
    #define TABLESPACE_SHARED_CLOCKS
    #include <stdint.h>
    #include <time.h>
    static inline uint64_t ts_clock_ns(clockid_t clock)
    {
        struct timespec now;
        clock_gettime(clock, &now);
        return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
    }
    /* Expiry: counts the time that the machine was suspended too. */
    static inline uint64_t ts_boot_ns(void) { return ts_clock_ns(CLOCK_BOOTTIME); }
    /* Heartbeats and recency: a few milliseconds behind, and a tenth of the price. */
    static inline uint64_t ts_coarse_ns(void) { return ts_clock_ns(CLOCK_MONOTONIC_COARSE); }
    #endif
    """
    uint64_t boot_ns "ts_boot_ns"() noexcept nogil
    uint64_t coarse_ns "ts_coarse_ns"() noexcept nogil
