"""The fourth held-out set, chosen by somebody who had read neither the rules nor the earlier sets, and frozen
before the first verdict.

What counts, for every arm. Two texts are read: ``verl-rc report`` (its verdict) and ``verl-rc diagnose``; the
better one decides, and both are written down.

- named: what a text gives as its first or only cause is ``named`` below, in whatever words.
- classed: the first cause is the class of ``classed``, or a list of causes has the right one, and what a text
  says to do next would find it.
- seen, not named: an alarm of this run's numbers is raised, and neither of the two holds.
- misnamed: another cause is stated as the finding, and its remedy would send the reader the wrong way.
- not seen: nothing is said that a healthy run would not say.

A right run is judged "quiet" (no cause is named, no alarm is raised), "asked" (an oddity is pointed at, and
nothing is called wrong) or "false alarm".
"""

from collections.abc import Mapping
from dataclasses import dataclass

from planted_faults.faults import HEALTHY, Fault

TOOLS = (
    "data.max_prompt_length=12",
    "data.max_response_length=48",
    "actor_rollout_ref.actor.optim.lr_scheduler_type=constant",
    "actor_rollout_ref.rollout.multi_turn.enable=True",
    "actor_rollout_ref.rollout.multi_turn.tools=[calculator]",
    "actor_rollout_ref.rollout.multi_turn.format=tag",
    "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=2",
)
"""Those of ``recipes/digits_cpu_tools.sh``; such an arm starts from that recipe's model and data."""


@dataclass(frozen=True)
class Expected:
    """An arm, and what would be said of it."""

    planted: str
    """What the workers do wrong; empty: nothing."""
    named: str
    """What a perfect diagnosis says, in a sentence."""
    classed: str = ""
    """The class of causes that is right too, with its next test; empty for a right run."""
    overrides: tuple[str, ...] = ()


FOURTH: Mapping[str, Expected] = {
    # transformers 5 moved rope_theta into rope_parameters; engines that read the old key fall back.
    "another rotary base in the engine": Expected(
        "rope_theta:500000",
        "The engine computes positions with another rotary base than the trainer: the same weights, from the "
        "first step on another model.",
        "Trainer and engine do not compute the same model though the weights arrive, from the first step on: "
        "compare their configurations, or their outputs for the same tokens layer by layer.",
    ),
    # Windowed layers of Gemma and Mistral, which one of two attention kernels applies.
    "an attention window in the engine alone": Expected(
        "attention_window:16",
        "The engine's attention sees the last 16 tokens alone, the trainer's all: the gap begins where a "
        "sequence is longer than that.",
        "The gap grows with the position, from the first step on and not with age: context, positions, cache "
        "or window of the engine; rescore the same tokens with cut contexts.",
    ),
    # A tied head that is its own tensor in the engine, as in prime-rl's pull request 2823.
    "a head that is never updated": Expected(
        "stale_head",
        "Updates reach all of the engine's weights but lm_head, which stays as it was at the start; the gap "
        "grows with every update.",
        "The engine's weights are not those of the trainer, in whole or in part, and the gap grows with "
        "updates: compare the tensors by name.",
    ),
    # final_logit_softcapping of Gemma 2, which a fused loss or an engine leaves out.
    "a soft cap of the logits in the trainer alone": Expected(
        "logit_softcap:30",
        "The trainer caps its logits (30 tanh(x / 30)), the engine does not: large logits differ, small ones "
        "do not.",
        "The two make other probabilities of the same logits (cap, scale, temperature, precision of head) "
        "from the first step on: compare logits of the same tokens. A temperature that is stated as the only "
        "cause is misnamed; one that is offered as the shape of the gap, with this test, is classed.",
    ),
    # A bias that a generation config or a server's default brings along.
    "a logit bias in the engine": Expected(
        "logit_bias:-1",
        "The engine makes one token less likely (-1 on the digit 7), the trainer does not know of it.",
        "The gap belongs to certain tokens of the vocabulary: a sampling option that the trainer lacks "
        "(bias, penalty, banned or allowed tokens), or a wrong row of the head; list the gap by token.",
    ),
    # A seed of the run, or of the prompt, given to every one of n requests.
    "one seed for all samples of a prompt": Expected(
        "shared_seed",
        "All samples of a prompt are the same, because their requests have one seed: advantages are 0 and "
        "nothing is learned; the gap is that of a healthy run.",
        "Groups have no spread of scores or no different responses, though the temperature is not 0: look at "
        "seeds and at the samples of a prompt.",
    ),
    # Results that are gathered in the order in which they end.
    "samples given to other prompts": Expected(
        "foreign_samples",
        "Some responses are trained on behind the prompt of another request.",
        "Whole sequences, a few of them, are far off from their first tokens on while the others are as in a "
        "healthy run: rows or requests are mixed up between engine and trainer; score those under the step's "
        "other prompts.",
    ),
    # Servers that return the best few log-probs, and give a token outside of them the last of these.
    "reported log-probs with a floor": Expected(
        "log_prob_floor:-3",
        "The engine reports no log-prob below -3: unlikely tokens come as likelier than they are, the others "
        "are right.",
        "The gap is one-sided and belongs to unlikely tokens: the log-probs that are reported are cut or "
        "those of another distribution (top-k, top-p) than was sampled from; look at the lowest ones.",
    ),
    # Turns that go through text and the chat template lose the token that ended them.
    "turn ends lost in the history of the engine": Expected(
        "lost_turn_ends",
        "From its second turn on the engine sees the conversation without the EOS that ended the first one, "
        "the trainer sees it: the gap begins behind the first answer of a tool.",
        "The gap is that of tokens behind the first turn: the two see other tokens at the border of turns "
        "(template, encoding anew, answers); compare the ids of the second request.",
        TOOLS,
    ),
    # vLLM without include_stop_str_in_output, or a trainer that strips special tokens.
    "stop tokens left out of responses": Expected(
        "stripped_stop",
        "Responses that ended come without their stop token, so that ending is never trained; the gap is "
        "that of a healthy run.",
        "Something is wrong with how responses end: finished ones lack a stop token; look at the last "
        "token of some.",
    ),
}
"""What goes wrong, by arm."""

RIGHT_4: Mapping[str, Expected] = {
    "right with tools": Expected(
        "",
        "Nothing is wrong.",
        overrides=(*TOOLS, "actor_rollout_ref.rollout.quantization=null"),
    ),
    # As one does to measure the gap alone; it looks like a trainer that forgot to learn.
    "right at learning rate 0 hot and padded": Expected(
        "",
        "Nothing is wrong: by its own settings this run learns nothing, samples at 1.5 and pads.",
        overrides=(
            "actor_rollout_ref.actor.optim.lr=0",
            "actor_rollout_ref.rollout.temperature=1.5",
            "actor_rollout_ref.model.use_remove_padding=False",
        ),
    ),
}
"""What is right, by arm; the second merely looks odd."""


def fourth_set() -> Mapping[str, Fault]:
    """The arms in the terms of ``faults.py``."""
    faults = {
        arm: Fault(number, (), expected.overrides, expected.planted)
        for number, (arm, expected) in enumerate(FOURTH.items(), 301)
    }
    return faults | {arm: Fault(0, HEALTHY, expected.overrides) for arm, expected in RIGHT_4.items()}
