"""Processor time of the ledger and the guards per step, for batches of four sizes.

A step computes fingerprints twice (of the samples as they arrive, and of the batch before the update), counts
tokens in the ledger and watches the reward. The last column is the time per token: a run that handles 100,000
tokens per second, from sampling to update, has 10,000 ns for each.
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from verl_rc.data.fingerprints import fingerprints_of_samples, require_sampled_tokens
from verl_rc.data.optimizer_step import OptimizerStep
from verl_rc.data.parts import Part, Sample
from verl_rc.data.rollout_batch import build_rollout_batch
from verl_rc.health.guards import RewardHistory
from verl_rc.ppo.ledger import Ledger, accounts_of_update

SIZES = ((256, 64, 64), (256, 512, 1024), (1024, 512, 4096), (1024, 512, 8192))
"""Rows, prompt tokens, response tokens."""


def samples_of(rows: int, prompt: int, response: int) -> tuple[list[list[int]], list[Sample]]:
    """Prompts and samples of random tokens and lengths."""
    generator = torch.Generator().manual_seed(0)

    def tokens(most: int) -> Tensor:
        length = int(torch.randint(1, most + 1, (), generator=generator))
        return torch.randint(0, 150_000, (length,), generator=generator, dtype=torch.int32)

    responses = [tokens(response) for _ in range(rows)]
    samples = [Sample(row, [Part(ids, torch.zeros(len(ids)), 0)]) for row, ids in enumerate(responses)]
    return [tokens(prompt).tolist() for _ in range(rows)], samples


def milliseconds(work: Callable[[], object], repeats: int = 20) -> float:
    """Processor time of one call: other processes on the machine do not count."""
    work()
    start = time.process_time()
    for _ in range(repeats):
        work()
    return 1000 * (time.process_time() - start) / repeats


def ledger_work(mask: Tensor) -> None:
    """The ledger's work in a step with eight mini-batches: three counts of tokens."""
    ledger, count = Ledger(), int(torch.count_nonzero(mask))
    ledger.add_sampled(count, prompts=len(mask) // 8)
    ledger.require_in_batch(int(torch.count_nonzero(mask)))
    ledger.book({"rejected": int(torch.count_nonzero(mask & ~mask))})
    parts = [count // 8] * 7 + [count - 7 * (count // 8)]
    ledger.book(accounts_of_update(parts, parts, [OptimizerStep(1.0)] * 8, epochs=1))
    ledger.book_prompts({"in_batch": len(mask) // 8})
    ledger.balanced_metrics()


def costs_of(rows: int, prompt: int, response: int) -> list[float]:
    """Milliseconds of each part."""
    prompts, samples = samples_of(rows, prompt, response)
    batch = build_rollout_batch(prompts, range(rows), samples, pad_token_id=0)
    scores, watch, mask = torch.rand(rows), RewardHistory(), batch.response_mask
    return [
        milliseconds(lambda: fingerprints_of_samples(prompts, samples)),
        milliseconds(lambda: require_sampled_tokens(batch.fingerprints, batch.tokens, mask)),
        milliseconds(lambda: ledger_work(mask)),
        milliseconds(lambda: watch.with_scores(scores, 5).collapse(5, 0.5)),
    ]


def main() -> None:
    """Print one line per size."""
    torch.set_num_threads(1)
    print(
        f"{'rows x (prompt + response)':>28} {'fingerprints':>13} {'check':>9} {'ledger':>9} {'reward':>9} "
        f"{'a token':>9}"
    )
    for rows, prompt, response in SIZES:
        costs, tokens = costs_of(rows, prompt, response), rows * (prompt + response)
        cells = " ".join(f"{cost:>6.2f} ms" for cost in costs)
        print(
            f"{f'{rows} x ({prompt} + {response})':>28} {'':>4}{cells} {1e6 * sum(costs) / tokens:>6.1f} ns"
        )


if __name__ == "__main__":
    main()
