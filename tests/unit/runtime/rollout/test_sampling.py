"""Request seeds depend on the whole identity of a sample and on nothing else."""

from itertools import product

from verl_rc.runtime.rollout.sampling import part_seed, request_seed


def test_every_entry_matters_and_order_does_not() -> None:
    seeds = {
        request_seed({"seed": a, "step": b, "row": c, "sample": d})
        for a, b, c, d in product(range(4), repeat=4)
    }
    assert len(seeds) == 4**4
    assert request_seed({"seed": 1, "row": 2}) == request_seed({"row": 2, "seed": 1})


def test_seeds_fit_a_signed_64_bit_integer() -> None:
    assert all(0 <= request_seed({"row": row}) < 2**63 for row in range(1000))


def test_a_known_value_never_changes() -> None:
    # blake2b-8 of "row=3,seed=1", shifted right once: seeds must survive releases, or resumed runs would
    # differ.
    assert request_seed({"seed": 1, "row": 3}) == 5208355718854699039


def test_a_later_part_has_a_seed_of_its_own_and_the_first_keeps_the_requests() -> None:
    seeds = [part_seed(5208355718854699039, offset) for offset in range(1000)]
    assert seeds[0] == 5208355718854699039
    assert len(set(seeds)) == 1000
    # blake2b-8 of "offset=12,seed=5", shifted right once.
    assert part_seed(5, 12) == 2208532849645091645
