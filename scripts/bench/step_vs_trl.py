"""Completions per second of a whole GRPO step: TRL's GRPOTrainer against verl_rc, on this machine's CPU.

Both train one model on the quickstart's prompts: 32 prompts x 2 samples, each until its end token, and one
optimizer step over all 64 rows. Size "quickstart" is its model after SFT (1.2 M parameters), up to 32 tokens;
"10m" and "30m" are untrained models of so many parameters, whose responses end at random and have up to 192
tokens. Both compute in fp32 without gradient checkpointing, or, with ``--defaults``, as each of them does
when nothing is said. TRL generates with transformers and, with one update per batch, computes no old
log-probs; verl_rc's step is generation, reward, old log-probs, sequence-level rollout correction, update and
weight sync.

TRL lives in an environment of its own (torch's CPU build; torchvision and torchaudio are not needed and must
stay out):
    python -m venv ~/.trl && ~/.trl/bin/pip install torch==2.13.0 trl==1.16.0 transformers==5.19.0
Where pip finds only a CUDA build of torch, install the CPU build first, from where scripts/install.sh takes
it.

Usage: python scripts/bench/step_vs_trl.py --trl_python ~/.trl/bin/python [--size 10m] Minutes on two idle
cores: about four for the quickstart's size. It needs the quickstart's model and data: bash
scripts/quickstart.sh trainer.total_training_steps=1, or --model and --data. The two take turns, each in fresh
processes; steps of all rounds are pooled, medians are printed.
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
SAME_LENGTH = 0.1
"""Relative difference of the mean lengths up to which two runs are comparable."""
WARM_UP_STEPS = 2
LEARNING_RATE = 1e-5


@dataclass(frozen=True)
class Size:
    """A model, and how long its responses may get."""

    most_tokens: int
    model: tuple[str, ...] = ()
    """Arguments of make_tiny_model.py; without any the model is ``--model``."""


SIZES = {
    "quickstart": Size(32),
    "10m": Size(
        192,
        (
            "--hidden_size=384",
            "--num_layers=6",
            "--num_heads=6",
            "--num_kv_heads=3",
            "--intermediate_size=1024",
        ),
    ),
    "30m": Size(
        192,
        (
            "--hidden_size=576",
            "--num_layers=8",
            "--num_heads=9",
            "--num_kv_heads=3",
            "--intermediate_size=1536",
        ),
    ),
}


@dataclass(frozen=True)
class Measurement:
    """The measurements of one run of one trainer."""

    step_seconds: list[float]
    """Wall clock of every step after the warm-up."""
    mean_tokens: float
    """Response tokens per completion."""


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]
) -> float:
    """The reward of both trainers: the share of digits. Untrained samples differ in it, so that gradients are
    not zero."""
    return sum(character.isdigit() for character in solution_str) / max(1, len(solution_str))


def completions_per_second(step_seconds: list[float]) -> float:
    """Rate of the median step."""
    return COMPLETIONS_PER_STEP / statistics.median(step_seconds)


def run_process(command: list[str], log: Path) -> None:
    """Run ``command`` with all cores; what it says goes to ``log``. Exits with the log's end when it
    fails."""
    threads = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    environment = {name: value for name, value in os.environ.items() if name not in threads}
    environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
    with log.open("w") as file:
        code = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, check=False
        ).returncode
    if code:
        raise SystemExit(
            f"{' '.join(command[:3])} ... ended with {code}; the end of {log}:\n{log.read_text()[-3000:]}"
        )


def train_with_trl(options: argparse.Namespace) -> None:
    """TRL's part, run by TRL's interpreter: writes ``trl.json`` to ``--trl_part``."""
    folder, num_steps = options.trl_part, options.steps
    import pyarrow.parquet
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class StepClock(TrainerCallback):
        """Records the time at the end of each step."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.times.append(time.perf_counter())

    def share_of_digits(completions: list[Any], **_: Any) -> list[float]:
        return [compute_score("digits", messages[0]["content"], "", {}) for messages in completions]

    prompts = pyarrow.parquet.read_table(options.data / "train.parquet", columns=["prompt"]).to_pylist()
    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        max_steps=num_steps,
        per_device_train_batch_size=COMPLETIONS_PER_STEP,
        gradient_accumulation_steps=1,
        num_generations=SAMPLES_PER_PROMPT,
        max_completion_length=SIZES[options.size].most_tokens,
        temperature=1.0,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        model_init_kwargs={"dtype": "float32"},
        use_cpu=True,
        **({} if options.defaults else {"bf16": False, "gradient_checkpointing": False}),
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    clock = StepClock()
    trainer = GRPOTrainer(
        model=str(options.model),
        reward_funcs=share_of_digits,
        args=config,
        train_dataset=Dataset.from_list(prompts),
        processing_class=AutoTokenizer.from_pretrained(options.model),
        callbacks=[clock],
    )
    trainer.train()
    seconds = [after - before for before, after in zip(clock.times, clock.times[1:], strict=False)]
    lengths = [
        line["completions/mean_length"]
        for line in trainer.state.log_history
        if "completions/mean_length" in line
    ]
    report = {"step_seconds": seconds[WARM_UP_STEPS - 1 :], "mean_tokens": statistics.mean(lengths)}
    (folder / "trl.json").write_text(json.dumps(report))


def measure_trl(folder: Path, options: argparse.Namespace) -> Measurement:
    """Run TRL's part in its own environment."""
    command = [
        options.trl_python,
        str(Path(__file__).resolve()),
        "--trl_part",
        str(folder),
        "--steps",
        str(options.steps),
    ]
    command += ["--model", str(options.model), "--data", str(options.data), "--size", options.size]
    run_process([*command, *(["--defaults"] if options.defaults else [])], folder / "trl.log")
    return Measurement(**json.loads((folder / "trl.json").read_text()))


def measure_verl_rc(folder: Path, options: argparse.Namespace) -> Measurement:
    """Run verl_rc and read its step times."""
    run_folder = Path(tempfile.mkdtemp(prefix="run_", dir=folder))
    overrides = [
        "algorithm.adv_estimator=grpo",
        "algorithm.rollout_correction.preset=decoupled_seq_is",
        f"data.train_files={options.data / 'train.parquet'}",
        f"data.val_files={options.data / 'val.parquet'}",
        f"data.train_batch_size={PROMPTS_PER_STEP}",
        "data.max_prompt_length=20",
        f"data.max_response_length={SIZES[options.size].most_tokens}",
        f"actor_rollout_ref.model.path={options.model}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS_PER_STEP}",
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096",
        f"actor_rollout_ref.actor.optim.lr={LEARNING_RATE}",
        f"actor_rollout_ref.rollout.n={SAMPLES_PER_PROMPT}",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.kv_cache_megabytes=256",
        f"reward.custom_reward_function.path={Path(__file__).resolve()}",
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=1",
        "trainer.total_epochs=1",
        f"trainer.total_training_steps={options.steps}",
        "trainer.val_before_train=False",
        "trainer.logger=['console']",
        f"trainer.default_local_dir={run_folder}",
    ]
    if not options.defaults:
        overrides += [
            "actor_rollout_ref.actor.fsdp_config.dtype=float32",
            "actor_rollout_ref.rollout.dtype=float32",
        ]
    run_process([sys.executable, "-m", "verl_rc.main_ppo", *overrides], folder / "verl_rc.log")
    lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["step"] > WARM_UP_STEPS]
    timed = sorted({name for line in steps for name in line if name.startswith("timing_s/")})
    print(
        "verl_rc:",
        ", ".join(
            f"{name[9:]} {statistics.median(line.get(name, 0.0) for line in steps):.2f} s" for name in timed
        ),
    )
    return Measurement(
        [line["timing_s/step"] for line in steps],
        statistics.mean(line["response_length/mean"] for line in steps),
    )


def print_comparison(rounds: dict[str, list[Measurement]]) -> None:
    """One line per trainer, and the ratio of their rates when completions had the same length."""
    print(
        "| trainer | completions/s | seconds per step | tokens per completion | completions/s of each round |"
    )
    print("|---|---|---|---|---|")
    rates, lengths = {}, {}
    for name, measurements in rounds.items():
        pooled = [seconds for measurement in measurements for seconds in measurement.step_seconds]
        rates[name] = completions_per_second(pooled)
        lengths[name] = statistics.mean(measurement.mean_tokens for measurement in measurements)
        each = ", ".join(
            f"{completions_per_second(measurement.step_seconds):.1f}" for measurement in measurements
        )
        print(
            f"| {name} | {rates[name]:.1f} | {statistics.median(pooled):.3f} | {lengths[name]:.1f} | {each} |"
        )
    if max(lengths.values()) > (1 + SAME_LENGTH) * min(lengths.values()):
        print("not comparable: the completions of one trainer are longer than those of the other")
    elif len(rates) == 2:
        print(
            f"verl_rc makes {rates['verl_rc'] / rates['TRL']:.2f} times as many completions per second as TRL"
        )


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--trl_python", help="interpreter of an environment with TRL; without it verl_rc is measured alone"
    )
    quickstart = ROOT / "runs" / "quickstart"
    parser.add_argument(
        "--size", choices=SIZES, default="quickstart", help="the model and the length of its responses"
    )
    parser.add_argument(
        "--model", type=Path, default=quickstart / "sft_model", help="model folder of --size=quickstart"
    )
    parser.add_argument(
        "--data", type=Path, default=quickstart / "data", help="folder with train.parquet and val.parquet"
    )
    parser.add_argument(
        "--defaults", action="store_true", help="precision and gradient checkpointing by each one's defaults"
    )
    parser.add_argument(
        "--steps", type=int, default=12, help=f"steps per round, {WARM_UP_STEPS} of them for warm-up"
    )
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
        train_with_trl(options)
        return
    rounds: dict[str, list[Measurement]] = {}
    with tempfile.TemporaryDirectory() as folder:
        if SIZES[options.size].model:
            options.model = Path(folder) / "model"
            make = [
                sys.executable,
                str(ROOT / "scripts" / "make_tiny_model.py"),
                "--output_dir",
                str(options.model),
            ]
            run_process([*make, *SIZES[options.size].model], Path(folder) / "model.log")
        for _ in range(options.rounds):
            if options.trl_python:
                rounds.setdefault("TRL", []).append(measure_trl(Path(folder), options))
            if not options.only_trl:
                rounds.setdefault("verl_rc", []).append(measure_verl_rc(Path(folder), options))
    print_comparison(rounds)


if __name__ == "__main__":
    main()
