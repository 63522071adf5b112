"""The line about prompt lengths, by hand."""

from verl_rc.data.dataset import describe_lengths, evenly_spread


def test_bins_double_and_the_limit_is_counted():
    assert describe_lengths([1, 3, 9, 8, 15, 4, 20, 21, 2, 9], 10, limit=20) == (
        "10 prompts by tokens: 1: 10%, 2-3: 20%, 4-7: 10%, 8-15: 40%, 16-31: 20%; median 8, longest 21, "
        "data.max_prompt_length=20, longer 10.0%"
    )


def test_a_sample_says_that_it_is_one():
    assert describe_lengths([8], 500, limit=9).startswith("1 of 500 prompts by tokens: 8-15: 100%")


def test_spread_numbers():
    assert evenly_spread(3, 10) == [0, 1, 2]
    assert evenly_spread(10, 4) == [0, 3, 6, 9]
    assert evenly_spread(11, 5) == [0, 3, 6, 9]
