"""Groups: what parts and answers become in the batch that is trained on, and that a checkpoint loses nothing
of them."""

import io
from dataclasses import replace

import pytest
import torch
from conversing import tool_reply

from verl_rc.records.dataset import PromptRow
from verl_rc.records.episode import Opening, Reply
from verl_rc.records.groups import Group, GroupSample, Scores, pack, unpack
from verl_rc.records.parts import UNKNOWN, Answer, Part, Sample, token_ids


def part(tokens: list[int], version: int) -> Part:
    """The log-prob of a token is minus a hundredth of its id."""
    return Part(
        torch.tensor(tokens, dtype=torch.int32), torch.tensor(tokens, dtype=torch.float32) / -100, version
    )


def answer(tokens: list[int]) -> Answer:
    return Answer(torch.tensor(tokens, dtype=torch.int32))


def row(index: int) -> PromptRow:
    return PromptRow(
        index, [1, 2, index], [{"role": "user", "content": str(index)}], "digits", "3", {"index": index}
    )


def make_group(number: int, *, ended: bool = True) -> Group:
    """Two samples: one cut by an update in its second turn, after a tool's answer; one short."""
    prompt = row(number).prompt_token_ids
    long = Sample(
        0,
        [part([11, 12], 3), answer([90]), part([13], 3), part([14, 15], 5)],
        ended,
        [tool_reply(), Reply(reward=-0.1, done=True)],
        b"\x00\xff",
    )
    short = Sample(1, [part([16], 5)], True, [])
    samples = [GroupSample(number, 0, prompt, long, ended), GroupSample(number, 1, prompt, short, True)]
    return Group(number, row(number), epoch=0, admitted_for_step=4, admitted_at=3, samples=samples)


def scored(group: Group, *values: float) -> Group:
    return group.scored(
        Scores(
            torch.tensor(values), [f"{value}" for value in values], {"acc": [value > 0 for value in values]}
        ),
        accepted=True,
    )


def test_scores_are_joined_in_order_and_a_column_that_some_lack_has_gaps() -> None:
    one = Scores(torch.tensor([1.0, 0.0]), ["a", "b"], {"acc": [True, False]}, torch.tensor([1.5, 0.5]))
    other = Scores(torch.tensor([0.25]), ["c"], {"note": ["late"], "acc": [True]}, torch.tensor([0.75]))
    joined = Scores.joined([one, other])
    assert joined.values.tolist() == [1.0, 0.0, 0.25]
    assert joined.texts == ["a", "b", "c"]
    assert list(joined.extras.items()) == [("acc", [True, False, True]), ("note", [None, None, "late"])]


def test_the_version_of_a_group_is_its_oldest_and_that_of_its_admission_until_it_is_whole() -> None:
    assert make_group(7).version == 3
    response = Sample(0, [part([5], 4), part([6], 5)])
    younger = Group(1, row(1), 0, 4, 3, [GroupSample(1, 0, [1], response, True)])
    assert younger.version == 4
    younger.samples[0].ended = False
    assert younger.version == 3
    assert not younger.is_whole


def test_a_group_is_scored_when_it_is_whole_sample_by_sample() -> None:
    with pytest.raises(
        ValueError, match="group 7 must be whole and get a score for each of its 2 samples, got 1"
    ):
        scored(make_group(7), 1.0)
    with pytest.raises(ValueError, match="group 7 must be whole"):
        scored(make_group(7, ended=False), 1.0, 0.0)


@pytest.mark.parametrize(
    ("tokens", "log_probs", "version"),
    [
        (torch.ones(2, dtype=torch.int64), torch.ones(2), 0),
        (torch.ones(2, dtype=torch.int32), torch.ones(2, dtype=torch.float64), 0),
        (torch.ones(0, dtype=torch.int32), torch.ones(0), 0),
        (torch.ones(2, dtype=torch.int32), torch.ones(3), 0),
        (torch.ones(2, dtype=torch.int32), torch.ones(2), -2),
    ],
)
def test_a_part_that_is_none_is_refused(tokens: torch.Tensor, log_probs: torch.Tensor, version: int) -> None:
    with pytest.raises(ValueError, match="Part"):
        Part(tokens, log_probs, version)


def saved(groups: list[Group]) -> tuple[list[Group], int]:
    """What a file gives back, and its bytes."""
    file = io.BytesIO()
    torch.save(pack(groups), file)
    packed = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    return unpack(packed, row), len(file.getvalue())


def test_a_checkpoint_knows_where_another_conversation_begins() -> None:
    opening = Opening([{"role": "user", "content": "anew"}], [{"type": "function"}])
    replies = [Reply(opening=opening, waited=0.5, asked_again=1)]
    turns = [part([11], 2), replace(answer([90, 91]), restarts=True), part([12], 2)]
    group = make_group(7)
    group = replace(group, samples=[replace(group.samples[0], response=Sample(0, turns, replies=replies))])
    ((found,), _) = saved([group])
    assert [getattr(turn, "restarts", None) for turn in found.samples[0].response.parts] == [None, True, None]
    (reply,) = found.samples[0].response.replies
    assert (reply, reply.waited, reply.asked_again) == (replies[0], 0.5, 1)


def test_a_checkpoint_holds_groups_exactly() -> None:
    groups = [scored(make_group(7), 1.0, 0.0), make_group(9, ended=False), make_group(12)]
    found, _ = saved(groups)
    for group, other in zip(groups, found, strict=True):
        assert (other.number, other.epoch, other.admitted_for_step, other.admitted_at) == (
            group.number,
            0,
            4,
            3,
        )
        assert (other.row, other.is_accepted, other.attempt, other.version) == (
            group.row,
            group.is_accepted,
            0,
            group.version,
        )
        assert (other.scores is None) == (group.scores is None)
        for sample, restored in zip(group.samples, other.samples, strict=True):
            assert (restored.number, restored.index, restored.prompt, restored.ended, restored.versions) == (
                sample.number,
                sample.index,
                sample.prompt,
                sample.ended,
                sample.versions,
            )
            before, after = sample.response, restored.response
            assert token_ids(after.parts) == token_ids(before.parts)
            assert replace(after, parts=()) == replace(before, parts=())
            for turn, same in zip(before.parts, after.parts, strict=True):
                assert type(turn) is type(same)
                if isinstance(turn, Part):
                    assert torch.equal(turn.log_probs, same.log_probs)
    assert found[0].scores is not None
    assert (found[0].scores.values.tolist(), found[0].scores.extras) == ([1.0, 0.0], {"acc": [True, False]})


def test_a_checkpoint_holds_what_an_environment_opened_with() -> None:
    opening = Opening([{"role": "system", "content": "guess"}], ({"type": "function"},))
    group = make_group(7).opened(replace(row(7), opening=opening, prompt_token_ids=[4, 5]))
    (found,), _ = saved([group])
    assert (found.row, found.samples[1].prompt) == (group.row, [4, 5])
    assert (found.row.prompt, found.row.for_environment()["prompt"]) == (opening.messages, row(7).messages)


def test_a_part_of_unknown_weights_stays_one_and_is_no_answer_of_a_tool() -> None:
    response = Sample(0, [part([11, 12], UNKNOWN), answer([90]), part([13], 4)])
    (found,), _ = saved([Group(7, row(7), 0, 1, 0, [GroupSample(7, 0, [1], response)])])
    restored = found.samples[0]
    assert [type(turn) for turn in restored.response.parts] == [Part, Answer, Part]
    assert (restored.versions, restored.num_sampled) == ([UNKNOWN, 4], 3)


def test_a_checkpoint_takes_about_nine_bytes_per_token() -> None:
    """4 for the token, 4 for its log-prob; records of parts and files are small beside long responses."""
    tokens = 2000
    parts = [part(list(range(1, tokens // 2 + 1)), version) for version in (0, 1)]
    groups = [
        Group(n, row(n), 0, 1, 0, [GroupSample(n, i, [1], Sample(i, parts), True) for i in range(4)])
        for n in range(8)
    ]
    assert saved(groups)[1] <= 9 * tokens * 4 * 8


def test_a_checkpoint_with_scores_of_a_sample_that_goes_on_is_refused() -> None:
    packed = pack([scored(make_group(7), 1.0, 0.0)])
    packed["groups"][0]["samples"][1]["ended"] = False
    with pytest.raises(ValueError, match="group 7 must be whole"):
        unpack(packed, row)


def test_a_prompt_of_other_tokens_than_were_sampled_from_is_refused() -> None:
    packed = pack([make_group(7)])
    with pytest.raises(
        ValueError, match=r"those of row \d+, which the checkpoint was sampling, are others now"
    ):
        unpack(packed, lambda index: replace(row(index), prompt_token_ids=[9, 9]))


@pytest.mark.parametrize("change", [1, -1])
def test_tokens_that_belong_to_nobody_are_noticed(change: int) -> None:
    packed = pack([make_group(7)])
    packed["token_ids"] = packed["token_ids"][:-1] if change < 0 else packed["token_ids"].repeat(2)
    with pytest.raises(ValueError, match="saved groups must have"):
        unpack(packed, row)
