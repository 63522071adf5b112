"""The trainer's side of a certificate: what it computes of an engine's tokens, operation by operation."""

from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface

from verl_rc.records.batches import TokenBatch
from verl_rc.runtime.distributed.fsdp import shard_model
from verl_rc.runtime.distributed.network import listen
from verl_rc.runtime.distributed.process_group import RankAddress, join_trainer_group, trainer_device
from verl_rc.runtime.exact import capture
from verl_rc.runtime.workers.environment import LOOPBACK
from verl_rc.runtime.workers.forward import ForwardOptions, packed_logits, score_tokens
from verl_rc.runtime.workers.language_model import Products, load_causal_lm

_CAPTURED_ATTENTION = "verl_rc_captured"
_FUSED_LAYERS = {
    "self_attn.q_proj": capture.QKV,
    "self_attn.k_proj": capture.QKV,
    "self_attn.v_proj": capture.QKV,
    "mlp.gate_proj": capture.GATE_UP,
    "mlp.up_proj": capture.GATE_UP,
}
"""Layers that the engine computes as one, in the order of its output."""
_INPUTS = {capture.OUTPUT: capture.ATTENTION, capture.DOWN: capture.ACTIVATION}
"""Layers whose input is the result of another operation, which is no module."""

Place = tuple[int, int, bool]
"""Sequence, position, and whether the engine was decoding."""


@dataclass(frozen=True)
class ComparedOperation:
    """One operation of one layer, in prefill or in decoding, of engine and trainer."""

    name: str
    decoding: bool
    rows: int
    different_rows: int
    """Rows in which a number differs; NaN differs from NaN."""
    largest_difference: float
    """NaN where a difference is NaN."""
    first_difference: tuple[int, int] | None
    """Sequence and position of the first row that differs. None if no row does."""


class CapturedTrainer:
    """A model on one rank, sharded as a policy is, that captures the results of its operations."""

    def __init__(self, model_path: str, dtype: str, exact: bool) -> None:
        """Load the model, which computes in ``dtype``."""
        compute_dtype: torch.dtype = getattr(torch, dtype)
        self._device = trainer_device("auto")
        mesh = join_trainer_group(RankAddress(0, 1, LOOPBACK, listen(LOOPBACK)), self._device)
        self.model = load_causal_lm(
            model_path, torch.float32, products=Products(exact_dtype=compute_dtype if exact else None)
        )
        config: Any = self.model.config
        attention = AttentionInterface()[config._attn_implementation]
        AttentionInterface.register(_CAPTURED_ATTENTION, self._with_captured_rotary(attention))
        config._attn_implementation = _CAPTURED_ATTENTION
        shard_model(self.model, mesh, compute_dtype)
        self.model.eval()
        self._captured: dict[str, list[Tensor]] = {}
        for name, module in self.model.named_modules():
            self._add_hooks(name, module)

    def compare(self, prompts: list[list[int]], file: str) -> list[ComparedOperation]:
        """Compare with the ``file`` of ``CapturingEngine.sample``, in the order of computation."""
        engine = torch.load(file, map_location="cpu")
        sampled = torch.tensor([value for values in engine["log_probs"] for value in values])
        engine_results = {**engine["results"], capture.LOG_PROBS: (None, sampled[:, None])}
        compared = []
        for name, (places, trainer_rows) in self._results(prompts, engine).items():
            engine_rows = engine_results[name][1]
            if name == capture.HEAD:  # the engine's vocabulary may be padded
                engine_rows = engine_rows[:, : trainer_rows.shape[1]]
            compared += compare_rows(name, places, trainer_rows, engine_rows)
        return compared

    def _results(
        self, prompts: list[list[int]], engine: dict[str, Any]
    ) -> dict[str, tuple[list[Place], Tensor]]:
        """The engine's places, and this model's rows there, by operation in the order of computation."""
        responses = engine["responses"]
        sequences = [[*prompt, *response] for prompt, response in zip(prompts, responses, strict=True)]
        lengths = torch.tensor([len(sequence) for sequence in sequences])
        starts = lengths.cumsum(0) - lengths
        head_places, _ = engine["results"][capture.HEAD]
        self._captured = {}
        with torch.no_grad():
            ids = torch.tensor([*chain.from_iterable(sequences)], device=self._device)
            head_rows = _packed_positions(head_places, starts).to(self._device)
            logits = packed_logits(self.model, ids, lengths, head_rows).cpu()
            captured = {name: torch.cat(outputs, -1) for name, outputs in self._captured.items()}
            log_probs = self._log_probs(prompts, responses)
        sampled_places = [
            (row, len(prompts[row]) + place, place > 0)
            for row, response in enumerate(responses)
            for place in range(len(response))
        ]
        results = {
            name: (places, captured[name][_packed_positions(places, starts)])
            for name, (places, _) in engine["results"].items()
            if name in captured
        }
        results[capture.HEAD] = head_places, logits
        results[capture.LOG_PROBS] = sampled_places, log_probs[:, None]
        return results

    def _log_probs(self, prompts: list[list[int]], responses: list[list[int]]) -> Tensor:
        """float32 ``[K]``, of all response tokens, row by row."""
        batch = TokenBatch(
            prompts=pad_sequence([torch.tensor(prompt) for prompt in prompts], True, padding_side="left"),
            prompt_lengths=torch.tensor([len(prompt) for prompt in prompts]),
            responses=pad_sequence([torch.tensor(response) for response in responses], True),
            response_lengths=torch.tensor([len(response) for response in responses]),
            batch_size=[len(prompts)],
        )
        scores = score_tokens(self.model, batch.to(self._device), ForwardOptions(), with_entropy=False)
        log_probs = scores.log_probs.cpu()
        return torch.cat([row[: len(response)] for row, response in zip(log_probs, responses, strict=True)])

    def _add_hooks(self, name: str, module: nn.Module) -> None:
        layer = ".".join(name.split(".")[-2:])
        if layer in _FUSED_LAYERS:
            self._capture_output(name.removesuffix(layer) + _FUSED_LAYERS[layer], module)
        elif name.endswith(capture.FIRST_LAYER):
            self._capture_input(name.removesuffix(capture.FIRST_LAYER) + capture.EMBEDDING, module)
        elif name.endswith(capture.CAPTURED_MODULES):
            if name.endswith("norm"):
                self._capture_input(name + capture.RESIDUAL, module)
            elif layer in _INPUTS:
                self._capture_input(name.removesuffix(layer) + _INPUTS[layer], module)
            self._capture_output(name, module)

    def _capture_input(self, name: str, module: nn.Module) -> None:
        module.register_forward_pre_hook(lambda _, inputs: self._capture(name, inputs[0]))

    def _capture_output(self, name: str, module: nn.Module) -> None:
        module.register_forward_hook(lambda _, inputs, output: self._capture(name, output))

    def _capture(self, name: str, values: Tensor) -> None:
        """``values`` of a packed batch: one row."""
        rows = values.detach()[0].cpu()
        self._captured.setdefault(name, []).append(rows.reshape(len(rows), -1))

    def _with_captured_rotary(self, attention: Any) -> Any:
        def captured_attention(module: Any, query: Tensor, key: Tensor, *inputs: Any, **options: Any) -> Any:
            name = f"model.layers.{module.layer_idx}.{capture.ROTARY}"
            for rotated in (query, key):
                self._capture(name, rotated.transpose(1, 2))
            return attention(module, query, key, *inputs, **options)

        return captured_attention


def _packed_positions(places: list[Place], starts: Tensor) -> Tensor:
    """int64, of ``places`` in sequences that begin at ``starts``."""
    return torch.tensor([int(starts[sequence]) + position for sequence, position, _ in places])


def compare_rows(
    name: str, places: list[Place], trainer_rows: Tensor, engine_rows: Tensor
) -> list[ComparedOperation]:
    """Compare an operation in prefill and in decoding, where there are rows of it; both ``[rows,
    numbers]``."""
    decoding_rows = torch.tensor([decoding for *_, decoding in places])
    compared = []
    for decoding in (False, True):
        rows = (decoding_rows == decoding).nonzero()[:, 0]
        if len(rows):
            ours, theirs = trainer_rows[rows], engine_rows[rows]
            is_different = (ours != theirs).any(-1)
            differences = ours.double() - theirs.double()
            compared.append(
                ComparedOperation(
                    name,
                    decoding,
                    rows=len(rows),
                    different_rows=int(is_different.sum()),
                    largest_difference=float(differences.abs().max()),
                    first_difference=min((places[int(row)][:2] for row in rows[is_different]), default=None),
                )
            )
    return compared
