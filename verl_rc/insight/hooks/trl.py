"""TRL's ``GRPOTrainer``, which keeps neither log-prob of a sampled token. Read and run at TRL 1.16.

``record_tokens(trainer)`` before ``trainer.train()`` writes token records below the trainer's ``output_dir``.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from verl_rc.insight.hooks.recorder import Recorder, attaches, masked_rows, rows_of
from verl_rc.records.token_records.token_record import FOLDER

VERSIONS = ("1.16", "1.17")
SIGNATURES = {
    "train": (),
    "_generate_single_turn": ("prompt_ids",),
    "_generate_and_score_completions": ("inputs",),
    "_calculate_rewards": ("inputs", "prompts"),
    "_compute_loss": ("model", "inputs"),
}
_HEAD = {"old_log_prob": "log_probs", "entropy": "entropy", "sum_pi_squared": "log_sum_sq_probs"}
"""Outputs of TRL's fused head by our names; the last is the logarithm of ours."""
_SAMPLED = "sampling_per_token_logps"
_ENGINE, _SCORE = "verl_rc_rollout_log_prob", "verl_rc_score"
"""Added to the inputs of a loss, which TRL shuffles and splits."""


def record_tokens(trainer: Any, folder: str | Path | None = None) -> None:
    """Record each sampled token before the first update with it.

    Args:
        trainer: a ``GRPOTrainer``, not yet training.
        folder: for the records; default: ``tokens`` in the trainer's ``output_dir``.
    """
    if not attaches("TRL", "trl", VERSIONS, trainer, SIGNATURES):
        return
    folder = Path(trainer.args.output_dir) / FOLDER if folder is None else folder
    records = Recorder(folder, "TRL", trainer.accelerator.process_index)
    with records:
        records.facts |= _facts(trainer)
        _Recording(trainer, records).attach()


def _facts(trainer: Any) -> dict[str, Any]:
    arguments = trainer.args
    dtype = "bfloat16" if arguments.bf16 else "float16" if arguments.fp16 else str(trainer.model.dtype)
    facts = {
        "temperature": trainer.temperature,
        "top_p": arguments.top_p,
        "top_k": arguments.top_k,
        "logprobs_mode": "processed_logprobs",
        "stop_token_ids": list(trainer.eos_token_ids),
        "trainer_dtype": dtype.removeprefix("torch."),
    }
    return facts if arguments.use_vllm else {**facts, "engine_dtype": facts["trainer_dtype"]}


class _Recording:
    """Wrappers of a trainer's methods, by the names of these; each gets the trainer's own method first."""

    def __init__(self, trainer: Any, records: Recorder) -> None:
        self._trainer, self._records = trainer, records
        self._model = getattr(trainer.model, "get_base_model", lambda: trainer.model)()
        self._forwards: list[dict[str, Any]] = []
        self._score: Any = None
        self._version = 0
        self._samples_here = False

    def attach(self) -> None:
        from trl.trainer.utils import add_fused_lm_head  # noqa: PLC0415  (no dependency of this project)

        arguments = self._trainer.args
        add_fused_lm_head(
            self._model,
            temperature=self._trainer.temperature,
            cast_lm_head_to_fp32=arguments.cast_lm_head_to_fp32,
            outputs=tuple(_HEAD.values()),
        )
        self._model.forward = functools.wraps(self._model.forward)(
            functools.partial(self._forward, self._model.forward)
        )
        for name in SIGNATURES:
            setattr(self._trainer, name, functools.partial(getattr(self, name), getattr(self._trainer, name)))

    def _forward(self, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = stock(*args, **kwargs)
        if kwargs.get("fused_lm_head") and self._records.is_on:
            self._forwards.append({ours: getattr(output, theirs).detach() for ours, theirs in _HEAD.items()})
        return output

    def train(self, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Train; then complete the file of the last step, or remove it where the step did not end."""
        try:
            return stock(*args, **kwargs)
        finally:
            self._records.close(is_whole=(self._records.step or 0) <= self._trainer.state.global_step)

    def _generate_single_turn(
        self, stock: Callable[..., Any], prompt_ids: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if not self._records.is_on:
            return stock(prompt_ids, *args, **kwargs)
        with _sampling(self._model, self._records) as sampled:
            completion_ids, log_probs = stock(prompt_ids, *args, **kwargs)
        if log_probs is None and self._records.is_on:
            with self._records:
                log_probs = sampled.log_probs_of(completion_ids)
                self._samples_here = log_probs is not None
        return completion_ids, log_probs

    def _calculate_rewards(
        self, stock: Callable[..., Any], inputs: Any, prompts: Any, *args: Any, **kwargs: Any
    ) -> Any:
        rewards = stock(inputs, prompts, *args, **kwargs)
        with self._records:
            first = self._trainer.accelerator.process_index * len(prompts)
            weighted = rewards * self._trainer.reward_weights.to(rewards.device)
            self._score = weighted.nansum(dim=1)[first : first + len(prompts)]
        return rewards

    def _generate_and_score_completions(self, stock: Callable[..., Any], inputs: Any) -> Any:
        self._forwards.clear()
        self._samples_here, self._version = False, self._trainer.state.global_step
        output = stock(inputs)
        # TRL's own loss would use the log-probs of transformers' sampling for an off-policy mask.
        log_probs = output.pop(_SAMPLED, None) if self._samples_here else output.get(_SAMPLED)
        with self._records:
            if log_probs is not None:
                scored = self._scored(output) if "old_per_token_logps" in output else {}
                output.update({_ENGINE: log_probs, _SCORE: self._score, **scored})
        return output

    def _compute_loss(self, stock: Callable[..., Any], model: Any, inputs: Any) -> Any:
        self._forwards.clear()
        loss = stock(model, inputs)
        with self._records:
            trainer, step = self._trainer, self._trainer.state.global_step + 1
            period = trainer.args.steps_per_generation * trainer.num_iterations
            is_first = trainer._step % period < trainer.args.steps_per_generation
            if trainer.model.training and is_first and _ENGINE in inputs and self._records.takes(step):
                self._records.write(step, self._rows(inputs))
        return loss

    def _scored(self, inputs: Any) -> dict[str, Any]:
        """The fused head's outputs for the completions, ``[B, R]`` by our names."""
        count, length = inputs["completion_ids"].shape
        return {
            name: torch.cat([forward[name] for forward in self._forwards])[:count, -length:] for name in _HEAD
        }

    def _rows(self, inputs: Any) -> Iterator[dict[str, Any]]:
        scored = inputs if "old_per_token_logps" in inputs else self._scored(inputs)
        ids, mask, engine = inputs["completion_ids"], inputs["completion_mask"], inputs[_ENGINE]
        weight = inputs.get("importance_sampling_ratio")
        stops = torch.tensor(list(self._trainer.eos_token_ids), device=ids.device)
        # The last one alone: turns with tools end with such tokens, too.
        last_ids = ids.gather(1, (mask.sum(1, keepdim=True) - 1).clamp(min=0))[:, 0]
        return rows_of(
            mask,
            {
                "response_mask": inputs.get("tool_mask", mask),
                "response_ids": ids,
                "rollout_log_prob": engine,
                "old_log_prob": scored["old_log_prob"],
                "entropy": scored["entropy"],
                "sum_pi_squared": scored["sum_pi_squared"].exp(),
                "ref_log_prob": inputs.get("ref_per_token_logps"),
                "weight": None if weight is None else weight.expand_as(engine),
            },
            prompt_ids=masked_rows(inputs["prompt_ids"], inputs["prompt_mask"]),
            advantage=inputs["advantages"],
            score=inputs[_SCORE],
            finished=torch.isin(last_ids, stops),
            version=[self._version] * len(ids),
        )


class _Sampled:
    """The last logits processor of transformers' sampling: stores the log-prob of each sampled token."""

    def __init__(self, records: Recorder) -> None:
        self._records = records
        self._scores: Any = None
        self._log_probs: list[Any] = []

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        with self._records:
            if self._scores is not None:
                self._take(input_ids[:, -1:])
            self._scores = scores
        return scores

    def _take(self, tokens: Any) -> None:
        log_probs = self._scores.gather(-1, tokens) - self._scores.logsumexp(-1, keepdim=True)
        self._log_probs.append(log_probs.flatten())

    def log_probs_of(self, completion_ids: Sequence[Sequence[int]]) -> list[list[float]] | None:
        """The log-probs of completions; None where nothing was sampled here."""
        if self._scores is None:
            return None
        longest = len(self._log_probs) + 1
        last = [[ids[-1] if len(ids) == longest else 0] for ids in completion_ids]
        self._take(torch.tensor(last, device=self._scores.device))
        columns = [log_probs.tolist() for log_probs in self._log_probs]
        return [[column[row] for column in columns[: len(ids)]] for row, ids in enumerate(completion_ids)]


@contextmanager
def _sampling(model: Any, records: Recorder) -> Iterator[_Sampled]:
    """Inside it ``model.generate`` samples through the ``_Sampled`` that it yields."""
    sampled, stock = _Sampled(records), model._get_logits_processor

    def with_sampled(*args: Any, **kwargs: Any) -> Any:
        processors = stock(*args, **kwargs)
        processors.append(sampled)
        return processors

    model._get_logits_processor = with_sampled
    try:
        yield sampled
    finally:
        del model._get_logits_processor
