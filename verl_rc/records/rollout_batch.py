"""The batch of a step's samples, and the check of the weights that sampled it."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from verl_rc.records.batches import FIELDS, RolloutBatch
from verl_rc.records.fingerprints import fingerprints_of_samples
from verl_rc.records.parts import UNKNOWN, Answer, Part, Sample, columns_of, num_tokens, num_turns
from verl_rc.records.pictures import Pictures
from verl_rc.records.ragged import Column, Ragged, rows_of


def build_rollout_batch(
    prompts: Sequence[list[int]],
    group_ids: Sequence[int],
    samples: Sequence[Sample],
    *,
    with_tools: bool = False,
    turn_rewards: Sequence[Sequence[float]] | None = None,
    pictures: Sequence[Pictures | None] = (),
) -> Ragged[RolloutBatch]:
    """Join ``B`` prompts (token ids) with their samples, in the same order.

    ``response_mask`` leaves out the tokens of tools' answers. The columns about tools are None unless the run
    has tools. ``turn_rewards`` are the rewards of each sample's turns, in order; turns without one count 0.
    ``pictures`` are those of the prompts; none of them are in the batch where a run has none.
    Raises ``ValueError`` when counts differ, or a log-prob of a sampled token is positive.
    """
    rows = len(samples)
    if len(prompts) != rows or len(group_ids) != rows:
        raise ValueError(f"every request needs exactly one sample: {len(prompts)} requests, {rows} samples.")
    parts = [part for sample in samples for part in sample.parts]
    sizes = [len(part.token_ids) for part in parts]
    lengths = {
        "BP": np.array([len(prompt) for prompt in prompts]),
        "BR": np.array([num_tokens(sample.parts) for sample in samples]),
    }
    none = np.zeros(0, np.float32)
    columns: dict[str, Column] = {
        "prompts": np.concatenate([np.asarray(prompt, np.int32) for prompt in prompts]),
        "prompt_lengths": lengths["BP"],
        "responses": np.concatenate([none.astype(np.int32), *(part.token_ids.numpy() for part in parts)]),
        "response_lengths": lengths["BR"],
        "response_mask": np.repeat([isinstance(part, Part) for part in parts], sizes).astype(np.bool_),
        "rollout_log_probs": np.concatenate(
            [
                none,
                *(
                    part.log_probs.numpy() if isinstance(part, Part) else np.zeros(size, np.float32)
                    for part, size in zip(parts, sizes, strict=True)
                ),
            ]
        ),
        "policy_versions": np.repeat(
            np.array([part.version if isinstance(part, Part) else UNKNOWN for part in parts], np.int32), sizes
        ),
        "group_ids": np.array(group_ids, np.int64),
        "finished": np.array([sample.finished for sample in samples]),
        "fingerprints": fingerprints_of_samples(prompts, samples).numpy(),
    }
    # A log-softmax in float32 can end slightly above 0. For NaN rollout correction has a rule.
    positive = (columns["rollout_log_probs"] > 1e-5).nonzero()[0]
    if len(positive):
        bad_rows = sorted(set(np.searchsorted(np.cumsum(lengths["BR"]), positive, "right").tolist()))
        raise ValueError(
            "the log-prob of a sampled token must be <= 0, which does not hold for rows "
            f"{bad_rows[:5]} of the rollouts."
        )
    if any(isinstance(part, Answer) and part.restarts for part in parts):
        columns["restarts"] = np.concatenate(
            [
                np.arange(size) == (0 if isinstance(part, Answer) and part.restarts else size)
                for part, size in zip(parts, sizes, strict=True)
            ]
        )
    if with_tools:
        columns["num_turns"] = np.array([num_turns(sample.parts) for sample in samples])
        columns["tool_calls"] = np.array([sample.tool_calls for sample in samples])
    engines = [sample.engine for sample in samples if sample.engine is not None]
    if len(engines) == rows:
        columns["engines"] = np.array(engines)
    if turn_rewards is not None:
        columns["turn_rewards"] = at_turn_ends(
            turn_rewards, rows_of(columns["response_mask"], lengths["BR"])
        ).numpy()
    distinct = {one.number: one for one in pictures if one is not None}
    if distinct:
        columns["pictures"] = np.array([0 if one is None else one.number for one in pictures])
    lists = _lists(samples)
    return Ragged(RolloutBatch, columns | lists[0], lengths | lists[1], tuple(distinct.values()))


def _lists(samples: Sequence[Sample]) -> tuple[dict[str, Column], dict[str, Column]]:
    """The fields of ``COLUMNS`` that the engine has recorded beside tokens, and their lengths by symbols."""
    columns, lengths = dict[str, Column](), dict[str, Column]()
    for name in {name for sample in samples for part in sample.parts for name in columns_of(part)}:
        counts, values, sizes = list[Column](), list[Column](), list[int]()
        for sample in samples:
            lists = [columns_of(part).get(name) for part in sample.parts]
            counts += [
                np.zeros(len(part.token_ids), np.int32) if one is None else one.counts.astype(np.int32)
                for part, one in zip(sample.parts, lists, strict=True)
            ]
            values += [one.values for one in lists if one is not None]
            sizes.append(sum(len(one.values) for one in lists if one is not None))
        dtype, symbols = FIELDS[f"{name}_ids"]
        columns[f"{name}_counts"] = np.concatenate(counts)
        columns[f"{name}_ids"] = np.concatenate(values, dtype=torch.empty(0, dtype=dtype).numpy().dtype)
        lengths[symbols] = np.array(sizes)
    return columns, lengths


def at_turn_ends(values: Sequence[Sequence[float]], response_masks: Sequence[Column]) -> Tensor:
    """float32 ``[N]``: the values of a row's turns, each at the last token of its turn.

    A turn is a run of tokens in the row's mask. Raises ``ValueError`` when a row has fewer turns than values.
    """
    by_row = list[Column]()
    for row, (row_values, mask) in enumerate(zip(values, response_masks, strict=True)):
        places = (mask & ~np.append(mask[1:], False)).nonzero()[0]
        if len(row_values) > len(places):
            raise ValueError(
                f"a turn has one reward at most, but row {row} has {len(row_values)} rewards for "
                f"{len(places)} turns."
            )
        by_row.append(np.zeros(len(mask), np.float32))
        by_row[-1][places[: len(row_values)]] = row_values
    return torch.from_numpy(np.concatenate(by_row))


def check_versions(rollouts: Ragged[RolloutBatch], expected_version: int) -> None:
    """Raise ``RuntimeError`` when a token was sampled with weights of another version than
    ``expected_version``."""
    wrong = rollouts.response_mask & (rollouts.policy_versions != expected_version)
    if bool(wrong.any()):
        row = int(rollouts.row_sums(wrong).nonzero()[0])
        versions = sorted(set(rollouts.policy_versions[wrong].tolist()))
        raise RuntimeError(
            f"every token of this step must come from weight version {expected_version}, but "
            f"{int(wrong.sum())} tokens come from version {versions} (first in row {row}): an engine missed "
            "a weight update."
        )
