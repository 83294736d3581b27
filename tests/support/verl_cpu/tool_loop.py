"""For verl's tool loop with the tiny model, which writes no calls: a parser that reads every answer
as a call of a slow tool, and a tokenizer without the marks of ChatML. A module for
VERL_USE_EXTERNAL_MODULES."""

import json
from pathlib import Path
from typing import Any

from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.utils.tokenizer import continuous_token_wiring as wiring

wiring._MODEL_TYPE_TO_FAMILY["qwen3"] = wiring.ContinuousTokenModelFamily.DEFAULT
TOOL = Path(__file__).with_name("slow_tool.py")
ROLLOUT = "actor_rollout_ref.rollout"
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
)
WORDS = (
    f"{ROLLOUT}.agent.default_agent_loop=tool_agent", f"{ROLLOUT}.multi_turn.enable=True",
    f"{ROLLOUT}.multi_turn.format=every_answer", f"{ROLLOUT}.multi_turn.max_assistant_turns=2",
    f"{ROLLOUT}.multi_turn.function_tool_path={TOOL}", "data.max_response_length=40",
    f"+data.apply_chat_template_kwargs.chat_template='{TEMPLATE}'",
)  # fmt: skip


@ToolParser.register("every_answer")
class EveryAnswer(ToolParser):
    async def extract_tool_calls(
        self, responses_ids: list[int], tools: Any = None
    ) -> tuple[str, list[FunctionCall]]:
        text = self.tokenizer.decode(responses_ids)
        return text, [FunctionCall(name="ask", arguments=json.dumps({"answer": text}))]
