"""``python -m verl_rc.main_ppo key=value …``: train a policy with PPO and rollout correction."""

from verl_rc.config.load import run_with_config
from verl_rc.config.run import RunConfig


def train(config: RunConfig) -> None:
    """Hand a valid configuration over."""
    from verl_rc.driver.train import main as run_training  # noqa: PLC0415  (torch and ray load once it is valid)

    run_training(config)


def main() -> None:
    """Entry point."""
    run_with_config(RunConfig, train, prog="verl_rc.main_ppo")


if __name__ == "__main__":
    main()
