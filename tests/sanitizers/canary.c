/* What the sanitizers must report: one write past the end, one signed overflow, one data race. */
#include <sched.h>
#include <stdlib.h>

int write_past_the_end(int length)
{
    volatile char *memory = malloc(length);
    memory[length] = 1;
    free((void *)memory);
    return length;
}

int overflow(int value)
{
    return value + 1;
}

static long shared;
static int entered;

/* Two threads meet here, in an order that nothing but their own additions tells. */
long race(long rounds)
{
    __atomic_fetch_add(&entered, 1, __ATOMIC_RELAXED);
    while (__atomic_load_n(&entered, __ATOMIC_RELAXED) < 2)
        sched_yield();
    for (long at = 0; at < rounds; at++)
        *(volatile long *)&shared = shared + 1;
    return shared;
}
