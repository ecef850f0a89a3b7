"""The address is taken before anything else, and one that is taken already is said in a line."""

import socket

import pytest

from refitd.api.server import listening
from refitd.root.ownership import StartRefusedError


def test_a_port_that_is_taken_is_named_with_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(StartRefusedError) as caught, listening("127.0.0.1", port):
            pass
    assert str(caught.value) == f"port {port} on 127.0.0.1 is taken: choose another with --port"


def test_an_address_that_this_machine_does_not_have_is_named() -> None:
    named = r"port 1 on 192\.0\.2\.1 cannot be had \(.*--host"
    with pytest.raises(StartRefusedError, match=named), listening("192.0.2.1", 1):
        pass


def test_nobody_can_connect_before_somebody_answers_and_the_port_is_given_back() -> None:
    with listening("127.0.0.1", 0) as (taken,):
        address = taken.getsockname()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)
    with listening(*address) as (again,):
        assert again.getsockname() == address


def test_a_name_with_several_addresses_gets_those_that_there_are() -> None:
    with listening("localhost", 0) as sockets:
        assert "127.0.0.1" in {each.getsockname()[0] for each in sockets}
