"""Parts of a response: what is counted of them, and that they travel exactly, in few bytes."""

import pickle
from dataclasses import replace

import torch

from verl_rc.records.parts import Answer, Part, context, num_sampled, num_since_sampled, num_tokens, num_turns


def part(*tokens: int, version: int = 3) -> Part:
    return Part(
        torch.tensor(tokens, dtype=torch.int32), torch.tensor(tokens, dtype=torch.float32) / -7, version
    )


def answer(*tokens: int) -> Answer:
    return Answer(torch.tensor(tokens, dtype=torch.int32))


def test_a_conversation_is_counted_by_its_turns_and_tokens() -> None:
    """Prompt, a turn, an answer, a turn that an update cut in two."""
    parts = [part(11, 12), answer(90), part(13), part(14, 15, version=5)]
    assert (num_turns(parts), num_tokens(parts), num_sampled(parts)) == (4, 6, 5)
    assert (num_turns([]), num_tokens([]), num_sampled([])) == (1, 0, 0)


def test_the_next_token_is_sampled_behind_the_last_conversation_that_began() -> None:
    parts = [part(11), answer(90), part(12), replace(answer(91, 92), restarts=True), part(13)]
    assert context([1, 2], parts[:3]) == [1, 2, 11, 90, 12]
    assert context([1, 2], parts) == [91, 92, 13]
    # from the last sampled token on: none yet, [12], [12, 91] or, where another conversation began, all of it
    found = [num_since_sampled([1, 2], parts[:count]) for count in range(6)]
    assert found == [2, 1, 2, 1, 2, 1]
    assert num_since_sampled([1, 2], [answer(7, 8, 9)]) == 5
    assert num_since_sampled([1, 2], [part(11, 12), answer(7, 8, 9)]) == 4
    assert [one.restarts for one in pickle.loads(pickle.dumps(parts)) if isinstance(one, Answer)] == [
        False,
        True,
    ]


def test_parts_travel_to_the_bit_and_can_be_written_to() -> None:
    sent = [part(5, 6, 2**31 - 1, version=8), answer(0, 7), part(1, version=-1)]
    first, middle, last = pickle.loads(pickle.dumps(sent))
    assert torch.equal(first.token_ids, sent[0].token_ids)
    assert torch.equal(first.log_probs, part(5, 6, 2**31 - 1).log_probs)
    assert (first.version, middle.token_ids.tolist(), last.version) == (8, [0, 7], -1)
    first.log_probs[0] = 0.0


def test_a_part_takes_eight_bytes_a_token_and_little_else() -> None:
    sent = [part(*range(1, 41), version=version) for version in range(256)]
    assert len(pickle.dumps(sent)) < 256 * (8 * 40 + 64)
