"""What engines return becomes a group's samples, and what is refused."""

import pytest
from conversing import tool_reply
from made_samples import answer, part

from verl_rc.records.groups import GroupSample
from verl_rc.records.parts import Answer, Part, Sample
from verl_rc.trainer.supply.group_requests import store_response


def growing(*parts: Part | Answer) -> GroupSample:
    return GroupSample(7, 2, [1, 2], Sample(2, parts))


def test_a_response_with_the_answers_of_tools_ends_its_sample() -> None:
    parts = [part([11, 12], 3), answer([90, 91]), part([13], 4)]
    ended = growing(parts[0])
    returned = Sample(5, parts, finished=True, replies=[tool_reply()])
    assert store_response(ended, returned, single_version=False) == 1  # new token
    assert ended.response.parts == parts
    assert (ended.versions, ended.num_sampled, ended.response.replies) == ([3, 4], 3, [tool_reply()])
    assert (ended.ended, ended.response.finished) == (True, True)


def test_a_sample_cut_while_its_tools_were_at_work_may_end_without_another_token() -> None:
    """The answer left no room: nothing was sampled after the update."""
    ended = growing(part([11, 12], 3))
    returned = Sample(5, [part([11, 12], 3)], replies=[tool_reply()])
    assert store_response(ended, returned, single_version=True) == 0
    assert (ended.num_sampled, ended.ended) == (2, True)


def test_what_is_known_may_have_another_version_than_what_was_lacking() -> None:
    ended = growing(part([11], 2))
    assert store_response(ended, Sample(5, [part([11], 2), part([12, 13], 3)]), single_version=True) == 2
    assert ended.versions == [2, 3]


@pytest.mark.parametrize(
    ("before", "returned", "single_version"),
    [
        ([], [part([11], 3), part([12], 4)], True),
        ([part([11], 2)], [part([11], 2), part([12], 3), part([13], 4)], True),
        ([part([11], 2)], [part([11, 12], 2), part([13], 3)], True),
        (
            [part([11, 12], 3)],
            [part([11, 12], 3)],
            False,
        ),  # without tools a request samples one token at least
    ],
)
def test_versions_that_cannot_be_are_refused(
    before: list[Part], returned: list[Part], single_version: bool
) -> None:
    with pytest.raises(RuntimeError, match="sample 2 of group 7"):
        store_response(growing(*before), Sample(5, returned), single_version=single_version)
