"""WHAT a supervised warm start is."""

from pydantic import Field

from verl_rc.config.base import StrictModel


class SftModelConfig(StrictModel):
    """The model to train."""

    path: str
    """Hugging Face model folder or hub id to start from."""
    trust_remote_code: bool = False
    """Allow code that comes with the model."""


class SftDataConfig(StrictModel):
    """Worked examples."""

    train_files: list[str] | str
    """Parquet files of training examples."""
    val_files: list[str] | str
    """Parquet files of held-out examples: validation loss and accuracy."""
    messages_key: str = "messages"
    """Column with chat messages, the last one the assistant's answer."""
    train_batch_size: int = Field(128, ge=1)
    """Examples per optimizer step."""
    max_length: int = Field(512, ge=2)
    """Longest example, tokens of prompt and answer; a longer one is refused."""
    max_val_samples: int = Field(128, ge=1)
    """Held-out examples used in each validation."""


class SftOptimConfig(StrictModel):
    """AdamW at a constant learning rate."""

    lr: float = Field(1e-3, gt=0)
    """Learning rate. Constant, because RL gains little on a policy whose rate was annealed away."""
    betas: list[float] = Field([0.9, 0.99], min_length=2, max_length=2)
    """Decay rates of AdamW's moments."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay."""
    clip_grad: float = Field(1.0, gt=0)
    """Largest gradient norm."""


class SftTrainerConfig(StrictModel):
    """Length, stopping and output."""

    output_dir: str
    """Folder for the trained model: config, safetensors, tokenizer."""
    total_steps: int = Field(120, ge=1)
    """Optimizer steps at most."""
    val_freq: int = Field(3, ge=1)
    """Steps between validations."""
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
