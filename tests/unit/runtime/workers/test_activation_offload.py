"""What a recomputed layer saves goes to the host and comes back as it was; nothing else goes there."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from verl_rc.runtime.workers import activation_offload
from verl_rc.runtime.workers.activation_offload import offload_layer_inputs
from verl_rc.runtime.workers.forward import packed_logits
from verl_rc.runtime.workers.language_model import load_causal_lm

TOKENS, LENGTHS = torch.arange(1, 13), [7, 5]


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    packed_logits(model, TOKENS, LENGTHS).float().square().mean().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def test_the_inputs_of_layers_alone_go_to_the_host(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed: list[torch.Size] = []

    class Recorded(saved_tensors_hooks):
        """``save_on_cpu`` of a machine with a device of its own."""

        def __init__(self, pin_memory: bool) -> None:
            assert pin_memory
            super().__init__(
                lambda saved: (packed.append(saved.shape), saved.numpy(force=True))[1], torch.tensor
            )

    monkeypatch.setattr(activation_offload, "save_on_cpu", Recorded)
    model = load_causal_lm(str(model_folder), torch.float32, gradient_checkpointing=True).train()
    plain = gradients(model)
    offload_layer_inputs(model, "cpu")
    gradients(model)
    assert not packed
    offload_layer_inputs(model, "cuda")
    offloaded = gradients(model)
    assert packed == [(1, len(TOKENS), model.config.hidden_size)] * model.config.num_hidden_layers
    assert all(torch.equal(plain[name], offloaded[name]) for name in plain)


@pytest.mark.gpu
def test_offloaded_inputs_take_less_memory_of_a_gpu(model_folder: Path) -> None:
    model = load_causal_lm(str(model_folder), torch.float32, gradient_checkpointing=True).train().cuda()
    tokens = torch.arange(4096, device="cuda") % 250

    def held() -> int:
        before = torch.cuda.memory_allocated()
        loss = packed_logits(model, tokens, [4096], torch.tensor([4095], device="cuda")).sum()
        after = torch.cuda.memory_allocated()
        loss.backward()
        return after - before

    plain = held()
    offload_layer_inputs(model, "cuda")
    inputs = model.config.num_hidden_layers * 4096 * model.config.hidden_size * 4
    assert held() <= plain - 0.9 * inputs
