"""What every engine has to do, tested on an engine in a process of its own and with a trainer's model."""

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from made_samples import of_parts
from shared_segments import nothing_left_behind
from two_processes import free_port

from verl_rc.records.episode import Episode, Reply
from verl_rc.records.parts import Part, Sample, num_tokens, token_ids
from verl_rc.runtime.distributed.child_process import ChildProcess
from verl_rc.runtime.rollout.conversation import AnsweredSample
from verl_rc.runtime.rollout.engine import Request
from verl_rc.runtime.rollout.environment import EpisodeFailedError
from verl_rc.runtime.rollout.sampling import GenerationRequest, SamplingOptions
from verl_rc.runtime.weight_sync.proof import LoadReceipt, SyncProofError, check_receipts
from verl_rc.runtime.weight_sync.sender import ModelWeights, WeightSender
from verl_rc.runtime.weight_sync.transfer_group import TransferAddress

STEPS = 6
"""Tokens that a sample gets from one version of the weights: engines under test are ``deterministic``."""
LONGEST = 20
DRAWN = SamplingOptions(1.0, 1.0, -1, max_tokens=LONGEST, stop_token_ids=(), ignore_eos=True)
GREEDY = replace(DRAWN, temperature=0.0, max_tokens=5)


@dataclass(frozen=True)
class Subject:
    """An engine in its process, and the trainer's side of it."""

    engine: ChildProcess
    model: Any
    bucket_bytes: int
    log_probs: Callable[[Any, list[int], list[int]], torch.Tensor]
    """Of each token of a response behind a prompt, by a model; nats."""

    def sender(self) -> WeightSender:
        return WeightSender(ModelWeights(self.model), 0, torch.device("cpu"), "float32", self.bucket_bytes)

    def change(self, seed: int) -> Any:
        """Move every weight so far that versions cannot be mistaken; returns the model as it is then."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
        return copy.deepcopy(self.model)

    def publish(self, version: int, leave_out: int | None = None) -> Any:
        """New weights, lent bucket by bucket and proved; returns the model that has them."""
        model = self.change(version)
        with nothing_left_behind():
            self.engine.call("begin_update")
            self.load(version, leave_out)
        return model

    def load(self, version: int, leave_out: int | None = None) -> None:
        sender = self.sender()
        for index in range(sender.num_buckets()):
            handle = sender.offer(index, True)
            if index != leave_out:
                self.engine.call("load_bucket", handle)
        sent = sender.release()
        received: list[LoadReceipt] = self.engine.call("finish_update", version)
        check_receipts(sender.manifest, sent, [received], version)

    def collect(self, count: int) -> dict[int, Sample]:
        """The next so many that end, by number."""
        ended: dict[int, Sample] = {}
        while len(ended) < count:
            ended |= {one.number: one for one in self.engine.call("collect", 1, 60.0).samples}
        return ended

    def gap(self, model: Any, queued: Request, sample: Sample, first: int = 0, end: int = LONGEST) -> float:
        """Largest difference of the engine's log-probs from the model's, of some tokens; nats."""
        expected = self.log_probs(model, queued.request.prompt_token_ids, token_ids(sample.parts))
        reported = torch.tensor([log_prob for _, log_prob, _ in of_parts(sample.parts)])
        return float((expected - reported)[first:end].abs().max())


def requests(count: int, first: int = 0) -> list[Request]:
    """Of different prompts, seeds and lengths; all longer than two versions' tokens."""

    def request(number: int) -> GenerationRequest:
        prompt = [5 + index % 7 for index in range(3 + number % 4)]
        return GenerationRequest(prompt, seed=number, max_tokens=LONGEST - number % 5)

    return [Request(number, request(number), DRAWN) for number in range(first, first + count)]


def versions_of(sample: Sample) -> list[int]:
    """The version of every token."""
    return [version for _, _, version in of_parts(sample.parts)]


def numbered(queued: Sequence[Request], first: int) -> list[Request]:
    return [replace(one, number=first + place) for place, one in enumerate(queued)]


class FailingTools:
    """In the place of ``Conversations``: the turn of an odd sample calls a tool, which fails."""

    def request_reply(
        self, request: GenerationRequest, sample: Sample, max_tokens: int
    ) -> "Future[AnsweredSample]":
        answer: Future[AnsweredSample] = Future()
        if sample.number % 2:
            answer.set_exception(EpisodeFailedError(f"the tool of sample {sample.number} failed"))
        else:
            answer.set_result(AnsweredSample(replace(sample, replies=[Reply(done=True)]), continues=False))
        return answer

    def close(self, request: GenerationRequest) -> None:
        pass


class EngineContract:
    """Derive from it, with a fixture ``subject`` of module scope."""

    def test_every_token_has_the_log_prob_of_the_weights_whose_version_it_has(self, subject: Subject) -> None:
        model = subject.publish(1)
        queued = requests(4)
        subject.engine.call("submit", queued)
        subject.engine.call("resume")
        subject.engine.call("finish", [0, 1, 2, 3])
        ended = subject.collect(4)
        other = subject.change(99)
        for one in queued:
            sample = ended[one.number]
            assert versions_of(sample) == [1] * (LONGEST - one.number % 5)
            assert (sample.finished, sample.tool_calls) == (False, 0)
            assert subject.gap(model, one, sample) < 1e-4
            assert subject.gap(other, one, sample) > 0.01
        assert subject.engine.call("collect", 0, 0.0).samples == []  # each is collected once

    def test_what_an_update_cuts_goes_on_exactly_where_it_was(self, subject: Subject) -> None:
        """And again from its parts, as on another engine or in a resumed run: equal to the bit."""
        before = subject.publish(2)
        queued = requests(5)
        subject.engine.call("submit", queued)
        subject.engine.call("resume")
        after = subject.publish(3)
        interrupted = subject.engine.call("interrupted")
        so_far = {one.number: one for one in interrupted.samples}
        assert sorted(so_far) == [0, 1, 2, 3, 4]
        assert all(versions_of(one) == [2] * STEPS for one in so_far.values())
        again = [replace(one, request=replace(one.request, so_far=so_far[one.number])) for one in queued]
        subject.engine.call("submit", numbered(again, first=10))
        subject.engine.call("resume")
        subject.engine.call("finish", [*range(5), *range(10, 15)])
        ended = subject.collect(10)
        for one in queued:
            sample = ended[one.number]
            length = num_tokens(sample.parts)
            assert length == LONGEST - one.number % 5
            assert versions_of(sample) == [2] * STEPS + [3] * (length - STEPS)
            assert of_parts(sample.parts)[:STEPS] == of_parts(so_far[one.number].parts)
            assert subject.gap(before, one, sample, 0, STEPS) < 1e-4
            assert subject.gap(after, one, sample, STEPS) < 1e-4
            assert subject.gap(before, one, sample, STEPS) > 0.01
            assert of_parts(ended[10 + one.number].parts) == of_parts(sample.parts)

    def test_a_sample_submitted_during_an_update_gets_no_token_of_older_weights(
        self, subject: Subject
    ) -> None:
        subject.publish(4)
        subject.engine.call("submit", requests(2))
        subject.engine.call("resume")
        subject.change(5)
        subject.engine.call("begin_update")
        subject.engine.call("submit", requests(2, first=2))
        assert subject.engine.call("collect", 1, 0.2).samples == []
        subject.load(5)
        subject.engine.call("resume")
        subject.engine.call("finish", [0, 1, 2, 3])
        found = {number: set(versions_of(one)) for number, one in subject.collect(4).items()}
        assert found == {0: {4, 5}, 1: {4, 5}, 2: {5}, 3: {5}}

    def test_without_resume_nothing_is_sampled_after_an_update(self, subject: Subject) -> None:
        subject.publish(6)
        subject.engine.call("submit", requests(2))
        subject.publish(7)
        assert subject.engine.call("interrupted").samples == []
        subject.engine.call("cancel", [0, 1])

    def test_cancelled_samples_are_neither_returned_nor_waited_for(self, subject: Subject) -> None:
        subject.publish(8)
        subject.engine.call("submit", requests(4))
        subject.engine.call("resume")
        subject.engine.call("cancel", [1, 3])
        subject.engine.call("finish", [0, 2])
        assert sorted(subject.collect(2)) == [0, 2]
        subject.publish(9)
        assert subject.engine.call("interrupted").samples == []
        assert subject.engine.call("collect", 0, 0.0).samples == []

    def test_a_generation_is_answered_in_order_beside_samples_that_wait(self, subject: Subject) -> None:
        model = subject.publish(10)
        subject.engine.call("submit", requests(2))
        queued = [
            replace(one, options=GREEDY, request=replace(one.request, max_tokens=None)) for one in requests(3)
        ]
        asked = [one.request for one in queued]
        found = subject.engine.call("generate", asked, GREEDY)
        assert [versions_of(one) for one in found] == [[10] * 5] * 3
        assert max(subject.gap(model, *pair) for pair in zip(queued, found, strict=True)) < 1e-4
        again = subject.engine.call("generate", asked[::-1], GREEDY)
        assert [of_parts(one.parts) for one in again[::-1]] == [of_parts(one.parts) for one in found]
        subject.engine.call("resume")
        subject.engine.call("finish", [0, 1])
        assert sorted(subject.collect(2)) == [0, 1]  # none was lost

    def test_an_update_that_broke_off_leaves_nothing_in_the_next(self, subject: Subject) -> None:
        subject.publish(11)
        sender = subject.sender()
        subject.change(12)
        subject.engine.call("begin_update")
        subject.engine.call("load_bucket", sender.offer(0, True))
        sender.release(interrupted=True)
        subject.engine.call("abandon_update")
        queued = requests(2)
        subject.engine.call("submit", queued)
        subject.engine.call("resume")
        subject.engine.call("finish", [0, 1])
        assert subject.engine.call("collect", 1, 0.2).samples == []
        model = subject.publish(13)
        subject.engine.call("resume")
        subject.engine.call("finish", [0, 1])
        for number, one in subject.collect(2).items():
            assert set(versions_of(one)) == {13}
            assert subject.gap(model, queued[number], one) < 1e-4

    def test_a_bucket_that_is_left_out_is_found(self, subject: Subject) -> None:
        with pytest.raises(SyncProofError, match="must receive all"):
            subject.publish(14, leave_out=1)

    def test_a_broadcast_proves_what_a_loan_proves(self, subject: Subject) -> None:
        """Received at once, and beside samples, which are loaded between."""
        subject.publish(15)
        sender = subject.sender()
        address = TransferAddress("127.0.0.1", free_port(), world_size=2)
        subject.engine.ask("join_transfer", address, 1, "gloo")
        sender.join(address, "gloo")
        subject.engine.answer()
        subject.change(16)
        subject.engine.ask("receive_weights", sender.manifest, subject.bucket_bytes, 16)
        sent = sender.send()
        check_receipts(sender.manifest, sent, [subject.engine.answer()], 16)
        model = subject.change(17)
        subject.engine.ask("stage_weights", sender.manifest, subject.bucket_bytes)
        sent = sender.send()
        subject.engine.answer()
        subject.engine.call("load_staged", 17)
        queued = requests(1)
        subject.engine.call("submit", queued)
        subject.engine.call("resume")
        subject.engine.call("finish", [0])
        ended = subject.collect(1)
        check_receipts(sender.manifest, sent, [subject.engine.call("loaded")], 17)
        assert set(versions_of(ended[0])) == {17}
        assert subject.gap(model, queued[0], ended[0]) < 1e-4

    def test_a_tool_that_fails_fails_its_sample_and_no_other(self, subject: Subject) -> None:
        subject.publish(18)
        subject.engine.call("converse_by", FailingTools())
        queued = [
            replace(one, request=replace(one.request, episode=Episode((one.number, 0, 0), {}, 0)))
            for one in requests(4)
        ]
        subject.engine.call("submit", queued)
        subject.engine.call("resume")
        subject.engine.call("finish", [0, 1, 2, 3])
        samples, failures = list[Sample](), dict[int, str]()
        while len(samples) + len(failures) < 4:
            collected = subject.engine.call("collect", 1, 60.0)
            samples += collected.samples
            failures |= collected.failures
        subject.engine.call("converse_by", None)
        assert sorted(one.number for one in samples) == [0, 2]
        assert failures == {n: f"the tool of sample {n} failed" for n in (1, 3)}
        assert all(isinstance(part, Part) for one in samples for part in one.parts)
