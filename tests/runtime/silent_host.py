"""Rank 0 in a network of its own, which goes down in the midst of a run: prints what the watch says."""

import fcntl
import socket
import struct
import sys
import time

from lightrft_visual.runtime import watchdog

watchdog.IDLE, watchdog.INTERVAL, watchdog.PROBES, watchdog.SILENCE = 1, 1, 2, 3
SET_FLAGS, UP = 0x8914, 1  # of a network interface


def loopback(flags: int) -> None:
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, SET_FLAGS, struct.pack("16sh", b"lo", flags))


loopback(UP)
told: list[str] = []
dog = watchdog.Watchdog(0, 2, limit=600.0, end=told.append)
with socket.create_server(("127.0.0.1", 0)) as server:
    other = socket.create_connection(server.getsockname())
    dog.keep(server.accept()[0], 1)
loopback(0)
ends = time.monotonic() + 30
while not told and time.monotonic() < ends:
    dog.say(watchdog.STAGE, "train")  # without an answer, so that the system does not probe the connection
    dog.look(0.5)
sys.exit("".join(told) or "nothing was noticed")
