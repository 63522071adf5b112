"""A real engine borrows the trainer's weights bucket by bucket, and then computes with exactly these weights.

What it samples is cut off by none of this, and depends on weights, prompt and seed alone.
"""

import copy
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from made_samples import of_parts
from shared_segments import nothing_left_behind
from small_engines import BUCKET_BYTES, publish, sender_of
from transformers import AutoModelForCausalLM
from two_processes import free_port

from verl_rc.records.parts import Part, Sample, num_tokens, token_ids
from verl_rc.runtime.distributed.child_process import ChildProcess
from verl_rc.runtime.rollout.engine import Request
from verl_rc.runtime.rollout.sampling import GenerationRequest, SamplingOptions
from verl_rc.runtime.weight_sync.proof import check_receipts
from verl_rc.runtime.weight_sync.sender import WeightSender
from verl_rc.runtime.weight_sync.shared_bucket import choose_offering_ranks
from verl_rc.runtime.weight_sync.transfer_group import TransferAddress

# Longer than one block of 32 tokens, so that a second request finds a cached prefix.
PROMPT = [5 + index % 7 for index in range(40)]
WIDTH = 40
GREEDY = SamplingOptions(
    temperature=0.0, top_p=1.0, top_k=-1, max_tokens=8, stop_token_ids=(), ignore_eos=True
)


@pytest.fixture
def engine(small_engine: ChildProcess) -> ChildProcess:
    """A VllmEngine in fp32 in a process of its own, without Ray."""
    return small_engine


@pytest.fixture
def model(task: dict[str, Path]) -> Any:
    return AutoModelForCausalLM.from_pretrained(task["model"], dtype=torch.float32)


@pytest.fixture
def sender(model: Any) -> Iterator[WeightSender]:
    with nothing_left_behind():
        yield sender_of(model)


def join(sender: WeightSender, engine: ChildProcess) -> None:
    """Make the group of a broadcast."""
    address = TransferAddress("127.0.0.1", free_port(), world_size=2)
    engine.ask("join_transfer", address, 1, "gloo")
    sender.join(address, "gloo")
    engine.answer()


def change(model: Any, seed: int) -> None:
    """Move every weight so far that another version cannot be mistaken for this one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))


def gap_to_model(model: Any, engine: ChildProcess, version: int) -> float:
    """Largest |log-prob of the engine - log-prob of transformers| over greedily generated tokens, nats."""
    (sample,) = engine.call("generate", [GenerationRequest(PROMPT, seed=0)], GREEDY)
    (part,) = sample.parts
    assert (part.version, len(part.token_ids)) == (version, GREEDY.max_tokens)
    sampled = part.token_ids.long()
    tokens = torch.tensor([PROMPT + sampled.tolist()])
    with torch.no_grad():
        log_probs = model(tokens).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    expected = log_probs.gather(-1, sampled[:, None])[:, 0]
    assert (log_probs.amax(-1) - expected).max() < 1e-4  # the likeliest, or as likely to rounding
    return float((expected - part.log_probs).abs().max())


def test_two_updates_with_changed_weights(model: Any, sender: WeightSender, engine: ChildProcess) -> None:
    assert sender.num_buckets() >= 3
    assert choose_offering_ranks([sender.device_key()], engine.call("device_keys")) == [True]
    for version in (1, 2):
        change(model, seed=version)
        publish(sender, engine, version)
        assert gap_to_model(model, engine, version) < 1e-4
        change(model, seed=99)
        with pytest.raises(AssertionError):
            assert gap_to_model(model, engine, version) < 0.01


def test_a_broadcast_loads_the_same_weights(model: Any, sender: WeightSender, engine: ChildProcess) -> None:
    change(model, seed=6)
    lent = publish(sender, engine, 6)
    join(sender, engine)
    engine.ask("receive_weights", sender.manifest, BUCKET_BYTES, 7)
    sent = sender.send()
    received = engine.answer()
    check_receipts(sender.manifest, sent, [received], 7)
    assert received == lent
    assert gap_to_model(model, engine, 7) < 1e-4


def test_a_staged_update_pauses_nothing_while_it_is_received(
    model: Any, sender: WeightSender, engine: ChildProcess
) -> None:
    """All samples end before the first bucket is sent; those that come later have the new weights, and only
    these."""
    change(model, seed=8)
    publish(sender, engine, 8)
    join(sender, engine)
    engine.call("act_on_update", "recompute")
    engine.call("submit", samples(6))
    change(model, seed=9)
    engine.call("receive_beside", sender.manifest, BUCKET_BYTES, 9)
    ended = collect(engine, 6)
    assert {version for one in ended.values() for version in versions_of(one)} == {8}
    sent = sender.send()
    check_receipts(sender.manifest, sent, [engine.call("received")], 9)
    assert gap_to_model(model, engine, 9) < 1e-4
    engine.call("act_on_update", "finish")


def test_a_staged_update_waits_for_whole_responses_and_its_caller_does_not(
    model: Any, sender: WeightSender, engine: ChildProcess
) -> None:
    """What was submitted before it has the old weights alone, what comes later the new ones; cancelled ones
    are no obstacle."""
    change(model, seed=10)
    publish(sender, engine, 10)
    join(sender, engine)
    change(model, seed=11)
    engine.call("submit", samples(6))
    engine.ask("stage_weights", sender.manifest, BUCKET_BYTES)
    sent = sender.send()
    engine.answer()
    engine.call("load_staged", 11)
    engine.call("cancel", [0])
    engine.call("submit", [replace(one, number=one.number + 10) for one in samples(2)])
    ended = collect(engine, 7)
    if 0 in ended:  # it ended before it could be cancelled
        ended |= collect(engine, 1)
    versions = {number: set(versions_of(one)) for number, one in ended.items() if number != 0}
    assert versions == {number: {11 if number >= 10 else 10} for number in (1, 2, 3, 4, 5, 10, 11)}
    check_receipts(sender.manifest, sent, [engine.call("loaded")], 11)
    assert gap_to_model(model, engine, 11) < 1e-4


def test_an_update_that_broke_off_within_a_layer_leaves_nothing_in_the_next(
    model: Any, sender: WeightSender, engine: ChildProcess
) -> None:
    change(model, seed=3)
    engine.call("begin_update")
    engine.call("load_bucket", sender.offer(0, True))
    sender.release()
    engine.call("abandon_update")  # as when another engine is lost
    engine.call("submit", samples(2))
    assert engine.call("collect", 1, 0.3).samples == []
    engine.call("begin_update")
    engine.call("load_bucket", sender.offer(0, True))
    engine.call("load_bucket", sender.offer(1, True))
    vanished = sender.offer(2, True)
    assert [spec.name.split(".")[-2] for spec in vanished.tensors[:4]] == [
        "k_proj",
        "k_proj",
        "v_proj",
        "v_proj",
    ]
    sender.release()
    with pytest.raises(RuntimeError, match="No such file"):
        engine.call("load_bucket", vanished)
    assert engine.call("collect", 1, 0.3).samples == []  # no sample comes from a mixture of weights
    change(model, seed=4)
    publish(sender, engine, 4)
    assert gap_to_model(model, engine, 4) < 1e-4
    assert {version for one in collect(engine, 2).values() for version in versions_of(one)} == {4}


def samples(count: int, first: int = 0) -> list[Request]:
    """Of different lengths and seeds, on eight prompts of which the longest fills more than one block."""
    sampling = SamplingOptions(
        temperature=1.0, top_p=1.0, top_k=-1, max_tokens=WIDTH, stop_token_ids=(), ignore_eos=True
    )

    def request(number: int) -> GenerationRequest:
        return GenerationRequest(PROMPT[: 5 + 5 * (number % 8)], seed=number, max_tokens=WIDTH - number % 11)

    return [Request(number, request(number), sampling) for number in range(first, first + count)]


def collect(engine: ChildProcess, count: int) -> dict[int, Sample]:
    """The next so many that end, by number."""
    ended: dict[int, Sample] = {}
    while len(ended) < count:
        ended |= {one.number: one for one in engine.call("collect", 1, 60.0).samples}
    return ended


def versions_of(sample: Sample) -> list[int]:
    """The version of every token."""
    return [version for _, _, version in of_parts(sample.parts)]


def plain(sample: Sample) -> tuple[Any, ...]:
    """Everything that was sampled, to compare to the bit."""
    return of_parts(sample.parts), sample.finished


def test_when_samples_come_and_with_which_others_changes_no_bit(
    model: Any, sender: WeightSender, engine: ChildProcess
) -> None:
    change(model, seed=8)
    publish(sender, engine, 8)
    wanted = samples(48)
    whole = engine.call("generate", [sample.request for sample in wanted], wanted[0].options)
    for start in range(0, 48, 7):
        engine.call("submit", wanted[start : start + 7])
        time.sleep(0.02)
    apart = [one for _, one in sorted(collect(engine, 48).items())]
    assert {version for one in whole for version in versions_of(one)} == {8}
    assert len({tuple(token_ids(one.parts)) for one in whole}) == 48
    assert list(map(plain, whole)) == list(map(plain, apart))


def test_validation_beside_samples_equals_validation_alone(
    model: Any, sender: WeightSender, engine: ChildProcess
) -> None:
    """T22: to the bit, and the samples end as they would have without it."""
    change(model, seed=12)
    publish(sender, engine, 12)
    wanted, questions = samples(32), [GenerationRequest(PROMPT[: 8 + place], seed=0) for place in range(6)]
    undisturbed = engine.call("generate", [sample.request for sample in wanted], wanted[0].options)
    alone = engine.call("generate", questions, GREEDY)
    for _ in range(10):  # on a busy machine the samples may end before the validation is asked for
        engine.call("submit", wanted)
        beside = engine.call("generate", questions, GREEDY)
        early = engine.call("collect", 0, 0.0).samples
        if len(early) < 32:
            break
    assert len(early) < 32, "the samples ended before the validation did: it was not beside them"
    ended = collect(engine, 32 - len(early))
    assert list(map(plain, alone)) == list(map(plain, beside))
    assert all(plain(one) == plain(undisturbed[number]) for number, one in ended.items())


def test_an_update_under_load_cuts_nothing_off_and_every_response_has_one_version(
    model: Any, sender: WeightSender, engine: ChildProcess
) -> None:
    change(model, seed=10)
    publish(sender, engine, 10)
    engine.call("submit", samples(16))
    change(model, seed=11)
    publish(sender, engine, 11)
    engine.call("submit", samples(8, first=16))
    change(model, seed=12)
    publish(sender, engine, 12)
    for number, one in collect(engine, 24).items():
        assert versions_of(one) == [10 if number < 16 else 11] * (WIDTH - number % 11), number


def log_probs_by(model: Any, prompt: list[int], response: list[int]) -> torch.Tensor:
    """Of each token of the response, nats."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0]


def log_probs_of(sample: Sample) -> torch.Tensor:
    """Of each token, as the engine reported them."""
    return torch.cat([part.log_probs for part in sample.parts if isinstance(part, Part)])


@pytest.fixture
def cutting_engine(engine: ChildProcess) -> Iterator[ChildProcess]:
    """The engine, whose updates cut running samples. It makes no step by itself: see ``after_steps``."""
    engine.call("act_on_update", "recompute")
    engine.call("after_steps", 0)
    yield engine
    engine.call("act_on_update", "finish")
    engine.call("after_steps", 1_000_000)


def test_an_update_under_running_samples_goes_on_with_the_new_weights(
    model: Any, sender: WeightSender, cutting_engine: ChildProcess
) -> None:
    """T5, T7, T9: nothing is lost, and every token fits the weights whose version it has, behind cached
    blocks too."""
    engine, before, wanted = cutting_engine, copy.deepcopy(model), samples(16)
    change(before, seed=20)
    change(model, seed=20)
    publish(sender, engine, 20)
    engine.call("submit", wanted)
    engine.call("after_steps", 12)
    change(model, seed=21)
    publish(sender, engine, 21)
    interrupted = engine.call("interrupted")
    so_far = {one.number: one for one in interrupted.samples}
    assert sorted(so_far) == list(range(16))
    assert interrupted.pause_seconds > 0
    assert all(versions_of(one) == [20] * 12 for one in so_far.values())
    engine.call("after_steps", 100)
    ended = collect(engine, 16)
    for sample in wanted:
        one, number = ended[sample.number], sample.number
        response = token_ids(one.parts)
        assert len(response) == sample.request.max_tokens
        assert versions_of(one) == [20] * 12 + [21] * (len(response) - 12)
        assert of_parts(one.parts)[:12] == of_parts(so_far[number].parts)
        gaps = [
            (log_probs_by(weights, sample.request.prompt_token_ids, response) - log_probs_of(one)).abs()
            for weights in (before, model)
        ]
        assert max(gaps[0][:12].max(), gaps[1][12:].max()) < 1e-4
        assert min(gaps[0][12:].max(), gaps[1][:12].max()) > 0.01
    again = [
        replace(sample, request=replace(sample.request, so_far=so_far[sample.number])) for sample in wanted
    ]
    engine.call("submit", again)  # as after a loss or in a resumed run: the same tokens, to the bit
    engine.call("after_steps", 100)
    assert all(plain(one) == plain(ended[number]) for number, one in collect(engine, 16).items())


@pytest.mark.slow
def test_a_cache_that_is_kept_serves_its_own_response_and_no_other(
    model: Any, sender: WeightSender, cutting_engine: ChildProcess
) -> None:
    """T5 with ``keep``: log-probs after the update are of new weights behind old keys and values; other
    requests see none."""
    engine, wanted = cutting_engine, samples(8)
    engine.call("act_on_update", "keep")
    change(model, seed=30)
    publish(sender, engine, 30)
    engine.call("submit", wanted)
    engine.call("after_steps", 12)
    change(model, seed=31)
    publish(sender, engine, 31)
    assert (
        gap_to_model(model, engine, 31) < 1e-4
    )  # its prompt is in the cache, with keys and values of version 30
    interrupted = engine.call("interrupted")
    so_far = {one.number: one for one in interrupted.samples}
    assert sorted(so_far) == list(range(8))
    engine.call("after_steps", 100)
    for number, one in collect(engine, 8).items():
        # The step of a validation decodes what runs beside it.
        assert versions_of(one) == [30] * 12 + [31] * (num_tokens(one.parts) - 12)
        assert of_parts(one.parts)[:12] == of_parts(so_far[number].parts)
        new = log_probs_by(model, wanted[number].request.prompt_token_ids, token_ids(one.parts))
        assert (new - log_probs_of(one)).abs()[13:].max() > 1e-3


@pytest.mark.slow
def test_thirty_updates_under_running_samples(
    model: Any, sender: WeightSender, cutting_engine: ChildProcess
) -> None:
    """T25, with the real engine."""
    engine = cutting_engine
    publish(sender, engine, 100)
    engine.call("submit", samples(200))
    for version in range(101, 131):
        engine.call("after_steps", 1 + version % 3)
        publish(sender, engine, version)
    engine.call("after_steps", 10_000)
    for number, one in collect(engine, 200).items():
        versions = versions_of(one)
        assert len(versions) == WIDTH - number % 11
        assert versions == sorted(versions)
        assert versions[0] >= 100


def test_a_cache_that_cannot_be_reset_under_load_is_an_error(cutting_engine: ChildProcess) -> None:
    engine = cutting_engine
    engine.call("submit", samples(16))
    engine.call("after_steps", 1)
    with pytest.raises(RuntimeError, match="must be empty after a weight update"):
        engine.call("reset_prefix_cache")
    engine.call("after_steps", 10_000)
    assert len(collect(engine, 16)) == 16
    engine.call("reset_prefix_cache")


def test_an_engine_on_a_cpu_says_that_it_cannot_sleep(engine: ChildProcess) -> None:
    assert engine.call("sleep") is False
    assert engine.call("wake_up", ["weights"]) is False


def test_an_engine_that_can_sleep_drops_its_weights_and_wakes_in_two_parts(engine: ChildProcess) -> None:
    assert engine.call("calls_around_an_update") == [
        ("sleep", (), {"level": 2}),
        ("wake_up", (["weights"],), {}),
        ("wake_up", (["kv_cache"],), {}),
    ]
