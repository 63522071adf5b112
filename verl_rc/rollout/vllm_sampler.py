"""vLLM as the step loop sees it: a sampler that is stepped by hand."""

from vllm import LLM, SamplingParams
from vllm.config import WeightTransferConfig
from vllm.inputs import tokens_input
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind

from verl_rc.rollout import engine_worker
from verl_rc.rollout.process_cleanup import unlink_shared_memory
from verl_rc.rollout.sampling import EngineOptions, GenerationRequest, SamplingOptions
from verl_rc.rollout.step_loop import Sample
from verl_rc.weight_sync import receiver


class VllmSampler:
    """vLLM as the step loop sees it."""

    def __init__(self, options: EngineOptions) -> None:
        """Build vLLM; weights come with the first update."""
        self.llm = LLM(
            model=options.model_path,
            dtype=options.dtype,
            max_model_len=options.max_model_len,
            # vLLM's default is raw_logprobs, from before temperature, top-k and top-p. A ratio needs the
            # probability under the distribution that was sampled from.
            logprobs_mode="processed_logprobs",
            disable_log_stats=True,
            weight_transfer_config=WeightTransferConfig(backend=receiver.BACKEND_NAME),
            # A name, not the class: with tensor parallelism vLLM imports it in processes of its own.
            worker_extension_cls=f"{engine_worker.__name__}.{engine_worker.EngineWorkerExtension.__name__}",
            **options.arguments,
        )
        # Once the constructor returns, all processes of the engine have mapped what they share.
        self.llm.collective_rpc("unlink_shared_memory")
        unlink_shared_memory()
        # vLLM would queue further requests itself, where a later one with priority could not overtake them.
        self.capacity: int = self.llm.llm_engine.vllm_config.scheduler_config.max_num_seqs

    def begin(self, key: str, sample: Sample) -> None:
        """Queue a sample; raises ``ValueError`` when it does not fit the model's length."""
        prompt = tokens_input(sample.request.prompt_token_ids)
        self.llm.llm_engine.add_request(key, prompt, sampling_parameters(sample.request, sample.options))

    def step(self) -> list[tuple[str, CompletionOutput]]:
        """See ``Sampler``."""
        return [(output.request_id, output.outputs[0]) for output in self.llm.llm_engine.step() if output.finished]


def sampling_parameters(request: GenerationRequest, options: SamplingOptions) -> SamplingParams:
    """Sampling parameters of one request: token ids and log-probs without text, returned at its end."""
    return SamplingParams(
        seed=request.seed,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        max_tokens=options.max_tokens if request.max_tokens is None else request.max_tokens,
        # vLLM's ignore_eos covers the model's EOS, not the tokens listed here.
        stop_token_ids=[] if options.ignore_eos else list(options.stop_token_ids),
        ignore_eos=options.ignore_eos,
        # 0 is the sampled token alone; 1 would add the most likely one. Flat: lists of numbers, where the
        # default builds a dict and an object for each token, which the garbage collector has to walk.
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        # The default returns every running request at every step.
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def sampled_log_probs(output: CompletionOutput, row: int) -> list[float]:
    """The log-prob of every sampled token, in nats; ``ValueError`` when one is missing or belongs to another token."""
    flat = output.logprobs
    count = len(output.token_ids)
    if flat is None or len(flat) != count:
        found = "none" if flat is None else str(len(flat))
        raise ValueError(f"every one of the {count} tokens of request {row} needs a log-prob, the engine returned {found}.")
    first = flat.start_indices
    if [flat.token_ids[start] for start in first] != list(output.token_ids):
        raise ValueError(f"the log-probs of request {row} must belong to its sampled tokens, the engine returned others.")
    return [flat.logprobs[start] for start in first]
