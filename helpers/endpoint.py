"""Ask a language model, at any address that speaks OpenAI's chat completions, with a key that shows up nowhere.

Address, key and model come from the environment (`HELPERS_ENDPOINT`, `HELPERS_ENDPOINT_KEY`, `HELPERS_MODEL`), so that
no notebook holds them. Whatever arrives is data: it is cut where it is long, and searched for the key before anybody
sees it. A redirect is not followed, since the key would travel with it.
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
from dataclasses import dataclass
from urllib.parse import urlsplit

from . import machine

ADDRESS, KEY, MODEL = "HELPERS_ENDPOINT", "HELPERS_ENDPOINT_KEY", "HELPERS_MODEL"
MOST_BYTES = 1 << 22
"""Of one answer."""

AGAIN = {408, 409, 425, 429, 500, 502, 503, 504, 529}
"""HTTP statuses after which the same question may be answered a little later."""

_KEYS = re.compile(r"\b(?:sk|key)-[\w*.-]{5,}[\w*]|(?<=Bearer )[\w*.-]{5,}[\w*]")
"""What a server shows of a key when it refuses it."""

HERE = ("localhost", "127.0.0.1", "::1")


class Refused(machine.Plain, RuntimeError):
    """No answer came: one sentence says why. calls, seconds: what asking has cost all the same."""

    def __init__(self, sentence: str, calls: int, seconds: float):
        super().__init__(sentence)
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
    its last byte. tries, patience: the most calls for one question, and the seconds for all of them with their pauses.
    No proxy is used. Raises `machine.NotReady` for an address or a key that cannot be used as it is.
    """

    address: str
    model: str
    key: str = ""
    seconds: float = 180
    tries: int = 5
    patience: float = 400

    def __post_init__(self):
        object.__setattr__(self, "key", _Key(self.key.strip()))
        said, mend = f"{ADDRESS} holds no address that can be asked", f"export {ADDRESS}=https://HOST/v1"
        try:
            parts = urlsplit(self.address)
            is_one = parts.port != 0 and bool(parts.hostname) and bool(re.fullmatch(r"[!-~]+", self.address))
        except ValueError:  # a port that is no number; half an IPv6 address
            is_one = False
        if not is_one or parts.scheme not in ("http", "https"):
            raise machine.NotReady(f"{said}: it is not of the form https://HOST/v1.", mend)
        if parts.username or parts.password:
            raise machine.NotReady(f"{said}: it holds a password, which others could see.", f"export {KEY}=… instead")
        if not re.fullmatch(r"[!-~]*", self.key):
            raise machine.NotReady(f"{KEY} holds a character that no key has.", f"export {KEY}=… again, in one line")
        if self.key and parts.scheme == "http" and parts.hostname not in HERE:
            raise machine.NotReady(
                f"The key would travel to {parts.hostname} for everybody to read.", f"export {ADDRESS}=https://…"
            )

    def __repr__(self) -> str:
        return f"{self.model} at {urlsplit(self.address).hostname}"

    def __call__(self, messages: list[dict]) -> Reply:
        """The model's answer to a conversation: `[{"role": "user", "content": "…"}]`.

        Refusals that pass (429, 5xx, a lost connection) are answered by asking again, after the time that the server
        names or twice as long as before. Raises `Refused`.
        """
        began = time.monotonic()
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
                    later = f", and it asks to wait for {wait:,.0f} s" if trouble.wait and calls < self.tries else ""
                    said += f" Asked {calls} times in {taken:.0f} s{later}."
            else:
                return Reply(text, problem, calls, time.monotonic() - began, tokens)
            raise Refused(self._clean(_KEYS.sub("[key]", said)), calls, time.monotonic() - began)

    # ---- one call ----

    def _post(self, messages: list[dict]) -> bytes:
        """The body of a good answer, in `seconds` whatever the server does. Raises `_Trouble`."""
        parts = urlsplit(self.address)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection, late = kind(parts.hostname, parts.port, timeout=self.seconds), threading.Event()
        path = f"{parts.path.rstrip('/')}/chat/completions" + (f"?{parts.query}" if parts.query else "")
        timer, began = None, time.monotonic()
        try:
            connection.connect()
            timer = threading.Timer(self.seconds, _shut, (connection.sock, late))  # a drip keeps any timeout at bay
            timer.daemon = True
            timer.start()
            headers = {"Content-Type": "application/json", "User-Agent": "gpu-kernel-ladder"}
            if self.key:
                headers["Authorization"] = _Key(f"Bearer {self.key}")
            connection.request("POST", path, json.dumps({"model": self.model, "messages": messages}).encode(), headers)
            response = connection.getresponse()
            body = response.read(MOST_BYTES + 1)
        except ssl.SSLCertVerificationError as error:
            raise _Trouble(f"its certificate is not to be trusted ({error.verify_message}).") from None
        except (OSError, http.client.HTTPException, ValueError, AttributeError) as error:
            if late.is_set() or isinstance(error, TimeoutError):
                late.set()
            elif isinstance(error, socket.gaierror):
                raise _Trouble("no machine has this name, or there is no network.") from None
            else:
                why = str(error) or type(error).__name__
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
        try:
            told = json.loads(body)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            told = ""
        told = re.sub(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]", " ", told) if isinstance(told, str) else ""
        told = f": {' '.join(told.split())[:300].rstrip('.')}" if told.strip() else ""
        return _Trouble(f"{why} (HTTP {status}){told}.", status in AGAIN, _seconds(retry_after))

    def _read(self, body: bytes) -> tuple[str, str, int]:
        """(text, problem, tokens) of a good answer's body. Nothing in it is taken for granted."""
        try:
            said = json.loads(body)
        except (ValueError, RecursionError):
            beginning = _KEYS.sub("[key]", self._clean(" ".join(body[:80].decode(errors="replace").split())))
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
        return text.replace(self.key, "[key]") if self.key else text


def from_environment(**options) -> Endpoint | None:
    """The endpoint that the environment names; None where it names none. Raises `machine.NotReady`, a sentence."""
    address, model = (os.environ.get(name, "").strip() for name in (ADDRESS, MODEL))
    if not address:
        return None
    if not model:
        raise machine.NotReady(f"{ADDRESS} is set, and {MODEL} is not.", f"export {MODEL}=NAME, one that it serves")
    return Endpoint(address, model, os.environ.get(KEY, ""), **options)


def _shut(sock: socket.socket, late: threading.Event) -> None:
    late.set()
    try:
        sock.shutdown(socket.SHUT_RDWR)
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
    except ValueError:
        return None
