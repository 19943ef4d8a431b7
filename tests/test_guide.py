"""The decision guide: written cases, and that every rule, caution and workload of its tables can be reached."""

import itertools

import pytest

from helpers import explore, guide, ladder

BASE = {
    "operator": "standard", "backends": "one vendor", "team": "pytorch", "purpose": "product", "shape": "large",
    "precision": "16", "deadline": "week",
}  # fmt: skip


def asked(**answers):
    return guide.decide({**BASE, **answers})


CASES = [
    # (what somebody would say, how the answers differ from BASE, the rung, part of the nearest workload's name)
    ("a bf16 product in a service, a team that knows PyTorch", {}, "library", "4096 × 4096 × 4096"),
    ("the same, for a frontier model by experts with a month", {"team": "cuda", "purpose": "frontier",
     "deadline": "month", "backends": "one card"}, "library", "4096"),
    ("softmax in fp32", {"shape": "rows", "precision": "32"}, "library", "softmax"),
    ("RMSNorm as it is in PyTorch", {"shape": "rows"}, "library", "RMSNorm"),
    ("top-k as PyTorch has it", {"shape": "small"}, "library", "router"),
    ("four-bit weights that a library takes, decoding", {"shape": "one row", "precision": "4"}, "library", "int4"),
    ("decoding's GEMV, the team writes Triton, every percent pays", {"shape": "one row", "team": "kernel",
     "purpose": "frontier"}, "Triton", "GEMV, 1 × 8192 × 4096, fp16"),
    ("the same, wanted this afternoon", {"shape": "one row", "team": "kernel", "purpose": "frontier",
     "deadline": "afternoon"}, "library", "GEMV"),
    ("linear, bias and GELU on NVIDIA's cards", {"operator": "chain"}, "library", "16384 × 4096 × 1024"),
    ("the same on several vendors' cards", {"operator": "chain", "backends": "several vendors"}, "AI compiler",
     "linear"),
    ("the same for one H200, by an expert with a month", {"operator": "chain", "backends": "one card",
     "team": "cuda", "purpose": "frontier", "deadline": "month"}, "CUDA", "linear"),
    ("residual, dropout and norm in a row", {"operator": "chain", "shape": "rows"}, "AI compiler", "RMSNorm"),
    ("a chain over a few rows", {"operator": "chain", "shape": "one row"}, "AI compiler", "GEMV"),
    ("a router's small steps, by an expert", {"operator": "chain", "shape": "small", "team": "cuda"}, "CUDA",
     "router"),
    ("the same by a PyTorch team", {"operator": "chain", "shape": "small"}, "AI compiler", "router"),
    ("a gated four-bit projection of one row, by an expert", {"operator": "chain", "shape": "one row",
     "precision": "4", "team": "cuda"}, "CUDA", "int4"),
    ("a gated four-bit projection of one row, by a Triton team", {"operator": "chain", "shape": "one row",
     "precision": "4", "team": "kernel"}, "Triton", "int4"),
    ("attention with a new mask, a PyTorch team", {"operator": "variant"}, "AI compiler", "prefill"),
    ("the same by a Triton team", {"operator": "variant", "team": "kernel"}, "Triton", "prefill"),
    ("the same, this afternoon", {"operator": "variant", "team": "kernel", "deadline": "afternoon"}, "AI compiler",
     "prefill"),
    ("attention for one generation, to the last percent", {"operator": "variant", "team": "cuda",
     "backends": "one card", "purpose": "frontier", "deadline": "month"}, "CUDA", "prefill"),
    ("decode with an int8 cache, by an expert", {"operator": "variant", "shape": "one row", "precision": "8",
     "team": "cuda"}, "CUDA", "int8 cache"),
    ("decode with an int8 cache on AMD too", {"operator": "variant", "shape": "one row", "precision": "8",
     "team": "cuda", "backends": "several vendors"}, "Triton", "int8 cache"),
    ("decode with a changed score, fp16", {"operator": "variant", "shape": "one row", "team": "kernel"}, "Triton",
     "decode, 16 × 32"),
    ("a selective scan on several vendors, by a Triton team", {"operator": "new", "shape": "rows",
     "backends": "several vendors", "team": "kernel"}, "Triton", "RMSNorm"),
    ("a new operator as one source for several vendors, kept for years", {"operator": "new", "team": "cuda",
     "backends": "several vendors", "deadline": "month"}, "Mojo", "linear"),
    ("a new operator in a team that reads generated code", {"operator": "new", "team": "compiler"}, "AI compiler",
     "linear"),
]  # fmt: skip


@pytest.mark.parametrize(("said", "answers", "rung", "near"), CASES, ids=[said for said, *_ in CASES])
def test_written_cases(said, answers, rung, near):
    advice = asked(**answers)
    assert (advice.rung, near in advice.workload.name) == (rung, True), advice.workload.name
    assert advice.sentences()[0].startswith(f"Start on: {rung}. Rule ")


def every():
    for chosen in itertools.product(*(question.answers for question in guide.QUESTIONS.values())):
        yield dict(zip(guide.QUESTIONS, chosen, strict=True))


def test_every_rule_caution_and_workload_is_reached():
    fits = {i: 0 for i in range(len(guide.RULES))}
    cautions, near = set(), set()
    for answers in every():
        rule = guide._first(answers)
        fits[guide.RULES.index(rule)] += 1
        cautions |= {text for when, rungs, text in guide.CAUTIONS
                     if rule.rung in rungs and all(answers[k] in v for k, v in when.items())}  # fmt: skip
        near.add(next(name for when, name in guide.NEAREST if all(answers[k] in v for k, v in when.items())))
    assert all(fits.values()), fits
    assert cautions == {text for *_, text in guide.CAUTIONS}
    assert near == {name for _, name in guide.NEAREST} <= {workload.name for workload in ladder.WORKLOADS}


def test_tables_name_questions_answers_and_rungs_that_there_are():
    whens = [rule.when for rule in guide.RULES] + [row[0] for row in (*guide.NEAREST, *guide.CAUTIONS)]
    for when in whens:
        for name, allowed in when.items():
            assert set(allowed) < set(guide.QUESTIONS[name].answers), when
    assert {rule.rung for rule in guide.RULES} == set(ladder.RUNGS)
    assert {rung for _, rungs, _ in guide.CAUTIONS for rung in rungs} <= set(ladder.RUNGS)


def test_what_would_change_the_answer_does():
    advice = asked(operator="variant", team="kernel")
    assert ("team", "pytorch", "AI compiler") in advice.changes
    for question, answer, rung in advice.changes:
        assert (
            guide.decide({**BASE, "operator": "variant", "team": "kernel", question: answer}).rung == rung != "Triton"
        )
    assert "It would be AI compiler with team: pytorch, or team: compiler" in "\n".join(advice.sentences())


def test_evidence_is_the_recorded_ladder_of_the_nearest_workload():
    advice = asked(operator="variant", team="kernel")
    rows = advice.evidence()
    assert [row["tool"] for row in rows] == [way.tool for way in advice.workload.ways]
    assert {row["rung"] for row in rows if row["advised"]} == {"Triton"}
    assert "H200" in str(advice)


def test_an_answer_that_is_none_is_refused_with_the_choices():
    with pytest.raises(ValueError, match="team: pytorch or compiler or kernel or cuda, not 'novice'"):
        asked(team="novice")
    with pytest.raises(ValueError, match="deadline: "):
        guide.decide({k: v for k, v in BASE.items() if k != "deadline"})
    with pytest.raises(ValueError, match="not colour"):
        asked(colour="red")


def test_the_form_follows_each_answer_and_the_flowchart_holds_each_rule():
    form = explore.Guide(BASE)
    assert "<b>Start on: library." in form.readout.value and "4096 × 4096 × 4096" in form.evidence.value
    form.controls["operator"].value = "variant"
    form.controls["team"].value = "kernel"
    assert "<b>Start on: Triton." in form.readout.value and 'role="status"' in form.readout.value
    assert "prefill" in form.evidence.value
    text = form.static().text
    assert all(f"{i}. {rule.condition}: {rule.rung}" in text for i, rule in enumerate(guide.RULES, 1))
    assert all(rule.condition in str(guide.rules()) for rule in guide.RULES)
