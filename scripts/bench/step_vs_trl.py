"""Completions per second of a whole GRPO step: TRL's GRPOTrainer against verl_rc, on this machine's CPU.

Both train the same 1.2 M-parameter model in fp32 on the same prompts: 32 prompts x 2 samples of exactly 32 tokens and one
optimizer step over all 64 rows. TRL generates with transformers and, with one update per batch, computes no old
log-probs; verl_rc's step is generation, reward, old log-probs, sequence-level rollout correction, update and weight sync.

TRL lives in an environment of its own (torch's CPU build; torchvision and torchaudio are not needed and must stay out):
    python -m venv ~/.trl && ~/.trl/bin/pip install torch==2.13.0 trl==1.16.0 transformers==5.19.0
Where pip finds only a CUDA build of torch, install the CPU build first, from where scripts/install.sh takes it.

Usage: python scripts/bench/step_vs_trl.py --trl_python ~/.trl/bin/python     (about four minutes on two idle cores)
The two take turns, each in fresh processes; steps of all rounds are pooled, medians are printed.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PROMPTS_PER_STEP = 32
SAMPLES_PER_PROMPT = 2
COMPLETIONS_PER_STEP = PROMPTS_PER_STEP * SAMPLES_PER_PROMPT
TOKENS_PER_COMPLETION = 32
WARM_UP_STEPS = 2
LEARNING_RATE = 1e-5


@dataclass(frozen=True)
class Measurement:
    """What one run of one trainer took."""

    step_seconds: list[float]
    """Wall clock of every step after the warm-up."""
    mean_tokens: float
    """Response tokens per completion."""


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """The reward of both trainers: the share of digits. Untrained samples differ in it, so that gradients are not zero."""
    return sum(character.isdigit() for character in solution_str) / max(1, len(solution_str))


def completions_per_second(step_seconds: list[float]) -> float:
    """Rate of the median step."""
    return COMPLETIONS_PER_STEP / statistics.median(step_seconds)


def run_process(command: list[str], log: Path) -> None:
    """Run ``command`` with all cores; what it says goes to ``log``. Exits with the log's end when it fails."""
    threads = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    environment = {name: value for name, value in os.environ.items() if name not in threads}
    environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
    with log.open("w") as file:
        code = subprocess.run(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
    if code:
        raise SystemExit(f"{' '.join(command[:3])} ... ended with {code}; the end of {log}:\n{log.read_text()[-3000:]}")


def make_inputs(folder: Path, num_steps: int) -> None:
    """Write the model and enough prompts for every step to have new ones."""
    run_process([sys.executable, "scripts/make_tiny_model.py", "--output_dir", str(folder / "model")], folder / "model.log")
    sizes = ["--num_train", str(PROMPTS_PER_STEP * num_steps), "--num_val", "1", "--num_sft", "1", "--num_sft_val", "1"]
    run_process([sys.executable, "scripts/prepare_data/digits.py", "--output_dir", str(folder), *sizes], folder / "data.log")


def train_with_trl(folder: Path, num_steps: int) -> None:
    """TRL's part, run by TRL's interpreter: writes ``trl.json`` to ``folder``."""
    import pyarrow.parquet
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class StepClock(TrainerCallback):
        """Notes the time whenever a step is over."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.times.append(time.perf_counter())

    def share_of_digits(completions: list[Any], **_: Any) -> list[float]:
        return [compute_score("digits", messages[0]["content"], "", {}) for messages in completions]

    prompts = pyarrow.parquet.read_table(folder / "train.parquet", columns=["prompt"]).to_pylist()
    options = GRPOConfig(
        output_dir=str(folder / "trl"),
        max_steps=num_steps,
        per_device_train_batch_size=COMPLETIONS_PER_STEP,
        gradient_accumulation_steps=1,
        num_generations=SAMPLES_PER_PROMPT,
        max_completion_length=TOKENS_PER_COMPLETION,
        generation_kwargs={"min_new_tokens": TOKENS_PER_COMPLETION},  # no end token before the last
        temperature=1.0,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        model_init_kwargs={"dtype": "float32"},
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    clock = StepClock()
    trainer = GRPOTrainer(
        model=str(folder / "model"),
        reward_funcs=share_of_digits,
        args=options,
        train_dataset=Dataset.from_list(prompts),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        callbacks=[clock],
    )
    trainer.train()
    seconds = [after - before for before, after in zip(clock.times, clock.times[1:], strict=False)]
    lengths = [line["completions/mean_length"] for line in trainer.state.log_history if "completions/mean_length" in line]
    report = {"step_seconds": seconds[WARM_UP_STEPS - 1 :], "mean_tokens": statistics.mean(lengths)}
    (folder / "trl.json").write_text(json.dumps(report))


def measure_trl(folder: Path, num_steps: int, trl_python: str) -> Measurement:
    """Run TRL's part in its own environment."""
    command = [trl_python, str(Path(__file__).resolve()), "--trl_part", str(folder), "--steps", str(num_steps)]
    run_process(command, folder / "trl.log")
    return Measurement(**json.loads((folder / "trl.json").read_text()))


def measure_verl_rc(folder: Path, num_steps: int) -> Measurement:
    """Run verl_rc and read its step times."""
    run_folder = Path(tempfile.mkdtemp(prefix="run_", dir=folder))
    overrides = [
        "algorithm.adv_estimator=grpo",
        "algorithm.rollout_correction.preset=decoupled_seq_is",
        f"data.train_files={folder / 'train.parquet'}",
        f"data.val_files={folder / 'val.parquet'}",
        f"data.train_batch_size={PROMPTS_PER_STEP}",
        "data.max_prompt_length=16",
        f"data.max_response_length={TOKENS_PER_COMPLETION}",
        f"actor_rollout_ref.model.path={folder / 'model'}",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS_PER_STEP}",
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096",
        "actor_rollout_ref.actor.fsdp_config.dtype=float32",
        f"actor_rollout_ref.actor.optim.lr={LEARNING_RATE}",
        f"actor_rollout_ref.rollout.n={SAMPLES_PER_PROMPT}",
        "actor_rollout_ref.rollout.ignore_eos=True",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.dtype=float32",
        "actor_rollout_ref.rollout.kv_cache_megabytes=64",
        f"reward.custom_reward_function.path={Path(__file__).resolve()}",
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=1",
        "trainer.total_epochs=1",
        f"trainer.total_training_steps={num_steps}",
        "trainer.val_before_train=False",
        "trainer.logger=['console']",
        f"trainer.default_local_dir={run_folder}",
    ]
    run_process([sys.executable, "-m", "verl_rc.main_ppo", *overrides], folder / "verl_rc.log")
    lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["step"] > WARM_UP_STEPS]
    return Measurement([line["timing_s/step"] for line in steps], statistics.mean(line["response_length/mean"] for line in steps))


def print_comparison(rounds: dict[str, list[Measurement]]) -> None:
    """One line per trainer, and the ratio of their rates when both were measured on completions of the same length."""
    print("| trainer | completions/s | seconds per step | tokens per completion | completions/s of each round |")
    print("|---|---|---|---|---|")
    rates, lengths = {}, {}
    for name, measurements in rounds.items():
        pooled = [seconds for measurement in measurements for seconds in measurement.step_seconds]
        rates[name] = completions_per_second(pooled)
        lengths[name] = statistics.mean(measurement.mean_tokens for measurement in measurements)
        each = ", ".join(f"{completions_per_second(measurement.step_seconds):.1f}" for measurement in measurements)
        print(f"| {name} | {rates[name]:.1f} | {statistics.median(pooled):.3f} | {lengths[name]:.1f} | {each} |")
    if any(length != TOKENS_PER_COMPLETION for length in lengths.values()):
        print(f"not comparable: every completion must have {TOKENS_PER_COMPLETION} tokens, one trainer's were shorter")
    elif len(rates) == 2:
        print(f"verl_rc makes {rates['verl_rc'] / rates['TRL']:.2f} times as many completions per second as TRL")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl_python", help="interpreter of an environment with TRL; without it verl_rc is measured alone")
    parser.add_argument("--steps", type=int, default=12, help=f"steps per round, of which {WARM_UP_STEPS} warm up")
    parser.add_argument("--rounds", type=int, default=2, help="times that each trainer runs")
    parser.add_argument("--only_trl", action="store_true", help="measure TRL alone")
    parser.add_argument("--trl_part", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.steps <= WARM_UP_STEPS:
        parser.error(f"--steps must be more than the {WARM_UP_STEPS} that warm up, got {options.steps}.")
    if options.only_trl and not options.trl_python:
        parser.error("--only_trl needs --trl_python.")
    return options


def main() -> None:
    """Measure both in turn and print the comparison."""
    options = parse_arguments()
    if options.trl_part:
        train_with_trl(options.trl_part, options.steps)
        return
    rounds: dict[str, list[Measurement]] = {}
    with tempfile.TemporaryDirectory() as folder:
        make_inputs(Path(folder), options.steps)
        for _ in range(options.rounds):
            if options.trl_python:
                rounds.setdefault("TRL", []).append(measure_trl(Path(folder), options.steps, options.trl_python))
            if not options.only_trl:
                rounds.setdefault("verl_rc", []).append(measure_verl_rc(Path(folder), options.steps))
    print_comparison(rounds)


if __name__ == "__main__":
    main()
