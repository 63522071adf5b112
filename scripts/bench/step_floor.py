"""The time of a step by stage against a lower bound: the engine alone and the trainer alone on the same
tokens.

Usage: python scripts/bench/step_floor.py RUN_FOLDER   (a finished run: resolved_config.yaml, metrics.jsonl)
Each half runs in a process of its own while nothing else computes; medians of five calls after one warm-up.
"""

import argparse
import json
import multiprocessing
import os
import pickle
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STAGES = ("gen", "reward", "old_log_prob", "adv", "update_actor", "update_weights")


def median_seconds(call: Callable[[], Any]) -> float:
    """Median of five calls after one that warms up."""
    seconds = []
    for _ in range(6):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def engine_alone(folder: Path, results: Any) -> None:
    """Seconds of one step's generation by the engine, in this process."""
    from verl_rc.workers.environment import engine_environment
    from verl_rc.workers.host import usable_cores

    os.environ.update(engine_environment(usable_cores(), "cpu", one_node=True))
    from verl_rc.config.load import load_config
    from verl_rc.config.run import RunConfig
    from verl_rc.data.dataset import build_train_loader
    from verl_rc.data.tokenize import load_tokenizer
    from verl_rc.rollout.sampling import GenerationRequest, SamplingOptions
    from verl_rc.rollout.vllm.engine import VllmEngine
    from verl_rc.rollout.vllm.options import engine_options

    config = load_config(RunConfig, ["--config-dir", str(folder), "--config-name", "resolved_config"])
    tokenizer = load_tokenizer(config.actor_rollout_ref.model.path)
    prompts = next(iter(build_train_loader(config.data, tokenizer)))
    rollout = config.actor_rollout_ref.rollout
    requests = [GenerationRequest(row.prompt_token_ids, seed) for row in prompts for seed in range(rollout.n)]
    engine = VllmEngine(engine_options(config, "cpu"))
    options = SamplingOptions.for_training(rollout, (tokenizer.eos_token_id,))
    samples = engine.generate(requests, options)
    seconds = median_seconds(lambda: engine.generate(requests, options))
    # Bytes outlive the process, shared tensors do not.
    results.put((seconds, pickle.dumps((requests, samples))))


def trainer_alone(folder: Path, rollouts_of_engine: bytes, results: Any) -> None:
    """Seconds of one forward without gradient, and of one update, over the same tokens in this process."""
    import torch

    from verl_rc.config.load import load_config
    from verl_rc.config.run import RunConfig
    from verl_rc.data.batches import TrainBatch
    from verl_rc.data.microbatch import MicroBatchLimit, assign_rows
    from verl_rc.data.rollout_batch import build_rollout_batch
    from verl_rc.distributed.process_group import RankAddress
    from verl_rc.ppo.mini_batches import MiniBatchShare
    from verl_rc.workers.policy_worker import PolicyWorker
    from verl_rc.workers.updates import UpdateRequest

    config = load_config(RunConfig, ["--config-dir", str(folder), "--config-name", "resolved_config"])
    requests, samples = pickle.loads(rollouts_of_engine)
    worker = PolicyWorker(config, RankAddress(0, 1, "127.0.0.1", 29_731), total_steps=10)
    prompts = [request.prompt_token_ids for request in requests]
    rollouts = build_rollout_batch(prompts, [0] * len(prompts), samples, pad_token_id=0)
    lengths = rollouts.tokens.sequence_lengths.tolist()
    [micro] = assign_rows(
        lengths, 1, MicroBatchLimit(max_tokens=config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu)
    )
    zeros = torch.zeros_like(rollouts.rollout_log_probs)
    batch = TrainBatch(
        tokens=rollouts.tokens,
        response_mask=rollouts.response_mask,
        loss_mask=rollouts.response_mask,
        proximal_log_probs=rollouts.rollout_log_probs,
        rollout_log_probs=rollouts.rollout_log_probs,
        advantages=zeros + 0.1,
        batch_size=[len(lengths)],
    )
    tokens = int(rollouts.response_mask.sum())
    share = MiniBatchShare(micro, tokens, len(lengths), tokens)
    forward = median_seconds(lambda: worker.compute_log_probs(rollouts.tokens, micro))
    request = UpdateRequest(config.algorithm.rollout_correction, policy_version=0)
    results.put((forward, median_seconds(lambda: worker.update(batch, [share], request))))
    worker.close()


def main() -> None:
    """Measure both halves and print them beside the run's own stages."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_folder", type=Path)
    folder: Path = parser.parse_args().run_folder
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    engine = context.Process(target=engine_alone, args=(folder, results))
    engine.start()
    generation, rollouts = results.get()
    engine.join()
    trainer = context.Process(target=trainer_alone, args=(folder, rollouts, results))
    trainer.start()
    forward, update = results.get()
    trainer.join()
    floors = {"gen": generation, "old_log_prob": forward, "update_actor": update}
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["step"] > 1 and "timing_s/testing" not in line]
    median = {
        name: statistics.median(line.get(f"timing_s/{name}", 0.0) for line in steps)
        for name in (*STAGES, "step")
    }
    print(
        f"median of {len(steps)} steps without validation; floor: engine and trainer alone on the same tokens"
    )
    print("| stage | seconds | share | floor | of the floor |\n|---|---|---|---|---|")
    for name in (*STAGES, "step"):
        floor = sum(floors.values()) if name == "step" else floors.get(name, 0.0)
        ratio = f"{median[name] / floor:.2f}" if floor else ""
        print(
            f"| {name} | {median[name]:.3f} | {median[name] / median['step']:.1%} | {floor:.3f} | {ratio} |"
        )
    overhead = statistics.median(line["perf/overhead_fraction"] for line in steps)
    print(f"driver, transfers and sync together: {overhead:.1%} of a step (median)")


if __name__ == "__main__":
    main()
