"""Where hosts meet: who shows the secret is answered, others are refused, told once, and keep nobody waiting."""

import os
import signal
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta

import pytest
import torch.distributed as dist

from podium.errors import Interrupted, UserError
from podium.launch import service as services
from podium.launch.channel import GREETING, MAX_BODY_BYTES, NONCE_BYTES, BadMessage, Channel, Seals, new_nonce
from podium.launch.meeting import Meeting
from podium.launch.service import MAX_UNPROVEN, MeetingService, listen_at, listen_in
from podium.launch.store import MeetingStore, is_open, nobody_listens
from tests.support.processes import until

SECRET = b"known to this run alone"
TOLD = "refused a connection from 127.0.0.1, which does not know the secret of this run"


class Open:
    """A service on loopback, and what it has said about strangers."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.service = MeetingService(listen_at("127.0.0.1", 0), SECRET, self.told.append)
        self.meeting = Meeting(port=self.service.port, secret=SECRET)

    def connection(self) -> socket.socket:
        return socket.create_connection((self.meeting.address, self.meeting.port), timeout=30)

    def works(self) -> bool:
        store = MeetingStore(self.meeting, 30)
        store.set("works", "yes")
        return store.get("works") == b"yes"

    def assert_told_once(self) -> None:
        until(lambda: self.told, "the stranger told")
        assert self.told == [TOLD]


@pytest.fixture
def meeting() -> Iterator[Open]:
    opened = Open()
    yield opened
    opened.service.close()


def test_a_store_keeps_what_torchs_would(meeting):
    store, other = MeetingStore(meeting.meeting, 30), MeetingStore(meeting.meeting, 30)
    store.set("text", "a")
    store.set("bytes", b"\x00\xff")
    assert (other.get("text"), other.get("bytes")) == (b"a", b"\x00\xff")
    assert (store.add("n", 2), other.add("n", 3), other.get("n")) == (2, 5, b"5")
    assert (other.check(["text", "n"]), other.check(["text", "missing"])) == (True, False)
    assert other.compare_set("text", "b", "c") == b"a"
    assert other.compare_set("text", "a", "c") == b"c"
    assert other.compare_set("new", "", "first") == b"first"
    assert (store.delete_key("text"), store.delete_key("text"), store.num_keys()) == (True, False, 3)
    assert dist.PrefixStore("below", store).check(["n"]) is False
    with pytest.raises(dist.DistStoreError, match="nothing at missing"):
        store.wait(["missing"], timedelta(milliseconds=10))
    assert not meeting.told


def test_who_waits_is_answered_when_the_last_key_comes_and_others_are_served_meanwhile(meeting):
    waiting, other = MeetingStore(meeting.meeting, 60), MeetingStore(meeting.meeting, 60)
    thread = threading.Thread(target=waiting.wait, args=(["a", "b"],))
    thread.start()
    other.set("a", "1")
    assert other.get("a") == b"1"
    assert thread.is_alive()
    other.set("b", "2")
    thread.join(60)
    assert not thread.is_alive()


def test_a_signal_in_the_middle_of_a_question_leaves_no_answer_for_the_next(meeting):
    def stop(number: int, frame: object) -> None:
        raise Interrupted("asked to stop")

    store = MeetingStore(meeting.meeting, 60)
    store.set("a", "1")
    before = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(Interrupted):
            store.wait(["never"])
    finally:
        signal.signal(signal.SIGALRM, before)
    assert (store.get("a"), store.check(["never"])) == (b"1", False)
    assert not meeting.told


@pytest.mark.parametrize("timeout_s", [30, 1e12])
def test_any_time_can_be_waited_for(timeout_s, meeting):
    store = MeetingStore(meeting.meeting, timeout_s)
    store.set("a", "1")
    store.wait(["a"], timedelta(days=10**6))
    assert store.get("a") == b"1"
    waiting = threading.Thread(target=store.wait, args=(["b"], timedelta(days=10**6)), daemon=True)
    waiting.start()
    MeetingStore(meeting.meeting, 60).set("b", "2")
    waiting.join(60)
    assert not waiting.is_alive()


def test_another_secret_is_one_sentence_on_one_side_and_told_once_on_the_other(meeting):
    wrong = Meeting(port=meeting.meeting.port, secret=b"a guess of somebody else")
    for _ in range(2):
        with pytest.raises(UserError, match=r"has another secret than this host: give all hosts the same with --secr"):
            MeetingStore(wrong, 30)
    assert meeting.works()
    meeting.assert_told_once()


def strangers() -> dict[str, bytes]:
    return {
        "nothing": b"",
        "a browser": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + b"x" * 100,
        "zeros": bytes(64),
        "noise": os.urandom(1 << 20),
        "a pickle": b"\x80\x04cos\nsystem\n(S'true'\ntR." + b"." * 64,
        "a length": struct.pack(">I", 2**32 - 1) * 20,
    }


@pytest.mark.parametrize("what", sorted(strangers()))
def test_garbage_is_refused_and_harms_nobody(what, meeting):
    store = MeetingStore(meeting.meeting, 30)
    with meeting.connection() as stranger, suppress(OSError):  # it may be refused before all of it is sent
        stranger.sendall(strangers()[what])
        stranger.shutdown(socket.SHUT_WR)
        while stranger.recv(1 << 16):
            pass
    store.set("still", "there")
    assert store.get("still") == b"there"
    assert meeting.works()
    meeting.assert_told_once()


def shown(connection: socket.socket) -> tuple[bytes, Seals]:
    """What a client that knows the secret sends first, and its keys."""
    greeting = connection.recv(len(GREETING) + NONCE_BYTES, socket.MSG_WAITALL)
    nonce = new_nonce()
    seals = Seals(SECRET, greeting[len(GREETING) :], nonce, is_service=False)
    return nonce + seals.own_proof(), seals


def is_refused(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def test_a_recorded_proof_opens_no_second_connection(meeting):
    with meeting.connection() as first, meeting.connection() as second:
        recorded, _ = shown(first)
        first.sendall(recorded)
        assert len(first.recv(32, socket.MSG_WAITALL)) == 32
        second.recv(len(GREETING) + NONCE_BYTES, socket.MSG_WAITALL)
        second.sendall(recorded)
        assert is_refused(second)
    assert meeting.works()


@pytest.mark.parametrize("change", ["again", "altered", "from another connection", "too long", "sent back"])
def test_a_message_is_good_once_at_its_place_and_unaltered(change, meeting):
    with meeting.connection() as connection:
        proof, seals = shown(connection)
        connection.sendall(proof)
        connection.recv(32, socket.MSG_WAITALL)
        good = seals.sealed({"do": "add", "keys": ["n"], "with": {"amount": 1}})
        other = Seals(SECRET, new_nonce(), new_nonce(), is_service=False)
        bad = {
            "again": good + good,
            "altered": good.replace(b'"amount": 1', b'"amount": 9'),
            "from another connection": other.sealed({"do": "add", "keys": ["n"], "with": {"amount": 1}}),
            "too long": struct.pack(">I", MAX_BODY_BYTES + 1) + bytes(100),
            "sent back": b"",
        }[change]
        if change == "sent back":
            connection.sendall(good)
            header = connection.recv(36, socket.MSG_WAITALL)
            bad = header + connection.recv(struct.unpack(">I", header[:4])[0], socket.MSG_WAITALL)
        connection.sendall(bad)
        if change == "again":
            header = connection.recv(36, socket.MSG_WAITALL)
            connection.recv(struct.unpack(">I", header[:4])[0], socket.MSG_WAITALL)
        assert is_refused(connection)
    store = MeetingStore(meeting.meeting, 30)
    assert store.add("n", 0) == (1 if change in ("again", "sent back") else 0)
    meeting.assert_told_once()


def test_a_client_asks_for_proof_too():
    """Somebody in the place of the service, who does not know the secret, learns nothing and is not believed."""
    with socket.create_server(("127.0.0.1", 0)) as impostor:

        def pose() -> None:
            for _ in range(3):
                connection, _ = impostor.accept()
                with connection:
                    connection.sendall(GREETING + new_nonce())
                    connection.recv(64, socket.MSG_WAITALL)
                    connection.sendall(bytes(32))

        thread = threading.Thread(target=pose, daemon=True)
        thread.start()
        with pytest.raises(UserError, match="has another secret than this host"):
            MeetingStore(Meeting(port=impostor.getsockname()[1], secret=SECRET), 30)


def test_something_else_at_the_port_is_one_sentence():
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer() -> None:
            connection, _ = other.accept()
            with connection:
                connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n" + bytes(64))

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(UserError, match=r"in use by something else than this Podium: choose another port with lau"):
            MeetingStore(Meeting(port=other.getsockname()[1], secret=SECRET), 30)


def test_an_answer_that_somebody_has_changed_ends_the_connection():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        nonces = new_nonce(), new_nonce()
        channel = Channel(ours, Seals(SECRET, *nonces, is_service=False))
        theirs.sendall(Seals(b"another secret", *nonces, is_service=True).sealed({"answer": "a lie"}))
        with pytest.raises(ConnectionAbortedError, match="changed"):
            channel.ask({"do": "get", "keys": ["x"], "with": {}}, 30)


def test_open_connections_of_strangers_do_not_keep_others_out(meeting):
    silent = [meeting.connection() for _ in range(MAX_UNPROVEN + 20)]
    try:
        assert meeting.works()
        meeting.assert_told_once()
    finally:
        for connection in silent:
            connection.close()


def test_who_shows_nothing_has_to_go_after_a_while(monkeypatch):
    monkeypatch.setattr(services, "PROOF_S", 0.1)
    opened = Open()
    with opened.connection() as half_open:
        half_open.sendall(b"x")
        half_open.recv(len(GREETING) + NONCE_BYTES, socket.MSG_WAITALL)
        assert is_refused(half_open)
    opened.assert_told_once()
    opened.service.close()


def test_a_service_that_has_ended_is_told_from_one_that_is_there(meeting):
    store = MeetingStore(meeting.meeting, 30)
    assert is_open(meeting.meeting, 30)
    assert not nobody_listens(meeting.meeting, 30)
    meeting.service.close()
    with pytest.raises(dist.DistNetworkError, match="the connection to where the instances meet is lost"):
        store.get("x")
    assert not is_open(meeting.meeting, 30)
    assert nobody_listens(meeting.meeting, 30)
    with pytest.raises(dist.DistNetworkError, match="does not answer"):
        MeetingStore(meeting.meeting, 0.1)


def test_in_a_folder_no_port_is_opened_however_long_its_name(tmp_path):
    folder = tmp_path / ("long" * 40)
    folder.mkdir(mode=0o700)
    service = MeetingService(listen_in(folder), b"")
    meeting = Meeting(folder=folder)
    assert Meeting.parse(str(meeting)) == meeting
    store = MeetingStore(meeting, 30)
    store.set("a", "b")
    assert MeetingStore(meeting, 30).get("a") == b"b"
    service.close()
    assert nobody_listens(meeting, 30)


def test_the_secret_is_in_no_text_about_a_meeting(meeting):
    assert SECRET.decode() not in f"{meeting.meeting} {meeting.meeting!r}"
    assert Meeting.parse("10.0.0.1:29400") == Meeting(address="10.0.0.1", port=29400)


def test_messages_are_whole_or_not_there_yet():
    nonces = new_nonce(), new_nonce()
    sends, receives = (Seals(SECRET, *nonces, is_service=side) for side in (True, False))
    sealed = sends.sealed({"answer": 1}) + sends.sealed({"answer": 2})
    received, taken = bytearray(), []
    for byte in sealed:
        received.append(byte)
        if (message := receives.take(received)) is not None:
            taken.append(message["answer"])
    assert (taken, received) == ([1, 2], b"")
    with pytest.raises(BadMessage):
        receives.take(bytearray(sealed))
