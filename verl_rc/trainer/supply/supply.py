"""Supplying steps with samples: up to k publications ahead of training; with k = 0 a step samples its own."""

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace

from verl_rc.algorithm.ppo.batch_metrics import version_metrics
from verl_rc.algorithm.rewards import RewardError
from verl_rc.algorithm.supply.ahead import advice
from verl_rc.algorithm.supply.group_book import AdmissionRule, Fate
from verl_rc.algorithm.supply.replay_order import ReplayRule, next_batch
from verl_rc.records.dataset import PromptRow
from verl_rc.records.groups import Group, GroupSample
from verl_rc.records.parts import Sample
from verl_rc.records.scored_batch import ScoredBatch
from verl_rc.runtime.checkpoint import RunState, SupplyState
from verl_rc.runtime.rollout.environment import EpisodeFailedError
from verl_rc.runtime.rollout.sampling import SamplingOptions
from verl_rc.trainer.cluster.engine_group import EnginesLostError
from verl_rc.trainer.cluster.engine_work import AssignedRequest
from verl_rc.trainer.cluster.remote import while_ranks_compute
from verl_rc.trainer.log import log
from verl_rc.trainer.services import Services
from verl_rc.trainer.step_record import StepRecord
from verl_rc.trainer.supply.group_requests import GroupRequests, environment_seed, store_response
from verl_rc.trainer.supply.scored_groups import join_groups, record_batch_of_groups, score_groups
from verl_rc.trainer.supply.supply_progress import (
    StepTotals,
    SupplyProgress,
    age_metrics,
    ages_to_come,
    require_ages,
    require_room,
    require_samples,
)
from verl_rc.trainer.weights import Publisher, pause_metrics

FindRejected = Callable[[ScoredBatch], list[int]]
"""Finds the groups of a batch, by their place in it, of which rejection keeps no token."""
_LOOK_SECONDS = 0.25
"""Longest wait for the next sample between two looks at what is late."""
_LENGTH_RATIO_STEPS, _LENGTH_RATIO_ERROR = 20, 0.02
"""The step from which on trained and sampled lengths must agree, and the largest relative difference."""


class Supply:
    """Groups are sampled up to k publications ahead of training, and trained on in the order of the replay
    rule.

    With k = 0 and a publication after each step, a step's groups are admitted when it begins, all are waited
    for, and nothing is under way when it ends. With ``partial_rollout=False`` engines take new weights when
    they have ended what they were handed before. So the version of a sample is that of its admission. The
    trainer waits for that at every publication, or, with ``stage_updates``, at the next one and where a
    checkpoint is written: what is open then is whole, or has not begun. Else a publication cuts what is under
    way, and its tokens so far are known here. In all cases a checkpoint of the step holds the open groups
    exactly.
    """

    def __init__(self, services: Services, state: RunState, publisher: Publisher) -> None:
        """Go on from ``state.supply``; ``admit`` hands over what it held unfinished.

        Raises ``ConfigError`` when the data lack a prompt of the checkpoint, its groups have another number
        of samples, or ``data.max_response_length`` leaves a response that is still sampled no room.
        """
        config = services.config
        options = config.async_training
        batch = config.data.train_batch_size
        self._services = services
        self._publisher = publisher
        self._options = options
        rule = AdmissionRule(
            batch,
            options.groups_in_memory(batch),
            services.total_steps * batch,
            config.data.gen_batch_size if self._draws_batches else None,
        )
        self._progress = SupplyProgress.resumed(rule, services.prompts, state.supply)
        self._book = self._progress.book
        groups = self._book.open.values()
        require_samples(groups, self._samples_of_group)
        require_room(groups, config.data.max_response_length, config.actor_rollout_ref.rollout.converses)
        # ``train.start`` published it, before anything is admitted.
        self._book.publish(state.step)
        strategy = options.max_off_policy_strategy
        oldest = options.oldest
        if strategy == "wait":
            oldest = max([oldest, *ages_to_come(groups, state.step, batch)])
        if oldest > options.oldest:
            log(
                "groups of the checkpoint are trained on first, up to %d steps old, the bound is %d",
                oldest,
                options.oldest,
            )
        self._rule = ReplayRule(options.resolved_order, batch, oldest, strategy)
        rollout = config.actor_rollout_ref.rollout
        self._requests = GroupRequests(
            services.engines,
            SamplingOptions.for_training(
                rollout,
                config.data.max_response_length,
                services.stop_token_ids,
                config.algorithm.rollout_correction.head_tokens,
            ),
            rollout.n,
            config.trainer.seed,
            converses=rollout.converses,
        )
        self._stepping_version: int | None = None
        """The version of the weights at the last ``begin_steps``."""
        self._canaries: list[list[AssignedRequest]] = []
        """Requests for canary tokens that were published with the current version and not judged yet, by
        engine."""
        self._totals = StepTotals(dict(self._book.ended))
        self._step_began = self._arrived_at = time.perf_counter()
        """When the step began, and when its last samples arrived."""

    @property
    def _draws_batches(self) -> bool:
        """Whether dynamic sampling draws whole batches of ``data.gen_batch_size`` prompts, as verl does."""
        return self._options.is_synchronous and self._services.config.algorithm.filter_groups.enable

    @property
    def _samples_of_group(self) -> int:
        config = self._services.config
        return config.actor_rollout_ref.rollout.n + config.algorithm.estimator_reads("reward_baselines")

    def admit(self, record: StepRecord) -> None:
        """Hand the next prompts to engines that sample while the trainer works; other engines get them when
        the step begins."""
        if self._services.config.overlaps:
            with record.stage("admit"):
                self._admit()

    def _admit(self) -> None:
        """Draw as many prompts as the engines' version of the weights admits, and hand them over to be
        sampled."""
        book = self._book
        # Openings that fail free places.
        while count := book.allowance():
            numbers = range(book.admitted, book.admitted + count)
            admitted = [self._new_group(number, *self._next_prompt()) for number in numbers]
            book.admit(admitted)
            self._open(admitted)
        self._submit(
            [group for group in book.open.values() if not group.is_whole and group.submitted_at is None]
        )
        if self._stepping_version != book.published:
            self._services.engines.begin_steps()
            self._stepping_version = book.published

    def _submit(self, groups: Sequence[Group]) -> None:
        self._requests.submit(groups, evenly=self._options.is_synchronous)
        for group in groups:
            self._book.update(replace(group, submitted_at=time.monotonic()))

    def take(self, step: int, record: StepRecord, find_rejected: FindRejected) -> ScoredBatch:
        """The groups of ``step``, waited for; those of which rejection keeps nothing are replaced
        ``algorithm.max_refills`` times. Raises ``RuntimeError`` when one is older than the rule allows."""
        self._step_began = time.perf_counter()
        numbers = self._next_batch(step, record)
        kept = set[int]()
        for _ in range(self._services.config.algorithm.max_refills):
            new = [self._book.open[number] for number in numbers if number not in kept]
            with while_ranks_compute(self.decide_ended_groups):
                rejected = find_rejected(join_groups(self._services, new))
            if not rejected:
                break
            self._remove("rejected", [new[place].number for place in rejected])
            kept = self._book.open.keys() & set(numbers)
            numbers = self._next_batch(step, record)
        groups = self._book.end("trained", numbers)
        if self._draws_batches:
            self._remove("surplus", list(self._book.open))
        if self._canaries:  # the trainer still holds the weights of their publication
            self._publisher.collect_canary(self._canaries, step - 1, record)
            self._canaries = []
        scored = join_groups(self._services, groups)
        ages = [step - 1 - group.version for group in groups]
        require_ages(ages, groups, self._rule.oldest)
        record_batch_of_groups(self._services, scored, groups, record)
        record.add({"training/epoch": max(group.epoch for group in groups)})
        if not self._options.is_synchronous:
            record.add(age_metrics(scored.rollouts, ages, step - 1, self._rule.oldest))
            num_trained = self._services.config.actor_rollout_ref.rollout.n
            versions = [one.versions for group in groups for one in group.samples[:num_trained]]
            record.add(version_metrics(versions, step - 1))
        return scored

    def publish(self, step: int, record: StepRecord) -> None:
        """Publish the weights of ``step``."""
        while not self._publisher.finish_staged(step, record):
            self._receive(record, version=step)
        if self._publishes_beside(step):
            self._publisher.publish_staged(step, record)
        else:
            while self._requests and not self._options.cuts:
                self._receive(record, version=step)
            # Counted engine steps decode nothing else, and after the last step no batch comes that canaries
            # could come with. Engines that take turns with the trainer have nothing to do beside them.
            is_alone = self._options.is_synchronous or self._options.deterministic_steps is not None
            defers_canary = not is_alone and step < self._services.total_steps
            self._publisher.publish(step, record, canary="never" if defers_canary else "if due")
            if defers_canary and self._publisher.canary_is_due(step):
                self._canaries = self._publisher.submit_canary()
        self._book.publish(step)
        if self._options.cuts:
            self._store_parts(record, version=step)

    def _publishes_beside(self, step: int) -> bool:
        """Whether whole responses may go on while the weights of ``step`` are published: nothing is to be
        proven or saved.

        After the last step none goes on.
        """
        services = self._services
        ends = step == services.total_steps
        return services.config.actor_rollout_ref.rollout.checkpoint_engine.stage_updates and not (
            self._options.cuts or ends or services.saves_at(step) or self._publisher.canary_is_due(step)
        )

    def close_step(self, step: int, record: StepRecord) -> SupplyState:
        """Close the books of ``step``, whose update is done; returns what a checkpoint holds.

        Raises ``LedgerError`` when a group or a token is unaccounted for.
        """
        book = self._book
        totals = self._totals
        self._totals = StepTotals(dict(book.ended))
        ended = totals.ended(book)
        for fate in ("filtered", "surplus", "rejected"):
            record.ledger.add_sampled(ended[fate].tokens, prompts=ended[fate].groups)
            record.ledger.book({fate: ended[fate].tokens})
            record.ledger.book_prompts({fate: ended[fate].groups})
        failed = totals.failed_attempt_tokens + ended["failed"].tokens
        accounts = {**record.ledger.accounts, "failed": failed, "stale": ended["stale"].tokens}
        book.close_step(totals.arrived, accounts)
        if step == self._services.total_steps and book.admitted == book.replaced + (book.rule.total or 0):
            book.close_run()
        if self._services.config.algorithm.filter_groups.enable:
            samples = self._services.config.actor_rollout_ref.rollout.n
            record.add(totals.filter_metrics(ended, samples, in_draws=self._draws_batches))
        rollout, openings = self._services.config.actor_rollout_ref.rollout, self._services.openings
        if rollout.converses:
            record.add({"env/failures": float(totals.environment_failures)})
        if rollout.environment.hosts and openings is not None:
            record.add({"env/hosts_lost": float(openings.hosts.count_lost())})
        if self._options.is_synchronous:
            seconds = self._arrived_at - self._step_began
            record.add({"perf/rollout_tokens_per_second": totals.arrived / seconds})
        else:
            record.add(totals.lead_metrics(ended))
            self._record_lead(totals, record, step)
        return self._progress.state()

    def _record_lead(self, totals: StepTotals, record: StepRecord, step: int) -> None:
        """Report what is open and what was waited for in a run that samples ahead."""
        progress = self._progress
        record.wait_stage = "gen"
        record.add({"async/length_ratio": progress.length_ratio})
        self._alert_about_lengths(step)
        elapsed = time.perf_counter() - self._step_began
        progress.waits = progress.waits.with_step(
            elapsed, record.seconds.get("gen", 0.0), totals.longest_group
        )
        if step == self._services.total_steps:
            log("%s", advice(progress.waits, self._options))

    # groups on their way to the engines

    def _next_prompt(self) -> tuple[int, PromptRow]:
        if not self._progress.drawn:
            epoch, rows = self._services.prompts.draw()
            self._progress.drawn.extend((epoch, row) for row in rows)
        return self._progress.drawn.popleft()

    def _new_group(self, number: int, epoch: int, row: PromptRow, attempt: int = 0) -> Group:
        version = self._book.published
        samples = [
            GroupSample(number, index, row.prompt_token_ids, Sample(index))
            for index in range(self._samples_of_group)
        ]
        step = version + 1 if self._options.is_synchronous else number // self._rule.batch + 1
        return Group(number, row, epoch, step, version, samples, attempt=attempt)

    def _open(self, groups: Sequence[Group]) -> None:
        """Give open groups the prompts that their environments open with; those that do not open fail."""
        openings = self._services.openings
        if openings is None:
            return
        seed = self._services.config.trainer.seed
        rows = openings.open([(group.row, environment_seed(seed, group)) for group in groups])
        for group, row in zip(groups, rows, strict=True):
            if isinstance(row, EpisodeFailedError):
                self._fail(group, row)
            else:
                self._book.update(group.opened(row))

    # groups on their way back

    def _next_batch(self, step: int, record: StepRecord) -> tuple[int, ...]:
        """The numbers of the groups that ``step`` trains on, waited for."""
        with record.stage("admit"):
            self._admit()
        if self._services.config.actor_rollout_ref.hybrid_engine:
            self._drain_engines(step, record)
        while True:
            decision = next_batch(self._book.open.values(), step, self._rule)
            if decision.dropped:
                self._remove("stale", decision.dropped)
                self._admit()
            if decision.numbers:
                self._progress.filtered_since_batch = 0
                return decision.numbers
            self._require_pending(step)
            is_enough = self._book.num_accepted >= self._rule.batch
            began = time.perf_counter()
            self._receive(record, step - 1, decision.awaited)
            self._totals.waited_for_oldest += time.perf_counter() - began if is_enough else 0.0

    def _require_pending(self, step: int) -> None:
        """Raise unless open requests can still complete a batch for ``step``."""
        filters, data = self._services.config.algorithm.filter_groups, self._services.config.data
        batch = self._rule.batch
        num_accepted = self._book.num_accepted
        num_sampled = self._progress.filtered_since_batch + num_accepted
        if 0 < filters.max_num_gen_batches * data.gen_batch_size <= num_sampled and num_accepted < batch:
            raise ValueError(
                f"step {step} needs data.train_batch_size={batch} prompts whose samples differ in "
                f"{filters.metric}, but algorithm.filter_groups.max_num_gen_batches="
                f"{filters.max_num_gen_batches} batches of {data.gen_batch_size} prompts gave "
                f"{num_accepted}. "
                "The prompts may be too easy or too hard; raise the limit (0: none), or data.gen_batch_size."
            )
        if not self._requests:
            raise RuntimeError(
                f"step {step} needs {batch} groups, but only {len(self._book.open)} are admitted, and "
                "all of them have ended."
            )

    def _drain_engines(self, step: int, record: StepRecord) -> None:
        """Engines that share the trainer's devices end what they have and sleep before a step is trained."""
        while self._requests:
            self._require_pending(step)
            self._receive(record, version=step - 1)
        # The samples are here; the next weight update replaces an engine that is lost.
        with record.stage("gen"), suppress(EnginesLostError):
            self._services.engines.sleep()

    def _receive(self, record: StepRecord, version: int, awaited: Collection[int] = ()) -> None:
        """Wait a moment for samples, decide the groups that are whole, and replace those that will not be
        trained on.

        So a group is scored while others are sampled. With ``deterministic_steps`` wait for the groups
        ``awaited`` and no others. Engines that are lost get the trainer's weights as ``version``.
        """
        with record.stage("gen", numbers=list(awaited)):
            began = time.perf_counter()
            replace_lost = self._publisher.engine_replacer(version, record)
            if self._options.deterministic_steps is None:
                ended = self._services.engines.collect(_LOOK_SECONDS, replace_lost)
            else:
                ended = self._requests.requests_of(awaited)
                self._services.engines.wait_for(ended, replace_lost)
            complete_groups = self._store_responses(ended)
            record.add_busy("gen", time.perf_counter() - began)
        with record.stage("reward"):
            self._decide(complete_groups)
        with record.stage("admit"):
            self._refill()

    def decide_ended_groups(self) -> None:
        """Decide groups that ended while the trainer works, so that their replacements begin at once."""
        if not self._requests or self._options.deterministic_steps is not None:
            return
        try:
            ended = self._services.engines.collect(0.0)
        except EnginesLostError:
            # The next wait for samples finds it too, when the trainer has time to send weights.
            return
        self._decide(self._store_responses(ended))
        self._refill()

    def _refill(self) -> None:
        self._fail_late_groups()
        if self._book.allowance():
            self._admit()

    def _store_parts(self, record: StepRecord, version: int) -> None:
        """Collect the samples that ended before a publication, and the tokens so far of those that it cut."""
        with record.stage("update_weights"):
            ended, interrupted = self._services.engines.collect_parts(
                self._publisher.engine_replacer(version, record)
            )
            record.add(pause_metrics(list(interrupted.values())))
            complete_groups = self._store_responses(ended)
            self._totals.arrived += self._requests.take_parts()
        with record.stage("reward"):
            self._decide(complete_groups)

    def _store_responses(self, ended: Sequence[AssignedRequest]) -> list[Group]:
        """Put what came of requests into their samples; returns the groups that are whole with them.

        The group of a sample that failed fails with it.
        """
        failures = dict[int, str]()
        for request in ended:
            if isinstance(request.outcome, str):
                failures.setdefault(request.owner.number, request.outcome)
            else:
                self._totals.arrived += store_response(
                    request.owner, request.sample, single_version=not self._options.cuts
                )
        self._arrived_at = time.perf_counter()
        for number, why in failures.items():
            self._fail(self._book.open[number], EpisodeFailedError(why))
        numbers = {request.owner.number for request in ended}
        return [group for number, group in self._book.open.items() if number in numbers and group.is_whole]

    def _decide(self, groups: Sequence[Group]) -> None:
        """Score whole groups: each is accepted for a batch, is filtered, or fails."""
        if not groups:
            return
        totals = self._totals
        filtered = list[int]()
        for group, outcome in zip(groups, score_groups(self._services, groups), strict=True):
            assert group.submitted_at is not None
            totals.longest_group = max(totals.longest_group, time.monotonic() - group.submitted_at)
            if isinstance(outcome, RewardError):
                self._fail(group, outcome)
                continue
            assert outcome.scores is not None
            count = self._services.config.actor_rollout_ref.rollout.n
            totals.scores.append(float(outcome.scores.values[:count].double().mean()))
            self._book.update(outcome)
            if outcome.is_accepted:
                totals.accepted += 1
            else:
                filtered.append(group.number)
        self._progress.filtered_since_batch += len(filtered)
        self._remove("filtered", filtered)

    def _remove(self, fate: Fate, numbers: Collection[int]) -> None:
        """Remove groups that will not be trained on; each frees a place."""
        for group in self._book.end(fate, numbers):
            self._requests.cancel(group.number)

    def _fail_late_groups(self) -> None:
        limit = self._options.group_timeout_seconds
        if limit is None:
            return
        now = time.monotonic()
        for group in list(self._book.open.values()):
            if group.submitted_at is None or group.is_accepted or now - group.submitted_at <= limit:
                continue
            key = f"async_training.group_timeout_seconds={limit:g}"
            self._fail(group, TimeoutError(f"group {group.number} must end within {key}, but it did not."))

    def _fail(self, group: Group, error: Exception) -> None:
        """Sample a group once more, under its number and with other seeds; one that fails again is
        replaced.

        A synchronous run ends with the first failure of a reward.
        """
        if isinstance(error, EpisodeFailedError):
            self._totals.environment_failures += 1
        elif self._options.is_synchronous:
            raise error
        if group.attempt == 0:
            log("group %d failed and is sampled once more: %s", group.number, error)
            self._requests.cancel(group.number)
            self._totals.failed_attempt_tokens += group.num_sampled
            again = self._new_group(group.number, group.epoch, group.row, attempt=1)
            self._book.update(again)
            self._open([again])
            if group.number in self._book.open:
                self._submit([self._book.open[group.number]])
            return
        log("group %d failed again and is replaced: %s", group.number, error)
        num_decided = self._book.num_decided
        self._remove("failed", [group.number])
        self._progress.failed = self._progress.failed.with_failure(num_decided, str(error))

    # what a step reports

    def _alert_about_lengths(self, step: int) -> None:
        """Alert once when trained groups are longer or shorter than sampled ones."""
        ratio = self._progress.length_ratio
        if (
            self._progress.is_length_alert_sent
            or step < _LENGTH_RATIO_STEPS
            or abs(ratio - 1) <= _LENGTH_RATIO_ERROR
        ):
            return
        self._progress.is_length_alert_sent = True
        self._services.tracker.alert(
            "lengths trained on are not those sampled",
            f"async/length_ratio must be within {_LENGTH_RATIO_ERROR:.0%} of 1 after {_LENGTH_RATIO_STEPS} "
            f"steps, it is {ratio:.3f}: groups are left out by their length. "
            "async_training.max_off_policy_strategy=wait trains on all of them.",
            step,
        )
