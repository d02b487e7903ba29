"""Headers: a golden one, every byte's damage, and each check by itself behind a right digest."""

from __future__ import annotations

import struct

import pytest

from kvd_connectors.gpu_direct import header as format
from kvd_connectors.gpu_direct.header import (
    Header,
    HeaderError,
    OtherVersionError,
    decode,
    length_of,
    name_of,
)

from .chunks import keys_of

SAMPLE = Header("vllm/m/0123", tuple(keys_of(1)), 10_000, 0x1122334455667788, 1_900_000_000)

# The first 192 bytes of SAMPLE as version 1 writes them, and its name: a file of a release must
# stay readable.
GOLDEN = (
    "4b564341434845 0a 01000000 00100000 1027000000000000 0040000000000000 8877665544332211"
    " 00b33f7100000000 0100 0b00 04000000 2000 000000000000"
)


def forged(at: int, data: bytes) -> bytes:
    """A header with other bytes, and the digest that belongs to them."""
    whole = bytearray(SAMPLE.encode())
    whole[at : at + len(data)] = data
    digest = format.digest_of(whole)
    whole[format.DIGEST_AT : format.DIGEST_AT + format.DIGEST_BYTES] = digest
    return bytes(whole)


def test_fields_lie_where_the_document_says() -> None:
    whole = SAMPLE.encode()
    assert whole[:64] == bytes.fromhex(GOLDEN)
    assert whole[80:128] == bytes(48)
    assert whole[128:139] == b"vllm/m/0123"
    assert whole[139 : 139 + 128] == b"".join(SAMPLE.keys)
    assert not any(whole[267:])


def test_what_is_encoded_is_decoded() -> None:
    assert decode(SAMPLE.encode(), SAMPLE.file_bytes) == SAMPLE


def test_a_header_of_many_keys_is_longer() -> None:
    many = Header("ns", tuple(keys_of(1)[0][:-1] + bytes([n % 256]) for n in range(4000)), 1, 2)
    whole = many.encode()
    assert len(whole) == many.size_bytes == length_of(whole[:4096]) > 32 * 4000
    assert decode(whole, many.file_bytes) == many
    with pytest.raises(HeaderError, match="4096 of"):
        decode(whole[:4096], many.file_bytes)


def test_a_changed_byte_is_seen() -> None:
    for place in range(4096):
        whole = bytearray(SAMPLE.encode())
        whole[place] ^= 0x40
        with pytest.raises((HeaderError, OtherVersionError)):
            decode(bytes(whole), SAMPLE.file_bytes)
            pytest.fail(f"byte {place}")


@pytest.mark.parametrize(
    ("at", "data", "words"),
    [
        (0, b"KVCACHE1", "magic"),
        (12, struct.pack("<I", 8192), "4096 of 8192"),
        (12, struct.pack("<I", 4097), "header of 4097"),
        (12, struct.pack("<I", 0), "header of 0"),
        (12, struct.pack("<I", 2 << 20), "header of"),
        (16, struct.pack("<Q", 9_000_000), "bytes of payload"),
        (16, struct.pack("<Q", 1 << 63), "bytes of payload"),
        (24, struct.pack("<Q", 4096), "bytes of payload"),
        (50, struct.pack("<H", 65535), "keys of"),
        (50, struct.pack("<H", 0), "keys of"),
        (52, struct.pack("<I", 0), "keys of"),
        (52, struct.pack("<I", 1 << 31), "keys of"),
        (56, struct.pack("<H", 0), "keys of"),
        (56, struct.pack("<H", 31), "keys of"),
        (58, b"\1", "reserved"),
        (80, b"\1", "reserved"),
        (127, b"\1", "reserved"),
        (128, b"\xff\xff", "UTF-8"),
        (4095, b"\1", "keys of"),
    ],
)
def test_each_field_is_checked_by_itself(at: int, data: bytes, words: str) -> None:
    """Behind a digest that is right: a writer with a bug has one too."""
    with pytest.raises(HeaderError, match=words):
        decode(forged(at, data), SAMPLE.file_bytes)


@pytest.mark.parametrize("at", [8, 48])
def test_another_version_is_told_from_damage(at: int) -> None:
    with pytest.raises(OtherVersionError):
        decode(forged(at, b"\2\0"), SAMPLE.file_bytes)


def test_a_file_of_another_length_is_none() -> None:
    for length in (SAMPLE.file_bytes - 1, SAMPLE.file_bytes - 4096, SAMPLE.file_bytes + 4096):
        with pytest.raises(HeaderError, match="payload"):
            decode(SAMPLE.encode(), length)


@pytest.mark.parametrize("keys", [(), (b"",), (b"a", b"bb"), (b"x" * 32,) * 40_000])
def test_keys_that_no_header_holds_are_refused(keys: tuple[bytes, ...]) -> None:
    with pytest.raises(ValueError):
        Header("ns", keys, 1, 1).encode()


def test_names_are_hexadecimal_whatever_the_text_is() -> None:
    for namespace in ("../../etc", "a/b", "\0", "-rf", "x" * 4000):
        name = name_of(namespace, [b"../../passwd", b"\0/"])
        assert len(name) == 40 and set(name) <= set("0123456789abcdef")


def test_names_tell_where_one_part_ends() -> None:
    names = {
        name_of("ab", [b"c"]),
        name_of("a", [b"bc"]),
        name_of("a", [b"b", b"c"]),
        name_of("a", [b"bc", b""]),
        name_of("a", [b"", b"bc"]),
    }
    assert len(names) == 5
