"""The kernel asks for signs of life on connections that this process has, whoever made them."""

import socket

from torchdistpackage.comm.keepalive import keep_alive


def test_connections_are_asked_for_a_sign_of_life_and_listeners_are_not():
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as ours,
        server.accept()[0] as theirs,
    ):
        assert keep_alive() >= 2
        for end in (ours, theirs):
            assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 8000
        assert not server.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
