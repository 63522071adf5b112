"""The trainer's side of a certificate: the tokens of an engine, operation by operation."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface

from verl_rc.data.batches import TokenBatch
from verl_rc.distributed.fsdp import shard_model
from verl_rc.distributed.network import listen
from verl_rc.distributed.process_group import RankAddress, join_trainer_group, trainer_device
from verl_rc.exact import capture
from verl_rc.workers.environment import LOOPBACK
from verl_rc.workers.forward import ForwardOptions, packed_logits, score_tokens
from verl_rc.workers.language_model import load_causal_lm
from verl_rc.workers.operations import operations

_CAPTURED_ATTENTION = "verl_rc_captured"
_PARTS = {"self_attn.q_proj": capture.QKV, "self_attn.k_proj": capture.QKV, "self_attn.v_proj": capture.QKV}
_PARTS |= {"mlp.gate_proj": capture.GATE_UP, "mlp.up_proj": capture.GATE_UP}
"""Layers that the engine computes as one, in its order of them."""
_INPUTS = {capture.OUTPUT: capture.ATTENTION, capture.DOWN: capture.ACTIVATION}
"""Layers whose input is the result of another operation, which is no module."""

Place = tuple[int, int, bool]
"""Sequence, position, and whether the engine was decoding."""


@dataclass(frozen=True)
class Compared:
    """One operation of one layer, in prefill or decoding."""

    name: str
    decodes: bool
    rows: int
    different: int
    """Rows with a number that is not equal; NaN is not."""
    largest: float
    """Largest difference; NaN where one is."""
    first: tuple[int, int] | None
    """Sequence and position of the first row that differs."""
    relative: float = 0.0
    """Root mean square of the difference over that of the trainer's numbers."""


class CapturedTrainer:
    """A model on one rank, sharded as a policy is."""

    def __init__(self, model_path: str, dtype: str, exact: bool) -> None:
        """Load the model, which computes in ``dtype``."""
        compute_dtype: torch.dtype = getattr(torch, dtype)
        self._device = trainer_device("auto")
        mesh = join_trainer_group(RankAddress(0, 1, LOOPBACK, listen(LOOPBACK)), self._device)
        chosen = operations(exact, compute_dtype)
        AttentionInterface.register(
            _CAPTURED_ATTENTION, self._watched(AttentionInterface()[chosen.attention])
        )
        chosen = replace(chosen, attention=_CAPTURED_ATTENTION)
        self.model = load_causal_lm(model_path, torch.float32, operations=chosen)
        shard_model(self.model, mesh, compute_dtype)
        self.model.eval()
        self._kept: dict[str, list[Tensor]] = {}
        for name, module in self.model.named_modules():
            self._watch(name, module)

    def compare(self, prompts: list[list[int]], file: str) -> list[Compared]:
        """Compare with the ``file`` of ``CapturingEngine.sample``, in the order in which it computes."""
        engine = torch.load(file, map_location="cpu")
        sampled = torch.tensor([value for given in engine["log_probs"] for value in given])
        theirs = {**engine["kept"], capture.LOG_PROBS: (None, sampled[:, None])}
        compared = []
        for name, (places, mine) in self._computed(prompts, engine).items():
            # the engine's vocabulary may be padded
            rows = theirs[name][1][:, : mine.shape[1]] if name == capture.HEAD else theirs[name][1]
            compared += compare_rows(name, places, mine, rows)
        return compared

    def keep(self, prompts: list[list[int]], file: str, kept: str) -> None:
        """Write to ``kept`` what this model computes of the tokens in an engine's ``file``, as if it were
        that."""
        engine = torch.load(file, map_location="cpu")
        computed = self._computed(prompts, engine)
        _, log_probs = computed.pop(capture.LOG_PROBS)
        parts = log_probs[:, 0].split([len(answer) for answer in engine["responses"]])
        torch.save({**engine, "kept": computed, "log_probs": [part.tolist() for part in parts]}, kept)

    def _computed(
        self, prompts: list[list[int]], engine: dict[str, Any]
    ) -> dict[str, tuple[list[Place], Tensor]]:
        """By operation, in the engine's order: its places, and the rows of this model there."""
        sequences = [[*prompt, *answer] for prompt, answer in zip(prompts, engine["responses"], strict=True)]
        lengths = torch.tensor([len(sequence) for sequence in sequences])
        begins = lengths.cumsum(0) - lengths
        ends, _ = engine["kept"][capture.HEAD]
        self._kept = {}
        with torch.no_grad():
            tokens = [token for sequence in sequences for token in sequence]
            ids = torch.tensor(tokens, device=self._device)
            keep = _rows(ends, begins).to(self._device)
            logits = packed_logits(self.model, ids, lengths, keep).cpu()
            mine = {name: torch.cat([*parts], -1) for name, parts in self._kept.items()}
            log_probs = self._log_probs(prompts, engine["responses"])
        sampled = [
            (row, len(prompts[row]) + place, place > 0)
            for row, answer in enumerate(engine["responses"])
            for place in range(len(answer))
        ]
        kept = engine["kept"].items()
        computed = {
            name: (where, mine[name][_rows(where, begins)]) for name, (where, _) in kept if name in mine
        }
        return {**computed, capture.HEAD: (ends, logits), capture.LOG_PROBS: (sampled, log_probs[:, None])}

    def _log_probs(self, prompts: list[list[int]], responses: list[list[int]]) -> Tensor:
        """float32 ``[K]``, of all response tokens, row by row."""
        batch = TokenBatch(
            prompts=pad_sequence([torch.tensor(one) for one in prompts], True, padding_side="left"),
            prompt_lengths=torch.tensor([len(one) for one in prompts]),
            responses=pad_sequence([torch.tensor(one) for one in responses], True),
            response_lengths=torch.tensor([len(one) for one in responses]),
            batch_size=[len(prompts)],
        )
        scores = score_tokens(self.model, batch.to(self._device), ForwardOptions(), with_entropy=False)
        return torch.cat(
            [row[: len(one)] for row, one in zip(scores.log_probs.cpu(), responses, strict=True)]
        )

    def _watch(self, name: str, module: nn.Module) -> None:
        end = ".".join(name.split(".")[-2:])
        if end in _PARTS:
            self._keep_output(name.removesuffix(end) + _PARTS[end], module)
        elif name.endswith(capture.FIRST_LAYER):
            self._keep_input(name.removesuffix(capture.FIRST_LAYER) + capture.EMBEDDING, module)
        elif name.endswith(capture.CAPTURED_MODULES):
            if name.endswith("norm"):
                self._keep_input(name + capture.RESIDUAL, module)
            elif end in _INPUTS:
                self._keep_input(name.removesuffix(end) + _INPUTS[end], module)
            self._keep_output(name, module)

    def _keep_input(self, name: str, module: nn.Module) -> None:
        module.register_forward_pre_hook(lambda _, inputs: self._keep(name, inputs[0]))

    def _keep_output(self, name: str, module: nn.Module) -> None:
        module.register_forward_hook(lambda _, inputs, output: self._keep(name, output))

    def _keep(self, name: str, values: Tensor) -> None:
        flat = values.detach()[0].cpu()
        self._kept.setdefault(name, []).append(flat.reshape(len(flat), -1))

    def _watched(self, attention: Any) -> Any:
        def watched(module: Any, query: Tensor, key: Tensor, *inputs: Any, **options: Any) -> Any:
            name = f"model.layers.{module.layer_idx}.{capture.ROTARY}"
            for part in (query, key):
                self._keep(name, part.transpose(1, 2))
            return attention(module, query, key, *inputs, **options)

        return watched


def _rows(places: list[Place], begins: Tensor) -> Tensor:
    """Packed positions of (sequence, position) pairs."""
    return torch.tensor([int(begins[sequence]) + position for sequence, position, _ in places])


def compare_rows(name: str, places: list[Place], mine: Tensor, theirs: Tensor) -> list[Compared]:
    """In prefill and in decoding, where there are rows of it."""
    phases = torch.tensor([decodes for *_, decodes in places])
    compared = []
    for decodes in (False, True):
        of_phase = (phases == decodes).nonzero()[:, 0]
        if len(of_phase):
            left, right = mine[of_phase], theirs[of_phase]
            different = (left != right).any(-1)
            first = min((places[int(row)][:2] for row in of_phase[different]), default=None)
            apart = left.double() - right.double()
            relative = float(apart.norm() / left.double().norm()) if different.any() else 0.0
            largest = float(apart.abs().max())
            compared.append(
                Compared(name, decodes, len(of_phase), int(different.sum()), largest, first, relative)
            )
    return compared
