"""How often a healthy run is called ill: the rate of each row of the table of causes.

A healthy step is made without a trainer: one model samples responses in the engine's precision, with the
probabilities that it reports, and scores them in float32, as the trainer does. Every step has new samples. So
tens of thousands of steps can be judged, for policies that differ in how certain they are (a model, and a
temperature on both sides), and by the fields that token records of other trainers lack.

Usage: python -m scripts.planted_faults.false_alarms MODEL ... --data train.parquet --steps 2000 --out FILE
Some 0.2 s a step on an idle core. FILE has a line of metrics for each run of 100 steps, and a repeated call
goes on behind the last. ``--sum FILE ... --out OUT`` judges them, with counts of
``false_alarms_in_files``.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from planted_faults.alarm_counts import PARTS, counted, sums_of

from verl_rc.data.token_record import TokenRecord, with_defaults
from verl_rc.insight.run_folder.records import Columns, RunData
from verl_rc.insight.run_folder.token_metrics import metrics_of

PRECISIONS = ("float32", "bfloat16", "fp8 weights")
TEMPERATURES = (1.0, 0.6)
"""On both sides; the lower one makes the policy nearly certain of most tokens."""
PROMPTS, SAMPLES, MOST_TOKENS = 16, 8, 12
STEPS_PER_RUN = 100
STEPS_AT_ONCE = 10
DISTRIBUTIONS = ("entropy", "sum_pi_squared", "varentropy")
LACKING = {
    "all fields": (),
    "without varentropy": ("varentropy",),
    "without distributions": DISTRIBUTIONS,
    "log-probs and mask alone": (*DISTRIBUTIONS, "response_ids"),
}
"""Fields that are left out, by the name of what is left."""


def in_fp8(model: Any) -> Any:
    """Round the weights of linear layers to e4m3 with a scale for each output channel, in bfloat16 else."""
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and module is not model.lm_head:
            weight = module.weight.data.float()
            scale = weight.abs().amax(1, keepdim=True).clamp_min(1e-12) / 448.0
            module.weight.data = (weight / scale).to(torch.float8_e4m3fn).float() * scale
    return model.to(torch.bfloat16)


def engine_of(folder: Path, precision: str) -> Any:
    """The model in the engine's precision."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return {"float32": lambda: model, "bfloat16": model.bfloat16, "fp8 weights": lambda: in_fp8(model)}[
        precision
    ]()


def behind_prompts(model: Any, prompts: Tensor) -> tuple[Any, Tensor]:
    """The cache of each prompt, once for each of its samples, and the logits behind it, ``[N, 1, V]``."""
    output = model(prompts, use_cache=True, logits_to_keep=1)
    output.past_key_values.batch_repeat_interleave(SAMPLES)
    return output.past_key_values, output.logits.repeat_interleave(SAMPLES, 0)


def sample(
    engine: Any, prompts: Tensor, temperature: float, chance: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Responses ``[N, T]`` and the log-probs of their tokens as the engine reports them."""
    cache, logits = behind_prompts(engine, prompts)
    ids, log_probs = list[Tensor](), list[Tensor]()
    for _ in range(MOST_TOKENS):
        if ids:
            logits = engine(ids[-1], past_key_values=cache).logits
        logs = (logits[:, -1].float() / temperature).log_softmax(-1)
        inputs = torch.multinomial(logs.exp(), 1, generator=chance)
        ids.append(inputs)
        log_probs.append(logs.gather(-1, inputs))
    return torch.cat(ids, 1), torch.cat(log_probs, 1)


def score(trainer: Any, prompts: Tensor, ids: Tensor, temperature: float) -> dict[str, Tensor]:
    """The trainer's fields of each token, ``[N, T]``."""
    cache, first = behind_prompts(trainer, prompts)
    logits = torch.cat([first, trainer(ids[:, :-1], past_key_values=cache).logits], 1)
    logs = (logits.float() / temperature).log_softmax(-1)
    probabilities = logs.exp()
    entropy = -(probabilities * logs).sum(-1)
    return {
        "old_log_prob": logs.gather(-1, ids[..., None])[..., 0],
        "entropy": entropy,
        "sum_pi_squared": probabilities.square().sum(-1),
        "varentropy": (probabilities * (logs + entropy[..., None]).square()).sum(-1),
    }


def records(
    engine: Any, trainer: Any, prompts: Tensor, stop: int, temperature: float, seed: int
) -> Iterator[TokenRecord]:
    """The healthy steps of a run."""
    chance = torch.Generator().manual_seed(seed)
    rows = PROMPTS * SAMPLES
    for first in range(0, STEPS_PER_RUN, STEPS_AT_ONCE):
        drawn = torch.randint(len(prompts), (PROMPTS * STEPS_AT_ONCE,), generator=chance)
        with torch.no_grad():
            ids, log_probs = sample(engine, prompts[drawn], temperature, chance)
            fields = {
                "response_ids": ids,
                "rollout_log_prob": log_probs,
                **score(trainer, prompts[drawn], ids, temperature),
            }
        asked = prompts[drawn].repeat_interleave(SAMPLES, 0)
        ended = (ids == stop).int().argmax(1) + 1
        lengths = torch.where((ids == stop).any(1), ended, MOST_TOKENS)
        for number in range(STEPS_AT_ONCE):
            of_step = slice(number * rows, (number + 1) * rows)
            mask = torch.arange(MOST_TOKENS) < lengths[of_step, None]
            tokens = {name: values[of_step][mask].numpy() for name, values in fields.items()}
            tokens["response_mask"] = np.ones(int(mask.sum()), bool)
            asked_ids = list(asked[of_step].int().numpy())
            yield TokenRecord(
                {"step": first + number + 1, "trainer": "simulated", "temperature": temperature},
                with_defaults({}, rows, asked_ids),
                lengths[of_step].numpy(),
                tokens,
                asked_ids,
            )


def metrics_without(steps: Sequence[TokenRecord], without: tuple[str, ...]) -> list[dict[str, float]]:
    """What is read from the records of each step without these fields, and without prompts where ids lack."""
    by_step = []
    for record in steps:
        kept = {name: values for name, values in record.tokens.items() if name not in without}
        prompts = None if "response_ids" in without else record.prompts
        by_step.append(metrics_of(replace(record, tokens=kept, prompts=prompts)))
    return by_step


def run_of(by_step: Sequence[Mapping[str, float]]) -> RunData:
    """A run whose steps have these metrics."""
    columns = Columns()
    for number, metrics in enumerate(by_step, start=1):
        columns.add(number, metrics)
    return RunData("simulated", Path(), "token records", columns.steps, columns.series())


def write_sums(paths: Sequence[Path], output: Path) -> None:
    """Add up the lines of files, those of metrics and those of counts."""
    counts = []
    for path in paths:
        for line in path.read_text("utf-8").splitlines():
            entry = json.loads(line)
            if "metrics" in entry:
                readings = map(run_of, entry["metrics"].values())
                entry = {"part": PARTS[2], "counts": counted(readings).as_json()}
            counts.append(json.dumps(entry))
    sums = {part: count.as_json() for part, count in sums_of(counts).items()}
    output.write_text(json.dumps(sums, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Simulate and judge what is not in the file yet."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", type=Path, nargs="*")
    parser.add_argument("--data", type=Path, help="parquet file whose prompts are of one length")
    parser.add_argument(
        "--steps", type=int, default=STEPS_PER_RUN, help="of each model, precision, temperature"
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--sum", type=Path, nargs="*", help="files to add up into --out")
    options = parser.parse_args()
    if options.sum:
        write_sums(options.sum, options.out)
        return
    options.out.touch()
    done = Counter(
        (line["model"], line["precision"], line["temperature"])
        for line in map(json.loads, options.out.read_text().splitlines())
    )
    for seed in range(options.steps // STEPS_PER_RUN):
        for folder, precision, temperature in product(options.models, PRECISIONS, TEMPERATURES):
            if done[folder.name, precision, temperature] > seed:
                continue
            tokenizer = AutoTokenizer.from_pretrained(folder)
            chats = pyarrow.parquet.read_table(options.data, columns=["prompt"])["prompt"].to_pylist()[:4096]
            encoded = [
                tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
                for chat in chats
            ]
            steps = list(
                records(
                    engine_of(folder, precision),
                    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
                    torch.tensor(encoded),
                    tokenizer.eos_token_id,
                    temperature,
                    seed,
                )
            )
            line: dict[str, Any] = {"model": folder.name, "precision": precision, "temperature": temperature}
            line |= {"seed": seed}
            line["metrics"] = {name: metrics_without(steps, without) for name, without in LACKING.items()}
            with options.out.open("a") as file:
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
