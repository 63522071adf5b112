"""Processor time of the ledger and the guards per step, for batches of three sizes.

A step computes fingerprints twice (when the samples arrive and before the update), checks masks, counts
tokens in the ledger and watches the reward. The last column is the time per token: a run that handles 100,000
tokens per second, from sampling to update, has 10,000 ns for each.
"""

import time
from collections.abc import Callable

import torch

from verl_rc.data.batches import TokenBatch
from verl_rc.data.fingerprints import fingerprints, require_sampled_tokens
from verl_rc.health.guards import RewardHistory
from verl_rc.ppo.ledger import Ledger, accounts_of_update, require_sampled_loss

SIZES = ((256, 64, 64), (256, 512, 1024), (1024, 512, 4096))
"""Rows, prompt tokens, response tokens."""


def tokens_of(rows: int, prompt: int, response: int) -> tuple[TokenBatch, torch.Tensor]:
    """Random tokens and lengths, and their response mask."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, response + 1, (rows,), generator=generator)
    tokens = TokenBatch(
        prompts=torch.randint(0, 150_000, (rows, prompt), generator=generator),
        prompt_lengths=torch.randint(1, prompt + 1, (rows,), generator=generator),
        responses=torch.randint(0, 150_000, (rows, response), generator=generator),
        response_lengths=lengths,
        batch_size=[rows],
    )
    return tokens, torch.arange(response) < lengths[:, None]


def milliseconds(work: Callable[[], object], repeats: int = 20) -> float:
    """Processor time of one call: other processes on the machine do not count."""
    work()
    start = time.process_time()
    for _ in range(repeats):
        work()
    return 1000 * (time.process_time() - start) / repeats


def ledger_work(mask: torch.Tensor) -> None:
    """The ledger's work in a step with eight mini-batches: three counts of tokens, two comparisons of
    masks."""
    ledger, count = Ledger(), int(torch.count_nonzero(mask))
    ledger.sampled(count, prompts=len(mask) // 8)
    ledger.require_in_batch(int(torch.count_nonzero(mask)))
    require_sampled_loss(mask, mask, mask)
    ledger.book({"rejected": int(torch.count_nonzero(mask & ~mask))})
    parts = [count // 8] * 7 + [count - 7 * (count // 8)]
    ledger.book(accounts_of_update(parts, parts, [1.0] * 8, epochs=1))
    ledger.book_prompts({"in_batch": len(mask) // 8})
    ledger.close()


def costs_of(rows: int, prompt: int, response: int) -> list[float]:
    """Milliseconds of each part."""
    tokens, mask = tokens_of(rows, prompt, response)
    expected, scores, watch = fingerprints(tokens, mask), torch.rand(rows), RewardHistory()
    return [
        milliseconds(lambda: fingerprints(tokens, mask)),
        milliseconds(lambda: require_sampled_tokens(expected, tokens, mask)),
        milliseconds(lambda: ledger_work(mask)),
        milliseconds(lambda: watch.observed(scores, 5).collapse(5, 0.5)),
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
