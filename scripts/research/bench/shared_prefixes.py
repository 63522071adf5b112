"""What a shared prompt saves: passes of a group of eight responses of 32 tokens with and without sharing.

Usage: python -m scripts.research.bench.shared_prefixes [--threads 2]
Ten million weights in float32, each line in pairs on idle cores. The expectation is the ratio of the tokens:
n (P + R) of every row against P + n R of the tree. Memory is the growth of the process in the update.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from verl_rc.records.batches import TokenBatch
from verl_rc.runtime.workers.forward import ForwardOptions, score_tokens
from verl_rc.runtime.workers.language_model import load_causal_lm
from verl_rc.runtime.workers.packing import PrefixSharing

VOCABULARY, SAMPLES, RESPONSE, PAIRS = 2048, 8, 32, 5
GROUPS = {16: 8, 64: 4, 256: 2, 1024: 1}
"""Groups of a micro-batch by the tokens of a prompt."""


def batch(prompt: int) -> TokenBatch:
    """Groups of random tokens."""
    rows = GROUPS[prompt] * SAMPLES
    return TokenBatch(
        prompts=torch.randint(VOCABULARY, (GROUPS[prompt], prompt)).repeat_interleave(SAMPLES, 0),
        prompt_lengths=torch.full((rows,), prompt),
        responses=torch.randint(VOCABULARY, (rows, RESPONSE)),
        response_lengths=torch.full((rows,), RESPONSE),
        batch_size=[rows],
    )


def model(folder: str) -> torch.nn.Module:
    """The model in ``folder``, which is written where it is missing."""
    sizes = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 5, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 4096}
    if not (Path(folder) / "config.json").exists():
        Qwen2ForCausalLM(Qwen2Config(**sizes, **heads)).save_pretrained(folder)
    return load_causal_lm(folder, torch.float32)


def passes(policy: torch.nn.Module, tokens: TokenBatch, shares: bool) -> tuple[float, float]:
    """Seconds of a pass without gradient, and of one with."""
    options = ForwardOptions(prefixes=PrefixSharing() if shares else None)
    began = time.perf_counter()
    with torch.no_grad():
        score_tokens(policy, tokens, options, with_entropy=True)
    between = time.perf_counter()
    score_tokens(policy, tokens, options, with_entropy=False).log_probs.sum().backward()
    policy.zero_grad()
    return between - began, time.perf_counter() - between


def peak_mebibytes() -> int:
    """Most memory that this process has had."""
    [line] = [one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("VmHWM")]
    return int(line.split()[1]) >> 10


def main() -> None:
    """Print a line for each length of prompt."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--memory_of", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.memory_of:
        folder, prompt, shares = options.memory_of
        policy, tokens = model(folder), batch(int(prompt))
        before = peak_mebibytes()
        passes(policy, tokens, shares == "True")
        print(peak_mebibytes() - before)
        return
    with tempfile.TemporaryDirectory() as folder:
        policy = model(folder)
        print("| P | tokens | expected | forward | forward and backward | MiB |\n|---|---|---|---|---|---|")
        for prompt, groups in GROUPS.items():
            tokens = batch(prompt)
            rows, tree = groups * SAMPLES * (prompt + RESPONSE), groups * (prompt + SAMPLES * RESPONSE)
            pairs = [[passes(policy, tokens, shares) for shares in (False, True)] for _ in range(PAIRS)]
            ratios = [statistics.median(off[i] / on[i] for off, on in pairs) for i in (0, 1)]
            command = [sys.executable, "-m", "scripts.research.bench.shared_prefixes", "--memory_of", folder]
            memory = [
                subprocess.run([*command, str(prompt), shares], capture_output=True, text=True, check=True)
                for shares in ("False", "True")
            ]
            used = ", ".join(run.stdout.split()[-1] for run in memory)
            print(
                f"| {prompt} | {rows}, {tree} | {rows / tree:.2f} | {ratios[0]:.2f} | {ratios[1]:.2f} |",
                f"{used} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
