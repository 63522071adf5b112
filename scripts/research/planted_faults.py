"""Plant the faults of the table of causes in the quickstart, one in a run, and print which of them the report
names: python -m scripts.research.planted_faults [WORD …] [--seeds 1,2]

Words choose arms by their names. A run takes 24 steps, some two minutes on two cores; run folders are kept
below --folder, so that an interrupted matrix goes on and a changed rule is judged without a run. The run's
own guards note what they find and stop nothing. ``--start FAULT OVERRIDE …`` trains once with a fault, as
``study.py`` does.
"""

import argparse
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from research.study import ROOT, Run, missing, place_of, read_runs, run_all
from torch import Tensor

from verl_rc import main_ppo
from verl_rc.algorithm.health import cause_table as causes
from verl_rc.insight.run_folder import read_run
from verl_rc.insight.verdict import verdict_of
from verl_rc.records.batches import TokenBatch, TokenScores, TrainBatch
from verl_rc.records.parts import Part, Sample
from verl_rc.records.ragged import Column, Ragged, rows_of
from verl_rc.runtime.rollout.engine import Collected, Request
from verl_rc.runtime.rollout.sampling import SamplingOptions, request_seed
from verl_rc.runtime.rollout.vllm import sampler as vllm_sampler
from verl_rc.runtime.rollout.vllm.engine import VllmEngine
from verl_rc.runtime.rollout.vllm.options import VllmOptions
from verl_rc.runtime.weight_sync.manifest import Manifest
from verl_rc.runtime.weight_sync.proof import LoadReceipt
from verl_rc.runtime.weight_sync.transfer_group import TransferAddress
from verl_rc.runtime.workers.policy_worker import PolicyWorker
from verl_rc.tensor_ops import logprobs
from verl_rc.trainer import stages
from verl_rc.trainer.cluster.model_groups import ActorGroup

ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
COMMON = (
    *("task=digits", "hardware=cpu", "correction=decoupled_token_is", "trainer.report=never"),
    *("trainer.total_training_steps=24", "trainer.test_freq=-1", "trainer.val_before_train=False"),
    *("trainer.save_freq=-1", f"{ACTOR}.optim.lr_scheduler_type=constant", f"{ROLLOUT}.dtype=bfloat16"),
    *("trainer.token_records.rows_per_step=64", "trainer.token_records.freq=4"),
    *(f"{ROLLOUT}.sync_proof.gap_limit=50", f"{ROLLOUT}.sync_proof.canary_freq=0"),
    "trainer.alerts.mismatch_limit=null",
)
"""Overrides of every run; an arm's own win."""
NOT_SEPARABLE = {cause.name for cause in (causes.GROWN, causes.LARGE, causes.BEYOND_ROUNDING)}
CHANGED, NAN = 2e-3, 1e-3
"""Shares of tokens that are changed, and whose log-probs are NaN."""
SKIPPED_VERSION = 8
"""The publication that an engine does not load, where one is skipped."""
FIRST_DIGIT = 15
"""Id of the digit 0 in the quickstart's tokenizer; a changed token becomes a 1, or a 2."""
FEWEST_TOKENS = 11
"""Tokens of a response whose stop token is banned: one more than a right answer has."""
_CHANCE = 7


@dataclass(frozen=True)
class Fault:
    """One arm of the matrix."""

    causes: tuple[str, ...]
    """Causes that are right; empty: none can be named from metrics. For a healthy run: no cause at all."""
    planted: str = ""
    """What the workers do wrong; empty: the configuration makes the fault, or there is none."""
    overrides: tuple[str, ...] = ()
    is_healthy: bool = False


ARMS: Mapping[str, Fault] = {
    "healthy bf16": Fault((), is_healthy=True),
    "healthy fp8": Fault((), overrides=(f"{ROLLOUT}.quantization=fp8_per_channel",), is_healthy=True),
    "healthy fp32": Fault((), overrides=(f"{ROLLOUT}.dtype=float32",), is_healthy=True),
    "NaN in 0.1 %": Fault((causes.OVERFLOW.name,), "nan_log_probs"),
    "log-probs shifted": Fault(("log-probs shifted",), "shifted_log_probs"),
    "log-probs in bf16": Fault(("log-probs rounded",), "rounded_log_probs"),
    "raw log-probs at 0.7": Fault(
        ("raw log-probs at another temperature",), "report_raw", (f"{ROLLOUT}.temperature=0.7",)
    ),
    "top-p 0.95": Fault(("sampling filter not mirrored",), "top_p:0.95"),
    "stop token banned": Fault(("token banned",), "banned_stop"),
    "temperature 0.9": Fault(("temperature",), "temperature:0.9"),
    "temperature 0.98": Fault(("temperature",), "temperature:0.98"),
    "soft cap in the trainer": Fault((causes.NOT_A_TEMPERATURE.name,), "logit_softcap:30"),
    "top-p 0.95 raw": Fault(("sampled from another distribution than reported",), "top_p:0.95,report_raw"),
    "tokens changed": Fault(
        (
            "few tokens are others than sampled",
            "not the sampled tokens, or not their log-probs",
            causes.STOP_LOST.name,  # stop tokens are among those that are changed
        ),
        "changed_tokens",
    ),
    "one engine of two stale": Fault(
        ("one engine differs from the others",),
        "stale_second_engine",
        ("actor_rollout_ref.hybrid_engine=False", f"{ROLLOUT}.n_gpus_per_node=2"),
    ),
    "samples four steps old": Fault(
        (causes.STALENESS.name,), overrides=("async=one_step_off", "async_training.staleness_threshold=4")
    ),
    "four updates in bypass": Fault(
        (causes.DRIFT.name,),
        overrides=("algorithm.rollout_correction.bypass_mode=True", f"{ACTOR}.ppo_epochs=2"),
    ),
    "every sync skipped": Fault((causes.WEIGHTS_NEVER_ARRIVE.name,), "skip_every_sync"),
    "one sync skipped": Fault((causes.MISSED_UPDATE.name, causes.ONE_VERSION_LATE.name), "skip_one_sync"),
    "half a tensor": Fault((), "half_a_tensor"),
    "prompt token missing": Fault((), "missing_prompt_token"),
    "stop tokens left out": Fault((causes.STOP_LOST.name,), "stripped_stop"),
    "one seed for a prompt": Fault((causes.EQUAL_SAMPLES.name,), "shared_seed"),
    "log-probs with a floor": Fault((causes.FLOORED.name,), "log_prob_floor:-3"),
    "mask shifted": Fault((causes.OUTSIDE_MASK.name,), "shifted_mask"),
}
"""The faults by name; causes as in docs/see_why.md."""


def planted() -> dict[str, str]:
    """What the environment variable ``PLANTED_FAULT`` plants in this process, each with its value."""
    words = os.environ.get("PLANTED_FAULT", "").split(",")
    return {name: value for name, _, value in (word.partition(":") for word in words if word)}


# ---- workers that go wrong


class PlantedEngine(VllmEngine):
    """An engine that samples, loads or reports what it should not."""

    def __init__(self, options: VllmOptions) -> None:
        self._planted, self._held = planted(), dict[str, Tensor]()
        self._first, self._holds_first, self._rank = dict[str, Tensor](), False, 1
        self._chance = torch.Generator().manual_seed(_CHANCE)
        if "banned_stop" in self._planted:
            _ban_stop_token()
        if "fp8_cache" in self._planted:
            _round_cache()
        super().__init__(options)
        if "report_raw" in self._planted:
            self._loop.call(_report_raw)
        if "router_noise" in self._planted:
            size = float(self._planted["router_noise"])
            self._loop.call(lambda sampler: _disturb_routers(sampler, size))

    def join_transfer(self, address: TransferAddress, first_rank: int, backend: str) -> None:
        """Join, and remember which of the engines this is."""
        self._rank = first_rank
        super().join_transfer(address, first_rank, backend)

    def submit(self, samples: Sequence[Request]) -> None:
        """Queue samples with other options or seeds; a frozen engine samples from its first weights, and
        validates the newest."""
        if "frozen" in self._planted:
            self._hold(first=any(sample.options.temperature > 0 for sample in samples))
        super().submit([self._changed(sample) for sample in samples])

    def _changed(self, sample: Request) -> Request:
        request = sample.request
        if "shared_seed" in self._planted:
            tokens = {str(place): token for place, token in enumerate(request.prompt_token_ids)}
            request = replace(request, seed=request_seed(tokens))
        return replace(sample, request=request, options=self._other(sample.options))

    def _other(self, options: SamplingOptions) -> SamplingOptions:
        factor = float(self._planted.get("temperature", 1.0))
        top_p = float(self._planted.get("top_p", options.top_p))
        return replace(options, temperature=factor * options.temperature, top_p=top_p)

    def _hold(self, *, first: bool) -> None:
        if first == self._holds_first:
            return

        def load(sampler: Any) -> None:
            transfer = sampler.weight_receiver()
            transfer.start_weight_update()
            transfer.model.load_weights((self._first if first else self._held).items())
            transfer.finish_weight_update()
            sampler.reset_prefix_cache()

        self._loop.call(load)
        self._holds_first = first

    def generate(self, requests: Any, options: SamplingOptions) -> list[Sample]:
        """Sample with other options, and report other numbers."""
        return [self._misreported(sample) for sample in super().generate(requests, self._other(options))]

    def collect(self, at_least: int = 1, wait_seconds: float | None = None) -> Collected:
        """Report other numbers."""
        collected = super().collect(at_least, wait_seconds)
        return replace(collected, samples=[self._misreported(sample) for sample in collected.samples])

    def receive_weights(self, manifest: Manifest, bucket_bytes: int, version: int) -> list[LoadReceipt]:
        """Acknowledge an update that may not be loaded, or by half."""
        transfer = self._loop.call(lambda sampler: sampler.weight_receiver())
        load = transfer.model.load_weights
        transfer.model.load_weights = lambda tensors: load(self._as_loaded(tensors, version))
        try:
            return super().receive_weights(manifest, bucket_bytes, version)
        finally:
            transfer.model.load_weights = load
            self._first, self._holds_first = self._first or dict(self._held), False

    def _as_loaded(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> Iterator[tuple[str, Tensor]]:
        is_skipped = (
            "skip_every_sync" in self._planted
            or ("skip_one_sync" in self._planted and version == SKIPPED_VERSION)
            or ("stale_second_engine" in self._planted and self._rank > 1)
        )
        for name, tensor in tensors:
            held, loaded = self._held.get(name, tensor), tensor.clone()
            if is_skipped:
                loaded = held.clone()
            elif "half_a_tensor" in self._planted and name.endswith("gate_proj.weight"):
                loaded[len(loaded) // 2 :] = held[len(loaded) // 2 :]
            self._held[name] = loaded.clone()
            yield name, loaded

    def _misreported(self, sample: Sample) -> Sample:
        """The sample with other numbers in the policy's parts; the answers of tools stay as they are."""
        last = len(sample.parts) - 1
        parts = [
            self._misreported_part(part, sample.finished and place == last)
            if isinstance(part, Part)
            else part
            for place, part in enumerate(sample.parts)
        ]
        return replace(sample, parts=parts)

    def _misreported_part(self, part: Part, is_last: bool) -> Part:
        log_probs, token_ids = part.log_probs, part.token_ids
        if "shifted_log_probs" in self._planted:
            log_probs = log_probs.roll(1)
            log_probs[0] = 0.0
        if "rounded_log_probs" in self._planted:
            log_probs = log_probs.bfloat16().float()
        if "log_prob_floor" in self._planted:
            log_probs = log_probs.clamp_min(float(self._planted["log_prob_floor"]))
        if "changed_tokens" in self._planted:
            struck = torch.rand(token_ids.shape, generator=self._chance) < CHANGED
            others = torch.where(token_ids == FIRST_DIGIT + 1, FIRST_DIGIT + 2, FIRST_DIGIT + 1)
            token_ids = torch.where(struck, others, token_ids).to(torch.int32)
        if "stripped_stop" in self._planted and is_last and len(token_ids) > 1:
            log_probs, token_ids = log_probs[:-1], token_ids[:-1]
        return replace(part, token_ids=token_ids, log_probs=log_probs)


def _ban_stop_token() -> None:
    make = vllm_sampler.sampling_parameters

    def banning(*arguments: Any) -> Any:
        parameters = make(*arguments)
        parameters.min_tokens = min(FEWEST_TOKENS, parameters.max_tokens)
        return parameters

    vllm_sampler.sampling_parameters = banning


def in_fp8(values: Tensor) -> Tensor:
    """``values`` as a cache in fp8 (e4m3, scale 1) gives them back, in their own dtype; those beyond its
    range are cut."""
    largest = torch.finfo(torch.float8_e4m3fn).max
    return values.clamp(-largest, largest).to(torch.float8_e4m3fn).to(values.dtype)


def _round_cache() -> None:
    # vLLM reads an fp8 cache on CPUs with AVX-512 or AMX alone, and rounds toward zero there; GPUs round to
    # the nearest number. It writes here before it reads, prompts included.
    from vllm.v1.attention.backends import cpu_attn

    write = cpu_attn.ops.cpu_attn_reshape_and_cache
    cpu_attn.ops.cpu_attn_reshape_and_cache = lambda key, value, *rest, **named: write(
        in_fp8(key), in_fp8(value), *rest, **named
    )


def _disturb_routers(sampler: Any, size: float) -> None:
    """Let routers choose experts by logits with normal noise of this standard deviation."""
    chance = torch.Generator().manual_seed(_CHANCE)
    for module in sampler.weight_receiver().model.modules():
        if (router := getattr(module, "router", None)) is None:
            continue
        route = router._compute_routing

        def disturbed(states: Tensor, logits: Tensor, *others: Any, route: Any = route, **named: Any) -> Any:
            noise = size * torch.randn(logits.shape, generator=chance)
            return route(states, logits.float() + noise, *others, **named)

        router._compute_routing = disturbed


def _report_raw(sampler: Any) -> None:
    runner_sampler = sampler._llm.llm_engine.model_executor.driver_worker.worker.model_runner.sampler
    # The part that filters returns log-probs of its own otherwise, which win.
    runner_sampler.logprobs_mode = runner_sampler.topk_topp_sampler.logprobs_mode = "raw_logprobs"


class PlantedPolicyWorker(PolicyWorker):
    """A trainer rank that scores what it should not."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._planted, self._chance = planted(), torch.Generator().manual_seed(_CHANCE)
        if "logit_softcap" in self._planted:
            cap, scale = float(self._planted["logit_softcap"]), logprobs._scaled
            logprobs._scaled = lambda logits, temperature: scale(
                cap * torch.tanh(logits.float() / cap), temperature
            )

    def compute_log_probs(
        self, tokens: Ragged[TokenBatch], micro_batches: Sequence[Sequence[int]]
    ) -> list[Column]:
        """Score other prompts, or with NaN."""
        if "missing_prompt_token" in self._planted:
            prompts = rows_of(tokens.columns["prompts"], tokens.lengths["BP"])
            prompts = [ids[1:] if len(ids) > 1 else ids for ids in prompts]
            lengths = np.array([len(ids) for ids in prompts])
            columns = {**tokens.columns, "prompts": np.concatenate(prompts), "prompt_lengths": lengths}
            tokens = replace(tokens, columns=columns, lengths={**tokens.lengths, "BP": lengths})
        log_probs, *others = super().compute_log_probs(tokens, micro_batches)
        if "nan_log_probs" in self._planted:
            log_probs[torch.rand(log_probs.shape, generator=self._chance).numpy() < NAN] = torch.nan
        return [log_probs, *others]

    def score(self, part: TrainBatch, *asked_for: bool) -> TokenScores:
        """Current log-probs behind other prompts."""
        changed = part.clone()
        changed.tokens = self._other(part.tokens)
        return super().score(changed, *asked_for)

    def _other(self, tokens: TokenBatch) -> TokenBatch:
        other = tokens.clone()
        if "missing_prompt_token" in self._planted:
            other.prompt_lengths = (tokens.prompt_lengths - 1).clamp_min(1)
        return other


def _shift_mask() -> None:
    """Let the loss look one token to the right of what was sampled."""
    build = stages.build_train_batch

    def build_and_shift(*arguments: Any) -> Any:
        step = build(*arguments)
        rows = rows_of(step.batch.columns["loss_mask"], step.batch.lengths["BR"])
        shifted = np.concatenate([np.append(False, row[:-1])[: len(row)] for row in rows])
        return replace(step, batch=step.batch.become(TrainBatch, loss_mask=shifted))

    stages.build_train_batch = build_and_shift


def start(fault: str, overrides: Sequence[str]) -> None:
    """Train with a fault planted."""
    os.environ["PLANTED_FAULT"] = fault
    os.environ["PYTHONPATH"] = os.pathsep.join((str(ROOT / "scripts"), os.environ.get("PYTHONPATH", "")))
    VllmOptions.worker = "research.planted_faults:PlantedEngine"
    ActorGroup.worker = "research.planted_faults:PlantedPolicyWorker"
    if fault == "shifted_mask":
        _shift_mask()
    sys.argv = [main_ppo.__file__, *overrides]
    main_ppo.main()


# ---- the matrix


def outcome_of(fault: Fault, folder: Path, exit_status: int) -> tuple[str, str]:
    """What came of a fault, and the cause that the report of its run names first."""
    if exit_status:
        return "stopped by the run itself", _last_error(folder / "output.log")
    statements = [one for one in verdict_of(read_run(folder)).statements if one.topic == "gap"]
    alarms = [one.cause for one in statements if one.level in ("fault", "notice")]
    if fault.is_healthy:
        return ("false alarm", alarms[0]) if alarms else ("right", "")
    if not alarms:
        return "not seen", ""
    if alarms[0] in NOT_SEPARABLE:
        return "not separable", alarms[0]
    return "named" if alarms[0] in fault.causes else "wrong", alarms[0]


def _last_error(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    return next((line.strip()[:200] for line in reversed(lines) if "Error" in line and ":" in line), "")


def main() -> int:
    """Run what is missing and print the matrix."""
    if sys.argv[1:2] == ["--start"]:
        start(sys.argv[2], sys.argv[3:])
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", help="words that an arm's name must have, such as: top-p")
    parser.add_argument("--seeds", default="1", help="such as 1,2,3")
    folder = ROOT / "runs" / "planted_faults"
    parser.add_argument("--folder", type=Path, default=folder, help="where models, data and runs are")
    options = parser.parse_args()
    folder, results = options.folder.resolve(), options.folder.resolve() / "runs.jsonl"
    arms = [arm for arm in ARMS if set(options.words) <= set(arm.split())]
    plans = [
        Run(arm, seed, [*COMMON, *ARMS[arm].overrides, f"trainer.seed={seed}"], planted=ARMS[arm].planted)
        for seed in map(int, options.seeds.split(","))
        for arm in arms
    ]
    for run in run_all(missing(plans, read_runs(results)), results, folder):
        print(f"{run.arm}, seed {run.seed}: exit {run.exit_status}, {run.seconds:.0f} s", flush=True)
    print("| planted | seed | outcome | named first |\n|---|---|---|---|")
    for run in read_runs(results):
        if run.arm in arms:
            outcome, cause = outcome_of(ARMS[run.arm], place_of(run, results, folder), run.exit_status)
            print(f"| {run.arm} | {run.seed} | {outcome} | {cause} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
