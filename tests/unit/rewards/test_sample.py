"""What a reward function is asked."""

from verl_rc.data.dataset import PromptRow
from verl_rc.rewards.sample import RewardSample


def test_a_sample_takes_its_prompts_fields_and_names_itself():
    row = PromptRow(5, [1, 2], [{"role": "user", "content": "21"}], "digits", "12", {"index": 9})
    sample = RewardSample.of(row, 100 * "ab", reward_model_score=0.5)
    assert sample == RewardSample(5, "digits", "12", {"index": 9}, 100 * "ab", 0.5)
    assert str(sample) == f"row 5 (data_source 'digits', response '{40 * 'ab'}')"
