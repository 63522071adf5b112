"""Going on in a learning-rate schedule, with the rates that the configuration asks for now."""

from torch.optim.lr_scheduler import LambdaLR


def schedule_state(scheduler: LambdaLR) -> dict[str, int]:
    """How far the schedule has come, as JSON data."""
    return {"num_steps": int(scheduler.last_epoch)}


def resume_schedule(scheduler: LambdaLR, state: dict[str, int]) -> None:
    """Put a new ``scheduler`` and its optimizer where ``schedule_state`` found the old one.

    Unlike ``load_state_dict`` this keeps the peak rates of the given scheduler, so that a rate changed for the resumed
    run has its effect, and it sets the optimizer's rates.
    """
    num_steps = state["num_steps"]
    rates = [base * factor(num_steps) for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
    scheduler.load_state_dict(
        {**scheduler.state_dict(), "last_epoch": num_steps, "_step_count": num_steps + 1, "_last_lr": rates}
    )
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
