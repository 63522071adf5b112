"""Engines and a reward that are a table, and a step that samples from them."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from made_samples import sample as made_sample
from small_models import small_run_config

from verl_rc.algorithm.rewards import RewardOutput
from verl_rc.records.dataset import PromptRow
from verl_rc.records.parts import Sample
from verl_rc.records.scored_batch import ScoredBatch
from verl_rc.runtime.checkpoint import RunState
from verl_rc.runtime.rollout.engine import Request
from verl_rc.runtime.rollout.sampling import GenerationRequest, SamplingOptions
from verl_rc.trainer.cluster.engine_work import AssignedRequest
from verl_rc.trainer.services import Services
from verl_rc.trainer.step_record import StepRecord
from verl_rc.trainer.supply.supply import FindRejected, Supply
from verl_rc.trainer.weights import Publisher

SCORES = {0: (1, 1), 1: (0, 1), 2: (0, 0), 3: (1, 0), 4: (1, 1), 5: (0, 1), 6: (0.5, 1), 7: (1, 1)}
"""The two samples' scores of each prompt: 1, 3, 5 and 6 tell something."""
GREEDY_SCORE = 7.0
FILTER = "algorithm.filter_groups.enable=True"


def prompt(row: int) -> PromptRow:
    """A prompt of 1 to 3 tokens that are its own number."""
    return PromptRow(row, [row] * (1 + row % 3), [], "table", None, {})


class Engines:
    """Sample k of a prompt is k + 1 tokens that are the prompt's number; a greedy response is six of them."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, float]] = []
        self.asleep, self.version = False, 0
        self.under_way: list[AssignedRequest] = []

    def submit(
        self,
        requests: Sequence[GenerationRequest],
        options: SamplingOptions,
        *,
        owners: Sequence[Any],
        evenly: bool,
    ) -> None:
        assert not self.asleep
        self.calls.append((len(requests), options.temperature))
        for request, owner, row in zip(requests, owners, self.sample(requests, options), strict=True):
            self.under_way.append(AssignedRequest(Request(row.number, request, options), 0, owner, row))

    def submitted(self) -> list[AssignedRequest]:
        return self.under_way

    def begin_steps(self) -> None:
        """Samples end as soon as they are submitted."""

    def collect(self, wait_seconds: float, replace_lost: Any) -> list[AssignedRequest]:
        ended, self.under_way = self.under_way, []
        return ended

    def sample(self, requests: Sequence[GenerationRequest], options: SamplingOptions) -> list[Sample]:
        greedy = options.temperature == 0
        lengths = [6 if greedy else index % 2 + 1 for index in range(len(requests))]
        return [
            made_sample(index, [request.prompt_token_ids[0]] * length, self.version)
            for index, (request, length) in enumerate(zip(requests, lengths, strict=True))
        ]

    def sleep(self) -> list[Any]:
        self.asleep = True
        return []


class Scorer:
    """Reads the sample's number from the length of its text."""

    def score(self, rows: Sequence[PromptRow], texts: Sequence[str]) -> list[RewardOutput]:
        outputs = []
        for row, text in zip(rows, texts, strict=True):
            score = GREEDY_SCORE if len(text) == 6 else SCORES[row.row_index][len(text) - 1]
            outputs.append(
                RewardOutput(float(score), {"acc": float(score), "length": len(text), "constant": 1.0})
            )
        return outputs


class Prompts:
    def __init__(self) -> None:
        self.drawn = 0

    def draw(self) -> tuple[int, list[PromptRow]]:
        rows = [prompt(row % 8) for row in range(self.drawn, self.drawn + 2)]
        self.drawn += 2
        return self.drawn // 8, rows


def make_run(*overrides: str) -> Any:
    def batch_decode(rows: list[list[int]], skip_special_tokens: bool) -> list[str]:
        return ["x" * len(row) for row in rows]

    engines = Engines()
    return SimpleNamespace(
        config=small_run_config(Path("unused"), *overrides),
        tokenizer=SimpleNamespace(pad_token_id=99, batch_decode=batch_decode),
        stop_token_ids=(98,),
        flops={},
        prompts=Prompts(),
        openings=None,
        scorer=Scorer(),
        engines=engines,
        total_steps=5,
    )


def new_supply(run: Any, state: RunState) -> Supply:
    services = cast(Services, run)
    return Supply(services, state, Publisher(services, state))


def keep_all(scored: ScoredBatch) -> list[int]:
    """No group is rejected."""
    del scored
    return []


def sample(run: Any, find_rejected: FindRejected = keep_all) -> tuple[ScoredBatch, dict[str, float]]:
    """What the first step trains on, and its metrics once its books are closed."""
    record = StepRecord()
    supply = new_supply(run, RunState())
    batch = supply.take(1, record, find_rejected)
    assert run.engines.asleep == run.config.actor_rollout_ref.hybrid_engine
    record.ledger.book({"trained": batch.num_tokens})
    supply.close_step(1, record)
    return batch, {**record.metrics(), **record.ledger.balanced_metrics()}
