"""What a checkpoint saves of a learner, in the smallest size."""

import torch
from torch import nn
from torch.optim import AdamW


def small_learner(inputs: int, outputs: int) -> tuple[nn.Module, AdamW]:
    """A linear model and its optimizer after one step; every call gives the same."""
    torch.manual_seed(0)
    model = nn.Linear(inputs, outputs)
    optimizer = AdamW(model.parameters())
    model(torch.ones(1, inputs)).sum().backward()
    optimizer.step()
    return model, optimizer
