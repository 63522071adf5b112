"""How many engines may be replaced, what is counted, and that a loss during recovery is recovered from
too."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock, patch

import pytest
import torch
from made_samples import sample
from ragged_rows import whole

from verl_rc.config.async_training import AsyncTrainingConfig
from verl_rc.records.batches import Timed, TokenBatch, TokenScores
from verl_rc.records.parts import Sample
from verl_rc.records.ragged import Ragged
from verl_rc.runtime.checkpoint import RunState
from verl_rc.runtime.distributed.child_process import ProcessLostError, RemoteError
from verl_rc.runtime.rollout.sampling import GenerationRequest, SamplingOptions
from verl_rc.runtime.weight_sync.proof import GapLimit, SyncProofError
from verl_rc.trainer import weights
from verl_rc.trainer.cluster.engine_group import EngineReplacer, EnginesLostError
from verl_rc.trainer.services import Services
from verl_rc.trainer.step_record import StepRecord

OPTIONS = SamplingOptions(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=2, stop_token_ids=())


def loss(*engines: int) -> EnginesLostError:
    return EnginesLostError(
        {engine: ProcessLostError(f"rollout engine {engine} died") for engine in engines}, {}
    )


class Machine:
    """Engines and the way of weights as one list of what was done; ``replace`` fails as often as there are
    failed starts, and ``deliver`` as there are losses."""

    num_engines = 2

    manifest = SimpleNamespace(num_bytes=1, tensors=())

    def __init__(self) -> None:
        self.done: list[Any] = []
        self.failed_starts: list[EnginesLostError] = []
        self.losses: list[EnginesLostError] = []
        self.held = {0: 8, 1: 8}
        """Unfinished requests of each engine."""

    def num_held(self, engines: list[int]) -> int:
        return sum(self.held[engine] for engine in engines)

    def replace(self, engines: list[int], timeout_seconds: float) -> None:
        self.done.append(("replace", engines))
        self.held |= dict.fromkeys(engines, 0)
        if self.failed_starts:
            raise self.failed_starts.pop(0)

    def generate(self, requests: list[Any], options: Any, replace_lost: EngineReplacer) -> None:
        """Engine 1 is lost; what is sampled afterwards is of no interest."""
        replace_lost(loss(1))

    def open(self) -> None:
        self.done.append("open")

    def sleep(self) -> None:
        self.done.append("sleep")

    def wake_up(self, tag: str) -> None:
        self.done.append(tag)

    def deliver(self, version: int) -> tuple[None, None]:
        self.done.append(("deliver", version))
        if self.losses:
            raise self.losses.pop(0)
        return None, None


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(weights, "check_receipts", lambda *_: None)
    machine = Machine()
    monkeypatch.setattr(
        weights.Publisher,
        "_check_canary",
        lambda self, version, record: machine.done.append(("canary", version)),
    )
    return machine


def on(machine: Machine) -> weights.Publisher:
    return weights.Publisher(run_on(machine), RunState())


def run_on(machine: Machine) -> Services:
    rollout = SimpleNamespace(sync_proof=SimpleNamespace(canary_freq=0))
    run = SimpleNamespace(
        config=SimpleNamespace(
            actor_rollout_ref=SimpleNamespace(rollout=rollout),
            trainer=SimpleNamespace(ready_timeout_seconds=1.0),
            async_training=AsyncTrainingConfig(),
        ),
        actor=SimpleNamespace(processes=SimpleNamespace(require_nodes=lambda: None)),
        engines=machine,
        transport=machine,
    )
    return cast(Services, run)


def test_new_engines_get_the_weights_the_others_have_with_proof(machine: Machine) -> None:
    record = StepRecord()
    machine.generate([GenerationRequest([1], 0)] * 8, OPTIONS, on(machine).engine_replacer(4, record))
    assert machine.done == [
        ("replace", [1]),
        "sleep",
        "open",
        "weights",
        ("deliver", 4),
        "kv_cache",
        ("canary", 4),
    ]
    metrics = record.metrics()
    assert (metrics["recovery/engines_replaced"], metrics["recovery/requests_reissued"]) == (1, 8)
    assert not [
        name for name in metrics if name.startswith("timing_s/update_weights")
    ]  # it is part of the generation


def test_requests_of_an_engine_that_is_lost_while_another_is_replaced_are_counted(machine: Machine) -> None:
    machine.losses, machine.failed_starts = [loss(0)], [loss(1)]
    record = StepRecord()
    machine.generate([], OPTIONS, on(machine).engine_replacer(4, record))
    assert (record.engines_replaced, record.requests_reissued) == (3, 16)


def test_a_loss_in_an_update_and_another_while_that_is_mended(machine: Machine) -> None:
    machine.losses = [loss(0), loss(0, 1)]
    record = StepRecord()
    on(machine).publish(5, record)
    assert [step for step in machine.done if step[0] in ("replace", "deliver", "canary")] == [
        ("deliver", 5),
        ("replace", [0]),
        ("deliver", 5),
        ("replace", [0, 1]),
        ("deliver", 5),
        ("canary", 5),
    ]
    assert record.metrics()["recovery/engines_replaced"] == 3


def test_engines_that_do_not_start_are_started_again_as_long_as_the_limit_allows(machine: Machine) -> None:
    machine.losses, machine.failed_starts = [loss(0, 1)], [loss(1)]
    record = StepRecord()
    on(machine).publish(5, record)
    assert [step for step in machine.done if step[0] in ("replace", "deliver", "canary")] == [
        ("deliver", 5),
        ("replace", [0, 1]),
        ("replace", [1]),
        ("deliver", 5),
        ("canary", 5),
    ]
    assert record.engines_replaced == 3
    machine.losses, machine.failed_starts = [loss(0, 1)], [loss(1), loss(1)]
    with pytest.raises(RemoteError, match=r"at most 3 engines .*but 4 were lost"):
        on(machine).publish(5, StepRecord())


class Beside(Machine):
    """Its engine is lost while weights are staged, or while it is asked for them; a new one takes 5 s."""

    staged = SimpleNamespace(version=5, send_receipt=None)

    def __init__(self, clock: Mock) -> None:
        super().__init__()
        self.clock = clock

    def stage(self, version: int) -> None:
        raise loss(0)

    def loaded(self) -> None:
        raise loss(0)

    def replace(self, engines: list[int], timeout_seconds: float) -> None:
        self.clock.return_value += 5.0


@pytest.mark.parametrize("call", ["publish_staged", "finish_staged"])
def test_seconds_of_a_replacement_beside_training_are_those_of_a_stage(machine: Machine, call: str) -> None:
    with patch("verl_rc.trainer.step_record.time.perf_counter", return_value=0.0) as clock:
        record = StepRecord()
        getattr(on(Beside(clock)), call)(5, record)
        assert record.seconds == {"update_weights": 5.0}


def test_more_losses_than_allowed_end_the_run_with_the_last(machine: Machine) -> None:
    machine.losses = [loss(0)] * 5
    expected = r"at most 3 engines .*but 4 were lost, the last: rollout engine 0 died"
    with pytest.raises(RemoteError, match=expected):
        on(machine).publish(5, StepRecord())
    assert [step for step in machine.done if step[0] == "replace"] == [("replace", [0])] * 3


def test_canaries_count_publications(machine: Machine) -> None:
    """Of weights that are published every third step, every second version has them; the last one may come
    early."""
    run = run_on(machine)
    run.config.actor_rollout_ref.rollout.sync_proof.canary_freq = 2  # type: ignore[misc]
    run.config.async_training = AsyncTrainingConfig(trigger_parameter_sync_step=3)  # type: ignore[misc]
    for version in (3, 6, 9, 11):
        weights.Publisher(run, RunState()).publish(version, StepRecord())
    assert [step[1] for step in machine.done if step[0] == "canary"] == [6, 11]


class Unread:
    """A prompt that nobody asks for."""

    @property
    def prompt_token_ids(self) -> list[int]:
        raise AssertionError("more prompts are read than the prefix needs")


@pytest.mark.parametrize(
    ("rows", "prefix", "last"),
    [
        (
            [SimpleNamespace(prompt_token_ids=[4, 5, 6, 7, 4, 5, 6, 7, 4, 5]), Unread()],
            "456745674",
            [4, 5, 6],
        ),
        ([SimpleNamespace(prompt_token_ids=[8, 9])] * 2, "898989898", [8, 9, 8]),
        ([], "898989898", [8, 9, 8]),
    ],
)
def test_canary_prompts_share_a_prefix_longer_than_a_block(
    rows: list[Any], prefix: str, last: list[int]
) -> None:
    run = Mock(validation_rows=rows, block_size=2)
    run.prompts.first.return_value = SimpleNamespace(prompt_token_ids=[8, 9])
    run.config.max_model_length = 99
    run.config.actor_rollout_ref.rollout.sync_proof.canary_num_prompts = 3
    with patch.object(weights.Publisher, "_canary_options", Mock(max_tokens=4)):
        requests = weights.Publisher(cast(Services, run), RunState())._canary_requests
    shared = [int(digit) for digit in prefix]
    assert [request.prompt_token_ids for request in requests] == [[*shared, token] for token in last]
    assert [request.seed for request in requests] == [0, 1, 2]


def minus_one(tokens: Ragged[TokenBatch]) -> torch.Tensor:
    return torch.full(tokens.responses.shape, -1.0)


def publisher_of(
    answers: list[list[Sample]],
    log_probs: Callable[[Ragged[TokenBatch]], torch.Tensor] = minus_one,
    rounding: float = 1.0,
) -> weights.Publisher:
    """Of engines in bfloat16 that answer each canary prompt with these samples; ``log_probs`` are the
    trainer's, and ``rounding`` what it takes for rounding's part of them."""
    run = Mock(gap_limit=GapLimit.for_precision("bfloat16"))
    run.config.actor_rollout_ref.exact = False
    run.config.actor_rollout_ref.rollout.enable_rollout_routing_replay = False
    run.actor.compute_log_probs.side_effect = lambda tokens, _: Timed(
        tokens.become(TokenScores, log_probs=log_probs(tokens)), 0.0
    )
    run.actor.estimate_rounding.side_effect = lambda tokens, _: torch.full(tokens.responses.shape, rounding)
    run.engines.generate_on_each = lambda *_: answers
    run.transport.deliver.return_value = None, None
    run.transport.manifest.num_bytes, run.transport.manifest.tensors = 1, ()
    return weights.Publisher(cast(Services, run), RunState())


def publish(publisher: weights.Publisher, num_prompts: int = 1) -> None:
    canaries = [GenerationRequest([7], seed) for seed in range(num_prompts)]
    with (
        patch.multiple(weights.Publisher, _canary_requests=canaries, _canary_options=Mock()),
        patch.multiple(weights, log_prob_limit=Mock(), check_receipts=Mock()),
    ):
        publisher.publish(1, StepRecord(), canary="always")


def judged(*gaps: float, rounding: float = 1.0) -> tuple[float | None, Mock]:
    """The limit that the first canary tokens of engines set, and what became of alerts; log-probs of the
    trainer are -1."""
    publisher = publisher_of([[sample(0, [5, 6], 1, -1.0 - gap)] for gap in gaps], rounding=rounding)
    publish(publisher)
    return publisher.canary_gap_limit, publisher._services.guards.act_on_canary_gap


def test_the_trainer_scores_canary_tokens_once_and_compares_each_engine_with_its_own() -> None:
    """The log-prob of token n is -n. Both engines answer the first prompt alike, and not the second one."""

    def minus_ids(tokens: Ragged[TokenBatch]) -> torch.Tensor:
        return -tokens.responses.float()

    first, second = sample(0, [3, 4], 1, [-3.0, -4.0]), sample(1, [5, 6], 1, [-5.0, -6.0])
    publisher = publisher_of([[first, second], [first, sample(1, [8, 6], 1, [-8.0, -6.0])]], minus_ids)
    publish(publisher, num_prompts=2)
    (call,) = publisher._services.actor.compute_log_probs.call_args_list
    assert sorted(whole(call.args[0]).responses.tolist()) == [[3, 4], [5, 6], [8, 6]]
    swapped = publisher_of([[first, second], [first, sample(1, [8, 6], 1, [-5.0, -6.0])]], minus_ids)
    with pytest.raises(SyncProofError, match=r"rollout engine 1 at weight version 1: .* it is 0\.75"):
        publish(swapped, num_prompts=2)


def test_a_first_gap_that_nobody_has_measured_is_one_to_be_alerted_of() -> None:
    """Of engine 0; that of engine 1 would have set the limit of both."""
    limit, act = judged(0.1, 0.05)
    assert limit is None
    gap, usual, *_ = act.call_args.args
    assert gap == pytest.approx(0.1)
    assert usual == 0.06
    limit, act = judged(0.04, 0.05)
    assert limit == act.call_args.args[1] == pytest.approx(4 * 0.05)


def test_a_first_gap_above_what_rounding_makes_in_this_model_calibrates_nothing() -> None:
    """Four times what rounding makes is called rounding, and forty times is a fault, where other models have
    up to 0.06 nats."""
    limit, act = judged(0.0035, rounding=0.001)
    assert limit == act.call_args.args[1] == pytest.approx(0.014, rel=1e-4)  # four times the first gap
    limit, act = judged(0.03, rounding=0.001)
    assert limit is None
    assert act.call_args.args[:2] == pytest.approx((0.03, 0.004))
    with pytest.raises(SyncProofError, match=r"must be at most 0\.04 nats for this engine, it is 0\.064"):
        judged(0.064, rounding=0.001)


def test_tokens_without_finite_log_probs_say_nothing_of_weights() -> None:
    limit, act = judged(math.nan, math.inf)
    assert limit is None
    act.assert_not_called()
    limit, act = judged(math.nan, 0.05)
    assert limit == act.call_args.args[1] == pytest.approx(4 * 0.05)


def test_a_first_gap_of_other_weights_names_its_engine() -> None:
    with pytest.raises(SyncProofError, match="engine 1 at weight version 1: the mean"):
        judged(0.05, 0.7)
