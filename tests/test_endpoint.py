"""A language model's server, good and bad, on this machine: an answer or one sentence, in time, and never the key."""

import email.utils
import json
import re
import shutil
import socket
import ssl
import subprocess
import threading
import time
import traceback
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from helpers import endpoint, machine
from helpers.endpoint import Endpoint, Refused

KEY = "sk-test-4711-abcdefgh"
ASK = [{"role": "user", "content": "Write a kernel."}]


class Server(ThreadingHTTPServer):
    """Answers each question with the next of `plan`, the last one again and again; keeps what it was asked."""

    daemon_threads = True

    def __init__(self, *plan):
        super().__init__(("127.0.0.1", 0), Handler)
        self.plan, self.asked, self.over = list(plan), [], threading.Event()
        self.address = f"http://127.0.0.1:{self.server_port}/v1"

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.over.set()
        self.shutdown()
        self.server_close()

    def model(self, **options) -> Endpoint:
        return Endpoint(self.address, "a-model", KEY, **options)


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append({"path": self.path, "key": self.headers["Authorization"], **body})
        plan = self.server.plan
        act = plan.pop(0) if len(plan) > 1 else plan[0]
        act(self)

    def log_message(self, *_):
        pass


def sends(body, status=200, **headers):
    """A response; `body` is bytes, or what is sent as JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()

    def act(handler):
        handler.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(data)

    return act


def says(text, **more):
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": "stop", **more}
    return sends({"choices": [choice], "usage": {"total_tokens": 30}})


HEAD = b"HTTP/1.1 200 OK\r\nX: a\r\n\r\n"


def hangs(handler):
    handler.server.over.wait(20)


def drips(first):
    """`first`, and then one byte after another for ever: no single read of it takes long."""

    def act(handler):
        handler.wfile.write(first)
        while not handler.server.over.wait(0.02):
            try:
                handler.wfile.write(b"x")
            except OSError:
                return

    return act


def drops(handler):
    handler.connection.close()


def raw(data):
    """Bytes in place of a response, and then the end of the connection."""

    def act(handler):
        handler.wfile.write(data)
        handler.connection.shutdown(socket.SHUT_RDWR)

    return act


@pytest.fixture
def pauses(monkeypatch):
    """The pauses between calls, which are not made."""
    made = []
    monkeypatch.setattr(endpoint.time, "sleep", made.append)
    return made


def test_an_answer_and_what_it_cost():
    with Server(says("```python\nx = 1\n```")) as server:
        reply = server.model()(ASK)
    assert (reply.text, reply.problem, reply.calls, reply.tokens) == ("```python\nx = 1\n```", "", 1, 30)
    assert 0 < reply.seconds < 5
    [asked] = server.asked
    assert asked == {"path": "/v1/chat/completions", "key": f"Bearer {KEY}", "model": "a-model", "messages": ASK}


def test_a_slow_answer_is_waited_for():
    def slow(handler):
        handler.server.over.wait(0.4)
        says("at last")(handler)

    with Server(slow) as server:
        reply = server.model(seconds=20)(ASK)
    assert reply.text == "at last" and 0.4 <= reply.seconds < 10 and reply.calls == 1


def test_without_a_key_none_is_sent():
    with Server(says("yes")) as server:
        Endpoint(f"{server.address}/?version=1", "m")(ASK)
    assert server.asked[0]["key"] is None and server.asked[0]["path"] == "/v1/chat/completions?version=1"


def test_what_passes_is_asked_again_each_time_later(pauses):
    plan = [sends({}, 500), drops, sends(b"busy", 503), sends({"error": {"message": "slow down"}}, 429), says("there")]
    with Server(*plan) as server:
        reply = server.model()(ASK)
    assert (reply.text, reply.calls) == ("there", 5)
    assert all(0.8 * 2**i <= pause <= 1.2 * 2**i for i, pause in enumerate(pauses)) and len(pauses) == 4


@pytest.mark.parametrize("named", [lambda: "7", lambda: email.utils.formatdate(time.time() + 8, usegmt=True)])
def test_a_server_says_when(pauses, named):
    with Server(sends({}, 429, Retry_After=named()), sends({}, 429, Retry_After="nonsense"), says("there")) as server:
        assert server.model()(ASK).calls == 3
    assert 6 <= pauses[0] <= 8 and 1.6 <= pauses[1] <= 2.4


def test_patience_ends(pauses):
    with Server(sends({}, 429)) as server, pytest.raises(Refused, match=r"too many.*Asked 3 times") as refused:
        server.model(tries=3)(ASK)
    assert refused.value.calls == 3 and len(server.asked) == 3
    with Server(sends({}, 503, Retry_After="3600")) as server, pytest.raises(Refused, match="wait for 3,600 s"):
        server.model()(ASK)
    assert len(server.asked) == 1 and len(pauses) == 2


@pytest.mark.parametrize("act", [hangs, drips(HEAD[:-2]), drips(HEAD)], ids=["hangs", "drips a head", "drips"])
def test_a_server_that_never_ends_is_left(act):
    began = time.monotonic()
    with Server(act) as server, pytest.raises(Refused, match="no answer in .* given up"):
        server.model(seconds=0.5)(ASK)
    assert time.monotonic() - began < 5 and len(server.asked) == 1  # the same question would take as long again


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (sends({"error": {"message": f"Incorrect API key provided: {KEY}."}}, 401), "does not accept the key"),
        (sends({"error": {"message": "Incorrect API key provided: sk-te****efgh."}}, 401), "does not accept the key"),
        (sends({"error": "no"}, 403), "HTTP 403"),
        (sends(b"<html>", 404), "no such address or no model 'a-model'"),
        (sends({"error": {"message": ["odd"]}}, 400), "it refused .HTTP 400.[.]"),
        (sends({"error": {"message": "a\x1b[2J\nb\ud800c."}}, 400), r"400\): a \[2J b c\.$"),
        (sends(b"", 307, Location="http://127.0.0.1:9/"), "elsewhere"),
        (sends(b" " * (endpoint.MOST_BYTES + 5)), "longer than 4 MiB"),
        (sends(b"[" * 100_000, 400), "it refused .HTTP 400.[.]$"),
        (sends({"error": "model 'q' not found"}, 400), "400.: model 'q' not found[.]$"),
        (sends([{"error": {"message": "too small a quota"}}], 400), "400.: too small a quota[.]$"),
        (sends({"detail": "Not authenticated"}, 403), "403.: Not authenticated[.]$"),
    ],
)
def test_a_refusal_is_one_sentence_and_one_call(act, said):
    with Server(act) as server, pytest.raises(Refused, match=said) as refused:
        server.model()(ASK)
    assert len(server.asked) == 1
    words = str(refused.value)
    assert words.startswith("a-model at 127.0.0.1: ") and words.endswith(".") and "\n" not in words
    assert KEY not in words and "sk-te" not in words


CUT = b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{"
CHUNKS = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (raw(CUT), "ended before the answer did"),
        (raw(CHUNKS + b"10\r\n{"), "ended before the answer did"),
        (raw(CHUNKS + b"zz\r\n{"), "ended before the answer did"),
        (raw(b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 200 + b"\r\n"), "more than 100 headers"),
        (raw(b"\x1b[2J" + b"A" * 60_000 + b"\r\n\r\n"), r"connection failed \(\[2JA{290,300}\)"),
        (raw(f"HTTP/1.1 no to {KEY}\r\n\r\n".encode()), r"no to \[key\]"),
    ],
    ids=["a length", "chunks", "no chunk", "headers", "a long line", "the key in it"],
)
def test_what_breaks_off_or_is_no_http_is_asked_again_and_told_in_a_sentence(pauses, act, said):
    with Server(act) as server, pytest.raises(Refused, match=said) as refused:
        server.model(tries=2)(ASK)
    words = str(refused.value)
    assert len(server.asked) == 2 and len(words) < 500 and words.isprintable() and KEY not in words


@pytest.mark.parametrize(
    "act",
    [drips(CHUNKS + b"0\r\n"), lambda handler: [handler.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n" * 1000)] * 9],
    ids=["a foot", "go on"],
)
def test_a_server_that_goes_on_without_an_answer_is_left(act):
    def until_closed(handler):
        try:
            while not handler.server.over.is_set():
                act(handler)
        except OSError:
            return

    with Server(until_closed) as server, pytest.raises(Refused, match="no answer in .* given up"):
        server.model(seconds=0.5)(ASK)


OTHER = "AIzaSy" + "4711abcdefgh" * 4
"""A key of a form that no pattern knows."""


@pytest.mark.parametrize("before", [0, 30, 45, 60, 75, 240, 270, 290])
def test_half_a_key_is_not_shown_either(before):
    """What is cut where it is long is cut after the key was taken out."""
    dots = "." * before
    with Server(sends({"error": {"message": f"{dots} {OTHER}"}}, 401), sends(f"<{dots} {OTHER}".encode())) as server:
        model = Endpoint(server.address, "m", OTHER)
        with pytest.raises(Refused) as refused:
            model(ASK)
        problem = model(ASK).problem
    for words in (str(refused.value), problem):
        assert "AIzaSy" not in words and "4711" not in words and "." * min(before, 70) in words


def test_a_long_page_is_read_in_no_time():
    began = time.monotonic()
    with Server(sends(b"A" * (endpoint.MOST_BYTES - 1)), sends(b"<" + b"sk-." * 1_000_000)) as server:
        model = server.model()
        assert "no JSON" in model(ASK).problem and "no JSON" in model(ASK).problem
    assert time.monotonic() - began < 20


def test_a_page_that_is_no_text_brings_no_orders_to_a_terminal():
    with Server(sends(b"\x1f\x8b\x1b[31m\x07<html>")) as server:
        assert server.model()(ASK).problem.isprintable()


@pytest.mark.parametrize("zone", ["+99999999999999999999", "-99999999999999", "+9999"])
def test_a_time_that_is_none_is_no_time(pauses, zone):
    with Server(sends({}, 503, Retry_After=f"Mon, 01 Jan 2024 00:00:00 {zone}"), says("there")) as server:
        assert server.model()(ASK).text == "there"
    assert 0.8 <= pauses[0] <= 1.2


@pytest.mark.parametrize("word", ["x", "none", "EMPTY"])
def test_a_word_in_place_of_a_key_changes_no_code(word):
    """A server on this machine is given any word; it stands in the code as well."""
    code = "```python\nx = None if EMPTY else none(max)\n```"
    with Server(says(code)) as server:
        assert Endpoint(server.address, "m", word)(ASK).text == code


def test_an_address_in_numbers_of_ipv6():
    with pytest.raises(Refused, match="::1: (?!no machine)"):
        Endpoint("http://[::1]/v1", "m", tries=1, seconds=5)(ASK)


def test_no_proxy_hears_of_it(monkeypatch):
    with Server(says("to the proxy")) as proxy, Server(says("to the model")) as server:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.address.removesuffix("/v1"))
        assert server.model()(ASK).text == "to the model"
    assert proxy.asked == []


@pytest.fixture
def https(tmp_path, monkeypatch):
    """A function that gives a server TLS, with a certificate that is made here; `trusted` makes it one."""
    if not shutil.which("openssl"):
        pytest.skip("openssl, which makes a certificate for the test, is not installed")
    made = ["-nodes", "-keyout", tmp_path / "key", "-out", tmp_path / "cert", "-days", "2", "-subj", "/CN=localhost"]
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", *made, *names], check=True, capture_output=True)

    def begin(server, trusted):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tmp_path / "cert", tmp_path / "key")
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        server.address = server.address.replace("http:", "https:")
        if trusted:
            monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert"))
        return server

    return begin


def test_https_asks_those_who_show_who_they_are(https):
    with https(Server(says("there")), trusted=False) as server:
        with pytest.raises(Refused, match="certificate is not to be trusted"):
            server.model()(ASK)
        assert server.asked == []
    with https(Server(says("there")), trusted=True) as server:
        assert server.model()(ASK).text == "there" and server.asked[0]["key"] == f"Bearer {KEY}"


@pytest.mark.parametrize("act", [hangs, drips(HEAD)], ids=["hangs", "drips"])
def test_https_that_never_ends_is_left_and_nothing_goes_on_in_the_open(https, monkeypatch, act):
    shut, shutdown = [], ssl.SSLSocket.shutdown

    def watched(self, how):
        shut.append(self.server_side)
        shutdown(self, how)

    monkeypatch.setattr(ssl.SSLSocket, "shutdown", watched)
    began = time.monotonic()
    with https(Server(act), trusted=True) as server, pytest.raises(Refused, match="no answer in .* given up"):
        server.model(seconds=1)(ASK)
    assert time.monotonic() - began < 6
    assert False not in shut  # what Python sends after this one goes out as it is


def test_nobody_there(pauses):
    with pytest.raises(Refused, match="connection failed.*refused.*Asked 2 times"):
        Endpoint("http://127.0.0.1:9/v1", "m", tries=2)(ASK)
    with pytest.raises(Refused, match="no machine has this name"):
        Endpoint("https://no-such-host.invalid/v1", "m", KEY)(ASK)


ODD = [
    *(b"", b"<html>busy</html>", b"\xff\xfe", b'{"choices": [', b"[]", b"null", b"3", b"{}", b"[" * 100_000),
    *(b'{"choices": []}', b'{"choices": {}}', b'{"choices": [null]}', b'{"choices": [{"message": "text"}]}'),
    *(b'{"choices": [{"message": {"content": null}}]}', b'{"choices": [{"message": {"content": 7}}], "usage": []}'),
    *(b'{"choices": [{"message": {"content": " \\n"}}], "usage": {"total_tokens": "many"}}',),
    *(b'{"choices": [{"message": {"content": [null, 3]}}], "usage": {"total_tokens": -1}}',),
    *(b'{"choices": [{"message": {"content": ""}, "finish_reason": "length"}]}',),
]


@pytest.mark.parametrize("body", ODD, ids=lambda body: body[:60].decode(errors="replace"))
def test_an_answer_that_holds_nothing_says_so(body):
    with Server(sends(body)) as server:
        reply = server.model()(ASK)
    assert reply.text == "" and reply.problem.endswith(".") and reply.tokens == 0 and reply.calls == 1


def test_parts_and_an_answer_that_was_cut():
    with Server(says([{"type": "text", "text": "a"}, {"text": "b"}], finish_reason="length")) as server:
        reply = server.model()(ASK)
    assert reply.text == "ab" and "cut off" in reply.problem


def test_the_key_is_taken_out_of_what_comes_back():
    with Server(says(f"Your key is {KEY}!")) as server:
        assert server.model()(ASK).text == "Your key is [key]!"


def with_variables(error) -> str:
    """A traceback as a notebook may be set to print it: with the variables of each frame."""
    return "".join(traceback.TracebackException.from_exception(error, capture_locals=True).format())


@pytest.mark.parametrize("at", ["HTTPConnection.send", "HTTPConnection.endheaders", "HTTPResponse.begin"])
def test_no_traceback_shows_the_key(monkeypatch, at):
    """Also not that of a stop while the question, with the key in its head, is on its way."""

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    with Server(sends({}, 401)) as server:
        model = server.model()
        with pytest.raises(Refused) as refused:
            model(ASK)
        kind, _, name = at.partition(".")
        monkeypatch.setattr(getattr(endpoint.http.client, kind), name, interrupted)
        with pytest.raises(endpoint.Stopped, match="You stopped it") as stopped:
            model(ASK)
    assert stopped.value.calls == 1 and stopped.value.seconds > 0 and isinstance(stopped.value, KeyboardInterrupt)
    for shown in (with_variables(refused.value), with_variables(stopped.value), repr(model), str(model), f"{model!r}"):
        assert KEY not in shown and "a-model" in shown


def test_a_stop_in_a_pause_tells_what_was_asked(monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(endpoint.time, "sleep", interrupted)
    with Server(sends({}, 503)) as server, pytest.raises(endpoint.Stopped) as stopped:
        server.model()(ASK)
    assert stopped.value.calls == len(server.asked) == 1


@pytest.fixture
def environment(monkeypatch):
    def set_to(address=None, model=None, key=None):
        for name, value in ((endpoint.ADDRESS, address), (endpoint.MODEL, model), (endpoint.KEY, key)):
            monkeypatch.delenv(name, raising=False)
            if value is not None:
                monkeypatch.setenv(name, value)

    return set_to


def test_the_environment_names_it(environment):
    environment()
    assert endpoint.from_environment() is None
    environment("https://host.example/v1", "m", f" {KEY}\n")
    found = endpoint.from_environment(seconds=3)
    assert (found.address, found.model, str(found.key), found.seconds) == ("https://host.example/v1", "m", KEY, 3)
    environment("http://localhost:8000/v1", "m")
    assert endpoint.from_environment().key == ""


@pytest.mark.parametrize(
    ("address", "model", "key", "said"),
    [
        ("https://host/v1", None, KEY, "HELPERS_MODEL is not"),
        ("file:///etc/passwd", "m", KEY, "not of the form"),
        ("host/v1", "m", KEY, "not of the form"),
        ("https://host:many/v1", "m", KEY, "not of the form"),
        ("https://[::1/v1", "m", KEY, "not of the form"),
        (f"https://host/v1?key={KEY} ü", "m", KEY, "not of the form"),
        (f"https://me:{KEY}@host/v1", "m", "", "holds a password"),
        (f"https://host/v1?api-key={KEY}", "m", "", "holds a password or a key"),
        (f"https://host/v1?v=1&access_token={KEY}", "m", "", "holds a password or a key"),
        ("http://host.example/v1", "m", KEY, "for everybody to read"),
        ("https://host/v1", "m", f"{KEY}\r\nX: y", "no key has"),
    ],
)
def test_what_cannot_be_asked_is_said_before_anything_is_sent(environment, address, model, key, said):
    environment(address, model, key)

    def asked():  # this test's own variables stand in no frame of the traceback
        return endpoint.from_environment()

    try:
        asked()
    except machine.NotReady as refused:
        error = refused.with_traceback(refused.__traceback__.tb_next)
    assert re.search(said, str(error)) and KEY not in str(error) + with_variables(error)
