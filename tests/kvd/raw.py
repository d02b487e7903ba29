"""A connection without a client behind it, for tests that speak the protocol themselves."""

import socket
import struct

import msgspec


def frame(body):
    return struct.pack(">I", len(body)) + body


def pack(**message):
    return frame(msgspec.msgpack.encode(message))


class Raw:
    def __init__(self, path):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(10)
        self.socket.connect(path)

    def hello(self, **more):
        try:
            self.socket.sendall(pack(op="HELLO", id=1, versions=[1], map=False, **more))
        except (BrokenPipeError, ConnectionResetError):
            pass  # Refused already: why is there to be read.
        self.ack = self.reply()
        assert self.ack["op"] == "HELLO_ACK"
        return self

    def reply(self):
        (length,) = struct.unpack(">I", self._exactly(4))
        return msgspec.msgpack.decode(self._exactly(length))

    def ask(self, **message):
        self.socket.sendall(pack(**message))
        return self.reply()

    def close(self):
        self.socket.close()

    def _exactly(self, size):
        data = b""
        while len(data) < size:
            part = self.socket.recv(size - len(data))
            if not part:
                raise EOFError
            data += part
        return data
