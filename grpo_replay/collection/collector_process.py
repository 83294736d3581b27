"""The collector's process: `python -m grpo_replay.collection.collector_process SETTINGS_FILE`.

Rank 0 spawns it (`collection.link`), without a GPU and without the variables of a rank. It ends
on a Stop message, and when rank 0 has ended.
"""

import asyncio
import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from grpo_replay.collection.collector import Collector
from grpo_replay.collection.messages import (
    CollectorSettings,
    Delivery,
    Failure,
    Report,
    decode_command,
    encode,
)
from grpo_replay.errors import first_line
from grpo_replay.prompts.prompt_set import load_prompts
from grpo_replay.recipe import resolve_recipe
from grpo_replay.rewards.scorer import RewardScorer
from grpo_replay.sampling.completion_text import CompletionText
from grpo_replay.terminal.quiet import RedactingFormatter

PARENT_POLL_SECONDS = 0.5


def main() -> int:
    """Run a collector by the JSON file that argv names. It takes commands from one ZeroMQ socket,
    and sends to another. Returns 0 after Stop, 1 after a failure, reported to rank 0."""
    arguments = json.loads(Path(sys.argv[1]).read_text())
    handler = logging.StreamHandler()
    handler.setFormatter(RedactingFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    context = zmq.asyncio.Context()
    deliveries: zmq.Socket = zmq.Context.shadow(context).socket(zmq.PUSH)
    commands = context.socket(zmq.PULL)
    for socket in (deliveries, commands):
        socket.set_hwm(0)
        socket.setsockopt(zmq.LINGER, 2000)
    deliveries.connect(arguments["deliveries"])
    commands.bind(arguments["commands"])

    def send(delivery: Delivery) -> None:
        deliveries.send(encode(delivery), zmq.NOBLOCK)

    try:
        asyncio.run(_collect(arguments, commands, send))
        return 0
    except Exception as error:
        logging.exception("the collector failed")
        failure = Failure(type(error).__name__, str(error) or first_line(error))
        send(Delivery(failure, Report(sent=time.monotonic())))
        return 1
    finally:
        commands.close()
        deliveries.close()
        context.term()


async def _collect(arguments: dict[str, Any], commands: zmq.asyncio.Socket, send: Any) -> None:
    """Loads tokenizer, prompts and scorer, and runs the collector until Stop or until rank 0 ends.
    `arguments` are those of the settings file that rank 0 wrote."""
    from grpo_replay.engine.models import load_tokenizer

    recipe = resolve_recipe([arguments["settings"]["recipe"]], "the collector's recipe")
    tokenizer = load_tokenizer(recipe.model)
    prompts = load_prompts(recipe.prompts, tokenizer, recipe.run.seed, recipe.reward.reads_rows)

    decode = CompletionText.from_recipe(recipe, tokenizer).decode
    settings = CollectorSettings(**arguments["settings"] | {"recipe": recipe})
    with RewardScorer.open(recipe.reward) as scorer:
        collector = Collector(settings, prompts, decode, scorer, send)
        executed = _execute_commands(collector, commands)
        await collector.run(executed, _watch_parent(arguments["parent"]))


async def _execute_commands(collector: Collector, commands: zmq.asyncio.Socket) -> None:
    while True:
        collector.handle(decode_command(await commands.recv()))


async def _watch_parent(parent: int) -> None:
    """Return when the parent process has ended. The kernel's death signal would follow the thread
    that spawned this process, which may end earlier."""
    while os.getppid() == parent:
        await asyncio.sleep(PARENT_POLL_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
