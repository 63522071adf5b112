"""The task of an agent. It imports no package: processes of agents have packages of their own."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class AgentTask:
    """One episode for an agent."""

    row: Mapping[str, Any]
    """See ``Episode.row``."""
    seed: int
    """Seed of the agent's random numbers, the same for all samples of a prompt."""
    base_url: str
    """URL of the endpoint, which accepts any model name."""
    api_key: str
    """Key of this episode only."""

    def variables(self) -> dict[str, str]:
        """The task as environment variables of a process."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "VERL_RC_ROW": json.dumps(self.row, default=str),
            "VERL_RC_SEED": str(self.seed),
        }

    @classmethod
    def from_variables(cls, variables: Mapping[str, str]) -> "AgentTask":
        """The task of a process with these environment variables."""
        row, seed = json.loads(variables["VERL_RC_ROW"]), int(variables["VERL_RC_SEED"])
        return cls(row, seed, variables["OPENAI_BASE_URL"], variables["OPENAI_API_KEY"])
