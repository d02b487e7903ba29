"""Journal lines."""

import json

import pytest
from tablespace._core import line_codec


def lines() -> list[bytes]:
    writer = line_codec.LineWriter()
    writer.put(7, 5, b"\x00key\xff", 3, 9, 65536, 0x0123456789ABCDEF, b"meta")
    writer.put(8, 5, b"k" * 255, 0, 0, 0, 2**64 - 1)
    writer.free("evict", 9, 9, b"a", 1, 2)
    writer.free("delete", 10, 9, b"b", 1, 2)
    writer.free("drop", 2**63 - 1, 9, b"c", 2**24 - 1, 2**24 - 1)
    writer.quarantine(11, 11, 3, 2**24 - 1)
    writer.restore(12, 11, 0, 0)
    writer.claim(13, 13, 5, 2**21)
    writer.release(14, 13, 2**24 - 1)
    return writer.getvalue().splitlines()


def test_a_line_is_json_and_says_what_was_written() -> None:
    record = json.loads(lines()[0])
    assert record["op"] == "put"
    assert (record["seq"], record["grp"]) == (7, 5)
    assert bytes.fromhex(record["key"]) == b"\x00key\xff"
    assert record["at"] == [3, 9]
    assert record["len"] == 65536
    assert record["xxh3"] == "0123456789abcdef"
    assert bytes.fromhex(record["meta"]) == b"meta"


def test_every_kind_of_line_is_read_back() -> None:
    parsed = [line_codec.parse(line) for line in lines()]
    kinds = "put put evict delete drop quarantine restore claim release"
    assert [record["op"] for record in parsed] == kinds.split()
    assert parsed[0]["metadata"] == b"meta"
    assert parsed[1]["key"] == b"k" * 255
    assert parsed[1]["check"] == 2**64 - 1
    assert parsed[4]["seq"] == 2**63 - 1
    assert (parsed[4]["container"], parsed[4]["slot"]) == (2**24 - 1, 2**24 - 1)
    assert (parsed[5]["container"], parsed[5]["slot"]) == (3, 2**24 - 1)
    assert json.loads(lines()[6])["at"] == [0, 0]
    assert (parsed[7]["container"], parsed[7]["slot_bytes"]) == (5, 2**21)
    assert parsed[8] == {"op": "release", "seq": 14, "grp": 13, "container": 2**24 - 1}


def test_what_a_writer_is_not_able_to_do_changes_nothing() -> None:
    writer = line_codec.LineWriter()
    writer.claim(13, 13, 5, 2**21)
    before = writer.getvalue()
    with pytest.raises(ValueError, match="unknown kind"):
        writer.free("lend", 9, 9, b"a", 1, 2)
    with pytest.raises(ValueError, match="only"):
        writer.cut(len(before) + 1)
    assert writer.getvalue() == before


@pytest.mark.parametrize("which", range(9))
def test_any_changed_byte_is_noticed(which: int) -> None:
    line = lines()[which]
    for at in range(len(line)):
        for bit in (1, 0x80):
            changed = bytearray(line)
            changed[at] ^= bit
            assert line_codec.parse(bytes(changed)) is None, (at, bit)


def test_any_cut_line_is_noticed() -> None:
    line = lines()[0]
    assert all(line_codec.parse(line[:at]) is None for at in range(len(line)))
    assert line_codec.parse(line + b" ") is None


def test_a_whole_line_of_another_layout_is_no_record() -> None:
    line = line_codec.seal(b'{"seq":1,"grp":1,"op":"put","key":"00" ,"at":[0,0]')[:-1]
    assert line_codec.is_whole(line)
    assert line_codec.parse(line) is None


def test_records_of_containers_are_read_back() -> None:
    writer = line_codec.LineWriter()
    writer.claim(1, 1, 7, 65536)
    writer.release(2, 1, 7)
    claim, release = map(line_codec.parse, writer.getvalue().splitlines())
    assert claim == {"op": "claim", "seq": 1, "grp": 1, "container": 7, "slot_bytes": 65536}
    assert release == {"op": "release", "seq": 2, "grp": 1, "container": 7}


def test_a_writer_takes_a_group_of_any_size() -> None:
    """The largest: 4096 deletes of the longest keys, some fifty times what it begins with."""
    writer = line_codec.LineWriter()
    for number in range(4096):
        writer.free("delete", number + 1, 1, b"%255d" % number, 0, number)
    written = writer.getvalue().splitlines()
    assert len(written) == 4096 and len(writer) > 2 << 20
    parsed = [line_codec.parse(line) for line in written]
    assert [record["slot"] for record in parsed if record] == list(range(4096))
