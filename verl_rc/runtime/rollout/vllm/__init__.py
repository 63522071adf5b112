"""The only room that knows vLLM: an engine on one process, its workers, its weights, its clean-up."""
