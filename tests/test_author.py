"""Kernels written by a model: what it is told, what becomes of any answer, and a loop that keeps the best."""

import json
import re
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


RMSNORM = author.task("rmsnorm", large, library)
QUICK = replace(RMSNORM, exercise=replace(RMSNORM.exercise, seconds=4))  # the endless loop is given up sooner


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
        ("```cuda\nvoid f();\n```", []),
    ],
)
def test_the_code_in_an_answer(text, cells):
    assert code_in(text, "f") == cells


ODD = {
    "nothing": ("", "holds no code"),
    "a refusal": ("I can't help with that.", "holds no code"),
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
