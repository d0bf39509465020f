"""What the thinker is told of instructions and tools: one text behind its own anchor.

The wording of tools is the one Qwen and Hermes models were trained on; `engine/calls.py` reads their answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_TOOLS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def condition_of(instructions: str, tools: Sequence[Mapping[str, Any]], choice: object) -> str:
    """ "" when there is nothing to tell. Only the function that `choice` names, if it names one, is shown."""
    shown = [] if choice == "none" else list(tools)
    if isinstance(choice, Mapping):
        shown = [tool for tool in shown if tool.get("name") == choice.get("name")]
    parts = [instructions.strip()] if instructions.strip() else []
    if shown:
        parts.append(_TOOLS.format(tools="\n".join(_signature(tool) for tool in shown)))
        if choice == "required" or isinstance(choice, Mapping):
            parts.append("Answer with a function call.")
    return "\n\n".join(parts)


def _signature(tool: Mapping[str, Any]) -> str:
    function = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
    return json.dumps({"type": "function", "function": function}, ensure_ascii=False)
