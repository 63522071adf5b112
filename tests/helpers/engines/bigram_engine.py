"""A second engine: a table of logits for the next token, decoded in plain Python, in this folder alone."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from verl_rc.records.parts import UNKNOWN, Part, Sample, num_tokens, token_ids
from verl_rc.runtime.rollout.engine import (
    Collected,
    Engine,
    EngineFacts,
    Interrupted,
    MemoryTag,
    Request,
)
from verl_rc.runtime.rollout.environment import EpisodeFailedError
from verl_rc.runtime.rollout.open_request import OpenRequest
from verl_rc.runtime.rollout.sampling import GenerationRequest, SamplingOptions, next_seed
from verl_rc.runtime.weight_sync.manifest import Manifest, TensorSpec, tensor_digest
from verl_rc.runtime.weight_sync.proof import LoadReceipt
from verl_rc.runtime.weight_sync.shared_bucket import BucketHandle, copy_bucket, device_key
from verl_rc.runtime.weight_sync.transfer_group import (
    TransferAddress,
    TransferGroup,
    broadcast_from_sender,
    join_transfer_group,
)

Bucket = tuple[Sequence[TensorSpec], Tensor]


class Bigrams(nn.Module):
    """The trainer's model: row t of the sum of two tables holds the logits of the token after t."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first = nn.Parameter(torch.randn(vocabulary, vocabulary, generator=generator))
        self.second = nn.Parameter(torch.randn(vocabulary, vocabulary, generator=generator))


@dataclass(frozen=True)
class BigramOptions:
    """How it is built. An update cuts what runs."""

    worker: ClassVar[str] = "bigram_engine:BigramEngine"
    deterministic_steps: int | None = None
    """Tokens that a sample gets from one version of the weights; None: no limit."""

    @property
    def deterministic(self) -> bool:
        return self.deterministic_steps is not None


class BigramEngine(Engine):
    """Decodes when it is asked for samples, and before an update what it owes by then: it has no thread."""

    def __init__(self, options: BigramOptions) -> None:
        self._options = options
        self._tables: dict[str, Tensor] = {}
        self._version = UNKNOWN
        self._conversations: Any = None
        self._open: dict[int, OpenRequest] = {}
        """Requests by number. ``decoding``: random numbers, tokens and log-probs of the part that is being
        sampled."""
        self._box: list[Sample] = []
        self._failures: dict[int, str] = {}
        self._steps_left = 0 if options.deterministic else None
        self._required: set[int] = set()
        self._updating = False
        self._interrupted = Interrupted([])
        self._group: TransferGroup | None = None
        self._staged: list[Bucket] = []
        self._receipts: list[LoadReceipt] = []
        self._digests: dict[str, int] = {}
        self._spans: list[tuple[float, float]] = []

    def facts(self) -> EngineFacts:
        return EngineFacts(block_size=1)

    # requests and answers

    def submit(self, samples: Sequence[Request]) -> None:
        self._open |= {request.number: OpenRequest(request.number, request, []) for request in samples}

    def cancel(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._forget(number)

    def collect(
        self, at_least: int = 1, wait_seconds: float | None = None, linger_seconds: float | None = None
    ) -> Collected:
        while len(self._box) + len(self._failures) < at_least and self._may_step():
            self._step()
        collected = Collected(self._box, self._failures)
        self._box, self._failures = [], {}
        return collected

    def generate(self, requests: Sequence[GenerationRequest], options: SamplingOptions) -> list[Sample]:
        others = BigramEngine(BigramOptions())
        others._tables, others._version = self._tables, self._version
        others.submit([Request(row, request, options) for row, request in enumerate(requests)])
        return sorted(others.collect(len(requests)).samples, key=lambda sample: sample.number)

    def resume(self) -> None:
        self._steps_left, self._required = self._options.deterministic_steps, set()

    def finish(self, numbers: Sequence[int]) -> None:
        self._required |= set(numbers)

    def activity(self) -> list[tuple[float, float]]:
        spans, self._spans = self._spans, []
        return spans

    def _may_step(self) -> bool:
        owed = self._steps_left is None or self._steps_left > 0 or bool(self._required & set(self._open))
        return bool(self._open) and not self._updating and owed

    def _step(self) -> None:
        """One more token of every sample."""
        began = time.time()
        for number, opened in sorted(self._open.items()):
            self._grow(number, opened)
        if self._steps_left:
            self._steps_left -= 1
        self._spans.append((began, time.time()))

    def _grow(self, number: int, opened: OpenRequest) -> None:
        request, options, so_far = opened.request.request, opened.request.options, opened.sample
        if opened.decoding is None:
            generator = torch.Generator().manual_seed(next_seed(request.seed, so_far.parts))
            opened.has_begun, opened.decoding = True, (generator, [], [])
        generator, tokens, log_probs = opened.decoding
        before = [*request.prompt_token_ids, *token_ids(so_far.parts), *tokens]
        logits = sum(self._tables.values(), torch.tensor(0.0))[before[-1]]
        distribution = (logits / (options.temperature or 1.0)).log_softmax(-1)
        if options.temperature == 0:
            token = int(distribution.argmax())
        else:
            token = int(torch.multinomial(distribution.exp(), 1, generator=generator))
        tokens.append(token)
        log_probs.append(float(distribution[token]))
        stopped = not options.ignore_eos and token in options.stop_token_ids
        if not stopped and num_tokens(so_far.parts) + len(tokens) < request.limit(options):
            return
        outcome: Any = opened.end_turn(self._conversations, self._parts(opened), stopped)
        opened.decoding = None
        if not isinstance(outcome, Sample):
            try:
                answered = outcome.result()
            except EpisodeFailedError as failure:
                self._forget(number)
                self._failures[number] = str(failure)
                return
            outcome = opened.sample = answered.sample
            if answered.continues:
                return
        del self._open[number]
        self._box.append(outcome)

    def _parts(self, opened: OpenRequest) -> list[Part]:
        """What was sampled of a sample since it began or was cut."""
        _, tokens, log_probs = opened.decoding or (None, [], [])
        if not tokens:
            return []
        columns = torch.tensor(tokens, dtype=torch.int32), torch.tensor(log_probs, dtype=torch.float32)
        return [Part(*columns, self._version)]

    def _forget(self, number: int) -> None:
        if number in self._open:
            self._open.pop(number).close(self._conversations)

    # weights

    def device_keys(self) -> list[str]:
        return [device_key(torch.device("cpu"))]

    def join_transfer(self, address: TransferAddress, first_rank: int, backend: str) -> None:
        self._group = join_transfer_group(address, first_rank, backend)

    def receive_weights(self, manifest: Manifest, bucket_bytes: int, version: int) -> list[LoadReceipt]:
        self.stage_weights(manifest, bucket_bytes)
        self.load_staged(version)
        return self._receipts

    def stage_weights(self, manifest: Manifest, bucket_bytes: int) -> None:
        self._staged = list(self._received(manifest, bucket_bytes))

    def _received(self, manifest: Manifest, bucket_bytes: int) -> Iterator[Bucket]:
        for bucket in manifest.buckets(bucket_bytes):
            flat = torch.empty(sum(spec.num_elements for spec in bucket), dtype=bucket[0].torch_dtype)
            assert self._group is not None
            broadcast_from_sender(self._group, flat)
            yield bucket, flat

    def load_staged(self, version: int) -> None:
        self.begin_update()
        for tensors, flat in self._staged:
            self._load(tensors, flat)
        self.finish_update(version)

    def loaded(self) -> list[LoadReceipt] | None:
        return self._receipts

    def begin_update(self) -> None:
        while self._options.deterministic and self._may_step():
            self._step()
        begun = [opened for opened in self._open.values() if opened.has_begun]
        for opened in begun:
            opened.sample, opened.decoding = opened.extended(self._parts(opened)), None
        self._interrupted = Interrupted([opened.sample for opened in begun], 0.001)
        self._steps_left = 0 if self._options.deterministic else None
        self._required.clear()
        self._updating, self._tables, self._digests = True, {}, {}

    def load_bucket(self, handle: BucketHandle) -> None:
        self._load(handle.tensors, copy_bucket(handle, torch.device("cpu")))

    def _load(self, tensors: Sequence[TensorSpec], flat: Tensor) -> None:
        parts = flat.split([spec.num_elements for spec in tensors])
        for spec, part in zip(tensors, parts, strict=True):
            self._digests[spec.name] = tensor_digest(part)
            self._tables[spec.name] = part.reshape(spec.shape)

    def finish_update(self, version: int) -> list[LoadReceipt]:
        self._version, self._updating = version, False
        missing = sorted({"first", "second"} - set(self._tables))
        self._receipts = [LoadReceipt(self._digests, missing)]
        return self._receipts

    def abandon_update(self) -> None:
        self._version = UNKNOWN

    def interrupted(self) -> Interrupted:
        return self._interrupted

    # memory

    def sleep(self) -> bool:
        return False

    def wake_up(self, tags: Sequence[MemoryTag]) -> bool:
        return False

    # for tests

    def converse_by(self, conversations: Any) -> None:
        self._conversations = conversations
