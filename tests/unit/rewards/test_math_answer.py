"""Mathematics: equality of meaning, not of text."""

import pytest

from verl_rc.rewards.math_answer import dapo_math, last_boxed, math_answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{4}", "4"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{1} no, \boxed{ 2 }", "2"),
        (r"\fbox{7}", "7"),
        (r"\boxed {7}", "7"),
        (r"\boxed{1} and \boxed{2", None),
        ("4", None),
        ("", None),
    ],
)
def test_last_boxed(text, answer):
    assert last_boxed(text) == answer


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


@pytest.mark.parametrize(
    ("response", "score", "accuracy", "answer"),
    [
        ("thinking\nAnswer: 34", 1.0, 1.0, "34"),
        ("answer: $34$", 1.0, 1.0, "34"),
        ("Answer: 35\nAnswer: 34\n", 1.0, 1.0, "34"),
        (r"Answer: \boxed{34}", 1.0, 1.0, "34"),
        (r"\boxed{34}", 1.0, 1.0, "34"),
        ("Answer: 35", -1.0, 0.0, "35"),
        ("34", -1.0, 0.0, None),
        ("Answer: 34" + 400 * " x", -1.0, 0.0, None),
    ],
)
def test_dapo_math(response, score, accuracy, answer):
    assert dapo_math(response, "34") == {"score": score, "acc": accuracy, "pred": answer}
