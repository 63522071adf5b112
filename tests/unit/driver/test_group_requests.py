"""What engines return becomes a group's samples: parts by version, answers of tools, and what is refused."""

import pytest
import torch

from verl_rc.data.batches import Completions
from verl_rc.data.groups import GroupSample
from verl_rc.data.parts import Answer, Part
from verl_rc.driver.group_requests import end_sample

TOKENS = [11, 12, 90, 91, 13]


def returned(versions: list[int], tools: bool = False) -> Completions:
    """One response; with ``tools`` its third and fourth token are an answer."""
    count = len(versions)
    mask = torch.tensor([[place not in (2, 3) for place in range(count)]])
    return Completions(
        responses=torch.tensor([TOKENS[:count]]),
        response_lengths=torch.tensor([count]),
        rollout_log_probs=torch.full((1, count), -0.5),
        policy_versions=torch.tensor([versions]),
        finished=torch.tensor([True]),
        response_mask=mask if tools else None,
        num_turns=torch.tensor([4]) if tools else None,
        tool_calls=torch.tensor([1]) if tools else None,
        batch_size=[1],
    )


def sample(*parts: Part | Answer) -> GroupSample:
    return GroupSample(7, 2, [1, 2], list(parts))


def part(token_ids: list[int], version: int) -> Part:
    return Part(torch.tensor(token_ids, dtype=torch.int32), torch.full((len(token_ids),), -0.5), version)


def test_tokens_of_tools_have_no_version_and_are_answers() -> None:
    ended = sample()
    end_sample(ended, returned([3, 3, -1, -1, 4], tools=True), 0, one_version=False)
    assert [(type(one).__name__, one.token_ids.tolist()) for one in ended.turns] == [
        ("Part", [11, 12]),
        ("Answer", [90, 91]),
        ("Part", [13]),
    ]
    assert (ended.versions, ended.num_sampled, ended.tool_calls, ended.state) == ([3, 4], 3, 1, "ended")


def test_a_sample_cut_while_its_tools_were_at_work_may_end_without_another_token() -> None:
    """The answer left no room: nothing was sampled after the update."""
    ended = sample(part([11, 12], 3))
    end_sample(ended, returned([3, 3], tools=True), 0, one_version=False)
    assert (ended.num_sampled, ended.state) == (2, "ended")


@pytest.mark.parametrize(
    ("before", "versions", "one_version"),
    [
        ([], [3, -1], False),  # no version is known
        ([], [3, 4], True),
        ([part([11], 2)], [2, 3, 4], True),
        ([part([11, 12], 3)], [3, 3], False),  # without tools a request samples one token at least
    ],
)
def test_versions_that_cannot_be_are_refused(
    before: list[Part], versions: list[int], one_version: bool
) -> None:
    with pytest.raises(RuntimeError, match="sample 2 of group 7"):
        end_sample(sample(*before), returned(versions), 0, one_version=one_version)
