"""Configuration of supervised fine-tuning."""

from typing import Annotated

from pydantic import Field

from verl_rc.config.schema import OneOrMore, StrictModel, UserPath
from verl_rc.config.task import PixelLimits


class SftModelConfig(StrictModel):
    """``model.*``: the model to train."""

    path: UserPath
    """Hugging Face model folder or hub id to start from."""
    enable_gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more time."""
    trust_remote_code: bool = False
    """Allow code that comes with the model."""


class SftDataConfig(StrictModel):
    """``data.*``: worked examples."""

    train_files: Annotated[list[UserPath], OneOrMore] = Field(min_length=1)
    """Files of training examples (one path, or a list)."""
    val_files: Annotated[list[UserPath], OneOrMore] = Field(min_length=1)
    """Files of held-out examples (one path, or a list): validation loss and accuracy."""
    messages_key: str = "messages"
    """Column with chat messages, the last one the assistant's answer."""
    image_key: str = "images"
    """Column with the pictures of an example, for models that read some."""
    mm_processor_kwargs: PixelLimits = {}
    """Fewest and most pixels of a resized picture; those of the model where not given."""
    train_batch_size: int = Field(128, ge=1)
    """Examples per optimizer step."""
    max_length: int = Field(1024, ge=2)
    """Longest example, tokens of prompt and answer; a longer one is refused."""
    max_token_len_per_gpu: int = Field(16384, ge=2)
    """Tokens of one forward pass; a step's examples are packed into as many passes as they need."""
    val_max_samples: int = Field(256, ge=1)
    """Held-out examples used in each validation, the first of the files."""


class SftOptimConfig(StrictModel):
    """``optim.*``: AdamW at a constant learning rate, because RL gains little on a policy whose rate was
    annealed away."""

    lr: float = Field(1e-3, gt=0)
    """Learning rate. The default suits a model of a million parameters; 1e-5 is usual for billions."""
    betas: list[Annotated[float, Field(ge=0, lt=1)]] = Field([0.9, 0.99], min_length=2, max_length=2)
    """Decay rates of AdamW's moments."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay."""
    clip_grad: float = Field(1.0, gt=0)
    """Largest gradient norm."""


class SftTrainerConfig(StrictModel):
    """``trainer.*``: length, stopping and output."""

    output_dir: UserPath
    """Folder for the trained model: config, safetensors, tokenizer."""
    total_training_steps: int = Field(120, ge=1)
    """Optimizer steps at most."""
    test_freq: int = Field(3, ge=1)
    """Steps between validations; the last step always validates."""
    stop_at_accuracy: float | None = Field(None, gt=0, le=1)
    """Stop once greedy exact-match accuracy on held-out examples reaches this share; null: run all steps."""
    seed: int = 1
    """Seed of the order of examples."""


class SftConfig(StrictModel):
    """A supervised warm start."""

    model: SftModelConfig
    """The model to train."""
    data: SftDataConfig
    """Worked examples."""
    optim: SftOptimConfig = SftOptimConfig()
    """Optimizer."""
    trainer: SftTrainerConfig
    """Length, stopping and output."""
