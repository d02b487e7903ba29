/* Copies of blocks, as fast from and to any address.
 *
 * memcpy of a long block is one `rep movsb`, which x86 processors run at a fifth of the speed
 * where the target lies a few bytes after the source within a page: a page-aligned slot copied
 * into an array of numpy, whose data begins 16 bytes into a page, say.  There, a loop of vectors.
 */
#ifndef TABLESPACE_BLOCK_COPY_H
#define TABLESPACE_BLOCK_COPY_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define BLOCK_COPY_MIN ((size_t)4096)

#if defined(__x86_64__)
/* Loads and stores at any address, of bytes that have any type. */
typedef long long block_lane __attribute__((vector_size(16), aligned(1), may_alias));

static inline void copy_lanes(unsigned char *to, const unsigned char *from, size_t length) {
    size_t at = 0;
    for (; at + 64 <= length; at += 64) {
        /* All loads before the stores: no compiler makes a memcpy of that again. */
        block_lane a = *(const block_lane *)(from + at);
        block_lane b = *(const block_lane *)(from + at + 16);
        block_lane c = *(const block_lane *)(from + at + 32);
        block_lane d = *(const block_lane *)(from + at + 48);
        *(block_lane *)(to + at) = a;
        *(block_lane *)(to + at + 16) = b;
        *(block_lane *)(to + at + 32) = c;
        *(block_lane *)(to + at + 48) = d;
    }
    memcpy(to + at, from + at, length - at);
}

static inline void copy_block(void *to, const void *from, size_t length) {
    size_t ahead = ((uintptr_t)to - (uintptr_t)from) & 4095;
    if (length >= BLOCK_COPY_MIN && ahead > 0 && ahead < 64)
        copy_lanes((unsigned char *)to, (const unsigned char *)from, length);
    else
        memcpy(to, from, length);
}
#else
static inline void copy_block(void *to, const void *from, size_t length) {
    memcpy(to, from, length);
}
#endif

#endif
