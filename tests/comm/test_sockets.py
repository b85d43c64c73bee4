from __future__ import annotations

import socket

from hvdtrain.comm import sockets


def test_who_waits_at_the_other_end_hears_that_we_hang_up_and_nobody_else_does():
    with socket.create_server(("127.0.0.1", 0)) as server:
        kept = socket.create_connection(server.getsockname())
        other_end_of_kept, _ = server.accept()
        before = sockets.opened()
        ours = socket.create_connection(server.getsockname())
        mine = sockets.opened() - before
        other_end, _ = server.accept()
        assert len(mine) == 1
        other_end.settimeout(5)
        sockets.hang_up(mine)
        assert other_end.recv(1) == b""
        kept.sendall(b"x")
        assert other_end_of_kept.recv(1) == b"x"
        for each in (kept, other_end_of_kept, ours, other_end):
            each.close()
