"""A language model's server, good and bad, on this machine: an answer or one sentence, in time, and never the key."""

import email.utils
import json
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
    ],
)
def test_a_refusal_is_one_sentence_and_one_call(act, said):
    with Server(act) as server, pytest.raises(Refused, match=said) as refused:
        server.model()(ASK)
    assert len(server.asked) == 1
    words = str(refused.value)
    assert words.startswith("a-model at 127.0.0.1: ") and words.endswith(".") and "\n" not in words
    assert KEY not in words and "sk-te" not in words


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


def test_no_traceback_shows_the_key(monkeypatch):
    with Server(sends({}, 401)) as server:
        model = server.model()
        with pytest.raises(Refused) as refused:
            model(ASK)

        def interrupted(*_):
            raise KeyboardInterrupt

        monkeypatch.setattr(endpoint.http.client.HTTPResponse, "begin", interrupted)
        with pytest.raises(KeyboardInterrupt) as stopped:
            model(ASK)
    for shown in (with_variables(refused.value), with_variables(stopped.value), repr(model), str(model), f"{model!r}"):
        assert KEY not in shown and "a-model" in shown
    assert "[key]" in with_variables(stopped.value)


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
        ("http://host.example/v1", "m", KEY, "for everybody to read"),
        ("https://host/v1", "m", f"{KEY}\r\nX: y", "no key has"),
    ],
)
def test_what_cannot_be_asked_is_said_before_anything_is_sent(environment, address, model, key, said):
    environment(address, model, key)
    with pytest.raises(machine.NotReady, match=said) as refused:
        endpoint.from_environment()
    assert KEY not in str(refused.value)
