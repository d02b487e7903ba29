"""Hex digits, as journal and snapshot write and read them: lower case only."""

from libc.stdint cimport int8_t, uint8_t, uint64_t

cdef extern from *:
    """
    static const char tablespace_hex_digits[] = "0123456789abcdef";
    static const signed char tablespace_hex_values[256] = {
        [0 ... 255] = -1,
        ['0'] = 0, ['1'] = 1, ['2'] = 2, ['3'] = 3, ['4'] = 4, ['5'] = 5, ['6'] = 6, ['7'] = 7,
        ['8'] = 8, ['9'] = 9, ['a'] = 10, ['b'] = 11, ['c'] = 12, ['d'] = 13, ['e'] = 14,
        ['f'] = 15,
    };
    """
    const char *HEX_DIGITS "tablespace_hex_digits"
    const int8_t *HEX_VALUES "tablespace_hex_values"   # -1 for any other byte


cdef inline char *put_bytes(char *out, const uint8_t *data, size_t length) noexcept nogil:
    """Write two digits a byte; return where the text goes on."""
    cdef size_t at
    for at in range(length):
        out[2 * at] = HEX_DIGITS[data[at] >> 4]
        out[2 * at + 1] = HEX_DIGITS[data[at] & 15]
    return out + 2 * length


cdef inline char *put_number(char *out, uint64_t number, int digits) noexcept nogil:
    """Write a number with leading zeros; return where the text goes on."""
    cdef int at
    for at in range(digits):
        out[at] = HEX_DIGITS[(number >> (4 * (digits - 1 - at))) & 15]
    return out + digits


cdef inline bint get_number(const char *text, int digits, uint64_t *out) noexcept nogil:
    """Read a number of exactly `digits` digits; False for any other text."""
    cdef uint64_t number = 0
    cdef int at, digit
    for at in range(digits):
        digit = HEX_VALUES[<uint8_t>text[at]]
        if digit < 0:
            return False
        number = number << 4 | <uint64_t>digit
    out[0] = number
    return True


cdef inline bint get_bytes(const char *text, size_t length, uint8_t *out) noexcept nogil:
    """Read `length` bytes of two digits each; False for any other text."""
    cdef size_t at
    cdef int high, low
    for at in range(length):
        high = HEX_VALUES[<uint8_t>text[2 * at]]
        low = HEX_VALUES[<uint8_t>text[2 * at + 1]]
        if high < 0 or low < 0:
            return False
        out[at] = <uint8_t>(high << 4 | low)
    return True
