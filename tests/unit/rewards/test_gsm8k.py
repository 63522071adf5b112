"""GSM8K: the last number after ####, compared as a number."""

import pytest

from verl_rc.rewards.scorers import gsm8k


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
        ("#### 4", "so 1 + 3\n#### 4", 1.0, "4"),
    ],
)
def test_score(response, truth, score, answer):
    assert gsm8k(response, truth) == {"score": score, "acc": score, "pred": answer}


@pytest.mark.parametrize("truth", ["four", "", "nan", "Infinity"])
def test_a_ground_truth_that_is_no_number_is_refused(truth):
    with pytest.raises(ValueError, match="ground truth of a GSM8K problem must be a number"):
        gsm8k("#### 4", truth)
