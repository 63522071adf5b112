"""The built-in scorers: exact text, the last turn alone, numbers after ####, mathematics by meaning."""

import json
from pathlib import Path

import pytest

from verl_rc.algorithm.rewards.scorers import (
    dapo_math,
    exact_match,
    geometry,
    gsm8k,
    last_answer,
    last_boxed,
    math_answer,
)


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        ("0123", "0123", 1.0),
        (" 0123\n", "0123", 1.0),
        ("0123", " 0123 ", 1.0),
        ("12", 12, 1.0),
        ("01 23", "0123", 0.0),
        ("123", "0123", 0.0),
        ("", "0123", 0.0),
        ("01234", "0123", 0.0),
    ],
)
def test_score_of_exact_match(response, truth, score):
    assert exact_match(response, truth) == {"score": score, "acc": score, "pred": response.strip()}


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("<tool>1+2</tool>3=3", 1.0),
        ("3", 1.0),
        (" 3 ", 1.0),
        ("<tool>1+2</tool>3=4", 0.0),
        ("<tool>1+2</tool>3=", 0.0),
        ("3=<tool>1+2</tool>", 0.0),
        ("<tool>1+2</tool>", 0.0),
        ("", 0.0),
    ],
)
def test_scores(text: str, right: float) -> None:
    output = last_answer(text, "3")
    assert (output["score"], output["acc"]) == (right, right)


@pytest.mark.parametrize(
    ("response", "truth", "score", "answer"),
    [
        ("2 + 2 = 4\n#### 4", "4", 1.0, "4"),
        ("#### 1,234", "1234", 1.0, "1234"),
        ("#### 1234", "1,234", 1.0, "1234"),
        ("#### $18.00", "18", 1.0, "18.00"),
        ("####-3", "-3", 1.0, "-3"),
        ("#### 4. Done.", "4", 1.0, "4"),
        ("#### .5", "0.5", 1.0, ".5"),
        ("#### 5 wait #### 4", "4", 1.0, "4"),
        ("#### 4 wait #### 5", "4", 0.0, "5"),
        ("#### 40", "4", 0.0, "40"),
        ("The answer is 4.", "4", 0.0, None),
        ("#### four", "4", 0.0, None),
        ("### 4", "4", 0.0, None),
        ("#### 4 - done", "4", 1.0, "4"),
        ("#### 4\n-5 is no answer", "4", 1.0, "4"),
        ("#### 4, 5", "4", 1.0, "4"),
        ("#### 4/5", "4", 0.0, "4/5"),
        ("#### 4 1/5", "4", 0.0, "4 1/5"),
        ("#### 4\\frac{1}{5}", "4", 0.0, "4\\frac{1}{5}"),
        ("#### 4 + 1", "4", 0.0, "4 + 1"),
        ("#### 4e5", "4", 0.0, "4e5"),
        ("#### 4.5.6", "4.5", 0.0, "4.5.6"),
        ("#### 1,2,3,4", "1234", 0.0, "1,2,3,4"),
        ("#### 12345,678", "12345678", 0.0, "12345,678"),
        ("#### 4", "so 1 + 3\n#### 4", 1.0, "4"),
    ],
)
def test_score_of_gsm8k(response, truth, score, answer):
    assert gsm8k(response, truth) == {"score": score, "acc": score, "pred": answer}


@pytest.mark.parametrize("truth", ["four", "", "nan", "Infinity"])
def test_a_ground_truth_that_is_no_number_is_refused(truth):
    with pytest.raises(ValueError, match="ground truth of a GSM8K problem must be a number"):
        gsm8k("#### 4", truth)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{4}", "4"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{1} no, \boxed{ 2 }", "2"),
        (r"\fbox{7}", "7"),
        (r"\boxed {7}", "7"),
        (r"$\boxed 7$.", "7"),
        (r"\boxed{1} or \boxed 12 apples", "12"),
        (r"\boxed{1} and \boxed{2", None),
        ("4", None),
        ("", None),
    ],
)
def test_last_boxed(text, answer):
    assert last_boxed(text) == answer


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("<think>8 x 6</think> \\boxed{48}", 1.0),
        ("8 x 6 = \\boxed{48}", 0.9),
        ("<think>7 x 6</think> so \\boxed{42}.", 0.1),
        ("\\boxed{42}", 0.0),
    ],
)
def test_geometry_has_a_tenth_for_a_thought(response, score):
    assert geometry(response, "48")["score"] == pytest.approx(score)
    assert geometry(response, "48")["acc"] == ("48" in response)


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        (r"\boxed{\frac{2}{4}}", r"\frac{1}{2}", 1.0),
        (r"\boxed{0.5}", r"\dfrac12", 1.0),
        (r"\boxed{(1, 2]}", r"(1,2]", 1.0),
        (r"\boxed{x^2 + 2x + 1}", r"(x+1)^2", 1.0),
        (r"\boxed{\text{(B)}}", r"\text{(B)}", 1.0),
        (r"\boxed{4}", r"the answer is \boxed{4}", 1.0),
        (r"\boxed{3}", "4", 0.0),
        (r"\boxed{(1, 2]}", "[1,2]", 0.0),
        (r"\boxed{}", "4", 0.0),
        ("4", "4", 0.0),
    ],
)
def test_math_answer(response, truth, score):
    result = math_answer(response, truth)
    assert (result["score"], result["acc"], result["pred"]) == (score, score, last_boxed(response))


@pytest.mark.parametrize(("length", "right"), [(2_000, 1.0), (2_001, 0.0)])
def test_no_answer_is_longer_than_two_thousand_characters(length, right):
    answer = "1" + " " * (length - 3) + "+1"
    assert math_answer(f"\\boxed{{{answer}}}", "2")["acc"] == right


@pytest.mark.parametrize(
    ("response", "score", "accuracy", "answer"),
    [
        ("thinking\nAnswer: 34", 1.0, 1.0, "34"),
        ("answer: $34$", 1.0, 1.0, "34"),
        ("Answer: 35\nAnswer: 34\n", 1.0, 1.0, "34"),
        (r"Answer: \boxed{34}", 1.0, 1.0, "34"),
        (r"Answer: $\boxed{34}$.", 1.0, 1.0, "34"),
        ("\\boxed{35}\nAnswer: 34", 1.0, 1.0, "34"),
        ("Answer: 34\nso \\boxed{35}", 1.0, 1.0, "34"),
        (r"\boxed{34}", 1.0, 1.0, "34"),
        ("Answer: 35", -1.0, 0.0, "35"),
        ("34", -1.0, 0.0, None),
        ("Answer: 34" + 400 * " x", -1.0, 0.0, None),
    ],
)
def test_dapo_math(response, score, accuracy, answer):
    assert dapo_math(response, "34") == {"score": score, "acc": accuracy, "pred": answer}


PAIRS = json.loads((Path(__file__).parents[3] / "golden" / "math_answers.json").read_text())["pairs"]
PERCENT_IS_A_FACTOR = [("50", "0.5"), ("0.5", "50"), (r"10\%", "0.1"), ("0.1", r"10\%"), (r"5\%", "0.05")]
"""verl's prime_math takes a number for a hundredth of itself, with and without a percent sign; its other
scorers do not."""
TEXT_CUT_OFF = (r"50\text{ and }3", "50")
"""verl cuts what follows \\text, whether or not it is a unit; here these are the two numbers 50 and 3."""


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair['answer']} for {pair['ground_truth']}")
def test_signs_and_units_count_as_in_the_scorers_of_verl(pair):
    answer, truth = pair["answer"], pair["ground_truth"]
    right = bool(pair["accepted_by"]) and (answer, truth) not in [*PERCENT_IS_A_FACTOR, TEXT_CUT_OFF]
    assert math_answer(f"\\boxed{{{answer}}}", truth)["acc"] == right
    assert dapo_math(f"Answer: {answer}", truth)["acc"] == right


TABLE = json.loads((Path(__file__).parents[3] / "golden" / "math_pairs.json").read_text())


@pytest.mark.parametrize("right", [True, False])
def test_every_pair_of_the_table_is_judged_as_its_heading_says(right):
    judged = [
        (answer, truth)
        for answer, truth in TABLE["right" if right else "wrong"]
        if bool(math_answer(f"\\boxed{{{answer}}}", truth)["acc"]) != right
        or bool(dapo_math(f"Answer: \\boxed{{{answer}}}", truth)["acc"]) != right
    ]
    assert judged == []


@pytest.mark.parametrize("word", ["false", "no", "odd", "silent", "no solution", "Navin", "non-negative"])
@pytest.mark.parametrize("form", ["{}", r"\text{{{}}}", "x = {}", "5, {}", "({}, yes)"])
def test_a_word_is_right_in_every_case_and_wrong_with_its_letters_in_another_order(word, form):
    for scored, right in ((word, 1.0), (word.upper(), 1.0), (word[::-1], 0.0), (word[1:] + word[0], 0.0)):
        assert math_answer(f"\\boxed{{{form.format(scored)}}}", form.format(word))["acc"] == right
        assert dapo_math(f"Answer: {form.format(scored)}", form.format(word))["acc"] == right


@pytest.mark.parametrize("scorer", [exact_match, last_answer, gsm8k, math_answer, dapo_math])
@pytest.mark.parametrize(
    "response", ["43", "3", "345", "34 35", "35, 34", "I think that it is 34.", "it is 34, so 34", "no 34"]
)
@pytest.mark.parametrize("form", ["{}", "={}", "#### {}", r"\boxed{{{}}}", "Answer: {}"])
def test_no_scorer_takes_permutations_prefixes_and_prose_for_the_number(scorer, response, form):
    if (scorer, response, form) != (gsm8k, "34 35", "#### {}"):  # the number behind #### ends at a blank
        assert scorer(form.format(response), "34")["acc"] == 0.0


@pytest.mark.parametrize("scorer", [math_answer, dapo_math])
def test_of_two_boxed_answers_the_last_one_counts(scorer):
    assert scorer(r"\boxed{34} or \boxed{35}", "34")["acc"] == 0.0
    assert scorer(r"\boxed{35}, no, \boxed{34}", "34")["acc"] == 1.0


@pytest.mark.parametrize("truth", ["", " ", "???", r"\frac{1}{", "%", r"\boxed{\sqrt{}"])
@pytest.mark.parametrize("response", [r"\boxed{3}", "Answer: 3", "no answer"])
def test_a_ground_truth_that_is_not_mathematics_is_refused_for_every_answer(response, truth):
    for scorer in (math_answer, dapo_math):
        with pytest.raises(
            ValueError, match="ground truth of a math problem must be something math-verify can read"
        ):
            scorer(response, truth)
