"""Ask a language model, at any address that speaks OpenAI's chat completions, with a key that shows up nowhere.

Address, key and model come from the environment (`HELPERS_ENDPOINT`, `HELPERS_ENDPOINT_KEY`, `HELPERS_MODEL`), so that
no notebook holds them. Whatever arrives is data: it is searched for the key before anybody sees it, and then cut where
it is long. A redirect is not followed, since the key would travel with it.
"""

import email.utils
import http.client
import itertools
import json
import os
import random
import re
import socket
import ssl
import threading
import time
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, urlsplit

from . import child, machine

ADDRESS, KEY, MODEL = "HELPERS_ENDPOINT", "HELPERS_ENDPOINT_KEY", "HELPERS_MODEL"
MOST_BYTES = 1 << 22
"""Of one answer."""

AGAIN = {408, 409, 425, 429, 500, 502, 503, 504, 529}
"""HTTP statuses after which the same question may be answered a little later."""

_KEYS = re.compile(r"\b(?:sk|key)-[\w*.-]{5,}[\w*]|(?<=Bearer )[\w*.-]{5,}[\w*]|[\w.-]{0,40}\*{3,}[\w*.-]*")
"""What a server shows of a key when it refuses it."""

_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")

SHORTEST = 8
"""Characters of a key. What is shorter ("none", "EMPTY") is a word that a server without keys is given: to take it out
of an answer would change code."""

HERE = ("localhost", "127.0.0.1", "::1")


class Refused(machine.Plain, RuntimeError):
    """No answer came: one sentence says why. calls, seconds: what asking has cost all the same."""

    def __init__(self, sentence: str, calls: int, seconds: float):
        super().__init__(sentence)
        self.calls, self.seconds = calls, seconds


class Stopped(machine.Plain, KeyboardInterrupt):
    """Ctrl-C, or a notebook's stop button, while a model was asked; calls, seconds: as of `Refused`."""

    def __init__(self, calls: int, seconds: float):
        super().__init__(f"You stopped it, {seconds:.0f} s after the model was asked.")
        self.calls, self.seconds = calls, seconds


@dataclass(frozen=True)
class Reply:
    """What came back: the model's text, and what it cost: calls (refused ones too), seconds, and tokens, where told.

    problem: why the text is empty or ends early, in one sentence. about: of a stored answer, what it is.
    """

    text: str
    problem: str = ""
    calls: int = 1
    seconds: float = 0.0
    tokens: int = 0
    about: str = ""


class _Key(str):
    """A text that shows itself nowhere: not in a traceback that prints variables either."""

    def __repr__(self) -> str:
        return "'[key]'"


class _Trouble(Exception):
    """One call that gave no answer. again: whether another may; wait: seconds until then, where the server said."""

    def __init__(self, sentence: str, again: bool = False, wait: float | None = None):
        super().__init__(sentence)
        self.again, self.wait = again, wait


@dataclass(frozen=True, repr=False)
class Endpoint:
    """address: up to and without /chat/completions. seconds: the longest that one call may take, from its connection to
    its last byte. tries, patience: the most calls for one question, and the seconds after which none is begun. No proxy
    is used. Raises `machine.NotReady` for an address or a key that cannot be used as it is.
    """

    address: str
    model: str
    key: str = ""
    seconds: float = 180
    tries: int = 5
    patience: float = 400
    host: str = field(init=False, default="nowhere")

    def __post_init__(self):
        object.__setattr__(self, "key", _Key(self.key.strip()))
        if unusable := _unusable(self.address, self.key):
            raise machine.NotReady(*unusable)
        object.__setattr__(self, "host", urlsplit(self.address).hostname)

    def __repr__(self) -> str:
        return f"{self.model} at {self.host}"

    def __call__(self, messages: list[dict]) -> Reply:
        """The model's answer to a conversation: `[{"role": "user", "content": "…"}]`.

        Refusals that pass (429, 5xx, a lost connection) are answered by asking again, after the time that the server
        names or twice as long as before. Raises `Refused`.
        """
        began, calls = time.monotonic(), 0
        try:
            for calls in itertools.count(1):
                try:
                    text, problem, tokens = self._read(self._post(messages))
                except _Trouble as trouble:
                    wait = 2.0 ** (calls - 1) * random.uniform(0.8, 1.2) if trouble.wait is None else trouble.wait
                    taken, said = time.monotonic() - began, f"{self!r}: {trouble}"
                    if trouble.again and calls < self.tries and taken + wait < self.patience:
                        time.sleep(wait)
                        continue
                    if trouble.again:
                        is_long = trouble.wait and calls < self.tries
                        later = f", and it asks to wait for {wait:,.0f} s" if is_long else ""
                        said += f" Asked {calls} times in {taken:.0f} s{later}."
                else:
                    return Reply(text, problem, calls, time.monotonic() - began, tokens)
                raise Refused(self._clean(said), calls, time.monotonic() - began)
        except KeyboardInterrupt:  # without the frames that held the question's head, and so the key
            raise Stopped(calls, time.monotonic() - began) from None

    # ---- one call ----

    def _post(self, messages: list[dict]) -> bytes:
        """The body of a good answer, in `seconds` whatever the server does. Raises `_Trouble`."""
        parts = urlsplit(self.address)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        # with a port, or `http.client` would take the last part of an IPv6 address for one
        connection = kind(parts.hostname, parts.port or kind.default_port, timeout=self.seconds)
        path = f"{parts.path.rstrip('/')}/chat/completions" + (f"?{parts.query}" if parts.query else "")
        timer, late, began = None, threading.Event(), time.monotonic()
        try:
            connection.connect()
            left = max(0.0, began + self.seconds - time.monotonic())
            timer = threading.Timer(left, _shut, (connection.sock, late))  # a drip keeps any timeout at bay
            timer.daemon = True
            timer.start()
            headers = {"Content-Type": "application/json", "User-Agent": "gpu-kernel-ladder"}
            if self.key:
                headers["Authorization"] = _Key(f"Bearer {self.key}")
            connection.request("POST", path, json.dumps({"model": self.model, "messages": messages}).encode(), headers)
            response = connection.getresponse()
            body = response.read(MOST_BYTES + 1)
            if response.length and len(body) <= MOST_BYTES:  # which `read` takes for an end
                raise http.client.IncompleteRead(body, response.length)
        except ssl.SSLCertVerificationError as error:
            raise _Trouble(f"its certificate is not to be trusted ({error.verify_message}).") from None
        except (OSError, http.client.HTTPException, ValueError, AttributeError) as error:
            if late.is_set() or isinstance(error, TimeoutError):
                late.set()
            elif isinstance(error, socket.gaierror):
                raise _Trouble("no machine has this name, or there is no network.") from None
            elif isinstance(error, http.client.IncompleteRead):
                raise _Trouble("the connection ended before the answer did.", again=True) from None
            else:  # what it says may be the server's words
                why = self._words(str(error)) or type(error).__name__
                raise _Trouble(f"the connection failed ({why}).", again=True) from None
        finally:
            if timer:
                timer.cancel()
            connection.close()
        if late.is_set():
            raise _Trouble(f"no answer in {time.monotonic() - began:.0f} s, and it was given up.")
        if len(body) > MOST_BYTES:
            raise _Trouble(f"its answer is longer than {MOST_BYTES >> 20} MiB.")
        if response.status != 200:
            raise self._refusal(response.status, response.headers.get("Retry-After"), body)
        return body

    def _refusal(self, status: int, retry_after: str | None, body: bytes) -> _Trouble:
        if 300 <= status < 400:
            return _Trouble(f"it sends the question elsewhere (HTTP {status}), and the key does not travel.")
        why = {
            401: f"it does not accept the key in {KEY}",
            403: f"it does not let the key in {KEY} do this",
            404: f"it has no such address or no model {self.model!r} ({ADDRESS} ends before /chat/completions)",
            429: "it has had too many questions",
        }.get(status, "it refused")
        told = self._words(_told(body)).rstrip(".")
        return _Trouble(f"{why} (HTTP {status}){told and ': '}{told}.", status in AGAIN, _seconds(retry_after))

    def _read(self, body: bytes) -> tuple[str, str, int]:
        """(text, problem, tokens) of a good answer's body. Nothing in it is taken for granted."""
        try:
            said = json.loads(body)
        except (ValueError, RecursionError):
            beginning = self._words(body.decode(errors="replace"), 80)
            return "", f"The endpoint's answer is no JSON: it begins with `{beginning}`.", 0
        usage = said.get("usage") if isinstance(said, dict) else None
        tokens = usage.get("total_tokens") if isinstance(usage, dict) else 0
        tokens = tokens if type(tokens) is int and 0 <= tokens < 1 << 40 else 0
        choices = said.get("choices") if isinstance(said, dict) else None
        choice = choices[0] if isinstance(choices, list) and choices else None
        message = choice.get("message") if isinstance(choice, dict) else None
        if not isinstance(message, dict):
            return "", "The endpoint's answer holds no choice with a message.", tokens
        text = message.get("content")
        if isinstance(text, list):  # in parts
            text = "".join(str(part.get("text", "")) for part in text if isinstance(part, dict))
        is_cut = choice.get("finish_reason") == "length"
        if not isinstance(text, str) or not text.strip():
            why = "it thought until its length was spent" if is_cut else "the model said nothing"
            return "", f"The message is empty: {why}.", tokens
        return self._clean(text), "The answer was cut off at its greatest length." if is_cut else "", tokens

    def _clean(self, text: str) -> str:
        """A text without the key."""
        return text.replace(self.key, "[key]") if len(self.key) >= SHORTEST else text

    def _words(self, text: str, most: int = 300) -> str:
        """What a server wrote, for a sentence: in one line, and cut after the key is out, for half a key is one too."""
        begins = self._clean(text)[: most + 500]  # a body may be long, and the end of this part is not shown
        return " ".join(_CONTROLS.sub(" ", _KEYS.sub("[key]", begins)).split())[:most]


def from_environment(**options) -> Endpoint | None:
    """The endpoint that the environment names; None where it names none. Raises `machine.NotReady`, a sentence."""
    # an address may hold a password, and then no traceback is to show it
    address, model = _Key(os.environ.get(ADDRESS, "").strip()), os.environ.get(MODEL, "").strip()
    if not address:
        return None
    if not model:
        raise machine.NotReady(f"{ADDRESS} is set, and {MODEL} is not.", f"export {MODEL}=NAME, one that it serves")
    return Endpoint(address, model, _Key(os.environ.get(KEY, "")), **options)


def _unusable(address: str, key: str) -> tuple[str, str] | None:
    """Why an address cannot be asked with this key, and what mends it; it is returned, since a traceback that begins
    here would show the parts of the address."""
    said, mend = f"{ADDRESS} holds no address that can be asked", f"export {ADDRESS}=https://HOST/v1"
    try:
        parts = urlsplit(address)
        is_one = parts.port != 0 and bool(parts.hostname) and bool(re.fullmatch(r"[!-~]+", address))
    except ValueError:  # a port that is no number; half an IPv6 address
        is_one = False
    if not is_one or parts.scheme not in ("http", "https"):
        return f"{said}: it is not of the form https://HOST/v1.", mend
    names = [name.replace("-", "_") for name, _ in parse_qsl(parts.query)]
    if parts.username or parts.password or any(map(child.SECRET.search, names)):
        return f"{said}: it holds a password or a key, which others could see.", f"export {KEY}=… instead"
    if not re.fullmatch(r"[!-~]*", key):
        return f"{KEY} holds a character that no key has.", f"export {KEY}=… again, in one line"
    if key and parts.scheme == "http" and parts.hostname not in HERE:
        return f"The key would travel to {parts.hostname} for everybody to read.", f"export {ADDRESS}=https://…"
    return None


def _told(body: bytes) -> str:
    """What a server says of its refusal, in OpenAI's form or in one of those that others have."""
    try:
        said = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    said = said[0] if isinstance(said, list) and said else said
    for name in ("error", "message", "detail"):
        said = said.get(name, said) if isinstance(said, dict) else said
    return said if isinstance(said, str) else ""


def _shut(sock: socket.socket, late: threading.Event) -> None:
    late.set()
    try:
        socket.socket.shutdown(sock, socket.SHUT_RDWR)  # TLS's own would go on without encryption
    except OSError:
        return  # it is closed already


def _seconds(retry_after: str | None) -> float | None:
    """Seconds that a Retry-After header names, as a number or as a date."""
    if not retry_after:
        return None
    try:
        return max(0.0, min(float(retry_after), 1e6))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None
