"""Token records of a run: at which steps, of which rows, and what they hold."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl_rc.algorithm.ppo.train_batch import StepInputs
from verl_rc.config.folder_owner import FolderClaim
from verl_rc.config.schema import public_values
from verl_rc.correction.log_ratio import LogRatio
from verl_rc.metrics.json_lines import set_aside
from verl_rc.records.batches import RolloutBatch
from verl_rc.records.ragged import Ragged, rows_of
from verl_rc.records.rollout_batch import at_turn_ends
from verl_rc.records.scored_batch import ScoredBatch
from verl_rc.records.token_records.token_parquet import set_aside_later, thin_out, write_record
from verl_rc.records.token_records.token_record import FOLDER, PICTURES, PIECES, Array, TokenRecord, class_of
from verl_rc.runtime.rollout.sampling import request_seed
from verl_rc.trainer.services import Services
from verl_rc.trainer.step_record import Step

MOST_FILES = 512
_LASTING = ("first", "checkpoint", "alert")
"""Records that are the last to be removed when all of them take too much room."""
_FIRST_STEPS = 2
"""The first steps show the gap before anything was learned."""


@dataclass(frozen=True)
class ChosenRows:
    """Rows of a batch, and how they were chosen."""

    rows: list[int]
    is_worst: list[bool]
    inclusion: float
    """Probability with which each of the others was taken."""

    @classmethod
    def choose(cls, squares: Tensor, num_rows: int, seed: int) -> "ChosenRows":
        """Half at random, half those with the largest ``squares`` ``[B]`` of the rest; all where ``num_rows``
        is not below B."""
        num_available = len(squares)
        if num_rows >= num_available:
            return cls(list(range(num_available)), [False] * num_available, 1.0)
        num_random = num_rows - num_rows // 2
        order = torch.randperm(num_available, generator=torch.Generator().manual_seed(seed)).tolist()
        drawn = sorted(order[:num_random])
        ranked = squares.nan_to_num(torch.inf).argsort(descending=True, stable=True).tolist()
        worst = [row for row in ranked if row not in set(drawn)][: num_rows - num_random]
        return cls(drawn + worst, [False] * len(drawn) + [True] * len(worst), num_random / num_available)


class TokenRecorder:
    """Writes records into the run's folder; they are never sent anywhere."""

    def __init__(self, services: Services, steps_done: int) -> None:
        """Records after ``steps_done`` are of steps that this run does again, or of another run."""
        self._services = services
        self._settings = services.config.trainer.token_records
        self._folder = services.folder / FOLDER
        self._classes: dict[int, int] = {}
        """The class of each token id whose text is written."""
        with self._claim():
            self._picture_bytes = sum(path.stat().st_size for path in (self._folder / PICTURES).glob("*"))
            set_aside_later(self._folder, steps_done)
            set_aside(self._folder / PIECES)

    def _claim(self) -> FolderClaim:
        return FolderClaim(self._services.folder, "tokens")

    def write(self, inputs: StepInputs, step: Step) -> None:
        """Write the record of a step, if one is due."""
        why = self._reason(step.number)
        if why is None:
            return
        with self._claim(), step.record.stage("token_records"):
            self._folder.mkdir(parents=True, exist_ok=True)
            record = self._record(inputs, step, why)
            write_record(self._folder, record)
            if record.prompts is not None:
                self._write_pictures(inputs.scored, record.rows["row"])
            most_bytes = (self._settings.max_megabytes << 20) - self._picture_bytes
            thin_out(self._folder, most_bytes, MOST_FILES, _LASTING)

    def _write_pictures(self, scored: ScoredBatch, rows: Array) -> None:
        """Write the pictures of recorded rows that are not there yet, up to a quarter of the folder's
        limit."""
        most_bytes = self._settings.max_megabytes << 18
        found = {scored.rows[row].pictures for row in rows.tolist()} - {None}
        for pictures in found:
            assert pictures is not None
            for image, digest in zip(pictures.data, pictures.digests, strict=True):
                path = self._folder / PICTURES / digest
                if not path.exists() and self._picture_bytes + len(image) <= most_bytes:
                    path.parent.mkdir(exist_ok=True)
                    part = path.with_suffix(".part")
                    part.write_bytes(image)
                    part.replace(path)  # a picture is there whole or not at all
                    self._picture_bytes += len(image)

    def _reason(self, step: int) -> str | None:
        """The reason why a record of the step is written. None for a step without a record."""
        settings = self._settings
        last_alert = self._services.tracker.last_alert
        if not settings.enable:
            return None
        reasons = {
            "full": settings.full_freq > 0 and step % settings.full_freq == 0,
            "first": step <= _FIRST_STEPS,
            "alert": last_alert is not None and step - last_alert in (0, 1),
            "checkpoint": step > 1 and self._services.saves_at(step - 1),  # its weights are on the disk
            "regular": step % settings.freq == 0,
        }
        return next((reason for reason, holds in reasons.items() if holds), None)

    def _record(self, inputs: StepInputs, step: Step, why: str) -> TokenRecord:
        scored, rollouts = inputs.scored, inputs.scored.rollouts
        squares = _squares(inputs.evaluations.proximal_log_probs, rollouts)
        seed = self._services.config.trainer.seed
        seed = request_seed({"seed": seed, "step": step.number, "token_records": 1})
        num_rows = len(scored) if why == "full" else self._settings.rows_per_step
        recorded = ChosenRows.choose(squares, num_rows, seed)
        lengths = rollouts.lengths["BR"]

        def tokens_of(values: Tensor) -> Array:
            of_rows = rows_of(values.numpy(), lengths)
            return np.concatenate([of_rows[row] for row in recorded.rows])

        tokens = {name: tokens_of(values) for name, values in _token_columns(inputs)}
        ids = tokens_of(rollouts.responses)
        of_rows = rows_of(rollouts.columns["prompts"], rollouts.lengths["BP"])
        prompts = [of_rows[row] for row in recorded.rows]
        contents = self._settings.contents
        tokens["token_class"] = self._token_classes(
            ids, prompts if contents == "full" else [], contents != "numbers_only", step.number
        )
        if contents != "numbers_only":
            tokens["response_ids"] = ids
        return TokenRecord(
            {
                **self._facts,
                "correction": step.corrector.config.model_dump(mode="json"),
                "step": step.number,
                "why": why,
                "current_version": step.number - 1,
                "rows_of_batch": len(scored),
                "tokens_of_batch": scored.num_tokens,
            },
            _row_columns(scored, recorded),
            lengths[recorded.rows],
            tokens,
            prompts if contents == "full" else None,
        )

    @cached_property
    def _facts(self) -> dict[str, Any]:
        """The facts of the run that are the same in all records."""
        config = self._services.config
        public = public_values(self._services.config)
        rollout = config.actor_rollout_ref.rollout
        return {
            "trainer": "verl_rc",
            **{name: getattr(rollout, name) for name in ("temperature", "top_p", "top_k", "min_p")},
            "router_replay": rollout.enable_rollout_routing_replay,
            "logprobs_mode": "processed_logprobs",
            "stop_token_ids": list(self._services.stop_token_ids),
            "engine_dtype": rollout.dtype,
            "trainer_dtype": config.actor_rollout_ref.actor.fsdp_config.dtype,
            "engine": {name: getattr(rollout, name) for name in ("dtype", "quantization", "kv_cache_dtype")},
            "contents": self._settings.contents,
            "config_hash": hashlib.sha256(json.dumps(public, sort_keys=True).encode()).hexdigest()[:16],
        }

    def _token_classes(self, ids: Array, prompts: Sequence[Array], writes_text: bool, step: int) -> Array:
        """The class of each id; the text of ids that come for the first time is written beside the
        records."""
        distinct, inverse = np.unique(ids, return_inverse=True)
        present = {int(token) for token in np.unique(np.concatenate([distinct, *prompts]))}
        if new_ids := sorted(present - self._classes.keys()):
            texts = self._services.tokenizer.batch_decode(
                [[token] for token in new_ids], skip_special_tokens=False
            )
            special = {*self._services.tokenizer.all_special_ids, *self._services.stop_token_ids}
            classes = [class_of(text, token in special) for token, text in zip(new_ids, texts, strict=True)]
            self._classes |= dict(zip(new_ids, classes, strict=True))
            if writes_text:
                path = self._folder / PIECES
                pieces = list(zip(new_ids, texts, classes, strict=True))
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"step": step, "pieces": pieces}) + "\n")
        return np.array([self._classes[int(token)] for token in distinct], "int8")[inverse.reshape(-1)]


def _squares(proximal: Tensor | None, rollouts: Ragged[RolloutBatch]) -> Tensor:
    """float64 ``[B]``: sum of the squared log-ratios of each row, 0 where no proximal policy was computed;
    infinite where one is not finite."""
    rollout = rollouts.rollout_log_probs
    train = rollout if proximal is None else proximal
    ratio = LogRatio.from_log_probs(train, rollout, rollouts.response_mask)
    is_finite = rollouts.row_sums(ratio.valid != ratio.response) == 0
    return torch.where(is_finite, rollouts.row_sums(ratio.values.square()), torch.inf)


def _token_columns(inputs: StepInputs) -> Iterator[tuple[str, Tensor]]:
    """Columns ``[N]`` by name, those of the correction where the driver makes it."""
    scored, evaluations, batch = inputs.scored, inputs.evaluations, inputs.batch
    rollouts = scored.rollouts
    yield "response_mask", rollouts.response_mask
    yield "rollout_log_prob", rollouts.rollout_log_probs
    yield "advantage", batch.advantages
    yield "version", rollouts.policy_versions
    if rollouts.restarts is not None:
        yield "restart", rollouts.restarts
    if scored.episodes:
        masks = rows_of(rollouts.columns["response_mask"], rollouts.lengths["BR"])
        rewards = [[reply.reward for reply in replies] for replies in scored.episodes]
        yield "turn_reward", at_turn_ends(rewards, masks)
        waits = [[reply.waited for reply in replies] for replies in scored.episodes]
        yield "turn_wait", at_turn_ends(waits, masks)
    if inputs.correction is not None:
        yield "old_log_prob", batch.old_log_probs
        yield "kept", batch.loss_mask | ~batch.response_mask
        if batch.rollout_is_weights is not None:
            yield "weight", batch.rollout_is_weights
    optional = {
        "entropy": evaluations.entropies,
        "sum_pi_squared": evaluations.sum_pi_squared,
        "varentropy": evaluations.varentropies,
        "ref_log_prob": evaluations.reference_log_probs,
        "teacher_log_prob": evaluations.teacher_log_probs,
        "value": evaluations.critic_values,
    }
    yield from ((name, values) for name, values in optional.items() if values is not None)


def _row_columns(scored: ScoredBatch, recorded: ChosenRows) -> dict[str, Array]:
    rows = recorded.rows
    engines = scored.rollouts.engines
    optional = {} if engines is None else {"engine": engines[rows].numpy()}
    pictures = [scored.rows[row].pictures for row in rows]
    if any(pictures):
        digests = [() if one is None else one.digests for one in pictures]
        optional["pictures"] = np.array([" ".join(row) for row in digests], dtype=object)
    return {
        **optional,
        "row": np.array(rows),
        "group": scored.rollouts.group_ids[rows].numpy(),
        "source": np.array([str(scored.rows[row].data_source) for row in rows], dtype=object),
        "chosen_by": np.array(["worst" if worst else "random" for worst in recorded.is_worst], dtype=object),
        "inclusion": np.array([0.0 if worst else recorded.inclusion for worst in recorded.is_worst]),
        "score": scored.scores[rows].numpy(),
        "finished": scored.rollouts.finished[rows].numpy(),
    }
