"""`grpo-replay` where a launched server may have the trainer's card.

A run asks for a card besides its own, because two that share one are slower and must fit together.
The jobs of a machine with one card know what they do.
"""

from grpo_replay.sampling.server import server_process


def share() -> None:
    server_process._visible_devices = lambda: ["0", "0"]


if __name__ == "__main__":
    from grpo_replay.cli.app import main

    share()
    main()
