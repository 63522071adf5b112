"""Tools that a policy may call between its turns: text in, text out, bounded in time."""

from verl_rc.rewards.tools.calculator import CALCULATOR, evaluate_expression
from verl_rc.rewards.tools.caller import ToolCaller, ToolFailedError
from verl_rc.rewards.tools.registry import find_tools
from verl_rc.rewards.tools.tool import Tool, ToolError

__all__ = ["CALCULATOR", "Tool", "ToolCaller", "ToolError", "ToolFailedError", "evaluate_expression", "find_tools"]
