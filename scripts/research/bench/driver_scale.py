"""The driver's own share of a step, with engines and ranks that answer at once.

Run: python scripts/research/bench/driver_scale.py [--step 1024x4096] [--ranks 256]

Every function between the engines' samples and the ranks' reports is the package's own, and what would cross
Ray is pickled. For each step ROWSxMEAN (lengths are spread evenly from 1 to twice the mean; one row is the
longest) it prints CPU seconds of one thread by stage for which ranks wait, their sum, nanoseconds a token,
and the largest resident memory above that before the step; last, what a line through them predicts for 8,192
rows of 4,096.
"""

import argparse
import pickle
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from verl_rc.config.load import load_run_config
from verl_rc.metrics import Metric, Reduction
from verl_rc.metrics.sinks import JsonlSink, Tracker
from verl_rc.records.batches import Timed
from verl_rc.records.dataset import PromptRow
from verl_rc.records.groups import Group, GroupSample, Scores
from verl_rc.records.optimizer_step import OptimizerStep
from verl_rc.records.parts import Part, Sample
from verl_rc.runtime.checkpoint import RunState
from verl_rc.runtime.weight_sync.proof import GapLimit
from verl_rc.runtime.workers.updates import ActorReport
from verl_rc.trainer import stages
from verl_rc.trainer.cluster import rank_group
from verl_rc.trainer.cluster.model_groups import ActorGroup
from verl_rc.trainer.guards import Guards
from verl_rc.trainer.judge import record_and_judge
from verl_rc.trainer.step_record import Step
from verl_rc.trainer.stop import StopRequest
from verl_rc.trainer.supply.scored_groups import join_groups, record_batch_of_groups
from verl_rc.trainer.token_records import TokenRecorder

SAMPLES, VOCABULARY, PROMPT = 8, 32_000, 256
TARGET = 8192 * 4096
LOG_PROBS = -np.random.default_rng(0).exponential(0.5, VOCABULARY).astype(np.float32) - 0.2


def resident(name: str) -> float:
    """GiB: ``VmRSS`` now, ``VmHWM`` the largest since ``clear_refs``."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) / (1 << 20)


class Clock:
    """CPU seconds by stage, without those of other processes."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.outside = 0.0

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage."""
        began, outside = time.process_time(), self.outside
        yield
        spent = time.process_time() - began - (self.outside - outside)
        self.seconds[name] = self.seconds.get(name, 0.0) + spent

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Work of another process."""
        began = time.process_time()
        yield
        self.outside += time.process_time() - began


class AnsweringRank:
    """Answers with log-probs near those of the engine, which follow from the token, or with a report."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def call(self, method: str, rows: Any, *arguments: Any) -> bytes:
        """The answer as it comes from Ray."""
        pickle.dumps((method, rows, arguments), protocol=5)
        with self._clock.elsewhere():
            if method == "update":
                losses = [share.num_loss_tokens for share in arguments[0]]
                metrics = [Metric(f"actor/m{number}", 1.0, Reduction.SUM) for number in range(40)]
                return pickle.dumps(ActorReport(metrics, [OptimizerStep(1.0) for _ in losses], losses))
            ids = rows.columns["responses"]
            noise = np.random.default_rng(0).standard_normal(len(ids), dtype=np.float32) * 0.01
            near = LOG_PROBS[ids] + noise
            return pickle.dumps([near, *(np.abs(near) for _ in range(3))], protocol=5)


def make_groups(lengths: Sequence[int]) -> list[Group]:
    """Whole groups with scores, in the order of ``lengths``."""
    rng = np.random.default_rng(1)
    groups = []
    for number in range(len(lengths) // SAMPLES):
        prompt = rng.integers(2, VOCABULARY, PROMPT).tolist()
        samples = []
        for index in range(SAMPLES):
            ids = rng.integers(2, VOCABULARY, lengths[number * SAMPLES + index], dtype=np.int32)
            part = Part(torch.from_numpy(ids), torch.from_numpy(LOG_PROBS[ids]), 0)
            samples.append(
                GroupSample(number, index, prompt, Sample(index, [part], True, engine=index), True)
            )
        row = PromptRow(number, prompt, [], "table", None, {})
        scores = Scores(torch.from_numpy(rng.integers(0, 2, SAMPLES).astype(np.float32)), [""] * SAMPLES)
        groups.append(Group(number, row, 0, 1, 0, samples).scored(scores, accepted=True))
    return groups


def run_step(lengths: Sequence[int], ranks: int, folder: Path) -> tuple[dict[str, float], float]:
    """Seconds by stage of a step with responses of these lengths, in brackets those that not every step has,
    and GiB that it took."""
    prompts = len(lengths) // SAMPLES
    config = load_run_config(
        [
            "correction=decoupled_token_is",
            "data.train_files=unused.parquet",
            "data.val_files=unused.parquet",
            f"data.train_batch_size={prompts}",
            f"data.max_prompt_length={PROMPT}",
            f"data.max_response_length={max(lengths)}",
            f"actor_rollout_ref.model.path={folder}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts // 4}",
            f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={max(32_768, max(lengths) + PROMPT)}",
            "actor_rollout_ref.actor.use_dynamic_bsz=True",
            f"actor_rollout_ref.rollout.n={SAMPLES}",
            "algorithm.adv_estimator=grpo",
            "trainer.device=cpu",
            f"trainer.default_local_dir={folder}",
            "trainer.logger=[console]",
        ]
    )
    clock, tracker, stop = Clock(), Tracker([JsonlSink(folder)]), StopRequest()
    rank_group.wait_timed = lambda pending: Timed([pickle.loads(answer) for answer in pending], 0.0)
    rank: Any = AnsweringRank(clock)
    processes: Any = SimpleNamespace(
        sharing={"actor": 1}, shares_prefixes=False, ranks_of=lambda _: [rank] * ranks
    )
    services: Any = SimpleNamespace(
        config=config,
        tokenizer=SimpleNamespace(
            pad_token_id=0, batch_decode=lambda ids, **_: ["a"] * len(ids), all_special_ids=[]
        ),
        actor=ActorGroup(processes),
        critic=None,
        frozen={},
        folder=folder,
        tracker=tracker,
        stop_token_ids=(0,),
        saves_at=lambda step: False,
        is_due=lambda frequency, step: False,
        guards=Guards(config.trainer.alerts, tracker, stop),
        gap_limit=GapLimit.from_config(config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor),
    )
    groups, state = make_groups(lengths), RunState()
    step = Step.after(state, config)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    with clock.stage("join"):
        scored = join_groups(services, groups)
        record_batch_of_groups(config, scored, groups, step.record)
    with clock.stage("old_log_prob"):
        evaluations = stages.evaluate(services, scored.rollouts, step)
    with clock.stage("adv, metrics"):
        inputs = stages.correct(services, scored, evaluations, step)
    with clock.stage("judge, guards"):
        findings = record_and_judge(
            services, SimpleNamespace(next_gap_limit=None, health=state.health), inputs.measured, step
        )
        assert services.guards.decide_update(state.rewards, inputs, findings, step)
    with clock.stage("update_actor"):
        stages.update_actor(services, None, inputs, step)
    with clock.stage("(token records)"):
        TokenRecorder(services, 0).write(inputs, step)
    return clock.seconds, resident("VmHWM") - before


def measured(size: str, longest: int, ranks: int, rounds: int) -> tuple[int, dict[str, float], float]:
    """Tokens of a step, its seconds by stage (the shortest of all rounds) and the GiB that the first took."""
    rows, mean = map(int, size.split("x"))
    lengths = np.random.default_rng(0).integers(1, 2 * mean, rows)
    lengths[rows // 2] = max(longest, mean)
    best, memory = dict[str, float](), 0.0
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            seconds, needed = run_step(lengths.tolist(), ranks, Path(folder))
        best = {name: min(value, best.get(name, value)) for name, value in seconds.items()}
        memory = memory or needed
    return int(lengths.sum()), best, memory


def main() -> None:
    """Print a table, and what it predicts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--step", action="append", help="ROWSxMEAN, several times")
    parser.add_argument("--longest", type=int, default=32_768)
    parser.add_argument("--ranks", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    measured("64x64", 64, options.ranks, 1)  # what is done once in a process
    print("| rows x mean | tokens, M | CPU s by stage | all | ns a token | GiB |\n|" + "---|" * 6)
    points = []
    for size in options.step or ["1024x1024", "1024x4096", "2048x4096"]:
        tokens, seconds, memory = measured(size, options.longest, options.ranks, options.rounds)
        total = sum(value for name, value in seconds.items() if not name.startswith("("))
        stages_text = ", ".join(f"{name} {value:.2f}" for name, value in seconds.items())
        cells = size, f"{tokens / 1e6:.1f}", stages_text, f"{total:.2f}", f"{total / tokens * 1e9:.0f}"
        print(f"| {' | '.join(cells)} | {memory:.2f} |", flush=True)
        points.append((tokens, total, memory))
    tokens, totals, memories = map(np.array, zip(*points, strict=True))
    for name, unit, values in (("exposed", "CPU s", totals), ("memory", "GiB", memories)):
        slope, intercept = np.polyfit(tokens, values, 1)
        print(f"{name} of {TARGET / 1e6:.1f} M tokens: {slope * TARGET + intercept:.1f} {unit}")


if __name__ == "__main__":
    main()
