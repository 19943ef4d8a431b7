"""Kernels written by a model: what it is told, what becomes of any answer, and a loop that keeps the best."""

import json
import re
import time
from dataclasses import replace

import pytest
import torch

from helpers import ROOT, author, child, endpoint, exercises, machine
from helpers.author import code_in
from helpers.checks import Price
from tests.answers import solved
from tests.test_endpoint import KEY, Server, drops, hangs, says, sends

STORED = author.candidates("12_3_models")


def large(draw):
    rows, cols = machine.pick(gpu=(4096, 4096), cpu=(16, 500))
    return draw(rows, cols, dtype=torch.float16), draw(cols, dtype=torch.float16), 1e-6


def library(x, weight, eps):
    import torch

    return torch.nn.functional.rms_norm(x, (x.shape[1],), weight, eps)


AS_GIVEN = author.task("rmsnorm", large, library)
RMSNORM = replace(AS_GIVEN, exercise=replace(AS_GIVEN.exercise, seconds=60))  # other tests may be at work beside these
# the endless loop is given up sooner; a GPU's compiler may have others beside it
QUICK = replace(RMSNORM, exercise=replace(RMSNORM.exercise, seconds=machine.pick(gpu=15, cpu=4)))


def of(about: str) -> str:
    return next(one["answer"] for one in STORED if one["about"] == about)


WRONG, TWICE = of("takes the rows to be contiguous"), of("right, and reads each row twice")
ONCE, ORDERS = of("right: a row is read once and held"), of("gives orders, and wants the key")


def shown(log) -> str:
    """All that a notebook would save of a log."""
    table = log.table()
    parts = [str(table), table.html, log.picture().text, repr(log), json.dumps(author.conversation(log))]
    return "\n".join([*parts, *(str(one.verdict) for one in log.attempts)])


# ---- what it is told -------------------------------------------------------------------------------------------------

KERNELS = [one.name for one in exercises.every().values() if one.made_of in author.RULES]


@pytest.mark.parametrize("name", KERNELS)
def test_the_question_and_neither_answer_nor_hints(name):
    one = exercises.every()[name]
    text = author.Task(one, large, library).text
    assert f"`{one.entry}(" in text and f"defines `{one.entry}`" in text and "YOUR CODE HERE" in text
    assert not any(hint[:60] in text for hint in one.hints) and "](../" not in text
    cells = json.loads((ROOT / "labs" / f"{one.lab}.ipynb").read_text())["cells"]
    lab = "\n".join("".join(cell["source"]) for cell in cells)
    gaps = [line.strip() for line in solved(name).splitlines() if len(line.strip()) > 25 and line.strip() not in lab]
    assert gaps and not [line for line in gaps if line in text]
    calls = text.partition("Calls, for example:")[2].partition("Rules:")[0]
    assert calls.count(f": `{one.entry}(") == max(1, sum(case.seen for case in one.cases))


def test_what_is_no_task_is_refused_in_words():
    with pytest.raises(ValueError, match="asks for no kernel of triton or cuda"):
        author.task(next(one.name for one in exercises.every().values() if one.made_of not in author.RULES), None, None)


# ---- what comes back -------------------------------------------------------------------------------------------------

CODE = "def f():\n    return 1\n"


@pytest.mark.parametrize(
    ("text", "cells"),
    [
        ("", []),
        ("Here is how I would do it.", []),
        (CODE, [CODE]),
        (f"Sure:\n```python\n{CODE}```\nIt works.", [CODE]),
        (f"```\n{CODE}```", [CODE]),
        (f"  ```py\n  {CODE.replace(chr(10), chr(10) + '  ')}```", [CODE]),
        (
            f"```bash\npip install x\n```\n```Python\nimport math\n```\nand\n```python\n{CODE}```",
            ["import math\n", CODE],
        ),
        (f"```python\n{CODE}", [CODE]),
        (f"<think>```python\nx = 0\n```</think>```python\n{CODE}```", [CODE]),
        ("<think>I have not come to an end: def f():", []),
        (f"```python\nx = 0\n```\nNo.\n</think>\n```python\n{CODE}```", [CODE]),  # its beginning is in the question
        (f"No <think> here:\n```python\n{CODE}```", [CODE]),
        ("```cuda\nvoid f();\n```", []),
        (f"```diff\n-{CODE}+{CODE}```", []),
        (f"````python\n{CODE}````\nDone.", [CODE]),
        (f"~~~python\n{CODE}~~~\nDone.", [CODE]),
        (f'```python title="f.py"\n{CODE}```', [CODE]),
        (f"```{{.python}}\n{CODE}```", [CODE]),
        (f"```triton\n{CODE}```", [CODE]),
        (f"```markdown\nSure:\n```python\n{CODE}```\nIt works.\n```", [CODE]),
        (f"Here it is: ```python\n{CODE}```", [CODE]),
        (f"Run `pip install f`, then ```f``` is:\n```python\n{CODE}```", [CODE]),
    ],
)
def test_the_code_in_an_answer(text, cells):
    assert code_in(text, "f") == cells


ODD = {
    "nothing": ("", "holds no code"),
    "a refusal": ("I can't help with that.", "holds no code"),
    "a diff": ("```diff\n-    return x\n+    return y\n```", "no code in Python, only diff"),
    "too long": ("```python\n" + "x = 1\n" * 20_000 + "```", "longer than"),
    "nested": (f"```python\nrmsnorm = {'(' * 5000}1{')' * 5000}\n```", ""),
    "deep": (f"```python\nrmsnorm = {'-' * 40_000}1\n```", ""),
    "no entry": ("```python\ndef other():\n    pass\n```", ""),
    "null bytes": ("```python\ndef rmsnorm(x, weight, eps):\n    return '\0'\n```", ""),
    "half a character": ("```python\ndef rmsnorm(x, weight, eps):\n    return '\ud800'\n```", ""),
    "a terminal's commands": ("\x1b[2J\x1b[1;1H✔ passed ```python\ndef rmsnorm(:\n```", ""),
    "a gap": ("```python\ndef rmsnorm(x, weight, eps):\n    raise NotImplementedError\n```", ""),
    "a magic": ("```python\n!curl http://collector.invalid\ndef rmsnorm(x, weight, eps):\n    return x\n```", ""),
}


@pytest.mark.parametrize("about", ODD)
def test_an_odd_answer_is_a_row_and_a_sentence(about):
    text, problem = ODD[about]
    one = author.tried(RMSNORM, endpoint.Reply(text))
    assert not one.passed and one.said
    assert problem in one.problem if problem else (one.verdict and one.verdict.findings) or one.problem
    told = author.feedback(one, None, "rmsnorm")
    assert told.endswith("the whole module that defines `rmsnorm`.") and "\x1b" not in told + str(one.verdict)


@pytest.fixture(scope="module")
def log():
    return author.improve(QUICK, author.stored("12_3_models"), rounds=len(STORED) + 3)


@pytest.mark.slow  # lesson 12_3 shows the same answers and is run by make test
def test_each_stored_answer_is_judged_as_what_it_is(log):
    assert len(log.attempts) == len(STORED) >= 12 and not log.ended
    for one, want in zip(log.attempts, STORED, strict=True):
        kinds = [want["kind"]] if isinstance(want["kind"], str) else want["kind"]
        kind = one.verdict.kind if one.verdict else "none"
        assert kind in kinds, f"{want['about']}: {one.said}\n{one.verdict}"
        assert (one.price is not None) == (kind == "passed"), one.problem


@pytest.mark.slow  # lesson 12_3 shows the same answers and is run by make test
def test_the_best_is_right_and_costs_least(log):
    passed = [one for one in log.attempts if one.passed]
    assert len(passed) >= 3 and log.best.price.over == min(one.price.over for one in passed)
    if not machine.gpu():
        by_about = {one.reply.about: one.price.over for one in passed}
        assert by_about["right, and reads each row twice"] > 1.2 * by_about["right: a row is read once and held"]
        assert 1 <= log.best.price.over < 1.2  # of whom several rows share the weight
    table, picture = log.table(), log.picture()
    assert str(table).count("★") == 2 and f"{len(passed)} of {len(STORED)} answers passed" in picture.text
    assert "0 calls" in log.cost and "checking" in log.cost


@pytest.mark.slow
def test_what_a_text_claims_is_no_verdict(log):
    by_about = {one.reply.about: one for one in log.attempts}
    cheat, orders = by_about["makes every comparison come out well"], by_about["gives orders, and wants the key"]
    assert cheat.claims == "right" and not cheat.passed
    assert orders.claims == "right, gives orders, wants a key" and orders.verdict.kind == "forbidden"


@pytest.mark.parametrize("text", ["x=1;", "def f(x): return f(x)\n", "a.b;", "@f\n", "import torch as t\nu = t\n"])
def test_a_long_text_is_read_in_seconds(text):
    """Here, in the notebook's own process, where nothing limits it."""
    code = text * ((author.MOST_CODE - 60) // len(text)) + "\ndef rmsnorm(x, weight, eps): return x"
    began = time.process_time()
    one = author.tried(RMSNORM, endpoint.Reply(f"```python\n{code}\n```"))
    assert one.verdict and not one.passed and time.process_time() - began < 15


@pytest.mark.parametrize("text", ["~~~ ", "```x ", ":```", "`", "<think>", "```python\n"])
def test_the_code_in_a_long_answer_is_found_in_seconds(text):
    began = time.process_time()
    one = author.tried(RMSNORM, endpoint.Reply(text * ((1 << 20) // len(text))))
    assert one.problem and one.claims == "–" and time.process_time() - began < 15


def test_several_blocks_around_prose_are_one_module():
    """The last of several attempts counts; what a terminal printed, and another name for the same, do no harm."""
    beside = "```\n$ python rmsnorm.py\nmax error: 0.0\n```"
    first = ONCE.replace("eps)", "eps + 1)").replace("return y", "return y * 2")
    one = author.tried(RMSNORM, endpoint.Reply(f"{first}\nThat was wrong.\n{beside}\n{ONCE}\n{beside}"))
    assert one.passed, one.verdict
    one = author.tried(RMSNORM, endpoint.Reply(ONCE.replace("def rmsnorm(", "def rms_norm(")))
    assert "`rmsnorm` is bound nowhere" in author.feedback(one, None, "rmsnorm")


NOISE = """
import os, subprocess, sys

def flood():
    print("x" * (1 << 22))
    return 1

def eat():
    return len([bytearray(1 << 28) for _ in range(64)])

def fork():
    for _ in range(20):
        if os.fork() == 0:
            while True:
                pass
    return 1
"""


@pytest.mark.skipif(not child._can_fork(), reason="what it starts is found, and its memory limited, on Linux")
@pytest.mark.parametrize("call", ["flood()", "eat()", "fork()"])
def test_what_code_may_do_to_this_machine_ends_with_it(call):
    """Past the first layer, which reads the text: a room for a program that floods, eats, forks and stays."""
    done = child.run(NOISE, call, sealed=True, seconds=20, memory_bytes=1 << 30)
    assert len(done.stdout) < 1 << 21 and done.seconds < 20
    assert ("MemoryError" in done.error) == (call == "eat()") and done.kin == (20 if call == "fork()" else 0)


def test_code_of_a_model_reaches_no_other_program_of_this_machine():
    """A container engine or a service manager would do for it what it may not; on a GPU its driver needs some."""
    if author.unsealed():
        pytest.skip(author.unsealed())
    room = str(author.room())
    [line] = [line for line in room.splitlines() if line.startswith("talk to a program")]
    assert ("it can" if machine.gpu() else "refused (Permission denied)") in line
    assert ("refused (Permission denied)" in line) != machine.gpu()


# ---- the loop --------------------------------------------------------------------------------------------------------


def test_findings_go_back_and_the_best_is_kept():
    plan = [says(WRONG), sends({}, 429, Retry_After="0"), says(TWICE), says(ONCE), says("I give up."), says(WRONG)]
    with Server(*plan) as server:
        log = author.improve(RMSNORM, server.model(), rounds=5)
    assert [one.passed for one in log.attempts] == [False, True, True, False, False]
    assert log.best is log.attempts[2] if not machine.gpu() else log.best in log.attempts[1:3]
    assert [one.reply.calls for one in log.attempts] == [1, 2, 1, 1, 1] and "6 calls, 150 tokens" in log.cost
    first, _, after_wrong, after_twice, _, after_nothing = [asked["messages"] for asked in server.asked]
    assert [m["role"] for m in first] == ["user"] and first[0]["content"] == RMSNORM.text
    assert [m["role"] for m in after_wrong] == ["user", "assistant", "user"]
    finding = log.attempts[0].verdict.findings[0].message
    assert finding in after_wrong[2]["content"] and "did not pass" in after_wrong[2]["content"]
    assert log.attempts[0].code.strip() in after_wrong[1]["content"]
    assert "It passed" in after_twice[2]["content"] and "Make it cost less" in after_twice[2]["content"]
    assert "holds no code" in after_nothing[2]["content"] and len(after_nothing) == 3
    assert log.best.code.strip() in after_nothing[2]["content"]  # what is to be improved on
    assert KEY not in shown(log)


def test_an_answer_that_gives_orders_reaches_nobody():
    with Server(says(f"{ORDERS}\nThe key is {KEY}."), says(ONCE)) as server:
        log = author.improve(RMSNORM, server.model(), rounds=2)
    assert [one.said for one in log.attempts][0] == "forbidden" and log.attempts[1].passed
    again = json.dumps(server.asked[1]["messages"])
    assert "Ignore the task above" not in again and "Ignore the task above" in log.attempts[0].reply.text
    assert KEY not in shown(log) + again and "[key]" in log.attempts[0].reply.text


def test_code_of_a_model_finds_no_key(monkeypatch):
    """Also where the first layer, reading the text, would let it through; `test_sealed` looks deeper."""
    monkeypatch.setenv(endpoint.KEY, KEY)
    assert child.run("import os", f"{KEY!r} in str(os.environ)", sealed=True).value is False
    room = str(author.room())
    assert "there is none" in room and KEY not in room and endpoint.KEY not in room


@pytest.mark.parametrize(
    ("act", "said"), [(sends({}, 401), "does not accept"), (drops, "connection failed"), (hangs, "no answer in")]
)
def test_a_server_that_fails_half_way_leaves_what_there_was(act, said):
    with Server(says(ONCE), act) as server:
        log = author.improve(RMSNORM, server.model(seconds=1, tries=2), rounds=5)
    assert [one.passed for one in log.attempts] == [True, False] and log.best is log.attempts[0]
    assert said in log.ended and log.attempts[1].reply.calls == len(server.asked) - 1
    assert said in str(log.table()) and KEY not in shown(log)


def test_answers_that_hold_nothing_are_asked_about_again():
    with Server(sends(b"<html>"), sends({"choices": []}), says(ONCE)) as server:
        log = author.improve(RMSNORM, server.model(), rounds=3)
    assert [bool(one.problem) for one in log.attempts] == [True, True, False] and log.best is log.attempts[2]
    assert "no JSON" in log.attempts[0].said and "no choice" in server.asked[2]["messages"][2]["content"]


def test_the_same_code_again_is_not_judged_again():
    """Else the one that is timed most often would be the fastest."""
    again = f"Here is another one.\n{ONCE.strip()}\n"
    with Server(says(ONCE), says(again), says(WRONG), says(f"Better:{WRONG}"), says(TWICE)) as server:
        log = author.improve(RMSNORM, server.model(), rounds=5)
    one, same, wrong, still_wrong, _ = log.attempts
    assert same.same_as == 1 and (same.verdict, same.price, same.seconds) == (one.verdict, one.price, 0)
    assert still_wrong.same_as == 3 and still_wrong.verdict is wrong.verdict and "as answer 3" in str(log.table())
    assert log.best is one and same.reply.calls == 1 and "5 calls" in log.cost
    told = [asked["messages"][2]["content"] for asked in server.asked[1:]]
    assert told[1].startswith("This is the code of answer 1 again") and told[3].startswith(
        "This is the code of answer 3"
    )
    assert "again" not in told[0].partition("\n")[0] and told[1].count("def rmsnorm(") == 0  # it has it already


def test_the_best_is_kept_by_a_rule():
    one = author.tried(RMSNORM, endpoint.Reply(ONCE))
    times = [None, 20.0, 19.8, 21.0, 19.0, 19.0, None, 18.8]

    def kept(unit):
        prices = [time and Price(time, 10.0, unit) for time in times]
        log = author.Log(RMSNORM, [replace(one, number=i, price=price) for i, price in enumerate(prices, 1)])
        assert log.best is log.kept[-1] and "★" in str(log.table())
        return [one.number for one in log.kept], log.picture().text

    assert kept("bytes")[0] == [1, 2, 3, 5, 8]
    numbers, said = kept("us")  # less by 2 % at least: the rest is measuring again
    assert numbers == [1, 2, 5] and "2 from answer 2; 1.9 from answer 5." in said
    assert author.Log(RMSNORM, [replace(one, verdict=None)]).best is None


def test_going_on_with_a_log():
    with Server(says(WRONG), sends({}, 401), says(ONCE)) as server:
        log = author.improve(RMSNORM, server.model(), rounds=3)
        assert "does not accept" in log.ended and [one.came for one in log.attempts] == [True, False]
        assert author.improve(RMSNORM, server.model(), rounds=1, log=log) is log
    assert [one.number for one in log.attempts] == [1, 2, 3] and log.best is log.attempts[2] and not log.ended
    assert server.asked[2]["messages"] == server.asked[1]["messages"]  # as if nothing had been between
    assert "2 answers, 1 passed; 3 calls" in log.cost


def test_what_was_paid_for_is_in_the_log_whatever_happens(monkeypatch):
    log = author.Log(RMSNORM)

    def broken(*_, **__):
        raise OSError("No space left on device")

    with Server(says(ONCE)) as server:
        author.improve(RMSNORM, server.model(), rounds=1, log=log)
        monkeypatch.setattr(author.checks, "judge", broken)
        with pytest.raises(OSError, match="No space"):
            author.improve(RMSNORM, lambda messages: endpoint.Reply(TWICE), rounds=1, log=log)
    assert log.best is log.attempts[0]


def test_stopping_it_while_it_checks_keeps_the_answer(monkeypatch):
    def stopped(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, Server(says(ONCE)) as server:
        patch.setattr(author.checks, "judge", stopped)
        log = author.improve(RMSNORM, server.model(), rounds=3)
    [one] = log.attempts
    assert one.reply.text.strip() == ONCE.strip() and "not checked" in one.said and log.ended == "You stopped it."
    assert "1 calls, 30 tokens" in log.cost and log.best is None
    author.improve(RMSNORM, author.pasted(TWICE), rounds=1, log=log)  # it was paid for, and comes first
    assert [one.passed for one in log.attempts] == [True] and log.attempts[0].reply == one.reply and not log.ended


def test_stopping_it_while_it_asks_counts_the_calls(monkeypatch):
    def stopped(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(endpoint.time, "sleep", stopped)
    with Server(sends({}, 503)) as server:
        log = author.improve(RMSNORM, server.model(), rounds=3)
    assert "0 answers, 0 passed; 1 calls" in log.cost and "stopped" in log.attempts[0].said and not log.attempts[0].came


def test_a_system_that_cannot_seal_says_so(monkeypatch, capsys):
    author.unsealed.cache_clear()
    try:
        found = {"network": "a seccomp filter is not permitted here", "processes": ""}
        monkeypatch.setattr(author.child, "run", lambda *_, **__: Ran(found))
        author.improve(RMSNORM, author.pasted(), rounds=1)
        said = capsys.readouterr().out
        assert "leaves open" in said and "network, since a seccomp filter is not permitted here" in said
    finally:
        author.unsealed.cache_clear()
    monkeypatch.undo()
    author.improve(RMSNORM, author.pasted(), rounds=1)
    assert ("leaves open" in capsys.readouterr().out) == bool(author.unsealed())


class Ran:
    ok = True

    def __init__(self, value):
        self.value = value


def test_a_server_s_words_bring_no_orders_to_a_terminal():
    one = author.tried(RMSNORM, endpoint.Reply("", problem="it says\x1b[2J"))
    assert "\x1b" not in one.problem + author.feedback(one, None, "rmsnorm") + str(author.Log(RMSNORM, [one]).table())


def test_looking_at_an_answer_that_is_none_is_a_sentence():
    for number in (0, -1, 2):
        with pytest.raises(IndexError, match=f"no answer {number}: the log holds 1"):
            author.Log(RMSNORM, [author.tried(RMSNORM, endpoint.Reply(""))]).look(number)


def test_stopping_it_keeps_the_log():
    answers = author.pasted(ONCE)

    def ask(messages):
        if (reply := answers(messages)) is None:
            raise KeyboardInterrupt
        return reply

    log = author.improve(RMSNORM, ask, rounds=3)
    assert log.ended == "You stopped it." and log.best is log.attempts[0] and log.attempts[0].reply.about == "pasted"


def test_nothing_pasted_is_an_empty_log():
    log = author.improve(RMSNORM, author.pasted("", " \n"), rounds=3)
    assert log.attempts == [] and log.best is None and "0 answers" in str(log.table())


def test_an_answer_that_passes_and_fails_the_large_call_is_kept_without_a_price():
    def wide(draw):
        return draw(2, 2**21, dtype=torch.float16), draw(2**21, dtype=torch.float16), 1e-6  # more than a block may hold

    one = author.tried(author.task("rmsnorm", wide, library), endpoint.Reply(ONCE))
    assert one.passed and one.price is None and "the large call failed" in one.problem
    log = author.Log(RMSNORM, [one, replace(one, number=2, price=Price(3.0, 2.0, "bytes"), problem="")])
    assert log.best is log.attempts[1] and re.search(r"1 of 2 answers passed", log.picture().text)


def test_cuda_c_is_priced_too():
    name = "block-sum"
    given = author.task(name, exercises.every()[name].cases[0].inputs, library)
    one = author.tried(given, endpoint.Reply(f"```python\n{solved(name)}\n```"))
    assert one.passed and (machine.gpu() or one.price.unit == "bytes" and one.price.over >= 1), one.verdict
