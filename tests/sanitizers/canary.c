/* What the sanitizers must report: one write past the end, one signed overflow, one data race. */
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

static volatile long shared;

long race(long rounds)
{
    for (long at = 0; at < rounds; at++)
        shared = shared + 1;
    return shared;
}
