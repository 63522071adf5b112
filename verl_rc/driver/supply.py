"""Where a step's samples come from: sampled when the step begins, or ahead of it, while earlier steps are trained."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from verl_rc.checkpoint import RunState
from verl_rc.data.batches import Completions, RolloutBatch
from verl_rc.data.groups import Group, GroupScores, Part, Sample, completions, joined_samples, pack, unpack
from verl_rc.data.samples import Samples
from verl_rc.driver import weights
from verl_rc.driver.announce import say
from verl_rc.driver.sample import (
    decode,
    describe_sampled,
    reward_outputs,
    sample_batch,
    sample_seed,
    sampled_tokens,
    score_with_penalty,
    with_component_scores,
)
from verl_rc.driver.scoring import reward_metrics
from verl_rc.driver.services import Services
from verl_rc.driver.step_record import StepRecord
from verl_rc.ppo.admission import Admission
from verl_rc.ppo.number_ranges import NumberRanges
from verl_rc.ppo.replay_order import NextBatch, OpenGroup, ReplayRule, next_batch
from verl_rc.ppo.running_ledger import RunningLedger
from verl_rc.rollout.collect import build_rollout_batch
from verl_rc.rollout.sampling import GenerationRequest, SamplingOptions


def open_supply(services: Services, state: RunState) -> "TurnTaking | Ahead":
    """The supply that ``async_training`` asks for."""
    synchronous = services.config.async_training.is_synchronous
    return TurnTaking(services, state) if synchronous else Ahead(services, state)


class TurnTaking:
    """The synchronous run: a step's prompts are drawn and sampled when it begins, and nothing is under way afterwards."""

    def __init__(self, services: Services, state: RunState) -> None:
        """``state`` has nothing in flight, see ``checkpoints.choose``."""
        self._services, self._state = services, state

    def take(self, record: StepRecord) -> Samples:
        """What the next step trains on."""
        epoch, prompts = self._services.prompts.draw()
        record.add({"training/epoch": epoch})
        return sample_batch(self._services, self._state, prompts, epoch, record)

    def publish(self, step: int, record: StepRecord) -> float | None:
        """Publish the weights of ``step``; returns the limit of the canary tokens' gap."""
        return weights.publish(self._services, self._state, step, record)

    def admit(self, version: int, record: StepRecord) -> None:
        """Nothing is sampled ahead."""

    def close_step(self, record: StepRecord) -> dict[str, Any]:
        """There is nothing to keep from one step to the next."""
        return {}


@dataclass
class _Progress:
    """What changes in a supply, all of which a checkpoint holds."""

    admission: Admission
    ledger: RunningLedger
    groups: dict[int, Group] = field(default_factory=dict)
    """Open groups by number, ascending."""
    trained: tuple[int, int] = (0, 0)
    """Tokens and groups trained on so far, of those sampled ahead."""


class Ahead:
    """Groups are sampled up to k publications ahead of training, in the order of their admission; every response is whole.

    Weights are published when nothing is under way any more. So the version of a sample is that of its admission, and what is
    open at the end of a step is whole, or has not begun: a checkpoint holds it exactly.
    """

    def __init__(self, services: Services, state: RunState) -> None:
        """Go on from ``state.supply``; ``admit`` hands over what it held unfinished."""
        config, options = services.config, services.config.async_training
        batch = config.data.train_batch_size
        self._services, self._state = services, state
        admission = Admission(batch, options.trigger_parameter_sync_step, options.ahead, services.total_steps * batch)
        self._now = _resumed(admission, services, state)
        oldest = max([options.oldest, *_ages_to_come(self._now.groups.values(), state.step, batch)])
        if oldest > options.oldest:
            say("groups of the checkpoint are trained on first, up to %d steps old, the bound is %d", oldest, options.oldest)
        self._rule = ReplayRule(options.resolved_order, batch, oldest)
        self._under_way: dict[int, list[int]] = {}
        """The engines' numbers of the samples of groups that were submitted and have not come back."""
        self._arrived = 0
        """Tokens that came from the engines since the last step was closed."""

    def admit(self, version: int, record: StepRecord) -> None:
        """Draw as many prompts as the engines' ``version`` of the weights admits, and hand them over to be sampled."""
        with record.stage("admit"):
            self._admit(version)

    def _admit(self, version: int) -> None:
        now = self._now
        now.admission = now.admission.publish(version)
        count = now.admission.allowance()
        for group in self._drawn(now.admission.admitted, count, version):
            now.groups[group.number] = group
        now.admission, now.ledger = now.admission.admit(count), now.ledger.admit(count)
        idle = [group for group in now.groups.values() if not group.is_whole and group.number not in self._under_way]
        self._submit(idle)

    def take(self, record: StepRecord) -> Samples:
        """The next step's groups, waited for. Raises ``RuntimeError`` when one is older than the rule allows."""
        step, now = self._state.step + 1, self._now
        while not (decision := self._decide(step)).numbers:
            self._finish(decision.awaited, record, self._state.step)
        groups = [now.groups.pop(number) for number in decision.numbers]
        now.ledger = now.ledger.end("trained", decision.numbers)
        samples = with_component_scores(self._services, self._joined(groups), record)
        ages = [step - 1 - group.version for group in groups]
        _require_ages(ages, groups, self._rule.oldest)
        now.trained = (now.trained[0] + samples.num_tokens, now.trained[1] + len(groups))
        record.ledger.sampled(samples.num_tokens, prompts=len(groups))
        record.add({"training/epoch": max(group.epoch for group in groups)})
        record.add(_age_metrics(samples.rollouts, ages, step - 1, self._rule.oldest))
        record.add_records(reward_metrics(reward_outputs(samples)))
        describe_sampled(self._services, samples, samples.num_tokens, record)
        return samples

    def publish(self, step: int, record: StepRecord) -> float | None:
        """Let what is under way come to its end, then publish; returns the limit of the canary tokens' gap."""
        self._finish(sorted(self._under_way), record, step)
        return weights.publish(self._services, self._state, step, record)

    def close_step(self, record: StepRecord) -> dict[str, Any]:
        """Close the books of a step, whose update is done; returns what a checkpoint holds.

        Raises ``LedgerError`` when a group or a token is unaccounted for.
        """
        now = self._now
        open_tokens = {number: group.num_sampled for number, group in now.groups.items()}
        now.ledger = now.ledger.close_step(self._arrived, record.ledger.accounts, open_tokens)
        self._arrived = 0
        if self._state.step + 1 == self._services.total_steps and now.admission.admitted == now.admission.total:
            now.ledger.close_run()
        record.waits_in = "gen"
        record.add(self._progress_metrics())
        state = {"admission": now.admission.state(), "ledger": now.ledger.state(), "trained": list(now.trained)}
        return {**state, "groups": pack(list(now.groups.values()))}

    def _progress_metrics(self) -> dict[str, float]:
        now = self._now
        whole = [group.num_sampled for group in now.groups.values() if group.is_whole]
        tokens, groups = now.trained
        return {
            "async/in_flight_groups": float(len(now.groups) - len(whole)),
            "async/whole_waiting_groups": float(len(whole)),
            "async/length_ratio": (tokens / groups) / ((tokens + sum(whole)) / (groups + len(whole))),
        }

    def _decide(self, step: int) -> NextBatch:
        groups = self._now.groups.values()
        decision = next_batch([OpenGroup(one.number, one.version, one.fate == "kept") for one in groups], step, self._rule)
        if not decision.numbers and not decision.awaited:
            raise RuntimeError(
                f"step {step} needs {self._rule.batch} groups, but only {len(groups)} are admitted, and all of them have ended."
            )
        return decision

    def _drawn(self, first: int, count: int, version: int) -> list[Group]:
        """The next ``count`` prompts as groups, numbered from ``first`` on."""
        groups: list[Group] = []
        while len(groups) < count:
            epoch, rows = self._services.prompts.draw()
            for row in rows:
                number = first + len(groups)
                samples = [
                    Sample(number, index, row.prompt_token_ids)
                    for index in range(self._services.config.actor_rollout_ref.rollout.n)
                ]
                groups.append(Group(number, row, epoch, number // self._rule.batch + 1, version, samples))
        return groups

    def _submit(self, groups: Sequence[Group]) -> None:
        if not groups:
            return
        options = SamplingOptions.for_training(self._services.config.actor_rollout_ref.rollout, self._services.stop_token_ids)
        requests = [
            GenerationRequest(
                group.row.prompt_token_ids,
                sample_seed(self._services, group.admitted_for_step, group.epoch, group.row, one.index),
            )
            for group in groups
            for one in group.samples
        ]
        numbers = iter(self._services.engines.submit(requests, options))
        for group in groups:
            self._under_way[group.number] = [next(numbers) for _ in group.samples]

    def _finish(self, numbers: Sequence[int], record: StepRecord, version: int) -> None:
        """Wait until these groups are whole, and have them scored; engines that are lost get the weights as ``version``."""
        if not numbers:
            return
        groups = [self._now.groups[number] for number in numbers]
        requested = [place for number in numbers for place in self._under_way.pop(number)]
        with record.stage("gen"):
            answer = weights.finish(self._services, self._state, requested, version, record)
        record.add_busy("gen", answer.busy_seconds)
        self._arrived += sampled_tokens(answer.result)
        rows = [sample for group in groups for sample in group.samples]
        for row, sample in enumerate(rows):
            _end(sample, answer.result, row)
        apart = StepRecord()  # reward/* of a step tell of its batch, not of what arrived meanwhile
        with record.stage("reward"):
            scored = score_with_penalty(self._services, [group.row for group in groups], self._rollouts(groups), apart)
        for place, group in enumerate(groups):
            self._now.groups[group.number] = group.scored(_scores(scored, place, len(group.samples)), "kept")
        self._now.admission = self._now.admission.keep(numbers)

    def _rollouts(self, groups: Sequence[Group]) -> RolloutBatch:
        samples = [sample for group in groups for sample in group.samples]
        group_ids = [place for place, group in enumerate(groups) for _ in group.samples]
        prompts = [list(sample.prompt) for sample in samples]
        given = completions(samples, width=self._services.config.data.max_response_length)
        return build_rollout_batch(prompts, group_ids, given, self._services.tokenizer.pad_token_id)

    def _joined(self, groups: Sequence[Group]) -> Samples:
        rollouts = self._rollouts(groups)
        return joined_samples(groups, rollouts, decode(self._services, rollouts))


def _resumed(admission: Admission, services: Services, state: RunState) -> _Progress:
    """Where the checkpoint's supply stood; what a synchronous run has trained counts as admitted and trained."""
    if state.supply:
        groups = unpack(state.supply["groups"], services.prompts.row)
        ledger = RunningLedger.from_state(state.supply["ledger"])
        tokens, count = state.supply["trained"]
        admission = admission.resumed(state.supply["admission"])
        return _Progress(admission, ledger, {group.number: group for group in groups}, (tokens, count))
    done = NumberRanges.from_numbers(range(state.step * admission.batch))
    counts = {"published": state.step, "admitted": len(done), "replaced": 0, "decided": done.plain()}
    ledger = RunningLedger.from_state({"admitted": len(done), "ended": {"trained": done.plain()}, "balance": 0})
    return _Progress(admission.resumed(counts), ledger)


def _ages_to_come(groups: Iterable[Group], trained: int, batch: int) -> list[int]:
    """How old each of these groups, in order, will be in its step, when ``trained`` steps are done."""
    return [trained + place // batch - group.version for place, group in enumerate(groups)]


def _end(sample: Sample, given: Completions, row: int) -> None:
    """Put a row of what the engines returned into its sample. Raises ``RuntimeError`` unless one known version sampled it."""
    length = int(given.response_lengths[row])
    versions = sorted(set(given.policy_versions[row, :length].tolist()))
    if len(versions) != 1 or versions[0] < 0:
        raise RuntimeError(
            f"every response must come from one version of the weights, but sample {sample.index} of group {sample.number} has "
            f"tokens of {versions} (-1: none is known): an engine took an update under a running response."
        )
    tokens = given.responses[row, :length].to(torch.int32)
    sample.turns = [Part(tokens, given.rollout_log_probs[row, :length].clone(), versions[0])]
    sample.state, sample.finished = "ended", bool(given.finished[row])


def _scores(scored: Samples, place: int, count: int) -> GroupScores:
    rows = slice(place * count, (place + 1) * count)
    extras: Mapping[str, list[object]] = {name: column[rows] for name, column in scored.extras.items()}
    before = None if scored.unpenalised is None else scored.unpenalised[rows].clone()
    return GroupScores(scored.scores[rows].clone(), dict(extras), before)


def _age_metrics(rollouts: RolloutBatch, ages: Sequence[int], current: int, bound: int) -> dict[str, float]:
    """Ages of the groups and of their tokens; the trainer's weights are version ``current``."""
    token_ages = current - rollouts.policy_versions[rollouts.response_mask].double()
    return {
        "async/group_age/max": float(max(ages)),
        "async/group_age/bound": float(bound),
        "async/token_age/mean": float(token_ages.mean()),
    }


def _require_ages(ages: Sequence[int], groups: Sequence[Group], oldest: int) -> None:
    wrong = [(group.number, age) for group, age in zip(groups, ages, strict=True) if not 0 <= age <= oldest]
    if wrong:
        raise RuntimeError(
            f"what a step trains on must be 0 to {oldest} steps old, but {len(wrong)} groups are not; the first (number, age): "
            f"{wrong[:5]}."
        )
