"""The stages: each starts its processes, measures, and reports. None needs Ray; ``engine`` needs vLLM."""

import math
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import permutations
from os import environ
from typing import Any

import psutil
import torch
from torch import Tensor

from verl_rc.config.run import RunConfig
from verl_rc.config.schema import with_value
from verl_rc.data.batches import TokenBatch, TrainBatch
from verl_rc.data.rollout_batch import build_rollout_batch
from verl_rc.distributed.child_process import ChildProcess
from verl_rc.distributed.process_group import RankAddress
from verl_rc.exact import fix_summation_order
from verl_rc.ppo.choices import update_limit
from verl_rc.ppo.mini_batches import MiniBatchShare
from verl_rc.preflight.bring_up.run import Report
from verl_rc.preflight.finding import Finding
from verl_rc.preflight.machine import check_driver, uses_gpus
from verl_rc.preflight.memory import ModelShape, bytes_text, choose_gradient_sums, estimate_roles, model_paths
from verl_rc.rollout.engine import engine_options
from verl_rc.rollout.sampling import GenerationRequest, SamplingOptions
from verl_rc.weight_sync.proof import GapLimit, LogProbGap, check_receipts
from verl_rc.weight_sync.shared_bucket import BucketHandle, choose_offering_ranks
from verl_rc.workers.environment import engine_environment, trainer_environment
from verl_rc.workers.host import usable_cores
from verl_rc.workers.updates import UpdateRequest

_ACTOR = "verl_rc.workers.policy_worker:PolicyWorker"
_RING_MIB = (1, 16, 256)
_LENT_MIB = 256
_SAMPLES, _SAMPLED_TOKENS, _PROMPT_TOKENS = 16, 64, 32
_GIB = 1 << 30


class Stages:
    """The stages of a configuration; each runs in a process of its own."""

    def __init__(self, config: RunConfig) -> None:
        """A run over several nodes is measured on one of them."""
        config = with_value(config, "trainer.nnodes", 1)
        self._config = config = with_value(config, "actor_rollout_ref.rollout.nnodes", 1)
        self._device = "cuda" if uses_gpus(config) else "cpu"
        if config.actor_rollout_ref.exact:
            fix_summation_order(self._device)
        self._num_ranks = config.num_ranks

    def machine(self) -> Report:
        """Versions, driver, GPUs, and which GPUs cannot reach each other's memory."""
        count = torch.cuda.device_count()
        gpus = [torch.cuda.get_device_properties(index) for index in range(count)]
        numbers: dict[str, Any] = {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "gpus": [
                {"name": gpu.name, "bytes": gpu.total_memory, "capability": f"{gpu.major}.{gpu.minor}"}
                for gpu in gpus
            ],
            "without_peer_access": [
                list(pair)
                for pair in permutations(range(count), 2)
                if not torch.cuda.can_device_access_peer(*pair)
            ],
        }
        summary = f"{count} GPU(s): {', '.join(gpu.name for gpu in gpus) or 'none'}"
        if self._device == "cpu":
            return Report(
                numbers, [Finding("note", "machine", f"{summary}; the stages are rehearsed on the CPU")]
            )
        fits = Finding.from_condition(
            count >= self._num_ranks,
            "machine",
            summary,
            f"trainer.n_gpus_per_node={self._num_ranks} GPUs must be seen",
            f"pass trainer.n_gpus_per_node={count}",
        )
        return Report(numbers, [*check_driver(), fits])

    def ring(self) -> Report:
        """All-reduce over all ranks: are sums right, and what is the bandwidth of the slowest rank?"""
        report = Report()
        if self._num_ranks == 1:
            return Report(
                findings=[Finding("note", "all-reduce", "there is one rank, which waits for no other")]
            )
        with self._ranks("verl_rc.preflight.bring_up.ranks:RingMember", device=self._device) as ranks:
            for size in _RING_MIB:
                answers: list[tuple[bool, float]] = _call_all(ranks, "all_reduce", size << 20)
                seconds = max(seconds for _, seconds in answers)
                # Bus bandwidth of nccl-tests: bytes that each rank sends and receives.
                bus_bytes = 2 * (len(ranks) - 1) / len(ranks) * (size << 20)
                report.numbers[f"{size}_MiB"] = {
                    "seconds": seconds,
                    "bus_bytes_per_second": bus_bytes / seconds,
                }
                report.findings.append(
                    Finding.from_condition(
                        all(right for right, _ in answers),
                        "all-reduce",
                        f"{size} MiB over {len(ranks)} rank(s) in {1000 * seconds:.2f} ms, "
                        f"{bus_bytes / seconds / 1e9:.2f} GB/s each",
                        "sums of ones must be the number of ranks",
                        "look at NCCL_DEBUG=INFO, and at the links of the GPUs",
                    )
                )
            _call_all(ranks, "close")
        return report

    def lending(self) -> Report:
        """One process copies memory that another one lends on the same device."""
        environment = self._environment(0)
        with _processes() as processes:
            processes += [
                ChildProcess(
                    "verl_rc.preflight.bring_up.ranks:Lender",
                    environment,
                    device=self._device,
                    num_bytes=_LENT_MIB << 20,
                ),
                ChildProcess("verl_rc.preflight.bring_up.ranks:Borrower", environment, device=self._device),
            ]
            lender, borrower = processes
            handle, lent_digest = lender.call("lend")
            borrower.call("copy", handle)  # the first copy also initialises CUDA
            copied_digest, seconds = borrower.call("copy", handle)
            lender.call("take_back")
        finding = Finding.from_condition(
            lent_digest == copied_digest,
            "lent memory",
            f"{_LENT_MIB} MiB copied in {1000 * seconds:.1f} ms",
            "the copy must have the digest of what was lent",
            "pass checkpoint_engine.backend=broadcast",
        )
        return Report({"seconds": seconds, "bytes": _LENT_MIB << 20}, [finding])

    def trainer(self) -> Report:
        """Log-probs and two updates of two of the fullest micro-batches on every rank, which add up gradients
        as in a run; peak memory against the estimate."""
        shape, (_, gpu_bytes) = self._shape(), self._gpu_memory()
        shapes = dict.fromkeys(model_paths(self._config), shape)
        config, choices = choose_gradient_sums(self._config, shapes, gpu_bytes)
        estimate = estimate_roles(config, shapes, gpu_bytes)[0].model
        report = Report(findings=[Finding("note", "gradients", str(choice)) for choice in choices])
        if gpu_bytes is not None and estimate > gpu_bytes:
            report.findings.append(
                Finding(
                    "note",
                    "trainer",
                    f"not measured: an update takes {bytes_text(estimate)} of a GPU's "
                    f"{bytes_text(gpu_bytes)} on one node",
                )
            )
            return report
        with self._ranks(_ACTOR, config=config, total_steps=10) as ranks:
            tokens, micro_batches = _full_micro_batches(config, shape.vocabulary)
            # The first call of each kind compiles kernels for seconds on a GPU; the second is measured.
            _call_all(ranks, "compute_log_probs", tokens, micro_batches)
            scores, score_seconds = _timed(
                lambda: _call_all(ranks, "compute_log_probs", tokens, micro_batches)
            )
            sharing = config.sequence_parallel_sizes["actor"]
            batch, share = _train_batch(tokens, scores[0][0], micro_batches, len(ranks) // sharing)
            request = UpdateRequest(config.algorithm.rollout_correction, 0)
            _call_all(ranks, "update", batch, [share], request)
            reports, update_seconds = _timed(lambda: _call_all(ranks, "update", batch, [share], request))
            _call_all(ranks, "close")
        num_tokens = int(tokens.sequence_lengths.sum()) // sharing
        peaks = [
            metric.value
            for answer in reports
            for metric in answer.metrics
            if metric.name == "perf/max_memory_allocated_gb"
        ]
        report.numbers = {
            "tokens_per_rank": num_tokens,
            "log_prob_seconds": score_seconds,
            "update_seconds": update_seconds,
            "update_tokens_per_second": num_tokens * len(ranks) / update_seconds,
            "peak_bytes": max(peaks) * _GIB if peaks else None,
            "estimated_bytes": estimate,
        }
        report.findings.append(
            Finding(
                "ok",
                "trainer",
                f"{num_tokens} tokens a rank: log-probs in {score_seconds:.2f} s, an update in "
                f"{update_seconds:.2f} s",
            )
        )
        if not peaks:
            report.findings.append(Finding("note", "peak memory", "not measured without a GPU"))
            return report
        report.findings.append(
            Finding.from_condition(
                max(peaks) * _GIB <= estimate,
                "peak memory",
                f"{max(peaks):.2f} GiB at the peak of an update, {bytes_text(estimate)} estimated",
                "the estimate must not be exceeded",
                "report both numbers with this file: the estimate is wrong",
            )
        )
        return report

    def engine(self) -> Report:
        """An engine beside the ranks: start, sleep, wake, load the trainer's weights, sample, compare
        log-probs; then again."""
        config, report = self._config, Report()
        devices = range(config.actor_rollout_ref.rollout.tensor_model_parallel_size)
        environment = engine_environment(usable_cores(), self._device, one_node=True) | _visible_devices(
            devices, self._device
        )
        with self._ranks(_ACTOR, config=config, total_steps=1) as ranks, _processes() as processes:
            options = engine_options(config, self._device)
            engine, start_seconds = _timed(lambda: ChildProcess(options.worker, environment, options=options))
            processes.append(engine)
            offers = choose_offering_ranks(
                [key for key, _ in _call_all(ranks, "describe_buckets")], engine.call("device_keys")
            )
            rounds = [self._sleep_load_and_sample(ranks, engine, offers, version) for version in (1, 2)]
            load = self._time_full_load(engine)
            _call_all(ranks, "close")
        report.numbers = {
            "start_seconds": start_seconds,
            "rounds": [numbers for numbers, _ in rounds],
            "full_load": load,
        }
        report.findings.append(Finding("ok", "engine", f"started in {start_seconds:.1f} s"))
        token_ms, process_ms = (1000 * load[name] / load["steps"] for name in ("seconds", "process_seconds"))
        report.findings.append(
            Finding(
                "note",
                "engine's process",
                f"{load['sequences']} sequences: a token of each takes {token_ms:.1f} ms, of which the "
                f"process computes for {process_ms:.1f} ms (waiting for a GPU counts: CUDA polls)",
            )
        )
        policy = config.actor_rollout_ref
        limit = GapLimit.from_config(policy.rollout, policy.actor).limit(None)
        for numbers, gap in rounds:
            report.findings.append(
                Finding.from_condition(
                    gap.mean <= limit,
                    "engine's weights",
                    f"weights loaded in {numbers['load_seconds']:.2f} s, {numbers['sampled_tokens']} tokens "
                    f"sampled in {numbers['sample_seconds']:.2f} s, mean gap to the trainer {gap.mean:.3g} "
                    f"nats, largest {gap.maximum:.3g}",
                    f"the mean gap must be at most {limit:.3g} nats for this precision",
                    "run verl-rc diagnose on a short run, and try rollout.dtype=float32",
                )
            )
        return report

    def _sleep_load_and_sample(
        self, ranks: Sequence[ChildProcess], engine: ChildProcess, offers: Sequence[bool], version: int
    ) -> tuple[dict[str, Any], LogProbGap]:
        numbers: dict[str, Any] = {"free_bytes_awake": self._gpu_memory()[0]}
        numbers["sleeps"], numbers["sleep_seconds"] = _timed(lambda: engine.call("sleep"))
        numbers["free_bytes_asleep"] = self._gpu_memory()[0]

        def load() -> None:
            engine.call("wake_up", ["weights"])
            engine.call("begin_update")
            for index in range(_call_all(ranks, "describe_buckets")[0][1]):
                handles = [
                    _ask(rank, "offer_bucket", index, offer)
                    for rank, offer in zip(ranks, offers, strict=True)
                ]
                engine.call("load_bucket", BucketHandle.merged([handle() for handle in handles]))
            sent_manifest = _call_all(ranks, "release_bucket", False)[0]
            received = engine.call("finish_update", version)
            check_receipts(ranks[0].call("manifest"), sent_manifest, [received], version)
            engine.call("wake_up", ["kv_cache"])

        _, numbers["load_seconds"] = _timed(load)
        prompts, requests, sampling = self._requests(_SAMPLES)
        samples, numbers["sample_seconds"] = _timed(lambda: engine.call("generate", requests, sampling))
        rollouts = build_rollout_batch(prompts, range(_SAMPLES), samples, pad_token_id=0)
        numbers["sampled_tokens"] = int(rollouts.response_mask.sum())
        parts = [[row] for row in range(_SAMPLES)]
        log_probs = _call_all(ranks, "compute_log_probs", rollouts.tokens, parts)[0][0]
        gap = LogProbGap.between(log_probs, rollouts.rollout_log_probs, rollouts.response_mask)
        gap = gap or LogProbGap(math.nan, math.nan)  # above any limit
        return numbers | {"gap": asdict(gap)}, gap

    def _time_full_load(self, engine: ChildProcess) -> dict[str, Any]:
        """Seconds of sampling as many sequences as a run keeps in an engine, and those in which the engine's
        process computes: it schedules and returns outputs in the thread that feeds the GPU."""
        config = self._config
        rows = config.rows_per_step // config.num_engines
        count = max(1, min(config.actor_rollout_ref.rollout.max_num_seqs, rows))
        _, requests, sampling = self._requests(count)
        process = psutil.Process(engine.pid)
        start = process.cpu_times()
        _, seconds = _timed(lambda: engine.call("generate", requests, sampling))
        end = process.cpu_times()
        process_seconds = end.user + end.system - start.user - start.system
        return {
            "sequences": count,
            "steps": sampling.max_tokens,
            "seconds": seconds,
            "process_seconds": process_seconds,
        }

    def _requests(self, count: int) -> tuple[list[list[int]], list[GenerationRequest], SamplingOptions]:
        """Random prompts, and the requests for a response to each."""
        rollout, data = self._config.actor_rollout_ref.rollout, self._config.data
        max_tokens = min(_SAMPLED_TOKENS, data.max_response_length)
        sampling = replace(SamplingOptions.for_training(rollout, ()), max_tokens=max_tokens, ignore_eos=True)
        width = min(_PROMPT_TOKENS, data.max_prompt_length)
        generator = torch.Generator().manual_seed(0)
        prompts = torch.randint(self._shape().vocabulary, (count, width), generator=generator).tolist()
        return prompts, [GenerationRequest(prompt, seed) for seed, prompt in enumerate(prompts)], sampling

    def _shape(self) -> ModelShape:
        model = self._config.actor_rollout_ref.model
        return ModelShape.from_model_folder(model.path, model.trust_remote_code)

    def _gpu_memory(self) -> tuple[int | None, int | None]:
        """Free and total bytes; None on a CPU."""
        return torch.cuda.mem_get_info(0) if self._device == "cuda" else (None, None)

    def _environment(self, rank: int) -> dict[str, str]:
        threads = max(1, usable_cores() // self._num_ranks)
        return trainer_environment(threads, one_node=True) | _visible_devices([rank], self._device)

    @contextmanager
    def _ranks(self, target: str, **arguments: Any) -> Iterator[list[ChildProcess]]:
        """A process for each rank; all construct ``target`` at the same time."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        with _processes() as ranks:
            for rank in range(self._num_ranks):
                address = RankAddress(rank, self._num_ranks, "127.0.0.1", port)
                ranks.append(
                    ChildProcess(target, self._environment(rank), wait=False, address=address, **arguments)
                )
            for process in ranks:
                process.answer()
            yield ranks


@contextmanager
def _processes() -> Iterator[list[ChildProcess]]:
    """A list of processes that end with the block."""
    processes: list[ChildProcess] = []
    try:
        yield processes
    finally:
        for process in processes:
            process.end(5.0)


def _ask(process: ChildProcess, method: str, *arguments: Any) -> Callable[[], Any]:
    process.ask(method, *arguments)
    return process.answer


def _call_all(ranks: Sequence[ChildProcess], method: str, *arguments: Any) -> list[Any]:
    """The answers of all ranks, which are called at the same time."""
    return [answer() for answer in [_ask(rank, method, *arguments) for rank in ranks]]


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    result = work()
    return result, time.perf_counter() - start


def _visible_devices(devices: Sequence[int], device: str) -> dict[str, str]:
    """Environment variables that restrict a process to these of the GPUs that this process sees."""
    if device == "cpu":
        return {}
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[index] for index in devices)}


_MICRO_BATCHES = 2
"""Micro-batches of a measured update; the second adds its gradients to those of the first."""


def _full_micro_batches(config: RunConfig, vocabulary: int) -> tuple[TokenBatch, list[list[int]]]:
    """Random tokens, and micro-batches: each of as many sequences of the greatest length as one may hold."""
    data, limit = config.data, update_limit(config.actor_rollout_ref.actor)
    limit = limit.shared_by(config.sequence_parallel_sizes["actor"])
    size = limit.max_rows or max(1, (limit.max_tokens or 0) // config.longest_sequence)
    rows = _MICRO_BATCHES * size
    generator = torch.Generator().manual_seed(0)
    tokens = TokenBatch(
        prompts=torch.randint(vocabulary, (rows, data.max_prompt_length), generator=generator),
        prompt_lengths=torch.full((rows,), data.max_prompt_length),
        responses=torch.randint(vocabulary, (rows, data.max_response_length), generator=generator),
        response_lengths=torch.full((rows,), data.max_response_length),
        batch_size=[rows],
    )
    return tokens, [list(range(start, start + size)) for start in range(0, rows, size)]


def _train_batch(
    tokens: TokenBatch, log_probs: Tensor, micro_batches: list[list[int]], num_shares: int
) -> tuple[TrainBatch, MiniBatchShare]:
    """The batch of one update, and a share of a mini-batch in which all shares have the same rows."""
    rows, width = log_probs.shape
    mask = torch.ones(rows, width, dtype=torch.bool)
    advantages = torch.where(torch.arange(rows) % 2 == 0, 1.0, -1.0)[:, None].expand(rows, width).contiguous()
    batch = TrainBatch(
        tokens=tokens,
        response_mask=mask,
        loss_mask=mask,
        proximal_log_probs=log_probs,
        rollout_log_probs=log_probs,
        advantages=advantages,
        rollout_is_weights=torch.ones(rows, width),
        reference_log_probs=log_probs,
        batch_size=[rows],
    )
    num_tokens = rows * width * num_shares
    return batch, MiniBatchShare(micro_batches, num_tokens, rows * num_shares, num_tokens)
