"""An engine that is given the tokens: log-probs of whole sequences by its prefill, with one version of the weights or more."""

from collections.abc import Sequence

from vllm import LLM, SamplingParams
from vllm.inputs import tokens_input

from verl_rc.rollout.sampling import EngineOptions

Given = tuple[str, Sequence[Sequence[int]]]
"""A model folder, and prompt and response ids of each row to score with it."""


class TeacherForcedEngine:
    """Lives alone in its process: vLLM owns the process's threads. Prompt log-probs bypass the prefix cache."""

    def __init__(self, options: EngineOptions) -> None:
        """Build the engine with the weights of ``options.model_path``."""
        self._loaded = options.model_path
        self._llm = LLM(
            model=options.model_path, dtype=options.dtype, max_model_len=options.max_model_len, disable_log_stats=True,
            **options.arguments,
        )  # fmt: skip

    def log_probs(self, given: Sequence[Given]) -> list[list[list[float]]]:
        """Of each version, of each row, the log-prob of every token but the first, nats, at temperature 1."""
        parameters = SamplingParams(max_tokens=1, temperature=1.0, prompt_logprobs=0, detokenize=False)
        found = []
        for model_path, sequences in given:
            if model_path != self._loaded:
                self._llm.collective_rpc("reload_weights", kwargs={"weights_path": model_path})
                self._loaded = model_path
            outputs = self._llm.generate([tokens_input(list(ids)) for ids in sequences], parameters, use_tqdm=False)
            of_rows = []
            for ids, output in zip(sequences, outputs, strict=True):
                entries = output.prompt_logprobs
                assert entries is not None, "prompt log-probs were asked for"
                scored = zip(ids[1:], entries[1:], strict=True)
                of_rows.append([entry[token].logprob for token, entry in scored if entry is not None])
            found.append(of_rows)
        return found
