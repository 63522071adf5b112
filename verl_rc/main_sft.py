"""``python -m verl_rc.main_sft key=value …``: supervised warm start on worked examples."""

from verl_rc.config.load import run_with_config
from verl_rc.config.sft import SftConfig


def train(config: SftConfig) -> None:
    """Hand a valid configuration over."""
    from verl_rc.driver.sft import train_sft  # noqa: PLC0415  (torch loads only once the configuration is valid)

    train_sft(config)


def main() -> None:
    """Entry point."""
    run_with_config(SftConfig, train, prog="verl_rc.main_sft")


if __name__ == "__main__":
    main()
